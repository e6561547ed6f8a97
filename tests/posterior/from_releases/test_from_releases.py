"""The posterior from the releases: the mixture, and what a fit makes of it."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from conftest import linear_model
from release_cases import H3, STANDARD_NORMAL, X, Y, linear_fit, plan_of, quadratic_sums

import dpvim
from dpvim.inference.release_sums import LARGEST_FULL_DIM
from dpvim.posterior.from_releases import GaussianMixture, mixture_from_releases
from dpvim.posterior.from_releases.regression import GaussianPrior
from dpvim.posterior.from_trace import GaussianPosterior


def test_where_nothing_was_learnt_the_prior_comes_back():
    plan = plan_of(noise_multiplier=1e4)
    prior = GaussianPrior(np.array([0.0, 1.0, -2.0]), np.array([1.0, 0.5, 2.0]))
    sums, _, _ = quadratic_sums(h=H3, g_at_zero=np.zeros(3), plan=plan)
    mixture = mixture_from_releases(sums, plan, prior)
    np.testing.assert_allclose(mixture.loc, prior.loc, atol=0.25 * prior.scale.max())
    np.testing.assert_allclose(mixture.scale, prior.scale, rtol=0.15)


def test_diagonal_sums_agree_with_full_ones_where_the_curvature_is_diagonal():
    """Up to the information that a diagonal model takes to be shared: a factor of two at most."""
    plan = plan_of(noise_multiplier=1.0)
    h = np.diag([300.0, 100.0, 40.0])
    sums, _, _ = quadratic_sums(h=h, g_at_zero=h @ np.array([0.3, 0.5, -0.4]), plan=plan)
    diagonal = sums._replace(
        point_point=np.einsum("wii->wi", sums.point_point),
        point_gradient=np.einsum("wii->wi", sums.point_gradient),
    )
    full, slim = (mixture_from_releases(s, plan, STANDARD_NORMAL) for s in (sums, diagonal))
    assert (np.abs(slim.loc - full.loc) < full.scale).all()
    assert (slim.scale > 0.9 * full.scale).all()
    assert (slim.scale < 1.6 * full.scale).all()


def test_a_bend_is_reported_and_nothing_else():
    plan = plan_of(noise_multiplier=0.5)
    straight, _, _ = quadratic_sums(h=H3, g_at_zero=np.zeros(3), plan=plan)
    bent, _, _ = quadratic_sums(h=H3, g_at_zero=np.zeros(3), plan=plan, bend=30_000.0)
    for sums, expected in ((straight, True), (bent, False)):
        mixture = mixture_from_releases(sums, plan, STANDARD_NORMAL)
        assert mixture.windows.converged.all() == expected


def test_the_density_of_the_mixture_integrates_to_one():
    plan = plan_of(noise_multiplier=40.0)
    sums, _, _ = quadratic_sums(h=H3[:1, :1], g_at_zero=np.array([100.0]), plan=plan)
    mixture = mixture_from_releases(sums, plan, GaussianPrior(np.zeros(1), np.ones(1)))
    grid = np.linspace(-8, 8, 4001)
    density = np.exp(mixture.log_density(grid[:, None]))
    assert np.trapezoid(density, grid) == pytest.approx(1.0, abs=1e-3)
    below = np.cumsum(density) * (grid[1] - grid[0])
    low, high = mixture.quantiles(np.array([0.1, 0.9]))[0]
    assert np.interp(low, grid, below) == pytest.approx(0.1, abs=5e-3)
    assert np.interp(high, grid, below) == pytest.approx(0.9, abs=5e-3)


# -- of a fit ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["mean_field", "full_rank"])
def test_without_much_noise_the_posterior_is_the_exact_one(family):
    fit = linear_fit(
        noise_multiplier=0.5, num_steps=3000, family=family, probe_width=4.0, clip_norm=20.0
    )
    posterior = fit.posterior_at(noise_aware="releases")
    covariance = np.linalg.inv(X.T @ X + np.eye(3))
    exact = covariance @ X.T @ Y
    np.testing.assert_allclose(posterior.loc, exact, atol=0.6 * np.sqrt(covariance[2, 2]))
    np.testing.assert_allclose(posterior.scale, np.sqrt(np.diag(covariance)), rtol=0.25)


def constrained(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    scale = numpyro.sample("scale", dist.Gamma(2.0, 2.0))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, scale), obs=y)


def test_the_mixture_speaks_for_sites_with_supports():
    fit = dpvim.fit(
        constrained,
        X,
        Y,
        noise_multiplier=5.0,
        delta=1e-5,
        clip_norm=3.0,
        sampling_prob=0.1,
        num_steps=2000,
        learning_rate=1e-2,
        seed=0,
    )
    posterior = fit.posterior_at(noise_aware="releases")
    draws = posterior.sample(40_000, seed=1)
    assert (draws["scale"] > 0).all()
    np.testing.assert_allclose(posterior.mean["w"], draws["w"].mean(axis=0), atol=0.02)
    np.testing.assert_allclose(posterior.std["w"], draws["w"].std(axis=0), rtol=0.05)
    wanted = np.quantile(draws["w"], [0.05, 0.95], axis=0).T
    np.testing.assert_allclose(posterior.interval(0.9)["w"], wanted, atol=0.05)
    low, high = posterior.interval(0.9)["scale"]
    assert 0 < low < 1.05 < high + 0.2
    table = posterior.summary()
    assert ((table["dp_share"] >= 0) & (table["dp_share"] <= 1)).all()


def test_releases_take_no_window_and_need_noise():
    fit = linear_fit(num_steps=64)
    with pytest.raises(ValueError, match="leave out"):
        fit.posterior_at("last", noise_aware="releases")
    bare = dpvim.fit_nonprivate(linear_model, X, Y, sampling_prob=0.1, num_steps=64, seed=0)
    with pytest.raises(ValueError, match="private fits"):
        bare.posterior_at(noise_aware="releases")


# -- which posterior a fit has by default --------------------------------------------------------


def improper(X, y=None):
    prior = dist.ImproperUniform(dist.constraints.real_vector, (), (3,))
    w = numpyro.sample("w", prior)
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, 1.0), obs=y)


def moody(X, y=None):
    """A model that declares several modes."""
    return linear_model(X, y)


moody.several_modes = True

REASONS = {
    "other releases": "no sums of released gradients",
    "too short": "too short",
    "no noise": "no noise",
    "no proper prior": "improper",
    "no prior in the file": "no prior",
    "several modes": "several modes",
}


def test_the_posterior_comes_from_the_releases(tmp_path):
    fit = linear_fit()
    assert isinstance(fit.posterior.latent_dist, GaussianMixture)
    assert fit.posterior is fit.posterior_from("releases")
    assert fit.posterior is fit.posterior_at(noise_aware="releases")
    assert "from the releases (identified by them)" in repr(fit.posterior)
    assert set(fit.posterior.summary()["method"]) == {"releases"}
    assert "from the trace (asked for)" in repr(fit.averaged)
    fit.save(tmp_path / "fit.npz", not_for_release=True)
    again = dpvim.load(tmp_path / "fit.npz").posterior
    np.testing.assert_allclose(again.loc, fit.posterior.loc, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::dpvim.ConvergenceWarning")
@pytest.mark.parametrize(
    "other",
    [
        lambda: linear_fit(variant="vanilla", num_steps=64),
        lambda: linear_fit(num_steps=8),
        lambda: dpvim.fit_nonprivate(linear_model, X, Y, sampling_prob=0.1, num_steps=64, seed=0),
        lambda: dpvim.fit(improper, X, Y, noise_multiplier=5.0, delta=1e-5, num_steps=64, seed=0),
        lambda: dataclasses.replace(linear_fit(), session=None),
        lambda: dpvim.fit(moody, X, Y, noise_multiplier=5.0, delta=1e-5, num_steps=64, seed=0),
    ],
    ids=REASONS,
)
def test_where_releases_cannot_tell_it_is_the_average_of_the_trace(other, request):
    fit = other()
    assert fit.posterior is fit.averaged
    assert isinstance(fit.posterior.latent_dist, GaussianPosterior)
    reason = REASONS[request.node.callspec.id]
    assert reason in fit.posterior.reason
    assert f"from the trace ({fit.posterior.reason})" in repr(fit.posterior)
    assert fit.posterior.summary().attrs["reason"] == fit.posterior.reason


def test_several_modes_are_declared_and_remembered(tmp_path):
    """Releases tell about one mode; there is nothing to probe widely for."""
    fit = dpvim.fit(moody, X, Y, noise_multiplier=5.0, delta=1e-5, num_steps=64, seed=0)
    narrow = dpvim.fit(
        *(moody, X, Y), noise_multiplier=5.0, delta=1e-5, num_steps=64, seed=0, probe_width=1.0
    )
    np.testing.assert_array_equal(fit.trace.loc, narrow.trace.loc)
    fit.save(tmp_path / "fit.npz", not_for_release=True)
    again = dpvim.load(tmp_path / "fit.npz")
    assert again.several_modes
    with pytest.warns(dpvim.ConvergenceWarning):
        assert again.posterior.method == "trace"
    asked = fit.posterior_from("releases")
    assert "asked for, although the model has several modes" in repr(asked)


def test_unknown_methods_are_refused():
    with pytest.raises(ValueError, match="Did you mean 'releases'"):
        linear_fit(num_steps=64).posterior_from("release")
    with pytest.raises(ValueError, match="leave out"):
        linear_fit(num_steps=64).posterior_from("releases", window="slope")


def test_a_large_latent_has_the_average_of_the_trace():
    def wide(X, y=None):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([LARGEST_FULL_DIM + 1]).to_event(1))
        with numpyro.plate("records", X.shape[0]):
            numpyro.sample("y", dist.Normal(X @ w[:3] + w.sum(), 1.0), obs=y)

    fit = dpvim.fit(wide, X, Y, noise_multiplier=5.0, delta=1e-5, num_steps=1600, seed=0)
    with pytest.warns(dpvim.ConvergenceWarning):
        assert fit.posterior is fit.averaged
    # and there is nothing to probe widely for
    narrow = dpvim.fit(
        wide, X, Y, noise_multiplier=5.0, delta=1e-5, num_steps=1600, seed=0, probe_width=1.0
    )
    np.testing.assert_array_equal(fit.trace.loc, narrow.trace.loc)


def test_a_run_that_has_not_arrived_says_so():
    """Hardly an outcome is zero: the intercept is at 4.7, and the run ends long before."""
    rng = np.random.default_rng(3)
    outcome = (rng.random(2000) < 0.991).astype(np.float32)

    def intercept(y=None):
        a = numpyro.sample("a", dist.Normal(0, 5))
        with numpyro.plate("records", len(y)):
            numpyro.sample("y", dist.Bernoulli(logits=a * jnp.ones(len(y))), obs=y)

    settings = {"clip_norm": 1.0, "num_steps": 1000, "seed": 0}
    fit = dpvim.fit(intercept, outcome, epsilon=1.0, delta=1e-5, **settings)
    with pytest.warns(dpvim.ConvergenceWarning, match="has not arrived") as caught:
        posterior = fit.posterior
    assert posterior.not_converged == ["a"]
    assert caught[0].filename == __file__
