"""Rows with the moments of the released counts."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from scipy import sparse

from dpvim.privacy.counts import NoisyMarginal
from dpvim.synthesis.fitting import synthesize
from dpvim.synthesis.marginals import tilting
from dpvim.synthesis.marginals.grids import grid_of, group_cells, single_groups
from dpvim.synthesis.marginals.mixture import Mixture
from dpvim.synthesis.marginals.pair_counts import PairCounts, gather
from dpvim.synthesis.marginals.tilting import (
    Scores,
    TiltedRows,
    _Moments,
    _moments_of,
    _newton,
    _products,
    _weights,
    scores_of,
    tilt,
)
from dpvim.synthesis.schema import Categorical, Integer, Ordinal, Schema

ROWS, NOISE = 20_000, 30.0
SIZES = (6, 6, 3)


def close_table() -> np.ndarray:
    """Two ordered columns that go closely together, and levels that go with them."""
    rng = np.random.default_rng(0)
    trait = rng.normal(size=ROWS)
    first = np.clip(np.floor(1.2 * trait + 3), 0, 5)
    second = np.clip(np.floor(1.2 * trait + 3 + 0.4 * rng.normal(size=ROWS)), 0, 5)
    level = np.where(trait > rng.normal(size=ROWS), rng.integers(0, 3, ROWS), 1)
    return np.stack([first, second, level], axis=1).astype(int)


def means_by_level(table: np.ndarray) -> list[float]:
    return [float(table[table[:, 2] == level, 0].mean()) for level in range(SIZES[2])]


def counts_of(table: np.ndarray, noise: float, seed: int) -> PairCounts:
    rng = np.random.default_rng(seed)
    released = []
    for pair in ((0, 1), (0, 2), (1, 2)):
        shape = tuple(SIZES[column] for column in pair)
        at = np.ravel_multi_index([table[:, column] for column in pair], shape)
        exact = np.bincount(at, minlength=np.prod(shape)).reshape(shape)
        counts = np.rint(exact + noise * rng.normal(size=shape)).astype(int)
        released.append(NoisyMarginal(pair, counts, noise**2 + 1 / 12))
    return gather(released, [np.arange(size) for size in SIZES], float(len(table)))


def scores(counts: PairCounts) -> tuple[tuple[Scores, ...], ...]:
    ordered = [grid_of(Ordinal(name="a", levels=tuple("abcdef"), reviewed=True))] * 2
    grids = [*ordered, grid_of(Categorical(name="b", levels=tuple("abc"), reviewed=True))]
    sizes = np.split(counts.of_cells()[0], counts.offsets[1:-1])
    return tuple(scores_of(g, single_groups(g), own) for g, own in zip(grids, sizes, strict=True))


def loose(table: np.ndarray) -> Mixture:
    """A model in which columns do not go together at all."""
    probs = tuple(
        np.bincount(own, minlength=size)[None] / len(table)
        for own, size in zip(table.T, SIZES, strict=True)
    )
    return Mixture(np.ones(1), probs)


def test_rows_have_the_products_that_were_released_and_the_shares_of_the_model():
    table = close_table()
    counts = counts_of(table, 1.0, seed=1)
    rows = tilt(loose(table), counts, scores(counts), np.random.default_rng(2))
    drawn = rows.draw(ROWS, np.random.default_rng(3))
    wanted, found = (np.corrcoef(each[:, :2].T)[0, 1] for each in (table, drawn))
    assert wanted > 0.85
    assert found == pytest.approx(wanted, abs=0.01)
    for own, new, size in zip(table.T, drawn.T, SIZES, strict=True):
        shares = [np.bincount(each, minlength=size) / ROWS for each in (own, new)]
        np.testing.assert_allclose(*shares, atol=0.005)
    np.testing.assert_allclose(means_by_level(drawn), means_by_level(table), atol=0.05)


def test_many_levels_are_left_to_the_model(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tilting, "_MOST_LEVELS", 2)
    table = close_table()
    counts = counts_of(table, 1.0, seed=1)
    rows = tilt(loose(table), counts, scores(counts), np.random.default_rng(2))
    drawn = rows.draw(ROWS, np.random.default_rng(3))
    assert np.ptp(means_by_level(table)) > 0.5
    assert np.ptp(means_by_level(drawn)) < 0.1


def test_noise_moves_products_to_both_sides():
    """What cells that cannot be negative would make of it is always less."""
    table = close_table()
    wanted = np.corrcoef(table[:, :2].T)[0, 1]
    off = []
    for seed in range(20):
        counts = counts_of(table, NOISE, seed)
        rows = tilt(loose(table), counts, scores(counts), np.random.default_rng(seed))
        drawn = rows.draw(ROWS, np.random.default_rng(seed))
        off.append(np.corrcoef(drawn[:, :2].T)[0, 1] - wanted)
    # The noise of the sum over all cells of a pair.
    squares = [np.sum(each.values**2) for (each,) in scores(counts)[:2]]
    noise = NOISE * np.sqrt(np.prod(squares)) / ROWS
    assert abs(np.mean(off)) < 0.6 * noise
    assert np.std(off) < 1.5 * noise


def test_products_that_no_table_has_do_no_harm():
    table = close_table()
    counts = counts_of(table, 1.0, seed=1)
    at = counts.block(0, 1)
    counts.pairs[at] += np.diag(np.full(6, 300.0))
    counts = counts._replace(pairs_variance=np.where(counts.pairs > 0, 1e4, counts.pairs_variance))
    wanted = _moments_of(loose(table), counts, scores(counts))
    assert wanted.products[wanted.pairs.index((0, 1))] == 1
    rows = tilt(loose(table), counts, scores(counts), np.random.default_rng(2))
    assert np.isfinite(rows.weights).all()
    assert rows.weights.sum() == pytest.approx(1)


def close_moments(size: int) -> tuple[np.ndarray, _Moments]:
    """Independent rows, and two columns that are to be nearly the same."""
    rng = np.random.default_rng(0)
    shares = np.full(2 * size, 1 / size)
    values = (np.arange(size) - (size - 1) / 2) / np.sqrt((size**2 - 1) / 12)
    wanted = _Moments(
        shares,
        ((0, values), (1, values)),
        ((0, 1),),
        np.array([0.999]),
        np.full(2 * size, 1e-8),
        np.array([1e-8]),
    )
    return rng.integers(0, size, (ROWS, 2)), wanted


def test_rows_that_cannot_go_so_closely_together_are_not_left_to_a_few():
    cells, wanted = close_moments(40)
    weights = _weights(cells, (40, 40), wanted)
    assert 1 / np.square(weights).sum() > 0.1 * ROWS
    (product,) = weights @ _products(cells, wanted)
    assert 0.8 < product < 0.985


def test_slopes_of_a_few_rows_do_not_lead_all_rows_astray():
    """Where a start is useless, Newton's method goes on from zero."""
    cells, wanted = close_moments(8)
    ones = sparse.csr_array(np.hstack([np.eye(8)[each] for each in cells.T]))
    products = _products(cells, wanted)
    targets, slack = np.append(wanted.shares, wanted.products), np.full(17, 1e-6)
    _, expected = _newton(ones, products, targets, slack)
    for far in (300.0, -300.0):
        _, found = _newton(ones, products, targets, slack, far * np.sin(np.arange(17.0)))
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-9)


