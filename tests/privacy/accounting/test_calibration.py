"""The search for the noise, and what of it is read from disk."""

from __future__ import annotations

import json

import pytest
from accountant_settings import ROWS, calibrated, cost, facts_of

from dpvim.privacy.accounting import accountant, calibration
from dpvim.types import Relation


@pytest.mark.parametrize("row", ROWS[::6], ids=range(len(ROWS[::6])))
def test_calibration_asks_for_half_a_percent_more_noise_at_most(row):
    noise = calibrated(
        epsilon=row["tight"], delta=row["delta"], relation=row["relation"], **facts_of(row)
    )
    assert row["noise"] * (1 - 1e-5) <= noise <= row["noise"] * 1.005


@pytest.mark.parametrize("relation", list(Relation))
def test_noise_is_monotone_in_each_argument(relation):
    here = calibrated(relation=relation)
    assert calibrated(relation=relation, epsilon=1.01) < here
    assert calibrated(relation=relation, delta=1.1e-6) < here
    assert calibrated(relation=relation, sampling_prob=0.0202) > here
    assert calibrated(relation=relation, num_steps=2_040) > here


@pytest.fixture
def forgetful():
    """Nothing that was computed before in this process is known."""
    accountant._epsilon_in_memory.cache_clear()
    yield accountant._epsilon_in_memory.cache_clear
    accountant._epsilon_in_memory.cache_clear()


def count_searches(monkeypatch):
    """Searches for noise that was not read and checked."""
    searches = []
    search = calibration._bracketed_root
    monkeypatch.setattr(
        calibration, "_bracketed_root", lambda *args: (searches.append(args), search(*args))[1]
    )
    return searches


def test_a_second_search_is_answered_from_disk(monkeypatch, tmp_path):
    monkeypatch.setenv("DPVIM_CACHE", str(tmp_path / "new" / "folder"))
    noise = calibrated()
    searches = count_searches(monkeypatch)
    assert calibrated() == noise
    assert not searches
    changes = ({"delta": 2e-6}, {"relation": "replace_one"}, {"num_steps": 2_001}, {"epsilon": 2.0})
    for number, change in enumerate(changes, start=1):
        calibrated(**change)
        assert len(searches) == number


def test_epsilon_is_never_read_from_disk(monkeypatch, tmp_path, forgetful):
    """Statements claim it: a file must not be able to say what it is."""
    monkeypatch.setenv("DPVIM_CACHE", str(tmp_path))
    calibrated(), cost(3.0)
    forgetful()
    monkeypatch.setattr(accountant, "epsilon_upper_bound", lambda *args, **kwargs: 42.0)
    assert cost(3.0) == 42.0


@pytest.mark.parametrize("factor", [0.01, 0.9, 0.999, 1.2, 1e6, 1e-300])
def test_an_edited_answer_is_not_believed(monkeypatch, tmp_path, forgetful, factor):
    """Less noise would break the promise, far more would waste the data."""
    monkeypatch.setenv("DPVIM_CACHE", str(tmp_path))
    noise = calibrated()
    for file in tmp_path.rglob("*.json"):
        entry = json.loads(file.read_text())
        file.write_text(json.dumps(entry | {"answer": noise * factor}))
    forgetful()
    assert calibrated() == noise


def test_answers_of_other_versions_are_not_read(monkeypatch, tmp_path):
    monkeypatch.setenv("DPVIM_CACHE", str(tmp_path))
    calibrated()
    searches = count_searches(monkeypatch)
    with monkeypatch.context() as other:
        other.setattr(calibration, "_ALGORITHM_VERSION", -1)
        calibrated()
        assert len(searches) == 1
    version = calibration.importlib.metadata.version
    for number, package in enumerate(("dpvim", "dp-accounting"), start=2):
        with monkeypatch.context() as other:
            other.setattr(
                calibration.importlib.metadata,
                "version",
                lambda name, package=package: "other" if name == package else version(name),
            )
            calibrated()
            assert len(searches) == number
