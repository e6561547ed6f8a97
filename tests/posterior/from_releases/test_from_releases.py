"""Sums of releases, the model of what they say, and the posterior made of them."""

from __future__ import annotations

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC, NUTS

import dpvim
from dpvim.inference import loop
from dpvim.inference.gradient import default_width, width_schedule
from dpvim.inference.release_sums import LARGEST_FULL_DIM, NUM_WINDOWS, Collector
from dpvim.posterior.from_releases import GaussianMixture, curvature, mixture_from_releases
from dpvim.posterior.from_releases.regression import (
    GaussianPrior,
    fit_regression,
    lack_of_fit_p_values,
)
from dpvim.posterior.from_trace import GaussianPosterior
from dpvim.privacy.plan import PrivacyPlan

RNG = np.random.default_rng(0)
STEPS = 4000


def plan_of(**changes):
    facts = {
        "num_examples": 2000,
        "sampling_prob": 0.1,
        "num_steps": STEPS,
        "clip_norm": 3.0,
        "noise_multiplier": 20.0,
    }
    return PrivacyPlan(**(facts | changes))


def quadratic_sums(*, h, g_at_zero, plan, spread=0.1, bend=0.0, seed=0, steps=STEPS):
    """Releases of a log-likelihood with gradient g - H theta (+ bend theta^2), made up."""
    rng = np.random.default_rng(seed)
    points = spread * rng.normal(size=(steps, len(h))) + np.linspace(0, spread, steps)[:, None]
    noise = plan.noise_stddev / plan.sampling_prob * rng.normal(size=points.shape)
    gradients = g_at_zero - points @ h + bend * points**2 + noise
    return sums_of(points, gradients, plan), points, gradients


def sums_of(points, gradients, plan, chunks=None):
    """What a run with these releases would keep, if it were cut into these chunks."""
    collector, releases = Collector(points.shape[1], plan), gradients * plan.sampling_prob
    first = 0
    for length in chunks or [len(points)]:
        collector.add(first, length, points[first:], releases[first:])
        first += length
    return collector.total()


H3 = 300.0 * np.array([[1.0, 0.3, 0.0], [0.3, 0.5, -0.1], [0.0, -0.1, 0.4]])
FLAT = GaussianPrior(np.zeros(3), np.ones(3))


# -- sums ----------------------------------------------------------------------------------------


def test_sums_are_those_of_their_windows():
    plan = plan_of()
    sums, points, gradients = quadratic_sums(h=H3, g_at_zero=np.ones(3), plan=plan)
    part = slice(STEPS // NUM_WINDOWS, 2 * STEPS // NUM_WINDOWS)
    x, g = points[part], gradients[part]
    assert sums.steps.sum() == STEPS
    np.testing.assert_allclose(sums.point[1], x.sum(axis=0))
    np.testing.assert_allclose(sums.gradient[1], g.sum(axis=0))
    np.testing.assert_allclose(sums.point_point[1], x.T @ x)
    np.testing.assert_allclose(sums.point_gradient[1], x.T @ g)
    np.testing.assert_allclose(sums.gradient_squared[1], (g**2).sum(axis=0))


def test_large_latents_keep_diagonals():
    dim = LARGEST_FULL_DIM + 1
    x, g = RNG.normal(size=(2, 20, dim))
    sums = sums_of(x, g, plan_of(num_steps=20))
    assert not sums.is_full
    np.testing.assert_allclose(sums.point_gradient.sum(axis=0), (x * g).sum(axis=0))


@pytest.mark.parametrize("steps", [STEPS, 1000, 777, 10])
def test_sums_do_not_depend_on_how_a_run_was_cut(steps):
    """To the last bit: the pace of a run follows the clock, which knows about the data."""
    plan = plan_of(num_steps=steps)
    rng = np.random.default_rng(0)
    points, gradients = rng.normal(size=(2, steps, 3)) * np.array([1.0, 1e3, 1e-3])
    whole = sums_of(points, gradients, plan)
    assert whole.steps.sum() == steps
    for longest in (1, 7, 300):
        chunks = []
        while sum(chunks) < steps:
            chunks.append(min(int(rng.integers(1, longest + 1)), steps - sum(chunks)))
        for one, other in zip(whole, sums_of(points, gradients, plan, chunks), strict=True):
            np.testing.assert_array_equal(one, other)


def model(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, 1), obs=y)


