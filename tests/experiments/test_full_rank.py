"""The full-rank experiment in short."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from dpvim.experiments import full_rank
from dpvim.experiments.experiment import AS_PUBLISHED, RECOMMENDED, Scope
from dpvim.experiments.full_rank import FULL_RANK
from dpvim.experiments.running import quiet, reproduce, rows_of


def test_an_interrupted_run_has_some_repeats_of_everything():
    cells = FULL_RANK.cells(Scope(quick=False))
    first = [cell for cell in cells if cell["seed"] < 2]
    assert cells[: len(first)] == first
    swept = {cell["clip_norm"] for cell in first if cell["way"] == AS_PUBLISHED}
    assert swept == set(full_rank.CLIP_NORMS)
    assert len({FULL_RANK.together(cell) for cell in first}) == len(first) / 2


def test_aligned_is_ahead_of_vanilla():
    """One setting of the quick run, one repeat."""
    cells = [
        cell
        for cell in FULL_RANK.cells(Scope(ways=(AS_PUBLISHED,), repeats=1))
        if (cell["dim"], cell["density"], cell["clip_norm"]) == (20, 0.2, 0.2)
    ]
    with quiet():
        vanilla, aligned = (FULL_RANK.run([cell])[0].rows[0] for cell in cells)
    assert vanilla["log_likelihood"] + 0.2 < aligned["log_likelihood"] < aligned["nonprivate"]
    assert aligned["rmse"] < vanilla["rmse"]


def made_up(scope: Scope, best: float = 0.2, **only) -> pd.DataFrame:
    """Rows of cells that nobody ran: aligned is ahead of vanilla, the defaults of both."""
    ahead = {"vanilla": 0.0, "aligned": 0.5, "default": 0.8}
    entries = []
    for cell in FULL_RANK.cells(scope):
        if any(cell.get(name, value) != value for name, value in only.items()):
            continue
        noise = 0.01 * np.random.default_rng(len(entries)).random()
        row = dict.fromkeys(full_rank._MEASURED, 1.0) | dict.fromkeys(full_rank._COST, 1)
        noise -= abs(np.log(cell.get("clip_norm", best) / best))
        row |= {"log_likelihood": ahead[cell["variant"]] + noise, "estimator": "made up"}
        row |= {"nonprivate": 1.0}
        entries.append({"cell": cell, "rows": [row], "arrays": {}, "seconds": 1.0})
    return rows_of(entries)


@pytest.mark.parametrize(
    ("only", "verdicts"),
    [
        ({}, 4),
        ({"dim": 100}, 4),
        ({"clip_norm": 0.2}, 3),  # no sweep
        ({"density": 0.8}, 2),
        ({"variant": "aligned"}, 0),
        ({"way": RECOMMENDED}, 0),
    ],
)
def test_verdicts_and_figures_of_what_there_is(only, verdicts):
    """They hold if the repeats say so, and never after one."""
    for repeats, expected in {3: {"holds"}, 1: {"does not hold"}}.items():
        frame = made_up(Scope(quick=False, repeats=repeats), **only)
        found = FULL_RANK.judge(frame)
        assert len(found) == verdicts
        assert {verdict.judgement for verdict in found} == (expected if verdicts else set())
    FULL_RANK.summarise(frame)
    FULL_RANK.draw(frame)


def test_a_clip_norm_at_the_end_of_those_tried_is_not_the_best():
    for best, expected in {0.5: "holds in part", 0.2: "holds", 0.05: "holds in part"}.items():
        found = FULL_RANK.judge(made_up(Scope(quick=False, repeats=3), best))[2]
        assert found.judgement == expected
        assert ("may lie beyond" in found.measured) == (best == 0.05)


@pytest.mark.long
def test_the_quick_experiment(tmp_path):
    outcome = reproduce(FULL_RANK, Scope(), tmp_path, progress=False)
    assert outcome.done == outcome.wanted
    # Two repeats show a difference by luck alone.
    assert len(outcome.verdicts) == 4
    errors = outcome.summary[outcome.summary["clip_norm"] == full_rank.CLIP_NORM]
    values = errors.set_index(["variant", "dim", "density"])["log_likelihood"]
    assert (values["aligned"] > values["vanilla"]).all()
    assert set(outcome.summary["way"]) == {AS_PUBLISHED, RECOMMENDED}
    assert (outcome.folder / "figure.png").exists()
