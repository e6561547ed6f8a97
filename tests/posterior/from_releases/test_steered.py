"""The posterior from the windows of a steered run: exact without noise, honest with it."""

from __future__ import annotations

import numpy as np
import pytest
from steered_cases import (
    OPTIMUM,
    PRECISION,
    SCALE,
    SD,
    new_steering,
    plan_of,
    quadratic,
    run_to_the_end,
)

from dpvim.inference.variants import CLIP_SHIFT
from dpvim.inference.windows import NUM_NARROW
from dpvim.posterior.from_releases.regression import GaussianPrior
from dpvim.posterior.from_releases.steered import clip_shift, closed_form
from dpvim.posterior.from_releases.steered_doubts import shrunk_curvature
from dpvim.privacy.norm_counts import COUNT_SHARE

PRIOR = GaussianPrior(np.zeros(4), SCALE)
EXACT = np.linalg.inv(PRECISION + np.diag(1 / SCALE**2))


def posterior_of(noise_multiplier, seed=0, **settings):
    plan = plan_of(noise_multiplier)
    releases = run_to_the_end(new_steering(plan=plan), seed=seed, plan=plan, **settings)
    return closed_form(releases, plan, PRIOR).mixture, releases, plan


def test_without_much_noise_the_posterior_is_that_of_the_quadratic():
    found, _, _ = posterior_of(1.0)
    np.testing.assert_allclose(found.loc / SD, EXACT @ PRECISION @ OPTIMUM / SD, atol=0.1)
    unit = np.outer(SD, SD)
    np.testing.assert_allclose(found.covariance / unit, EXACT / unit, atol=0.15)
    assert (found.dp_scale < 0.4 * found.scale).all()
    assert found.doubts == ()


def test_what_is_said_of_the_noise_is_what_the_noise_does():
    """Over runs with noise of about a standard deviation of the posterior; with power."""
    errors, scales, held = [], [], []
    for seed in range(40):
        found, _, _ = posterior_of(150.0, seed=seed)
        errors.append((found.loc - OPTIMUM) / found.dp_scale)
        scales.append(found.scale / np.sqrt(np.diag(EXACT)))
        low, high = found.quantiles(np.array([0.05, 0.95])).T
        held.append((low < OPTIMUM) & (high > OPTIMUM))
    assert 2 / 3 < np.sqrt(np.mean(np.square(errors))) < 3 / 2
    assert 1.1 < np.median(scales) < 1.8
    assert np.mean(held) > 0.9


def test_records_beyond_the_clip_norm_widen_the_intervals():
    few, _, _ = posterior_of(20.0)
    many, releases, plan = posterior_of(20.0, clipped=0.1)
    clip = clip_shift(releases, plan)
    assert clip.share == pytest.approx(0.1, abs=0.02)
    assert many.clipped == clip.share
    # Two to four times the clip norm: 2 sqrt 2 - 1 too long, of which 0.3 may be a shift.
    expected = CLIP_SHIFT * 500 * (2 * np.sqrt(2) - 1) * plan.clip_norm / 2
    assert clip.shift == pytest.approx(expected, rel=0.2)
    assert (many.scale > 2 * few.scale).all()


def test_far_counts_that_noise_could_have_made_are_not_multiplied():
    _, releases, plan = posterior_of(150.0)
    error = 150 / np.sqrt(COUNT_SHARE) / np.sqrt(releases.steps[-NUM_NARROW:].sum())
    noisy = releases._replace(counts=releases.counts.copy())
    noisy.counts[-NUM_NARROW:, 8] = 2 * error
    assert clip_shift(noisy, plan).shift <= clip_shift(releases, plan).shift
    certain = releases._replace(counts=releases.counts.copy())
    certain.counts[-NUM_NARROW:, 8] = 20 * error
    assert clip_shift(certain, plan).shift > 5 * clip_shift(releases, plan).shift


def test_a_log_likelihood_that_is_no_quadratic_is_doubted():
    def saddle(latents):
        away = (latents - OPTIMUM) / SD
        return (-away + 12 * np.sin(away)) / SD

    found, _, _ = posterior_of(10.0, gradient=saddle)
    assert any("not linear" in doubt or "contradict" in doubt for doubt in found.doubts)
    assert not found.windows.converged.any()


def test_a_convex_direction_is_doubted():
    def gradient(latents):
        away = (latents - OPTIMUM) / SD
        signs = np.array([1.0, 1.0, 1.0, -0.4])
        return -np.tanh(away / 50) * 50 * signs / SD

    found, _, _ = posterior_of(5.0, gradient=gradient)
    assert found.doubts


@pytest.mark.parametrize(("least", "doubted"), [(-1.0, True), (-0.2, False), (0.1, False)])
def test_a_curvature_that_is_surely_negative_is_doubted(least, doubted):
    """Errors are 0.1: minus ten of them, minus two, plus one."""
    _, releases, plan = posterior_of(10.0)
    curvature, variance = np.diag([1.0, 1.0, 1.0, least]), np.full((4, 4), 0.01)
    bent = releases._replace(curvature=curvature, variance=variance)
    doubts = closed_form(bent, plan, PRIOR).mixture.doubts
    assert any("not concave" in doubt for doubt in doubts) == doubted