X = RNG.normal(size=(2000, 3)) * np.array([1.0, 0.6, 0.3])
Y = X @ np.array([0.5, -0.8, 0.4]) + RNG.normal(size=2000)


def quick(**changes):
    options = {
        "noise_multiplier": 20.0,
        "delta": 1e-5,
        "clip_norm": 3.0,
        "sampling_prob": 0.1,
        "num_steps": 1000,
        "learning_rate": 1e-2,
        "seed": 0,
    }
    return dpvim.fit(model, X, Y, **(options | changes))


def test_a_saved_fit_does_not_tell_the_pace_of_the_run(monkeypatch, tmp_path):
    """A record that makes the model slow must not show: the same releases, the same bytes."""
    files = {}
    for pace, seconds in {"slow": 100.0, "fast": 1e-9}.items():
        record = loop._Pace.record
        with monkeypatch.context() as patched:
            patched.setattr(
                loop._Pace,
                "record",
                lambda self, length, _, s=seconds, record=record: record(self, length, s),
            )
            patched.setattr(time, "localtime", lambda *_, s=seconds: time.gmtime(1e9 + 1e9 * s))
            patched.setattr(time, "time", lambda s=seconds: 1e9 + 1e6 * s)
            fit = quick()
            fit.save(tmp_path / pace, not_for_release=True)
        files[pace] = (tmp_path / pace).read_bytes()
    assert fit.releases.steps.sum() == 1000
    assert files["slow"] == files["fast"]


def test_sums_of_a_run_are_those_of_its_steps():
    """Step by step, with the same seed, by hand."""
    fit = quick(num_steps=64)
    plan, optimizer = fit.plan, fit.session.prepared.options.optimizer
    by_hand = dpvim.DPSVI(model, "mean_field", optimizer, plan, seed=0, probe_width="auto")
    state = by_hand.init(jax.random.key(0), X, Y)
    point, gradient = np.zeros(3), np.zeros(3)
    for _ in range(64):
        state, info = by_hand.update(state, X, Y)
        point += np.asarray(info.latent)
        gradient += np.asarray(info.release, float) / plan.sampling_prob
    np.testing.assert_allclose(fit.releases.point.sum(axis=0), point, rtol=1e-5)
    np.testing.assert_allclose(fit.releases.gradient.sum(axis=0), gradient, rtol=1e-4)


def test_vectorised_runs_have_their_own_sums():
    plan = plan_of(num_steps=100)
    svi = dpvim.DPSVI(model, "mean_field", dpvim_adam(), plan, seed=0)
    runs = svi.run_many(jax.random.key(0), 2, 100, X, Y, progress_bar=False)
    first, second = (run.releases for run in runs)
    assert first.steps.sum() == second.steps.sum() == 100
    assert not np.allclose(first.gradient, second.gradient)


def dpvim_adam():
    import optax

    return optax.adam(1e-2)


def test_other_variants_keep_no_sums_and_say_what_works():
    fit = quick(variant="vanilla", num_steps=64)
    assert fit.releases is None
    with pytest.raises(ValueError, match="aligned"):
        fit.posterior_at(noise_aware="releases")


def test_sums_survive_a_file_and_old_files_say_that_they_have_none(tmp_path):
    fit = quick()
    fit.save(tmp_path / "fit.npz", not_for_release=True)
    again = dpvim.load(tmp_path / "fit.npz")
    for before, after in zip(fit.releases, again.releases, strict=True):
        np.testing.assert_array_equal(after, before)
    here, there = (f.posterior_at(noise_aware="releases") for f in (fit, again))
    np.testing.assert_allclose(there.loc, here.loc)
    old = dpvim.Fit(fit.plan, fit.privacy, fit.trace, fit.space, fit.family)
    old.save(tmp_path / "old.npz", not_for_release=True)
    with pytest.raises(ValueError, match="this version"):
        dpvim.load(tmp_path / "old.npz").posterior_at(noise_aware="releases")


# -- the model -----------------------------------------------------------------------------------


