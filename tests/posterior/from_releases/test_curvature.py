"""The model of optimum and curvature: known answers, and its sampler against NUTS."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC, NUTS
from release_cases import H3, STANDARD_NORMAL, plan_of, quadratic_sums

from dpvim.posterior.from_releases import curvature, mixture_from_releases
from dpvim.posterior.from_releases.regression import fit_regression

# Chains that are long enough to compare moments.
LONG = curvature.SamplerConfig(8, 200, 500)


def test_known_curvature_and_optimum_are_found():
    """Hardly any noise: H and g are found, and theta has the exact posterior of a quadratic."""
    plan = plan_of(noise_multiplier=0.05)
    optimum = np.array([0.4, -0.3, 0.2])
    sums, _, _ = quadratic_sums(h=H3, g_at_zero=H3 @ optimum, plan=plan)
    regression = fit_regression(sums, plan, STANDARD_NORMAL)
    found = curvature.posterior_components(regression.stats)
    np.testing.assert_allclose(found.curvature, H3, atol=8)
    exact = np.linalg.inv(H3 + np.eye(3))
    mixture = mixture_from_releases(sums, plan, STANDARD_NORMAL)
    np.testing.assert_allclose(mixture.loc, exact @ H3 @ optimum, atol=0.01)
    np.testing.assert_allclose(mixture.covariance, exact, rtol=0.12, atol=2e-4)
    assert (mixture.dp_scale < 0.5 * mixture.scale).all()


def numpyro_model(stats):
    """The same model with nothing integrated out, for NUTS."""
    dim = len(stats.noise)
    size = curvature.num_coordinates(dim)
    flat = numpyro.sample("flat", dist.Normal(0, 1).expand([size]).to_event(1))
    h = curvature.curvature_matrix(flat, stats)
    theta = numpyro.sample(
        "theta", dist.Normal(stats.prior_loc, jnp.sqrt(stats.prior_variance)).to_event(1)
    )
    z = numpyro.sample("z", dist.Normal(0, 1).expand([dim]).to_event(1))
    g = h @ theta + jnp.linalg.cholesky(h) @ z
    within = -0.5 * jnp.sum((h @ stats.xx) * h / stats.noise[:, None])
    within -= jnp.sum(h * stats.xg.T / stats.noise[:, None])
    gap = stats.g + stats.x @ h - g
    numpyro.factor("releases", within - 0.5 * jnp.einsum("jvw,vj,wj->", stats.weight, gap, gap))


@pytest.mark.long
def test_the_sampler_agrees_with_nuts_on_the_whole_model():
    plan = plan_of(noise_multiplier=4.0)
    sums, _, _ = quadratic_sums(h=H3, g_at_zero=H3 @ np.array([0.3, 0.5, -0.4]), plan=plan)
    regression = fit_regression(sums, plan, STANDARD_NORMAL)
    found = curvature.posterior_components(regression.stats, config=LONG)
    assert found.r_hat < 1.05
    with jax.enable_x64(True):
        stats = jax.tree.map(jnp.asarray, regression.stats)
        mcmc = MCMC(NUTS(numpyro_model), num_warmup=300, num_samples=2000, progress_bar=False)
        mcmc.run(jax.random.key(0), stats)
        theta = np.asarray(mcmc.get_samples()["theta"])
    mixture = mixture_from_releases(sums, plan, STANDARD_NORMAL, sampler=LONG)
    spread = theta.std(axis=0)
    np.testing.assert_allclose(mixture.scale, spread, rtol=0.1)
    np.testing.assert_allclose(
        mixture.loc, theta.mean(axis=0) + regression.reference, atol=0.15 * spread.max()
    )


def test_what_is_done_for_large_matrices_agrees(monkeypatch):
    """A diagonal preconditioner and one chain after the other: the same posterior."""
    plan = plan_of(noise_multiplier=2.0)
    sums, _, _ = quadratic_sums(h=H3, g_at_zero=H3 @ np.array([0.3, -0.2, 0.1]), plan=plan)
    usual = mixture_from_releases(sums, plan, STANDARD_NORMAL, sampler=LONG)
    monkeypatch.setattr(curvature, "_MAX_DENSE_PRECONDITIONER", 0)
    monkeypatch.setattr(curvature, "_MAX_VECTORIZED_DIM", 0)
    large = mixture_from_releases(
        sums,
        plan,
        STANDARD_NORMAL,
        sampler=LONG._replace(num_chains=9),  # another shape is compiled anew
    )
    np.testing.assert_allclose(large.scale, usual.scale, rtol=0.08)
    np.testing.assert_allclose(large.loc, usual.loc, atol=0.15 * usual.scale.max())


def test_the_maximum_is_known_better_than_the_truth():
    plan = plan_of(noise_multiplier=0.2)
    sums, _, _ = quadratic_sums(h=H3, g_at_zero=H3 @ np.array([0.4, -0.3, 0.2]), plan=plan)
    stats = fit_regression(sums, plan, STANDARD_NORMAL).stats
    truth, maximum = (
        curvature.posterior_components(stats._replace(sampling_share=share)) for share in (1.0, 0.0)
    )
    spread = [np.linalg.norm(c.factor, axis=2).mean(axis=0) for c in (truth, maximum)]
    assert (spread[1] < 0.7 * spread[0]).all()
