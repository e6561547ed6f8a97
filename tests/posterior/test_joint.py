"""Posteriors by block: each as if it were alone, together as if they were one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from release_cases import H3, STANDARD_NORMAL, plan_of, quadratic_sums
from scipy import stats

import dpvim
from dpvim.inference.blocks import Blocks
from dpvim.inference.release_sums import LARGEST_FULL_DIM
from dpvim.posterior.convergence import Windows
from dpvim.posterior.from_releases import GaussianMixture, mixture_from_releases
from dpvim.posterior.from_releases.regression import GaussianPrior
from dpvim.posterior.from_trace import GaussianPosterior
from dpvim.posterior.joint import JointPosterior, posterior_by_block


def gaussian(loc, covariance):
    loc = np.asarray(loc, float)
    windows = Windows(np.arange(1, len(loc) + 1), np.arange(len(loc)) > 0)
    return GaussianPosterior(loc, np.linalg.cholesky(covariance), 0.1 * np.abs(loc), windows)


FIRST = gaussian([1.0, -2.0], np.array([[1.0, 0.5], [0.5, 2.0]]))
SECOND = gaussian([5.0], np.array([[4.0]]))
JOINT = JointPosterior((FIRST, SECOND), (np.array([2, 0]), np.array([1])))


def test_coordinates_stand_where_they_belong():
    np.testing.assert_array_equal(JOINT.loc, [-2.0, 5.0, 1.0])
    wanted = np.array([[2.0, 0.0, 0.5], [0.0, 4.0, 0.0], [0.5, 0.0, 1.0]])
    np.testing.assert_allclose(JOINT.covariance, wanted)
    np.testing.assert_allclose(JOINT.scale, np.sqrt(np.diagonal(wanted)))
    np.testing.assert_allclose(JOINT.dp_scale, [0.2, 0.5, 0.1])
    np.testing.assert_array_equal(JOINT.windows.lengths, [2, 1, 1])
    np.testing.assert_array_equal(JOINT.windows.converged, [True, False, False])


def test_draws_density_and_quantiles_are_those_of_the_product():
    draws = JOINT.draw(jax.random.key(0), 20_000)
    np.testing.assert_allclose(draws.mean(axis=0), JOINT.loc, atol=0.06)
    np.testing.assert_allclose(np.cov(draws, rowvar=False), JOINT.covariance, atol=0.15)
    whole = stats.multivariate_normal(JOINT.loc, JOINT.covariance)
    np.testing.assert_allclose(JOINT.log_density(draws[:5]), whole.logpdf(draws[:5]))
    assert JOINT.log_density(draws[0]) == pytest.approx(whole.logpdf(draws[0]))
    wanted = stats.norm.ppf([0.1, 0.9], JOINT.loc[:, None], JOINT.scale[:, None])
    np.testing.assert_allclose(JOINT.quantiles(np.array([0.1, 0.9])), wanted)


def test_a_gaussian_has_one_of_some_of_its_coordinates():
    part = gaussian([-2.0, 5.0, 1.0], JOINT.covariance).of(np.array([2, 0]))
    np.testing.assert_allclose(part.covariance, FIRST.covariance)
    np.testing.assert_allclose(part.loc, FIRST.loc)
    np.testing.assert_array_equal(part.windows.lengths, [3, 1])


def test_a_single_block_is_inferred_as_before():
    plan = plan_of()
    sums, _, _ = quadratic_sums(h=H3, g_at_zero=np.ones(3), plan=plan)
    whole = mixture_from_releases(sums, plan, STANDARD_NORMAL)
    found = posterior_by_block(sums, plan, STANDARD_NORMAL, Blocks.one(3))
    assert isinstance(found, GaussianMixture)
    np.testing.assert_array_equal(found.locs, whole.locs)


def test_a_block_does_not_see_the_others():
    """Releases of another block change nothing but its own posterior; what is in no block has its
    prior."""
    plan, blocks = plan_of(), Blocks((0, -1, 1))
    prior = GaussianPrior(np.array([0.0, 3.0, 0.0]), np.array([1.0, 0.5, 1.0]))
    h = np.diag(np.diagonal(H3))
    sums, _, _ = quadratic_sums(h=h, g_at_zero=np.array([30.0, 0.0, -20.0]), plan=plan)
    found = posterior_by_block(sums, plan, prior, blocks)
    moved = sums._replace(**{n: p.copy() for n, p in sums._asdict().items()})
    for part in (moved.gradient, moved.point, moved.gradient_squared):
        part[:, 2] *= 2
    moved.point_gradient[:, 2] *= 4
    moved.point_gradient[:, :2, 2] += 1e6
    moved.point_point[:, 2, 2] *= 4
    again = posterior_by_block(moved, plan, prior, blocks)
    np.testing.assert_array_equal(again.parts[0].locs, found.parts[0].locs)
    assert (again.parts[1].locs != found.parts[1].locs).any()
    assert (found.loc[1], found.scale[1], found.dp_scale[1]) == (3.0, 0.5, 0.0)


# -- of fits -------------------------------------------------------------------------------------

NUM_ROWS, HALF = 4000, LARGEST_FULL_DIM // 2 + 6
RNG = np.random.default_rng(1)
DESIGNS = RNG.normal(size=(2, NUM_ROWS, HALF)) / 4
TRUTH = 0.5 * RNG.normal(size=(2, HALF))
OUTCOMES = np.einsum("snd,sd->sn", DESIGNS, TRUTH) + RNG.normal(size=(2, NUM_ROWS))
SETTINGS = {
    "noise_multiplier": 2.0,
    "delta": 1e-5,
    "clip_norm": 12.0,
    "sampling_prob": 0.1,
    "num_steps": 1500,
    "learning_rate": 2e-2,
    "seed": 0,
}


def two_regressions(X, Z, y=None, z=None):
    a = numpyro.sample("a", dist.Normal(0, 0.5).expand([HALF]).to_event(1))
    b = numpyro.sample("b", dist.Normal(0, 0.5).expand([HALF]).to_event(1))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ a, 1.0), obs=y)
        numpyro.sample("z", dist.Normal(Z @ b, 1.0), obs=z)


def one_of_two_modes(X, Z, y=None, z=None):
    return two_regressions(X, Z, y, z)


one_of_two_modes.several_modes = ("b",)


def test_more_parameters_than_a_block_may_have_are_inferred_from_the_releases(tmp_path):
    fit = dpvim.fit(two_regressions, *DESIGNS, *OUTCOMES, **SETTINGS)
    assert fit.space.dim > LARGEST_FULL_DIM
    posterior = fit.posterior
    assert (posterior.method, posterior.reason) == ("releases", "identified by them")
    precision = [x.T @ x + 4 * np.eye(HALF) for x in DESIGNS]
    exact = [np.linalg.solve(p, x.T @ y) for p, x, y in zip(precision, DESIGNS, OUTCOMES)]  # noqa: B905
    away = (posterior.loc - np.concatenate(exact)) / posterior.scale
    assert np.mean(np.abs(away) < 1.645) > 0.85
    assert np.abs(away).max() < 5
    fit.save(tmp_path / "fit.npz", not_for_release=True)
    again = dpvim.load(tmp_path / "fit.npz")
    assert again.blocks == fit.blocks
    np.testing.assert_array_equal(again.releases.point_gradient, fit.releases.point_gradient)
    assert again._why_not_releases is None


@pytest.mark.filterwarnings("ignore::dpvim.ConvergenceWarning")
def test_a_block_with_several_modes_has_the_trace_and_the_other_its_releases(tmp_path):
    settings = SETTINGS | {"num_steps": 300}
    fit = dpvim.fit(one_of_two_modes, *DESIGNS, *OUTCOMES, **settings)
    posterior = fit.posterior
    assert posterior.method == "releases and trace"
    assert f"the trace for {HALF} parameters, since the model has several modes" in repr(posterior)
    table = posterior.summary()
    assert list(table["method"]) == ["releases"] * HALF + ["trace"] * HALF
    np.testing.assert_array_equal(posterior.loc[HALF:], fit.averaged.loc[HALF:])
    assert (posterior.loc[:HALF] != fit.averaged.loc[:HALF]).any()
    fit.save(tmp_path / "fit.npz", not_for_release=True)
    again = dpvim.load(tmp_path / "fit.npz")
    assert (again.several_modes, again.blocks) == (("b",), fit.blocks)


def test_names_of_sites_with_several_modes_are_checked():
    def model(x):
        a = numpyro.sample("a", dist.Normal(0, 1))
        with numpyro.plate("records", len(x)):
            numpyro.sample("x", dist.Normal(a * jnp.ones(len(x)), 1.0), obs=x)

    model.several_modes = ("aa",)
    with pytest.raises(ValueError, match="Did you mean 'a'"):
        dpvim.fit(model, np.zeros(100), epsilon=1.0, delta=1e-3)
