"""Doubts about pairs of columns: seen where tables differ from the counts, and nowhere else."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

import dpvim
from dpvim.privacy.counts import NoisyMarginal
from dpvim.synthesis.marginals import closeness
from dpvim.synthesis.marginals.grids import grid_of, single_groups
from dpvim.synthesis.marginals.release import Releases
from dpvim.synthesis.schema import Ordinal, Schema

NAMES = ("age", "years", "size")
SCHEMA = Schema(tuple(Ordinal(name=name, levels=tuple(range(6)), reviewed=True) for name in NAMES))
ROWS, NOISE = 5000, 8.0


def table_of(close, rng):
    """Two columns that go together as closely as `close` says, and one that does not."""
    age = rng.normal(size=ROWS)
    years = close * age + np.sqrt(1 - close**2) * rng.normal(size=ROWS)
    cells = [np.digitize(each, [-1, -0.5, 0, 0.5, 1]) for each in (age, years)]
    return np.stack([*cells, rng.integers(0, 6, ROWS)], axis=1)


def releases_of(table, rng):
    grids = tuple(grid_of(column) for column in SCHEMA.columns)
    noisy = []
    for first, second in ((0, 1), (0, 2), (1, 2)):
        counts = np.zeros((6, 6), np.int64)
        np.add.at(counts, (table[:, first], table[:, second]), 1)
        noise = np.rint(NOISE * rng.normal(size=counts.shape)).astype(np.int64)
        noisy.append(NoisyMarginal((first, second), counts + noise, NOISE**2))
    groups = tuple(single_groups(grid) for grid in grids)
    return Releases(grids, groups, tuple(noisy), float(ROWS))


def compared(close_of_tables, seed):
    rng = np.random.default_rng(seed)
    releases = releases_of(table_of(0.9, rng), rng)
    tables = [table_of(close_of_tables, rng) for _ in range(10)]
    return closeness.compare(releases, tables)


def test_right_tables_are_not_doubted():
    """Both have the error of sampling; one of them has it, and the noise, once."""
    errors = [each.errors for seed in range(40) for each in compared(0.9, seed)]
    assert np.mean(np.abs(errors) > 3) <= 0.03
    assert 0.6 < np.std(errors) < 1.5


@pytest.mark.parametrize(("close", "word"), [(0.8, "more"), (0.95, "less")])
def test_tables_that_are_too_loose_or_too_close_are_doubted(close, word):
    found = compared(close, 1)
    (line,) = closeness.describe(found, NAMES)
    assert line.startswith(f"age and years go together {word} closely")


def test_margins_do_not_matter():
    apart = np.array([[4, -4], [0, 0], [-4, 4]])
    counts = np.outer([5.0, 20.0, 75.0], [1.0, 3.0]) + apart
    weights = closeness.association_weights(counts)
    assert np.sum(weights * counts) > 0
    independent = np.outer(counts.sum(axis=1), counts.sum(axis=0))
    assert np.sum(weights * independent) == pytest.approx(0, abs=1e-9)


def test_only_the_columns_of_a_formula_matter():
    found = compared(0.8, 1)
    assert [each.columns for each in closeness.among(found, [1, 0])] == [(0, 1)]
    assert closeness.describe(closeness.among(found, [0, 2]), NAMES) == []


@pytest.mark.filterwarnings("ignore:The total variance")
def test_an_analysis_says_what_its_twin_doubts():
    frames = [
        pd.DataFrame(table_of(0.5, np.random.default_rng(i)), columns=NAMES).astype(float)
        for i in range(3)
    ]
    asked = []

    class Doubtful:
        schema = SCHEMA

        def doubts(self, tables, columns):
            asked.append((len(list(tables)), list(columns)))
            return ["age and years go together more closely"]

    with pytest.warns(dpvim.ConvergenceWarning, match="more closely"):
        found = dpvim.analyze(frames, "years ~ age", twin=Doubtful(), progress=False)
    assert asked == [(3, ["age", "years"])]
    assert "DOUBTFUL" in str(found)
    assert dpvim.analyze(frames, "years ~ 1", twin=Doubtful(), progress=False).doubts == ()