def test_a_cell_that_no_row_is_in_has_no_slope():
    cells, wanted = close_moments(8)
    kept = cells[cells[:, 0] > 0]
    ones = sparse.csr_array(np.hstack([np.eye(8)[each] for each in kept.T]))
    products = _products(kept, wanted)
    targets = np.append(wanted.shares, 0.5)
    slopes, _ = _newton(ones, products, targets, np.full(17, 1e-6))
    assert slopes[0] == 0


def test_rows_are_drawn_as_often_as_their_weights_say():
    cells = np.arange(4)[:, None]
    rows = TiltedRows(cells, np.array([0.5, 0.25, 0.25, 0.0]))
    drawn = rows.draw(8, np.random.default_rng(0))
    assert np.bincount(drawn[:, 0], minlength=4).tolist() == [4, 2, 2, 0]


def test_scores_are_places_of_values_and_missing_ones_have_none():
    grid = grid_of(Integer(name="age", lower=0, upper=9, nullable=True, reviewed=True))
    counts = np.append(np.full(10, 50.0), 500.0)
    (found,) = scores_of(grid, single_groups(grid), counts)
    np.testing.assert_allclose(found.values[:10], (np.arange(10) - 4.5) / np.sqrt(8.25))
    assert found.missing.tolist() == [0.0] * 10 + [1.0]
    assert found.values[10] == 0
    assert found.kept == pytest.approx(1)
    grouped = group_cells(grid, counts, 1.0, num_rows=1000, num_groups=5, noise=math.inf)
    sizes = np.bincount(grouped.of_cell, counts)
    (fewer,) = scores_of(grid, grouped, sizes)
    assert 0.8 < fewer.kept < 0.99


def of_levels(levels: str, sizes: list[float], *, nullable: bool = False) -> tuple[Scores, ...]:
    column = Categorical(name="place", levels=tuple(levels), nullable=nullable, reviewed=True)
    grid = grid_of(column)
    return scores_of(grid, single_groups(grid), np.array(sizes))


def test_a_few_levels_have_a_score_each_but_for_the_most_frequent():
    found = of_levels("abcd", [30.0, 50.0, 20.0, 0.01, 100.0], nullable=True)
    shares = np.array([0.3, 0.5, 0.2])
    assert len(found) == 2  # nor has one that is rare
    for each, level in zip(found, (0, 2), strict=True):
        assert each.values[:3] @ shares == pytest.approx(0, abs=1e-3)
        assert each.values[:3] ** 2 @ shares == pytest.approx(1, rel=1e-3)
        assert each.values.argmax() == level
        assert each.values[4] == 0
        assert each.missing.tolist() == [0, 0, 0, 0, 1]
    assert of_levels("abcdef", [1.0] * 6) == ()
    assert of_levels("abc", [0.0, -1.0, 0.0]) == ()
    assert len(of_levels("ab", [1.0, 1.0])) == 1
    assert of_levels("ab", [5.0, 0.0]) == ()


def test_draws_go_as_closely_together_as_the_original():
    """Without the tilt their correlation is 0.16 less."""
    rng = np.random.default_rng(0)
    age = np.clip(np.rint(2.5 + 1.5 * rng.normal(size=3000)), 0, 5).astype(int)
    years = np.clip(age - rng.integers(0, 2, 3000), 0, 5)
    frame = pd.DataFrame({"age": age, "years": years, "children": rng.integers(0, 6, 3000)})
    columns = [Ordinal(name=name, levels=tuple(range(6)), reviewed=True) for name in frame.columns]
    twin = synthesize(frame, Schema(tuple(columns)), epsilon=1.0, seed=0, progress=False)
    found = [table["age"].corr(table["years"]) for table in twin.datasets(6, seed=1)]
    assert np.mean(found) == pytest.approx(frame["age"].corr(frame["years"]), abs=0.04)
