"""The mixture that is fitted to noisy counts, and draws of its posterior."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dpvim.privacy.counts import NoisyMarginal
from dpvim.synthesis.marginals.mixture import (
    Distribution,
    _count_pairs,
    distribution,
    draw_cells,
    draw_mixture,
    expected_counts,
    fit_mixture,
    gather,
)

SIZES, ROWS, NOISE = (2, 3, 4), 20_000, 20.0


@pytest.fixture(scope="module")
def truth() -> Distribution:
    rng = np.random.default_rng(0)
    probs = tuple(rng.dirichlet(np.ones(size), 3) for size in SIZES)
    return Distribution(np.array([0.5, 0.3, 0.2]), probs)


@pytest.fixture(scope="module")
def counts(truth):
    """Noisy counts of all pairs of a table that was drawn from the truth."""
    rng = np.random.default_rng(1)
    pairs = _count_pairs(draw_cells(truth, ROWS, rng), SIZES)[1]
    starts = [0, *itertools.accumulate(SIZES)]
    noisy = []
    for i, j in itertools.combinations(range(3), 2):
        block = pairs[starts[i] : starts[i + 1], starts[j] : starts[j + 1]]
        noisy.append(NoisyMarginal((i, j), block + rng.normal(0, NOISE, block.shape), NOISE**2))
    return gather(noisy, [np.arange(size) for size in SIZES], ROWS)


@pytest.fixture(scope="module")
def fitted(counts):
    return fit_mixture(counts, 8, seed=0)


def test_the_fit_is_as_close_as_noise_and_sampling_allow(counts, truth, fitted):
    found = expected_counts(distribution(fitted.params, SIZES), counts)[1]
    wanted = expected_counts(truth, counts)[1]
    spread = np.sqrt(NOISE**2 + wanted)
    assert np.abs((found - wanted)[wanted > 0] / spread[wanted > 0]).max() < 4


def test_draws_spread_as_noise_and_sampling_do(counts, fitted):
    """For a count that the fit can choose freely the posterior is that of one number."""
    seeds = np.random.SeedSequence(0).spawn(40)
    draws = [draw_mixture(counts, fitted, each) for each in seeds]
    tables = np.array([expected_counts(distribution(d, SIZES), counts)[1] for d in draws])
    centre = expected_counts(distribution(fitted.params, SIZES), counts)[1]
    measured = np.isfinite(counts.pairs_variance)
    alone = np.sqrt(NOISE**2 + centre)[measured]
    ratio = tables.std(axis=0)[measured] / alone
    # Other pairs tell of the same cells, so it is less, but not by much.
    assert 0.4 < np.median(ratio) < 1.1
    shift = (tables.mean(axis=0) - centre)[measured] / alone
    assert np.abs(shift).max() < 0.7


def test_seeds_repeat_fits_and_draws(counts, fitted):
    again = fit_mixture(counts, 8, seed=0)
    np.testing.assert_array_equal(again.params.shifts, fitted.params.shifts)
    first, second = (draw_mixture(counts, fitted, np.random.SeedSequence(s)) for s in (1, 1))
    np.testing.assert_array_equal(first.shifts, second.shifts)
    other = draw_mixture(counts, fitted, np.random.SeedSequence(2))
    assert not np.array_equal(first.shifts, other.shifts)


def test_counts_of_a_pair_that_were_released_twice_are_put_together():
    first = NoisyMarginal((0, 1), np.full((2, 3), 10), 4.0)
    second = NoisyMarginal((0, 1), np.full((2, 3), 40), 8.0)
    found = gather([first, second], [np.arange(2), np.arange(3)], 100)
    np.testing.assert_allclose(found.pairs[found.block(0, 1)], 20.0)
    np.testing.assert_allclose(found.pairs_variance[found.block(0, 1)], 8 / 3)
    assert np.isinf(found.singles_variance).all()


def test_counts_of_fine_cells_are_summed_over_their_groups():
    fine = NoisyMarginal((0,), np.array([1, 2, 3, 4]), 5.0)
    found = gather([fine], [np.array([0, 0, 1, 1]), np.arange(2)], 10)
    np.testing.assert_allclose(found.singles[:2], [3.0, 7.0])
    np.testing.assert_allclose(found.singles_variance[:2], [10.0, 10.0])


def test_even_rows_have_the_shares_of_the_mixture(truth):
    codes = draw_cells(truth, 10_000, np.random.default_rng(0), evenly=True)
    for column, probs in enumerate(truth.probs):
        wanted = 10_000 * truth.weights @ probs
        # Off by less than one for each component; independent rows are off by fifty and more.
        assert np.abs(np.bincount(codes[:, column], minlength=len(wanted)) - wanted).max() < 8


def test_independent_rows_vary_as_they_should(truth):
    rng = np.random.default_rng(3)
    counts = [np.bincount(draw_cells(truth, 400, rng)[:, 0], minlength=2)[0] for _ in range(400)]
    share = float(truth.weights @ truth.probs[0][:, 0])
    assert np.std(counts) == pytest.approx(np.sqrt(400 * share * (1 - share)), rel=0.2)
