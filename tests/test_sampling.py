"""Poisson sampling: every row in every batch, independently, with the stated probability."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from dpvim.randomness import SecretStreams
from dpvim.sampling import PoissonSampler


def membership(*, rows=40, prob=0.2, steps=20_000, cap=None, seed=1):
    """A table of zeros and ones, [steps, rows]."""
    sampler = PoissonSampler(
        SecretStreams(seed), num_rows=rows, sampling_prob=prob, max_batch_size=cap or rows
    )
    batches = sampler.draw(steps)
    table = np.zeros((steps, rows), bool)
    real = np.arange(batches.rows.shape[1]) < batches.sizes[:, None]
    step = np.broadcast_to(np.arange(steps)[:, None], batches.rows.shape)
    table[step[real], batches.rows[real]] = True
    assert table.sum() == batches.sizes.sum()  # no row twice in a batch
    return table


@pytest.mark.parametrize("prob", [0.01, 0.2, 0.7])
def test_marginal_rates(prob):
    counts = membership(prob=prob).sum(axis=0)
    z = (counts - 20_000 * prob) / np.sqrt(20_000 * prob * (1 - prob))
    assert np.abs(z).max() < 4.5
    assert stats.kstest(z, "norm").pvalue > 0.001
    # The test can tell: a tenth more or less is seen in every row's sum.
    assert abs(counts.sum() / (20_000 * 40 * prob) - 1) < 0.02


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


def test_stream_does_not_depend_on_how_many_steps_are_drawn_at_a_time():
    def sampler():
        return PoissonSampler(
            SecretStreams(5), num_rows=1000, sampling_prob=0.05, max_batch_size=60
        )

    whole = sampler().draw(100)
    pieces = sampler()
    parts = [pieces.draw(n) for n in (1, 3, 40, 56)]
    np.testing.assert_array_equal(whole.rows, np.concatenate([p.rows for p in parts]))
    np.testing.assert_array_equal(whole.sizes, np.concatenate([p.sizes for p in parts]))


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
    assert batches.sizes.mean() == pytest.approx(10, abs=0.5)
    assert batches.rows.max() < 10**9
    assert batches.rows.max() > 0.99 * 10**9
