"""The model's own prior in place of Gaussians: against answers that are known without sampling."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import halfnorm, multivariate_normal, norm
from steered_cases import SCALE, new_steering, plan_of, quadratic, run_to_the_end

from dpvim.posterior.convergence import Windows
from dpvim.posterior.drawn import DrawnPosterior
from dpvim.posterior.from_releases import GaussianMixture
from dpvim.posterior.from_releases.exact_prior import (
    SAMPLER_DOUBT,
    PriorDraws,
    draws_with_prior,
    posterior_from_windows,
)
from dpvim.posterior.from_releases.hedge import HEDGED
from dpvim.posterior.from_releases.regression import GaussianPrior
from dpvim.posterior.from_releases.steered import closed_form

# A mean and three groups around it, with a spread of 0.7; only the groups are in the likelihood.
SPREAD = 0.7
GAUSSIANS = GaussianPrior(np.zeros(4), np.array([2.0, *[np.hypot(2.0, SPREAD)] * 3]))
GROUP_MEANS = np.array([[1.0, 1.5, 0.4], [1.2, 1.4, 0.1], [0.8, 1.1, 0.6]])
GROUP_SDS = np.array([[0.3, 0.5, 0.8], [0.4, 0.4, 0.5], [0.6, 0.9, 0.4]])


def log_prior(latent):
    mean, groups = latent[0], latent[1:]
    return -0.5 * (mean / 2) ** 2 - 0.5 * jnp.sum(jnp.square((groups - mean) / SPREAD))


def mixture_of(precisions, linear):
    """Components from precisions and linear terms."""
    covariances = np.linalg.inv(precisions)
    locs = np.einsum("kij,kj->ki", covariances, linear)
    dim = locs.shape[1]
    windows = Windows(np.full(dim, 10), np.ones(dim, bool))
    return GaussianMixture(
        locs, np.linalg.cholesky(covariances), np.zeros(dim), windows, np.ones(dim)
    )


def likelihood(means, sds):
    """Precisions and linear terms of the likelihoods of groups, which follow a coordinate."""
    before = np.zeros((len(means), 4 - means.shape[1]))
    precision = np.hstack([before, 1 / sds**2])
    return precision[:, :, None] * np.eye(4), precision * np.hstack([before, means])


def with_prior(precisions, linear, prior):
    inverse = 1 / prior.scale**2
    return mixture_of(precisions + np.diag(inverse), linear + inverse * prior.loc)


def exact_moments():
    """Of the mixture with the hierarchy: by the algebra of Gaussians, weights included."""
    precisions, linear = likelihood(GROUP_MEANS, GROUP_SDS)
    covariance = 4 * np.ones((4, 4)) + np.diag([0, *[SPREAD**2] * 3])
    covariances = np.linalg.inv(precisions + np.linalg.inv(covariance))
    locs = np.einsum("kij,kj->ki", covariances, linear)
    # The evidence under each prior: components have equal weights under the Gaussians.
    evidence = [
        [
            multivariate_normal.pdf(m, np.zeros(3), prior[1:, 1:] + np.diag(s**2))
            for prior in (covariance, np.diag(GAUSSIANS.scale**2))
        ]
        for m, s in zip(GROUP_MEANS, GROUP_SDS, strict=True)
    ]
    hierarchy, gaussians = np.array(evidence).T
    weights = hierarchy / gaussians / np.sum(hierarchy / gaussians)
    loc = weights @ locs
    away = locs - loc
    spread = np.einsum("k,kij->ij", weights, covariances) + (weights * away.T) @ away
    return loc, np.sqrt(np.diagonal(spread))


def test_a_gaussian_hierarchy_is_pooled_exactly():
    mixture = with_prior(*likelihood(GROUP_MEANS, GROUP_SDS), GAUSSIANS)
    draws = draws_with_prior(mixture, GAUSSIANS, log_prior)
    loc, scale = exact_moments()
    assert draws.are_good
    np.testing.assert_allclose((draws.latents.mean(axis=0) - loc) / scale, 0, atol=0.1)
    np.testing.assert_allclose(draws.latents.std(axis=0) / scale, 1, atol=0.08)
    # What was known before: nothing of the mean, and less of the groups.
    assert mixture.scale[0] > 3 * scale[0]
    assert (mixture.scale[1:] > 1.02 * scale[1:]).all()


def test_the_same_draws_each_time():
    mixture = with_prior(*likelihood(GROUP_MEANS, GROUP_SDS), GAUSSIANS)
    first, second = (draws_with_prior(mixture, GAUSSIANS, log_prior) for _ in range(2))
    np.testing.assert_array_equal(first.latents, second.latents)


def test_the_spread_of_groups_is_learnt():
    """Against a sum over a grid of mean and spread, with the groups integrated out."""
    means, sds = np.array([[2.0, -1.0, 0.5, 3.0]]), np.array([[0.3, 0.5, 0.4, 0.6]])
    prior = GaussianPrior(np.array([0, -0.4, *[0.0] * 4]), np.array([2, 0.9, *[2.3] * 4]))

    def hierarchy(latent):
        mean, log_spread, groups = latent[0], latent[1], latent[2:]
        spread = jnp.exp(log_spread)
        about = -0.5 * jnp.square((groups - mean) / spread) - log_spread
        return -0.5 * (mean / 2) ** 2 - 0.5 * spread**2 + log_spread + about.sum()

    precision = np.array([[0, 0, *(1 / sds[0] ** 2)]])
    linear = precision * np.array([[0, 0, *means[0]]])
    mixture = with_prior(precision[:, :, None] * np.eye(6), linear, prior)
    draws = draws_with_prior(mixture, prior, hierarchy)

    mean, log_spread = np.meshgrid(np.linspace(-6, 6, 241), np.linspace(-5, 3, 321))
    spread = np.exp(log_spread)
    log_weight = norm.logpdf(mean, 0, 2) + halfnorm.logpdf(spread) + log_spread
    for m, s in zip(means[0], sds[0], strict=True):
        log_weight += norm.logpdf(m, mean, np.hypot(spread, s))
    weight = np.exp(log_weight - log_weight.max())
    weight /= weight.sum()
    assert draws.are_good
    for values, found in ((mean, draws.latents[:, 0]), (log_spread, draws.latents[:, 1])):
        loc = np.sum(weight * values)
        scale = np.sqrt(np.sum(weight * (values - loc) ** 2))
        assert found.mean() == pytest.approx(loc, abs=0.12 * scale)
        assert found.std() == pytest.approx(scale, rel=0.1)


def test_gaussians_are_not_sampled():
    mixture = with_prior(*likelihood(GROUP_MEANS, GROUP_SDS), GAUSSIANS)

    def gaussians(latent):
        return -0.5 * jnp.sum(jnp.square(latent / GAUSSIANS.scale.astype(np.float32)))

    assert draws_with_prior(mixture, GAUSSIANS, gaussians) is None


def test_places_too_narrow_for_the_sampler_are_doubted():
    """A funnel: the spread of groups that nothing is known of."""
    prior = GaussianPrior(np.zeros(4), np.array([3.0, 5.0, 5.0, 5.0]))
    mixture = with_prior(*likelihood(np.zeros((1, 3)), np.full((1, 3), 50.0)), prior)

    def funnel(latent):
        scaled = latent[1:] / jnp.exp(1.5 * latent[0])
        return -0.5 * (latent[0] / 3) ** 2 - 0.5 * jnp.sum(scaled**2) - 4.5 * latent[0]

    assert not draws_with_prior(mixture, prior, funnel).are_good


INFORMED = np.array([False, True, True, True])


def steered(noise_multiplier):
    plan = plan_of(noise_multiplier)

    def gradient(latents):
        return np.where(INFORMED, quadratic(np.where(INFORMED, latents, 2.0)), 0.0)

    return run_to_the_end(new_steering(INFORMED, plan), plan=plan, gradient=gradient), plan


def in_units(latent):
    """The groups around their mean, in units of the prior of the cases."""
    return log_prior(latent / SCALE.astype(np.float32))


def test_the_noise_of_the_run_reaches_what_only_the_prior_knows():
    prior = GaussianPrior(np.zeros(4), SCALE * GAUSSIANS.scale)
    share = []
    for noise_multiplier in (5.0, 3000.0):
        releases, plan = steered(noise_multiplier)
        found, draws = posterior_from_windows(releases, plan, prior, log_prior=in_units)
        assert isinstance(found, DrawnPosterior)
        again, _ = posterior_from_windows(releases, plan, prior, draws=draws)
        np.testing.assert_array_equal(again.loc, found.loc)
        np.testing.assert_array_equal(again.dp_scale, found.dp_scale)
        assert (found.dp_scale < found.scale).all()
        closed = closed_form(releases, plan, prior).mixture
        assert found.clipped == closed.clipped
        share.append(found.dp_scale / found.scale)
        assert closed.dp_scale[0] == 0
    assert (share[1] > share[0]).all()


def test_a_sampler_in_trouble_is_a_doubt():
    prior = GaussianPrior(np.zeros(4), SCALE)
    releases, plan = steered(20.0)
    latents = np.random.default_rng(0).normal(size=(100, 4))
    for r_hat, doubts in ((1.0, ()), (1.5, (SAMPLER_DOUBT, HEDGED))):
        draws = PriorDraws(latents, np.array(r_hat), np.array(400.0), np.array(0.0))
        found, _ = posterior_from_windows(releases, plan, prior, draws=draws)
        assert found.doubts == doubts
        assert found.windows.converged.all() == (not doubts)


@pytest.mark.parametrize("x64", [False, True])
def test_draws_do_not_depend_on_the_precision_of_jax(x64):
    mixture = with_prior(*likelihood(GROUP_MEANS, GROUP_SDS), GAUSSIANS)
    with jax.enable_x64(x64):
        draws = draws_with_prior(mixture, GAUSSIANS, log_prior)
    assert draws.latents.mean() == draws_with_prior(mixture, GAUSSIANS, log_prior).latents.mean()
