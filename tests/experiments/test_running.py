"""Cells are run once, whatever happens; results are tidy."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from dpvim.experiments.experiment import CellResult, Experiment, Scope, Verdict, mean_and_error
from dpvim.experiments.registry import NAMES, RUNTIME, find
from dpvim.experiments.running import CellStore, fits, reproduce


class Counting:
    """An experiment of six cells that counts its runs, and may be interrupted."""

    def __init__(self):
        self.ran, self.stop_at = [], None

    def run(self, cells):
        if self.stop_at is not None and len(self.ran) >= self.stop_at:
            raise KeyboardInterrupt
        self.ran += [(cell["kind"], cell["seed"]) for cell in cells]
        return [
            CellResult([{"error": 1.0 / 3 + cell["seed"]}], {"curve": np.arange(3.0)})
            for cell in cells
        ]

    def experiment(self) -> Experiment:
        return Experiment(
            name="counting",
            title="",
            paper="nowhere",
            repeats=5,
            cells=lambda scope: [
                {"kind": kind, "seed": seed, "num_steps": 10}
                for kind in "ab"
                for seed in scope.seeds(quick=2, full=3)
            ],
            run=self.run,
            summarise=lambda frame: mean_and_error(frame, ["kind"], ["error"]),
            draw=lambda frame: Figure(),
            judge=lambda frame: [Verdict("it counts", str(len(frame)), "holds")],
            together=lambda cell: cell["kind"],
            most_together=2,
        )


@pytest.fixture
def counting() -> Counting:
    return Counting()


def test_a_cell_that_is_done_is_not_run_again(counting, tmp_path):
    first = reproduce(counting.experiment(), Scope(), tmp_path)
    assert (first.done, first.wanted) == (4, 4)
    again = reproduce(counting.experiment(), Scope(quick=False), tmp_path)
    assert len(counting.ran) == len(set(counting.ran)) == 6
    assert again.summary["repeats"].tolist() == [3, 3]


def test_an_interrupted_run_goes_on_where_it_stopped(counting, tmp_path):
    counting.stop_at = 2
    with pytest.raises(KeyboardInterrupt):
        reproduce(counting.experiment(), Scope(), tmp_path)
    counting.stop_at = None
    assert reproduce(counting.experiment(), Scope(), tmp_path).done == 4
    assert sorted(counting.ran) == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]


@pytest.mark.parametrize("left", [1, 20, 80])
def test_a_line_that_was_cut_short_is_run_again(counting, tmp_path, left):
    """The process was killed while it wrote the last cell."""
    reproduce(counting.experiment(), Scope(), tmp_path)
    path = tmp_path / "cells" / "counting.jsonl"
    whole = path.read_bytes()
    start = whole[:-1].rfind(b"\n") + 1
    path.write_bytes(whole[:start] + whole[start:][:left])
    assert reproduce(counting.experiment(), Scope(), tmp_path).done == 4
    assert len(counting.ran) == 5
    assert len(CellStore(path).entries()) == 4
    assert reproduce(counting.experiment(), Scope(), tmp_path).done == 4
    assert len(counting.ran) == 5


def test_two_runs_may_share_a_file(counting, tmp_path):
    first, second = (CellStore(tmp_path / "cells.jsonl") for _ in range(2))
    for seed in range(20):
        store = (first, second)[seed % 2]
        store.add({"seed": seed}, CellResult([{"x": 1.0}]), 1.0)
    assert len(CellStore(tmp_path / "cells.jsonl").entries()) == 20


def test_settings_are_compared_over_complete_repeats_alone(counting, tmp_path):
    counting.stop_at = 4
    with pytest.raises(KeyboardInterrupt):
        reproduce(counting.experiment(), Scope(quick=False), tmp_path)
    found = reproduce(counting.experiment(), Scope(quick=False), tmp_path, run=False)
    assert (found.done, found.wanted) == (5, 6)
    assert found.summary["repeats"].tolist() == [2, 2]


@pytest.mark.parametrize(("repeats", "judgement"), [(2, "not shown"), (3, "does not hold")])
def test_few_repeats_do_not_refute(counting, tmp_path, repeats, judgement):
    refuted = Verdict("it counts", "", "does not hold")
    experiment = dataclasses.replace(counting.experiment(), judge=lambda frame: [refuted])
    found = reproduce(experiment, Scope(repeats=repeats), tmp_path)
    assert found.verdicts[0].judgement == judgement


def test_options_that_would_be_ignored_are_refused(counting, tmp_path):
    for scope in (Scope(epsilons=(1.0,)), Scope(ways=("recommended",)), Scope(table=tmp_path)):
        with pytest.raises(ValueError, match="leave it out"):
            reproduce(counting.experiment(), scope, tmp_path)


def test_what_was_run_is_written_with_its_settings(counting, tmp_path):
    outcome = reproduce(counting.experiment(), Scope(repeats=1), tmp_path)
    rows = pd.read_csv(outcome.folder / "results.csv")
    assert set(rows) == {"kind", "seed", "num_steps", "seconds", "error"}
    assert rows["error"].tolist() == [0.333333, 0.333333]
    manifest = json.loads((outcome.folder / "manifest.json").read_text())
    assert manifest["repeats"] == {"least": 1, "most": 1, "paper": 5}
    assert manifest["cells"] == {"done": 2, "wanted": 2}
    assert "jax" in manifest["versions"]
    assert (outcome.folder / "figure.png").stat().st_size > 0
    written = json.loads((outcome.folder / "summary.json").read_text())
    assert written["verdicts"][0]["judgement"] == "holds"


def test_nothing_is_run_where_only_a_figure_is_asked_for(counting, tmp_path):
    with pytest.raises(ValueError, match="no repeat is complete yet; 0 of 4"):
        reproduce(counting.experiment(), Scope(), tmp_path, run=False)
    assert not counting.ran


def test_a_store_keeps_what_it_was_given(tmp_path):
    store = CellStore(tmp_path / "a" / "b.jsonl")
    cell = {"variant": "aligned", "epsilon": np.float64(1.0), "seed": 3}
    store.add(cell, CellResult([{"x": np.float32(0.1)}]), 1.234)
    found = CellStore(tmp_path / "a" / "b.jsonl")
    assert {"seed": 3, "variant": "aligned", "epsilon": 1.0} in found
    assert {"seed": 4, "variant": "aligned", "epsilon": 1.0} not in found
    assert found.entries()[0]["rows"] == [{"x": 0.1}]


def test_fits_that_were_interrupted_are_no_result(ctrl_c):
    from conftest import logistic_model

    X, y = np.ones((200, 2), np.float32), np.zeros(200, np.int32)
    ctrl_c(2)
    options = {"delta": 1e-3, "clip_norm": 1.0, "num_steps": 100_000, "sampling_prob": 0.1}
    with pytest.raises(KeyboardInterrupt):
        fits(logistic_model, X, y, each=[{"noise_multiplier": 1.0, "seed": 0}], **options)


@pytest.mark.parametrize("name", [name for name in NAMES if name != RUNTIME])
def test_every_experiment_has_cells_for_every_size(name):
    experiment = find(name)
    assert experiment.name == name
    for quick in (True, False):
        cells = experiment.cells(Scope(quick=quick))
        keys = [json.dumps(cell, sort_keys=True) for cell in cells]
        assert len(keys) == len(set(keys)) > 0
