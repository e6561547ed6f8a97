"""Poisson sampling: every row in every batch, independently, with the stated probability."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from dpvim.privacy import sampling
from dpvim.privacy.randomness import SecretStreams
from dpvim.privacy.sampling import EMPTY, PoissonSampler, _geometric


def membership(*, rows=40, prob=0.2, steps=20_000, cap=None, seed=1, shuffled=False):
    """A table of zeros and ones, [steps, rows]."""
    sampler = PoissonSampler(
        SecretStreams(seed),
        num_rows=rows,
        sampling_prob=prob,
        max_batch_size=cap or rows,
        shuffled=shuffled,
    )
    batches = sampler.draw(steps)
    table = np.zeros((steps, rows), bool)
    real = batches != EMPTY
    step = np.broadcast_to(np.arange(steps)[:, None], batches.shape)
    table[step[real], batches[real]] = True
    assert table.sum() == real.sum()  # no row twice in a batch
    return table


@pytest.mark.parametrize("prob", [0.01, 0.2, 0.7])
def test_marginal_rates(prob):
    counts = membership(prob=prob).sum(axis=0)
    z = (counts - 20_000 * prob) / np.sqrt(20_000 * prob * (1 - prob))
    assert np.abs(z).max() < 4.5
    assert stats.kstest(z, "norm").pvalue > 0.001
    # The test can tell: a tenth more or less is seen in every row's sum.
    assert abs(counts.sum() / (20_000 * 40 * prob) - 1) < 0.02


@pytest.mark.parametrize("prob", [1e-9, 0.01, 0.3, 0.9, 1.0])
def test_gaps_are_geometric(prob):
    gaps = _geometric(np.random.default_rng(0), prob, 100_000)
    assert gaps.min() >= 1  # no row twice
    if prob <= 0.3:  # above, NumPy searches and does not invert
        wanted = np.random.default_rng(0).geometric(prob, 100_000)
        np.testing.assert_array_equal(gaps, wanted)
    expected = 100_000 * prob * (1 - prob) ** np.arange(3)
    found = [(gaps == gap).sum() for gap in (1, 2, 3)]
    np.testing.assert_allclose(found, expected, atol=5 * np.sqrt(expected.max()) + 1e-9)


def test_pairs_are_independent():
    table = membership().astype(float)
    correlation = np.corrcoef(table.T)[np.triu_indices(40, 1)]
    assert np.abs(correlation).max() < 5 / np.sqrt(len(table))
    assert stats.kstest(correlation * np.sqrt(len(table)), "norm").pvalue > 0.001


def test_steps_are_independent():
    table = membership().astype(float)
    along = [np.corrcoef(table[:-1, j], table[1:, j])[0, 1] for j in range(40)]
    assert np.abs(along).max() < 5 / np.sqrt(len(table))
    sizes = table.sum(axis=1)
    assert abs(np.corrcoef(sizes[:-1], sizes[1:])[0, 1]) < 5 / np.sqrt(len(table))


def test_batch_sizes_are_binomial():
    """Sampling without replacement would have no spread, with replacement another one."""
    sizes = membership().sum(axis=1)
    observed = np.bincount(sizes, minlength=41)
    expected = 20_000 * stats.binom.pmf(np.arange(41), 40, 0.2)
    usual = expected > 5
    pooled = np.append(observed[usual], observed[~usual].sum())
    wanted = np.append(expected[usual], expected[~usual].sum())
    assert stats.chisquare(pooled, wanted).pvalue > 0.001


def test_stream_does_not_depend_on_how_many_steps_are_drawn_at_a_time(monkeypatch):
    def sampler():
        return PoissonSampler(
            SecretStreams(5), num_rows=1000, sampling_prob=0.05, max_batch_size=60
        )

    whole = sampler().draw(100)
    pieces = sampler()
    parts = [pieces.draw(n) for n in (1, 3, 40, 56)]
    np.testing.assert_array_equal(whole, np.concatenate(parts))
    assert (whole[:, -1] != EMPTY).any()  # batches that were cut are among them
    monkeypatch.setattr(sampling, "_PLACES_AT_A_TIME", 7 * 60)
    np.testing.assert_array_equal(whole, sampler().draw(100))


def test_shuffled_places_do_not_depend_on_how_many_steps_are_drawn(monkeypatch):
    def sampler():
        return PoissonSampler(
            SecretStreams(5), num_rows=50, sampling_prob=0.3, max_batch_size=30, shuffled=True
        )

    pieces = sampler()
    parts = [pieces.draw(n) for n in (1, 9, 30)]
    np.testing.assert_array_equal(sampler().draw(40), np.concatenate(parts))
    monkeypatch.setattr(sampling, "_PLACES_AT_A_TIME", 7 * 30)
    np.testing.assert_array_equal(sampler().draw(40), np.concatenate(parts))


def test_shuffling_changes_places_and_nothing_else():
    np.testing.assert_array_equal(membership(shuffled=True, steps=500), membership(steps=500))


def test_shuffled_rows_stand_anywhere_whoever_else_is_there():
    """The place of row 0 is uniform over all places, with row 1 in the batch and without it."""
    sampler = PoissonSampler(
        SecretStreams(6), num_rows=4, sampling_prob=0.5, max_batch_size=4, shuffled=True
    )
    batches = sampler.draw(40_000)
    has_one = (batches == 1).any(axis=1)
    for company in (has_one, ~has_one):
        places = np.nonzero(batches[company] == 0)[1]
        counts = np.bincount(places, minlength=4)
        expected = counts.sum() / 4
        assert stats.chi2.sf(np.sum((counts - expected) ** 2 / expected), 3) > 1e-4


def test_truncation_is_uniform_over_rows():
    table = membership(rows=20, prob=0.5, cap=8, steps=20_000)
    sizes = table.sum(axis=1)
    assert sizes.max() == 8
    rates = table.mean(axis=0)
    share = rates.mean()
    z = (rates - share) / np.sqrt(share * (1 - share) / len(table))
    assert np.abs(z).max() < 4.5


def test_empty_batches_are_ordinary():
    table = membership(rows=5, prob=0.05, steps=1000)
    assert (table.sum(axis=1) == 0).mean() == pytest.approx(0.95**5, abs=0.05)


def test_huge_data_cost_only_their_batches():
    sampler = PoissonSampler(
        SecretStreams(1), num_rows=10**9, sampling_prob=1e-8, max_batch_size=40
    )
    batches = sampler.draw(1000)
    assert (batches != EMPTY).sum(axis=1).mean() == pytest.approx(10, abs=0.5)
    assert batches.max() < 10**9
    assert batches.max() > 0.99 * 10**9


@pytest.mark.parametrize("prob", [1e-9, 4e-16, 1e-18, 1e-300])
def test_gaps_saturate_instead_of_overflowing(prob):
    """Below 4e-16 they did overflow, and the first record was in every batch."""
    gaps = _geometric(np.random.default_rng(0), prob, 4096)
    assert gaps.min() >= 1
    assert np.cumsum(gaps).min() > 0
    sampler = PoissonSampler(SecretStreams(1), num_rows=10, sampling_prob=prob, max_batch_size=10)
    assert (sampler.draw(1000) == EMPTY).all()