def test_known_curvature_and_optimum_are_found():
    """Hardly any noise: H and g are found, and theta has the exact posterior of a quadratic."""
    plan = plan_of(noise_multiplier=0.05)
    optimum = np.array([0.4, -0.3, 0.2])
    sums, _, _ = quadratic_sums(h=H3, g_at_zero=H3 @ optimum, plan=plan)
    regression = fit_regression(sums, plan, FLAT)
    found = curvature.posterior_components(regression.stats)
    np.testing.assert_allclose(found.curvature, H3, atol=8)
    exact = np.linalg.inv(H3 + np.eye(3))
    mixture = mixture_from_releases(sums, plan, FLAT)
    np.testing.assert_allclose(mixture.loc, exact @ H3 @ optimum, atol=0.01)
    np.testing.assert_allclose(mixture.covariance, exact, rtol=0.12, atol=2e-4)
    assert (mixture.dp_scale < 0.5 * mixture.scale).all()


def test_where_nothing_was_learnt_the_prior_comes_back():
    plan = plan_of(noise_multiplier=1e4)
    prior = GaussianPrior(np.array([0.0, 1.0, -2.0]), np.array([1.0, 0.5, 2.0]))
    sums, _, _ = quadratic_sums(h=H3, g_at_zero=np.zeros(3), plan=plan)
    mixture = mixture_from_releases(sums, plan, prior)
    np.testing.assert_allclose(mixture.loc, prior.loc, atol=0.25 * prior.scale.max())
    np.testing.assert_allclose(mixture.scale, prior.scale, rtol=0.15)


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


def test_the_sampler_agrees_with_nuts_on_the_whole_model():
    plan = plan_of(noise_multiplier=4.0)
    sums, _, _ = quadratic_sums(h=H3, g_at_zero=H3 @ np.array([0.3, 0.5, -0.4]), plan=plan)
    regression = fit_regression(sums, plan, FLAT)
    found = curvature.posterior_components(
        regression.stats, config=curvature.SamplerConfig(8, 200, 500)
    )
    assert found.r_hat < 1.05
    with jax.enable_x64(True):
        stats = jax.tree.map(jnp.asarray, regression.stats)
        mcmc = MCMC(NUTS(numpyro_model), num_warmup=300, num_samples=2000, progress_bar=False)
        mcmc.run(jax.random.key(0), stats)
        theta = np.asarray(mcmc.get_samples()["theta"])
    mixture = mixture_from_releases(sums, plan, FLAT, sampler=curvature.SamplerConfig(8, 200, 500))
    spread = theta.std(axis=0)
    np.testing.assert_allclose(mixture.scale, spread, rtol=0.1)
    np.testing.assert_allclose(
        mixture.loc, theta.mean(axis=0) + regression.reference, atol=0.15 * spread.max()
    )


def test_diagonal_sums_agree_with_full_ones_where_the_curvature_is_diagonal():
    """Up to the information that a diagonal model takes to be shared: a factor of two at most."""
    plan = plan_of(noise_multiplier=1.0)
    h = np.diag([300.0, 100.0, 40.0])
    sums, _, _ = quadratic_sums(h=h, g_at_zero=h @ np.array([0.3, 0.5, -0.4]), plan=plan)
    diagonal = sums._replace(
        point_point=np.einsum("wii->wi", sums.point_point),
        point_gradient=np.einsum("wii->wi", sums.point_gradient),
    )
    full, slim = (mixture_from_releases(s, plan, FLAT) for s in (sums, diagonal))
    assert (np.abs(slim.loc - full.loc) < full.scale).all()
    assert (slim.scale > 0.9 * full.scale).all()
    assert (slim.scale < 1.6 * full.scale).all()


def test_the_test_sees_a_bend_and_nothing_else():
    plan = plan_of(noise_multiplier=0.5)
    straight, _, _ = quadratic_sums(h=H3, g_at_zero=np.zeros(3), plan=plan)
    bent, _, _ = quadratic_sums(h=H3, g_at_zero=np.zeros(3), plan=plan, bend=30_000.0)
    for sums, expected in ((straight, True), (bent, False)):
        mixture = mixture_from_releases(sums, plan, FLAT)
        assert mixture.windows.converged.all() == expected
    # Uniform if the line is right: the mean over many of a uniform is one half.
    values = []
    for seed in range(40):
        sums, _, _ = quadratic_sums(h=H3, g_at_zero=np.zeros(3), plan=plan, seed=seed)
        values.append(lack_of_fit_p_values(fit_regression(sums, plan, FLAT), H3))
    assert 0.4 < np.mean(values) < 0.65


