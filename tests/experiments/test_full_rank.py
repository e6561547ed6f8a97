"""The full-rank experiment in short."""

from __future__ import annotations

import pytest

from dpvim.experiments import full_rank
from dpvim.experiments.experiment import AS_PUBLISHED, RECOMMENDED, Scope
from dpvim.experiments.full_rank import FULL_RANK
from dpvim.experiments.running import quiet, reproduce


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


@pytest.mark.long
def test_the_quick_experiment(tmp_path):
    outcome = reproduce(FULL_RANK, Scope(), tmp_path, progress=False)
    assert outcome.done == outcome.wanted
    assert [verdict.judgement for verdict in outcome.verdicts[:3]] == ["holds"] * 3
    assert set(outcome.summary["way"]) == {AS_PUBLISHED, RECOMMENDED}
    assert (outcome.folder / "figure.png").exists()