def test_correlations_that_are_noise_are_shrunk_and_others_are_not():
    rng = np.random.default_rng(0)
    noise = 0.3 * rng.normal(size=(12, 12))
    noise = np.tril(noise) + np.tril(noise, -1).T
    variance = np.full((12, 12), 0.09)
    off = ~np.eye(12, dtype=bool)
    none = shrunk_curvature(np.eye(12) + noise, variance)
    assert np.abs(none[off]).max() < 0.15
    much = 0.8 + 0.2 * np.eye(12)
    kept = shrunk_curvature(much + noise, variance)
    assert kept[off].mean() == pytest.approx(0.8, abs=0.1)


def test_many_clipped_records_are_doubted():
    found, _, _ = posterior_of(10.0, clipped=0.6)
    assert any("were clipped" in doubt for doubt in found.doubts)


def test_coordinates_without_information_have_their_prior():
    informed, plan = np.array([True, True, False, True]), plan_of(20.0)

    def gradient(latents):
        known = np.where(informed, latents, OPTIMUM)
        return np.where(informed, quadratic(known), 0.0)

    releases = run_to_the_end(new_steering(informed, plan), plan=plan, gradient=gradient)
    found = closed_form(releases, plan, PRIOR._replace(loc=np.array([0, 0, 0.7, 0]))).mixture
    assert found.loc[2] == pytest.approx(0.7)
    assert found.scale[2] == pytest.approx(SCALE[2])
    assert found.scale[0] < 0.2


def test_directions_without_information_have_their_prior():
    """The likelihood knows a sum and two coordinates; the other combination is independent."""
    plan, sum_sd = plan_of(20.0), 0.02
    span = np.array([[1, 0, 0, 1], [0, 1, 0, 0], [0, 0, 1, 0]], float).T

    def gradient(latents):
        sums = (3.0 - latents[:, 0] - latents[:, 3]) / sum_sd**2
        others = (OPTIMUM[1:3] - latents[:, 1:3]) / SD[1:3] ** 2
        return np.column_stack([sums, others, sums])

    steering = new_steering(span=span, plan=plan)
    releases = run_to_the_end(steering, plan=plan, gradient=gradient)
    assert releases.factor.shape == (3, 3)
    found = closed_form(releases, plan, PRIOR).mixture
    assert found.doubts == ()
    together = np.array([1.0, 0, 0, 1.0])
    assert found.loc @ together == pytest.approx(3.0, abs=0.1)
    assert 0.9 < np.sqrt(together @ found.covariance @ together) / sum_sd < 2
    # Given the sum each of the two is what independent Gaussians leave of it.
    variance = SCALE**2
    left = variance[0] * variance[3] / (variance[0] + variance[3])
    np.testing.assert_allclose(found.scale[[0, 3]], np.sqrt(left), rtol=1e-3)
    expected = 3.0 * variance[[0, 3]] / (variance[0] + variance[3])
    np.testing.assert_allclose(found.loc[[0, 3]], expected, atol=0.1)


def test_parameters_that_act_only_together_are_gravely_doubted():
    found, releases, plan = posterior_of(20.0)
    assert found.doubts == ()
    curved = closed_form(releases._replace(at_a_place=np.array(3.0)), plan, PRIOR)
    assert "act only together" in curved.mixture.doubts[0]
    assert curved.is_gravely_doubted


def test_noise_that_would_hide_what_the_data_hardly_tell_is_a_doubt():
    _, releases, plan = posterior_of(20.0)
    for variance, is_doubted in ((0.3, False), (0.5, True)):
        loud = releases._replace(variance=np.full((4, 4), variance))
        doubts = closed_form(loud, plan, PRIOR).mixture.doubts
        assert any("hardly told" in doubt for doubt in doubts) == is_doubted


def test_gradients_that_all_point_one_way_are_doubted():
    found, releases, plan = posterior_of(20.0)
    assert found.doubts == ()
    moving = releases._replace(gradient=releases.gradient.copy())
    moving.gradient[-NUM_NARROW:, 0] += 3.0
    (doubt,) = closed_form(moving, plan, PRIOR).mixture.doubts
    assert "still on its way" in doubt


def test_runs_that_have_arrived_are_seldom_said_to_be_on_their_way():
    doubts = [doubt for seed in range(40) for doubt in posterior_of(150.0, seed=seed)[0].doubts]
    assert sum("on its way" in doubt for doubt in doubts) <= 6


def test_a_metric_that_was_shrunk_for_a_few_records_is_doubted():
    found, _, _ = posterior_of(20.0, clipped=0.1)
    assert any("a few records have gradients many times as long" in d for d in found.doubts)