def test_far_windows_are_left_out():
    plan = plan_of(noise_multiplier=0.5)
    _, points, gradients = quadratic_sums(h=H3, g_at_zero=np.zeros(3), plan=plan)
    points = points + np.where(np.arange(STEPS) < STEPS // 8, 5.0, 0.0)[:, None]
    sums = sums_of(points, gradients, plan)
    regression = fit_regression(sums, plan, FLAT)
    np.testing.assert_array_equal(regression.used, np.arange(NUM_WINDOWS) >= NUM_WINDOWS // 8)


def test_a_short_run_is_refused():
    plan = plan_of()
    sums, _, _ = quadratic_sums(h=H3, g_at_zero=np.zeros(3), plan=plan, steps=8)
    with pytest.raises(ValueError, match="too few"):
        fit_regression(sums, plan, FLAT)


def test_what_is_done_for_large_matrices_agrees(monkeypatch):
    """A diagonal preconditioner and one matrix after the other: the same posterior."""
    plan, h = plan_of(noise_multiplier=2.0), H3[:2, :2]
    prior = GaussianPrior(np.zeros(2), np.ones(2))
    sums, _, _ = quadratic_sums(h=h, g_at_zero=h @ np.array([0.3, -0.2]), plan=plan)
    config = curvature.SamplerConfig(8, 150, 300)
    usual = mixture_from_releases(sums, plan, prior, sampler=config)
    monkeypatch.setattr(curvature, "_MAX_DENSE_PRECONDITIONER", 0)
    monkeypatch.setattr(curvature, "_MAX_VECTORIZED_DIM", 0)
    large = mixture_from_releases(
        sums,
        plan,
        prior,
        sampler=config._replace(num_chains=9),  # another shape is compiled anew
    )
    np.testing.assert_allclose(large.scale, usual.scale, rtol=0.08)
    np.testing.assert_allclose(large.loc, usual.loc, atol=0.15 * usual.scale.max())


def test_the_maximum_is_known_better_than_the_truth():
    plan = plan_of(noise_multiplier=0.2)
    sums, _, _ = quadratic_sums(h=H3, g_at_zero=H3 @ np.array([0.4, -0.3, 0.2]), plan=plan)
    stats = fit_regression(sums, plan, FLAT).stats
    truth, maximum = (
        curvature.posterior_components(stats._replace(sampling_share=share)) for share in (1.0, 0.0)
    )
    spread = [np.linalg.norm(c.factor, axis=2).mean(axis=0) for c in (truth, maximum)]
    assert (spread[1] < 0.7 * spread[0]).all()


# -- the posterior -------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["mean_field", "full_rank"])
def test_without_much_noise_the_posterior_is_the_exact_one(family):
    fit = quick(
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


def test_releases_take_no_window_and_need_noise():
    fit = quick(num_steps=64)
    with pytest.raises(ValueError, match="leave out"):
        fit.posterior_at("last", noise_aware="releases")
    bare = dpvim.fit_nonprivate(model, X, Y, sampling_prob=0.1, num_steps=64, seed=0)
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
    return model(X, y)


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
    fit = quick(num_steps=800, learning_rate=1e-2)
    assert isinstance(fit.posterior.latent_dist, GaussianMixture)
    assert fit.posterior is fit.posterior_from("releases")
    assert fit.posterior is fit.posterior_at(noise_aware="releases")
    assert "from the releases (they can tell)" in repr(fit.posterior)
    assert set(fit.posterior.summary()["method"]) == {"releases"}
    assert "from the trace (asked for)" in repr(fit.averaged)
    fit.save(tmp_path / "fit.npz", not_for_release=True)
    again = dpvim.load(tmp_path / "fit.npz").posterior
    np.testing.assert_allclose(again.loc, fit.posterior.loc, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::dpvim.ConvergenceWarning")
@pytest.mark.parametrize(
    "other",
    [
        lambda: quick(variant="vanilla"),
        lambda: quick(num_steps=8),
        lambda: dpvim.fit_nonprivate(model, X, Y, sampling_prob=0.1, num_steps=64, seed=0),
        lambda: dpvim.fit(improper, X, Y, noise_multiplier=5.0, delta=1e-5, num_steps=64, seed=0),
        lambda: dataclasses.replace(quick(), session=None),
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
        quick(num_steps=64).posterior_from("release")
    with pytest.raises(ValueError, match="leave out"):
        quick(num_steps=64).posterior_from("releases", window="slope")


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

    fit = dpvim.fit(intercept, outcome, epsilon=1.0, delta=1e-5, num_steps=1000, seed=0)
    with pytest.warns(dpvim.ConvergenceWarning, match="has not arrived") as caught:
        posterior = fit.posterior
    assert posterior.not_converged == ["a"]
    assert caught[0].filename == __file__


def test_a_few_windows_do_not_divide_by_nothing():
    """As many coordinates and windows as there are steps to tell the noise from."""
    dim, steps = 12, 64
    plan = plan_of(num_steps=steps * 4)
    rng = np.random.default_rng(0)
    points, noise = 0.1 * rng.normal(size=(steps, dim)), rng.normal(size=(steps, dim))
    gradients = -100.0 * points + plan.noise_stddev / plan.sampling_prob * noise
    sums = sums_of(points, gradients, plan)
    regression = fit_regression(sums, plan, GaussianPrior(np.zeros(dim), np.ones(dim)))
    assert np.isfinite(regression.stats.noise).all()


# -- probing wider -------------------------------------------------------------------------------


def test_probing_wider_leaves_the_mean_step_of_a_quadratic_alone():
    """Linear regression, no noise: means over many eta agree, spread of the scales' part falls."""
    from dpvim.inference.families import mean_field
    from dpvim.inference.gradient import Problem, make_private_gradient
    from dpvim.inference.variants import make_variant
    from dpvim.privacy.clipping import Likelihood
    from dpvim.privacy.plan import NonPrivatePlan

    def log_likelihood(latent, record):
        return -0.5 * jnp.square(record["y"] - record["x"] @ latent)

    family = mean_field(3)
    problem = Problem(3, Likelihood.from_log_prob(log_likelihood), lambda t: -0.5 * t @ t)
    plan = NonPrivatePlan(num_examples=len(X), sampling_prob=1.0, num_steps=1)
    gradient = make_private_gradient(problem, family, make_variant("aligned", family), plan)
    params = family.init(jnp.array([0.4, -0.7, 0.3]), 0.2)
    data = {"x": jnp.asarray(X, jnp.float32), "y": jnp.asarray(Y, jnp.float32)}
    nothing = jnp.zeros(3, jnp.int32)

    def one(key, width):
        eta = family.base_draw(key)
        padding = jnp.zeros(len(X), bool)
        release = gradient.release(params, eta, data, padding, nothing, width)
        return gradient.direction(params, eta, release, width)

    keys = jax.random.split(jax.random.key(0), 4000)
    near, far = (jax.vmap(lambda key, width=width: one(key, width))(keys) for width in (1.0, 4.0))
    for a, b in zip(near, far, strict=True):
        error = np.asarray(a.std(axis=0) + b.std(axis=0)) / np.sqrt(len(keys))
        assert (np.abs(np.asarray(a.mean(axis=0) - b.mean(axis=0))) < 4 * error).all()


def test_probes_are_wide_in_the_first_three_quarters():
    width_at = width_schedule(5.0, 8)
    assert [float(width_at(jnp.asarray(step))) for step in (0, 5, 6, 7)] == [5, 5, 1, 1]
    sums = quick(probe_width="auto", learning_rate=1e-6, num_steps=2000).releases
    count = sums.steps[:, None]
    spread = np.einsum("wii->wi", sums.point_point) / count - (sums.point / count) ** 2
    ratio = np.sqrt(spread[:12].mean(axis=0) / spread[12:].mean(axis=0))
    np.testing.assert_allclose(ratio, default_width(num_examples=2000, dim=3), rtol=0.1)


def test_variants_that_cannot_probe_elsewhere_have_a_width_of_one():
    usual, given = (quick(variant="natural", probe_width=width) for width in ("auto", 1.0))
    np.testing.assert_array_equal(usual.trace.loc, given.trace.loc)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"probe_width": 0.5}, "at least 1"),
        ({"probe_width": "wide"}, "probe_width"),
        ({"probe_width": 2.0, "variant": "vanilla"}, "'aligned' can probe wider"),
    ],
)
def test_bad_widths_are_refused(changes, message):
    with pytest.raises((ValueError, TypeError), match=message):
        quick(**changes)
