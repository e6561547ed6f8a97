"""Rows with the moments of the released counts."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from scipy import sparse

from dpvim.privacy.counts import NoisyMarginal
from dpvim.synthesis.fitting import synthesize
from dpvim.synthesis.marginals.grids import grid_of, group_cells, single_groups
from dpvim.synthesis.marginals.mixture import Mixture
from dpvim.synthesis.marginals.pair_counts import PairCounts, gather
from dpvim.synthesis.marginals.tilting import (
    Scores,
    TiltedRows,
    _Moments,
    _moments_of,
    _newton,
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
    return np.stack([first, second, rng.integers(0, 3, ROWS)], axis=1).astype(int)


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


def scores(counts: PairCounts) -> tuple[Scores | None, ...]:
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
    # Levels without an order are left to the model.
    assert abs(np.corrcoef(drawn[:, 0], drawn[:, 2])[0, 1]) < 0.03


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
    squares = [np.sum(each.values**2) for each in scores(counts)[:2] if each is not None]
    noise = NOISE * np.sqrt(np.prod(squares)) / ROWS
    assert abs(np.mean(off)) < 0.6 * noise
    assert np.std(off) < 1.5 * noise


def test_products_that_no_table_has_do_no_harm():
    table = close_table()
    counts = counts_of(table, 1.0, seed=1)
    at = counts.block(0, 1)
    counts.pairs[at] += np.diag(np.full(6, 300.0))
    counts = counts._replace(pairs_variance=np.where(counts.pairs > 0, 1e4, counts.pairs_variance))
    assert _moments_of(loose(table), counts, scores(counts)).products.tolist() == [1.0]
    rows = tilt(loose(table), counts, scores(counts), np.random.default_rng(2))
    assert np.isfinite(rows.weights).all()
    assert rows.weights.sum() == pytest.approx(1)


def close_moments(size: int) -> tuple[np.ndarray, _Moments]:
    """Independent rows, and two columns that are to be nearly the same."""
    rng = np.random.default_rng(0)
    shares = np.full(2 * size, 1 / size)
    scores = np.tile((np.arange(size) - (size - 1) / 2) / np.sqrt((size**2 - 1) / 12), 2)
    wanted = _Moments(
        shares, scores, ((0, 1),), np.array([0.999]), np.full(2 * size, 1e-8), np.array([1e-8])
    )
    return rng.integers(0, size, (ROWS, 2)), wanted


def test_rows_that_cannot_go_so_closely_together_are_not_left_to_a_few():
    cells, wanted = close_moments(40)
    weights = _weights(cells, (40, 40), wanted)
    assert 1 / np.square(weights).sum() > 0.1 * ROWS
    product = weights @ (wanted.scores[cells[:, 0]] * wanted.scores[cells[:, 1]])
    assert 0.8 < product < 0.985


def test_slopes_of_a_few_rows_do_not_lead_all_rows_astray():
    """Where a start is useless, Newton's method goes on from zero."""
    cells, wanted = close_moments(8)
    ones = sparse.csr_array(np.hstack([np.eye(8)[each] for each in cells.T]))
    products = (wanted.scores[cells[:, 0]] * wanted.scores[cells[:, 1]])[:, None]
    targets, slack = np.append(wanted.shares, wanted.products), np.full(17, 1e-6)
    _, expected = _newton(ones, products, targets, slack)
    for far in (300.0, -300.0):
        _, found = _newton(ones, products, targets, slack, far * np.sin(np.arange(17.0)))
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-9)


def test_a_cell_that_no_row_is_in_has_no_slope():
    cells, wanted = close_moments(8)
    kept = cells[cells[:, 0] > 0]
    ones = sparse.csr_array(np.hstack([np.eye(8)[each] for each in kept.T]))
    products = (wanted.scores[kept[:, 0]] * wanted.scores[kept[:, 1]])[:, None]
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
    found = scores_of(grid, single_groups(grid), counts)
    assert found is not None
    np.testing.assert_allclose(found.values[:10], (np.arange(10) - 4.5) / np.sqrt(8.25))
    assert found.missing.tolist() == [0.0] * 10 + [1.0]
    assert found.values[10] == 0
    assert found.kept == pytest.approx(1)
    grouped = group_cells(grid, counts, 1.0, num_rows=1000, num_groups=5, noise=math.inf)
    sizes = np.bincount(grouped.of_cell, counts)
    fewer = scores_of(grid, grouped, sizes)
    assert fewer is not None
    assert 0.8 < fewer.kept < 0.99


def test_columns_without_an_order_have_no_scores():
    three, two = (
        grid_of(Categorical(name="place", levels=tuple(levels), reviewed=True))
        for levels in ("abc", "ab")
    )
    assert scores_of(three, single_groups(three), np.ones(3)) is None
    assert scores_of(two, single_groups(two), np.ones(2)) is not None
    assert scores_of(two, single_groups(two), np.array([5.0, 0.0])) is None


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
