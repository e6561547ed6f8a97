"""Released counts side by side, and what is computed of them alone."""

from __future__ import annotations

import numpy as np
import pytest

from dpvim.privacy.counts import NoisyMarginal
from dpvim.synthesis.marginals.pair_counts import (
    PairCounts,
    clear_misfits,
    gather,
    misfit,
    split_noise,
    unexplained_shares,
)


@pytest.fixture
def counts() -> PairCounts:
    """Two columns of twenty cells, a hundred records in each pair, noise of ten records."""
    noisy = NoisyMarginal((0, 1), np.full((20, 20), 100), 100.0)
    return gather([noisy], [np.arange(20), np.arange(20)], 40_000)


def test_counts_of_a_pair_that_were_released_twice_are_put_together():
    first = NoisyMarginal((0, 1), np.full((2, 3), 10), 4.0)
    second = NoisyMarginal((0, 1), np.full((2, 3), 40), 8.0)
    found = gather([first, second], [np.arange(2), np.arange(3)], 100)
    np.testing.assert_allclose(found.pairs[found.block(0, 1)], 20.0)
    np.testing.assert_allclose(found.pairs_variance[found.block(0, 1)], 8 / 3)
    assert np.isinf(found.singles_variance).all()
    assert found.measured_pairs == [(0, 1)]


def test_counts_of_fine_cells_are_summed_over_their_groups():
    fine = NoisyMarginal((0,), np.array([1, 2, 3, 4]), 5.0)
    found = gather([fine], [np.array([0, 0, 1, 1]), np.arange(2)], 10)
    np.testing.assert_allclose(found.singles[:2], [3.0, 7.0])
    np.testing.assert_allclose(found.singles_variance[:2], [10.0, 10.0])


def test_split_counts_have_independent_noise_of_known_size(counts):
    """Noise of the release and of both parts, over many releases."""
    rng = np.random.default_rng(0)
    at = counts.block(0, 1)
    first, second = [], []
    for _ in range(50):
        released = counts.pairs.copy()
        released[at] += rng.normal(0, 10, (20, 20))
        for kept, part in zip(
            (first, second),
            split_noise(counts._replace(pairs=released), rng, ratio=0.5)[0],
            strict=True,
        ):
            kept.append(part.pairs[at] - 100)
            kept_variance = part.pairs_variance[at]
            assert np.std(kept[-1]) == pytest.approx(np.sqrt(kept_variance[0, 0]), rel=0.2)
    one, other = np.ravel(first), np.ravel(second)
    assert one.std() == pytest.approx(10 * np.sqrt(1.25), rel=0.02)
    assert other.std() == pytest.approx(10 * np.sqrt(5), rel=0.02)
    assert abs(np.corrcoef(one, other)[0, 1]) < 4 / np.sqrt(one.size)


def test_misfit_is_in_units_of_noise_and_sampling(counts):
    rng = np.random.default_rng(0)
    moved = counts.pairs.copy()
    moved[counts.block(0, 1)] += rng.normal(0, np.sqrt(100 + 100), (20, 20))
    found = misfit(counts._replace(pairs=moved), counts.singles, counts.pairs)
    assert found == pytest.approx(400, rel=0.2)


def test_what_noise_explains_is_not_unexplained(counts):
    rng = np.random.default_rng(1)
    at = counts.block(0, 1)
    noisy = counts.pairs.copy()
    noisy[at] += rng.normal(0, np.sqrt(200), (20, 20))
    expected = counts.pairs.copy()
    assert unexplained_shares(counts._replace(pairs=noisy), expected)[0, 1] < 0.003
    expected[at][:10] += 60  # of 40 000 records 12 000 are too many here,
    expected[at][10:] -= 60  # and as many too few there
    found = unexplained_shares(counts._replace(pairs=noisy), expected)[0, 1]
    assert found == pytest.approx(0.3 - 0.3 * 11.3 / 60, rel=0.1)


def test_the_second_split_has_the_noise_turned_around(counts):
    splits = split_noise(counts, np.random.default_rng(0), ratio=0.5)
    for first, second in zip(*splits, strict=True):
        np.testing.assert_allclose((first.pairs + second.pairs) / 2, counts.pairs)
        at = counts.block(0, 1)
        assert np.abs(first.pairs - counts.pairs)[at].max() > 1
        np.testing.assert_array_equal(first.pairs_variance, second.pairs_variance)


def test_only_clear_misfits_are_named(counts):
    rng = np.random.default_rng(2)
    at = counts.block(0, 1)
    noisy = counts.pairs.copy()
    noisy[at] += rng.normal(0, np.sqrt(200), (20, 20))
    assert clear_misfits(counts._replace(pairs=noisy), counts.pairs, errors=4.0) == {}
    noisy[at][:, :10] += 15  # 15^2 / 200 a cell, of which there are 400
    noisy[at][:, 10:] -= 15
    found = clear_misfits(counts._replace(pairs=noisy), counts.pairs, errors=4.0)
    assert found[0, 1] == pytest.approx(400 * 225 / 200, rel=0.3)
