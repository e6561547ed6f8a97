"""The latent trait model that is fitted to noisy counts, and draws of its posterior."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dpvim.privacy.counts import NoisyMarginal
from dpvim.synthesis.marginals.mixture import Mixture, count_pairs, draw_cells, expected_counts
from dpvim.synthesis.marginals.pair_counts import PairCounts, gather
from dpvim.synthesis.marginals.traits import (
    SCALES,
    FittedTraits,
    draw_loadings,
    fit_traits,
    mixture_of,
    points,
    prior_factor,
)

SIZES, ROWS, NOISE, POINTS = (2, 3, 4), 20_000, 20.0, 32
IN_ORDER = (0, 0, 4)


def noisy_counts(truth: Mixture, noise: float, seed: int) -> PairCounts:
    """Noisy counts of all pairs of a table that is drawn from the truth."""
    rng = np.random.default_rng(seed)
    pairs = count_pairs(draw_cells(truth, ROWS, rng), SIZES)[1]
    starts = [0, *itertools.accumulate(SIZES)]
    noisy = []
    for i, j in itertools.combinations(range(3), 2):
        block = pairs[starts[i] : starts[i + 1], starts[j] : starts[j + 1]]
        noisy.append(NoisyMarginal((i, j), block + rng.normal(0, noise, block.shape), noise**2))
    return gather(noisy, [np.arange(size) for size in SIZES], ROWS)


@pytest.fixture(scope="module")
def truth() -> Mixture:
    rng = np.random.default_rng(0)
    probs = tuple(rng.dirichlet(np.ones(size), 3) for size in SIZES)
    return Mixture(np.array([0.5, 0.3, 0.2]), probs)


@pytest.fixture(scope="module")
def counts(truth):
    return noisy_counts(truth, NOISE, 1)


@pytest.fixture(scope="module")
def fitted(counts):
    return fit(counts)


def fit(counts: PairCounts, seed: int = 0) -> FittedTraits:
    return fit_traits(counts, prior_factor(counts, IN_ORDER), num_points=POINTS, seed=seed)


def pairs_of(loadings, counts: PairCounts) -> np.ndarray:
    return expected_counts(mixture_of(loadings, POINTS, SIZES), counts.num_rows)[1]


def draws_of(counts: PairCounts, fitted, seeds) -> np.ndarray:
    """Expected counts of pairs under draws of the posterior."""
    factor = prior_factor(counts, IN_ORDER)
    draws = (draw_loadings(counts, factor, fitted, each).loadings for each in seeds)
    return np.array([pairs_of(each, counts) for each in draws])


def test_points_are_standardised_and_always_the_same():
    traits = points(64, 5)
    np.testing.assert_allclose(traits.mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(traits.T @ traits / 64, np.eye(5), atol=1e-5)
    points.cache_clear()
    np.testing.assert_array_equal(points(64, 5), traits)


def one_pair(counts: np.ndarray, stddev: float) -> PairCounts:
    noisy = NoisyMarginal((0, 1), counts, stddev**2)
    return gather([noisy], [np.arange(size) for size in counts.shape], float(counts.sum()))


def test_the_prior_has_neighbours_alike_and_other_cells_independent():
    factor = prior_factor(one_pair(np.full((3, 5), 1e12), 1.0), (0, 4))
    covariance = factor.T @ factor
    np.testing.assert_allclose(np.diag(covariance), 1.0)
    np.testing.assert_allclose(covariance[:3, :3], np.eye(3))
    np.testing.assert_allclose(covariance[:3, 3:], 0.0)
    assert covariance[3, 4] > covariance[3, 5] > covariance[3, 6] > 0.05
    np.testing.assert_allclose(covariance[7], np.eye(8)[7], atol=1e-9)  # the missing ones


def test_cells_that_do_not_stand_out_from_the_noise_have_next_to_no_slopes():
    counts = np.full((2, 4), 500.0)
    counts[:, 2:] = [3.0 * np.sqrt(2), -10.0]  # sums of two cells with noise 2: three deviations
    factor = prior_factor(one_pair(counts, 2.0), (0, 0))
    size = np.sqrt(np.diag(factor.T @ factor))
    assert size[2:4] == pytest.approx(1.0, abs=0.02)
    assert size[4] == pytest.approx(0.5)
    assert size[5] == pytest.approx(0.02)


def test_rare_levels_do_not_become_frequent():
    """A level that nobody has, beside a column of many: noise of forty counts, most of it cut."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(3):
        counts = np.zeros((3, 40))
        counts[0], counts[1] = 1000, 300
        released = one_pair(counts + rng.normal(0, 20, counts.shape), 20.0)
        factor = prior_factor(released, (0, 0))
        fitted = fit_traits(released, factor, num_points=POINTS, seed=0)
        draws = [
            mixture_of(draw_loadings(released, factor, fitted, each).loadings, POINTS, (3, 40))
            for each in np.random.SeedSequence(0).spawn(3)
        ]
        found += [expected_counts(draw, counts.sum())[0][2] for draw in draws]
    # All that is positive in the noise of forty cells would be 20 * 0.4 * 40 = 320 records, and
    # more in draws; the noise of their sum is 126.
    assert np.mean(found) < 170  # 114; 224 if rare cells have slopes like others


def test_fits_are_as_close_as_noise_and_sampling_allow(counts, truth, fitted):
    wanted = expected_counts(truth, counts.num_rows)[1]
    measured = wanted > 0
    spread = np.sqrt(NOISE**2 + wanted)[measured]
    for loadings in (fitted.best, fitted.wide):
        found = pairs_of(loadings, counts)
        assert np.abs((found - wanted)[measured] / spread).max() < 4


