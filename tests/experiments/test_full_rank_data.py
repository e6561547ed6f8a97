"""Simulated linear regressions, and their held-out log-likelihood."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

from dpvim.bridge.data import prepare
from dpvim.bridge.model import bridge
from dpvim.experiments import full_rank_data
from dpvim.experiments.full_rank_data import Approximation


@pytest.mark.parametrize(("dim", "density"), [*itertools.product((20, 100), (0.2, 0.8))])
def test_the_correlation_matrix_is_one_with_the_wanted_density(dim, density):
    factor = full_rank_data.correlation_factor(dim, density, np.random.default_rng(0))
    correlations = factor @ factor.T
    np.testing.assert_allclose(np.diag(correlations), 1)
    assert np.linalg.eigvalsh(correlations).min() > 0
    assert full_rank_data.density_of(factor) == pytest.approx(density, abs=0.05)


def test_the_papers_prior_goes_with_the_fast_sum():
    """The clipped sum of `Regression` is that of one gradient a record, with another prior."""
    data = full_rank_data.simulate(5, 0.8, 50)
    bridged = bridge(full_rank_data.model, prepare((data.X, data.y), {}))
    latent = jnp.linspace(-0.5, 0.5, 6)
    weights, is_padding = jnp.linspace(0.5, 2.0, 6), jnp.zeros(50, bool)
    records = prepare((data.X, data.y), {}).records
    sums = [
        problem.likelihood.clipped_sum(
            latent, weights, problem.arrange(records), is_padding, bound=2.0
        )
        for problem in (bridged.problem, bridged.by_record)
    ]
    np.testing.assert_allclose(*sums, rtol=1e-4, atol=1e-4)
    # Gamma(0.1, 0.1) of a scale, as a density of its logarithm.
    at, further = (bridged.problem.log_prior(latent.at[5].set(u)) for u in (0.0, 1.0))
    assert float(further - at) == pytest.approx(0.1 - 0.1 * (np.e - 1), abs=1e-5)


def test_log_likelihood_is_that_of_many_draws():
    rng = np.random.default_rng(1)
    half = 0.3 * rng.normal(size=(4, 4))
    found = Approximation(rng.normal(size=4), half @ half.T)
    X, y = rng.normal(size=(20, 3)), rng.normal(size=20)
    draws = rng.multivariate_normal(found.loc, found.covariance, size=50_000)
    densities = stats.norm.logpdf(y, draws[:, :3] @ X.T, np.exp(draws[:, 3:]))
    expected = (special.logsumexp(densities, axis=0) - np.log(len(draws))).mean()
    assert full_rank_data.log_likelihood(found, X, y) == pytest.approx(expected, abs=0.02)


def test_the_posterior_without_privacy_predicts_as_well_as_noise_allows():
    best = -0.5 * np.log(2 * np.pi * np.e)
    assert full_rank_data.nonprivate_log_likelihood(20, 0.2, 2000) == pytest.approx(best, abs=0.06)
