"""Grave doubts bring the prior back; mild ones widen by what the windows tell."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from steered_cases import OPTIMUM, SCALE, SD, new_steering, plan_of, quadratic, run_to_the_end

from dpvim.inference.windows import NUM_NARROW
from dpvim.posterior.convergence import Windows
from dpvim.posterior.drawn import DrawnPosterior
from dpvim.posterior.from_releases.exact_prior import PriorDraws, posterior_from_windows
from dpvim.posterior.from_releases.hedge import HEDGED, hedged
from dpvim.posterior.from_releases.regression import GaussianPrior
from dpvim.posterior.from_releases.steered import closed_form

PRIOR = GaussianPrior(np.zeros(4), SCALE)
TAILS = np.array([0.05, 0.95])
# Below this nothing is known beyond noise: a plan with so little of it shows the rules at work.
QUIET = plan_of(10.0)


def rippled(latents):
    """No quadratic at any scale."""
    away = (latents - OPTIMUM) / SD
    return (-away + 12 * np.sin(away)) / SD


@pytest.fixture(scope="module")
def arrived():
    return run_to_the_end(new_steering(plan=QUIET), plan=QUIET)


def inferred(releases, **options):
    return posterior_from_windows(releases, QUIET, PRIOR, **options)[0]


def test_releases_that_are_no_gradients_of_a_quadratic_give_half_of_the_prior_back():
    releases = run_to_the_end(new_steering(plan=QUIET), plan=QUIET, gradient=rippled)
    closed, found = closed_form(releases, QUIET, PRIOR), inferred(releases)
    assert closed.is_gravely_doubted
    assert found.doubts == (*closed.mixture.doubts, HEDGED)
    reach = np.abs(found.quantiles(TAILS) / SCALE[:, None])
    assert (reach > 1.2).all()  # 10 % and 90 % quantiles of the prior
    share = np.mean(np.all(found.locs == PRIOR.loc, axis=1))
    assert share == 0.5
    # What the run has found is still there, and the likeliest.
    density = found.log_density(np.stack([closed.mixture.loc, PRIOR.loc]))
    assert density[0] > density[1] + 3


def test_a_quadratic_is_left_alone(arrived):
    closed, found = closed_form(arrived, QUIET, PRIOR), inferred(arrived)
    assert not closed.is_gravely_doubted
    assert found.doubts == ()
    np.testing.assert_array_equal(found.locs, closed.mixture.locs)


def test_a_sampler_in_trouble_gives_half_of_the_prior_back(arrived):
    latents = OPTIMUM + SD * np.random.default_rng(0).normal(size=(4000, 4))
    good = PriorDraws(latents, np.array(1.0), np.array(400.0), np.array(0.0))
    bad = good._replace(r_hat=np.array(1.5))
    np.testing.assert_array_equal(inferred(arrived, draws=good).latents, latents)
    found = inferred(arrived, draws=bad)
    assert HEDGED in found.doubts
    assert (np.abs(found.quantiles(TAILS)).max(axis=1) > 1.2 * SCALE).all()


def test_half_of_the_draws_are_the_prior_s():
    latents = np.full((4000, 4), 100.0) * SCALE
    nothing = (np.zeros(4), Windows(np.ones(4, int), np.zeros(4, bool)), np.ones(4))
    posterior = DrawnPosterior(latents, *nothing, ("a doubt",))
    found = hedged(posterior, PRIOR)
    prior = found.latents[np.abs(found.latents[:, 0]) < 50 * SCALE[0]] / SCALE
    assert len(prior) == 2000
    np.testing.assert_allclose(prior.mean(axis=0), 0, atol=0.1)
    np.testing.assert_allclose(prior.std(axis=0), 1, atol=0.1)
    assert found.doubts == ("a doubt", HEDGED)
    assert np.all(posterior.latents == latents)
    assert found.draw(jax.random.key(0), 10).shape == (10, 4)


def test_windows_that_contradict_each_other_widen_where_they_do(arrived):
    """Half of the narrow windows see the optimum elsewhere, along one coordinate of the metric."""
    apart = arrived._replace(gradient=arrived.gradient.copy())
    signs = np.resize([1.0, -1.0], NUM_NARROW)
    apart.gradient[-NUM_NARROW:, 0] += 3 * signs
    before, after = closed_form(arrived, QUIET, PRIOR), closed_form(apart, QUIET, PRIOR)
    assert any("contradict" in doubt for doubt in after.mixture.doubts)
    assert not after.is_gravely_doubted
    units = np.linalg.inv(arrived.factor)
    was, now = (
        np.sqrt(np.diagonal(units @ each.mixture.covariance @ units.T)) for each in (before, after)
    )
    # The mean of eight windows that scatter by 3 is known to 3.2 / sqrt(8).
    assert now[0] == pytest.approx(np.hypot(was[0], 3.2 / np.sqrt(8)), rel=0.15)
    np.testing.assert_allclose(now[1:], was[1:], rtol=0.1)


def test_a_run_on_its_way_is_as_uncertain_as_its_next_step_is_long(arrived):
    moving = arrived._replace(gradient=arrived.gradient.copy())
    moving.gradient[-NUM_NARROW:, 0] += 3.0
    found = closed_form(moving, QUIET, PRIOR).mixture
    assert any("on its way" in doubt for doubt in found.doubts)
    units = np.linalg.inv(arrived.factor)
    spread = np.sqrt(np.diagonal(units @ found.covariance @ units.T))
    assert 2.5 < spread[0] < 4.0
    assert (spread[1:] < 1.5).all()


@pytest.mark.parametrize("is_mixture", [False, True])
def test_what_the_data_hardly_tell_is_doubted(is_mixture):
    """Two of four directions are flat: of a mixture, components that have merged."""

    def flat(latents):
        known = np.where(np.arange(4) < 2, latents, OPTIMUM)
        return np.where(np.arange(4) < 2, quadratic(known), 0.0)

    releases = run_to_the_end(new_steering(plan=QUIET), plan=QUIET, gradient=flat)
    closed = closed_form(releases, QUIET, PRIOR, is_mixture=is_mixture)
    assert any("of 2 combinations of the 4 parameters" in d for d in closed.mixture.doubts)
    assert closed.is_gravely_doubted == is_mixture