def _dependence(mixture) -> float:
    """Total distance of the shares of pairs from the products of those of their columns."""
    singles, pairs = expected_counts(mixture, 1.0)
    column = np.repeat(np.arange(len(SIZES)), SIZES)
    is_pair = column[:, None] < column
    return float(np.abs(pairs - np.outer(singles, singles))[is_pair].sum())


def test_a_loud_release_is_pulled_towards_independence(truth):
    loud = fit(noisy_counts(truth, 3000.0, 2))
    quiet = fit(noisy_counts(truth, 5.0, 2))
    # How far pairs of columns are from independent ones, in parts of the truth's distance.
    shares = [_dependence(mixture_of(each.best, POINTS, SIZES)) for each in (loud, quiet)]
    shares = np.array(shares) / _dependence(truth)
    assert shares[0] < 0.1
    assert shares[1] > 0.9
    for fitted in (loud, quiet):
        assert (fitted.scales >= 0.4 * SCALES[0]).all()
        assert (fitted.scales <= 3 * SCALES[-1]).all()
        # One for all cells of a column.
        for column in np.split(fitted.scales, np.cumsum(SIZES)[:-1]):
            assert np.ptp(column) == 0


def test_draws_spread_as_noise_and_sampling_do(counts, fitted):
    """For a count that the fit can choose freely the posterior is that of one number."""
    seeds = np.random.SeedSequence(0).spawn(40)
    tables = draws_of(counts, fitted, seeds)
    centre = pairs_of(fitted.wide, counts)
    measured = np.isfinite(counts.pairs_variance)
    alone = np.sqrt(NOISE**2 + centre)[measured]
    ratio = tables.std(axis=0)[measured] / alone
    # Other pairs tell of the same cells, so it is less, but not by much.
    assert 0.4 < np.median(ratio) < 1.1
    shift = (tables.mean(axis=0) - centre)[measured] / alone
    assert np.abs(shift).max() < 0.7


def test_seeds_repeat_fits_and_draws(counts, fitted):
    again = fit(counts)
    np.testing.assert_array_equal(again.best.slopes, fitted.best.slopes)
    seeds = [np.random.SeedSequence(seed) for seed in (1, 1, 2)]
    first, second, other = draws_of(counts, fitted, seeds)
    np.testing.assert_array_equal(first, second)
    assert not np.array_equal(first, other)


@pytest.mark.long
def test_draws_hold_the_truth(truth):
    """Pairs of cells, over many releases: 90 % intervals of the draws hold about 90 %."""
    held = []
    for seed in range(12):
        counts = noisy_counts(truth, 100.0, 10 + seed)
        fitted = fit(counts, seed)
        seeds = np.random.SeedSequence(seed).spawn(30)
        draws = draws_of(counts, fitted, seeds)
        wanted = expected_counts(truth, counts.num_rows)[1]
        measured = wanted > 0
        low, high = np.quantile(draws, [0.05, 0.95], axis=0)
        held.append(((low <= wanted) & (wanted <= high))[measured].mean())
    assert 0.8 < np.mean(held) < 0.97


NEAR = (12, 12, 4)


def nearly_determined(noise: float) -> tuple[PairCounts, np.ndarray]:
    """Counts of two columns of which one nearly tells the other, and of one beside; and theirs."""
    rng = np.random.default_rng(5)
    first = rng.integers(0, 12, ROWS)
    second = np.where(rng.random(ROWS) < 0.95, (7 * first + 3) % 12, rng.integers(0, 12, ROWS))
    third = np.minimum((first + rng.integers(0, 4, ROWS)) // 4, 3)
    pairs = count_pairs(np.stack([first, second, third], axis=1), NEAR)[1]
    starts = [0, *itertools.accumulate(NEAR)]
    noisy = []
    for i, j in itertools.combinations(range(3), 2):
        block = pairs[starts[i] : starts[i + 1], starts[j] : starts[j + 1]]
        noisy.append(NoisyMarginal((i, j), block + rng.normal(0, noise, block.shape), noise**2))
    return gather(noisy, [np.arange(size) for size in NEAR], ROWS), pairs[:12, 12:24]


def test_columns_that_nearly_determine_each_other_are_a_couple(monkeypatch):
    counts, wanted = nearly_determined(NOISE)
    factor = prior_factor(counts, (0, 0, 4))

    def away(fitted: FittedTraits, loadings) -> float:
        mixture = mixture_of(loadings, POINTS, NEAR, fitted.couples)
        found = expected_counts(mixture, ROWS)[1][:12, 12:24]
        return float(np.abs(found - wanted).sum() / 2 / ROWS)

    fitted = fit_traits(counts, factor, num_points=POINTS, seed=0)
    assert fitted.couples[0] == (0, 1)
    draw = draw_loadings(counts, factor, fitted, np.random.SeedSequence(0)).loadings
    best, wide, drawn = (away(fitted, each) for each in (fitted.best, fitted.wide, draw))
    monkeypatch.setattr("dpvim.synthesis.marginals.traits._COUPLE_ROUNDS", 0)
    alone = fit_traits(counts, factor, num_points=POINTS, seed=0)
    assert alone.couples == ()
    of_traits = away(alone, alone.best)
    assert max(best, wide) < of_traits / 2.5  # 0.028 and 0.090
    assert drawn < of_traits / 1.5  # noise is added to noise: 0.048


def test_noise_makes_no_couples(truth):
    """Columns that traits explain have none, whatever the noise."""
    for noise in (20.0, 300.0):
        assert fit(noisy_counts(truth, noise, 7)).couples == ()
