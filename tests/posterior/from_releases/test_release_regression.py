"""The regression of released gradients on points: its windows, its noise, its lack-of-fit test."""

from __future__ import annotations

import numpy as np
import pytest
from release_cases import H3, STANDARD_NORMAL, STEPS, plan_of, quadratic_sums, sums_of

from dpvim.inference.release_sums import NUM_WINDOWS
from dpvim.posterior.from_releases.regression import (
    GaussianPrior,
    fit_regression,
    lack_of_fit_p_values,
)


def test_p_values_are_uniform_if_the_line_is_right():
    """The mean over many of a uniform is one half."""
    plan = plan_of(noise_multiplier=0.5)
    values = []
    for seed in range(40):
        sums, _, _ = quadratic_sums(h=H3, g_at_zero=np.zeros(3), plan=plan, seed=seed)
        values.append(lack_of_fit_p_values(fit_regression(sums, plan, STANDARD_NORMAL), H3))
    assert 0.4 < np.mean(values) < 0.65


def test_far_windows_are_left_out():
    plan = plan_of(noise_multiplier=0.5)
    _, points, gradients = quadratic_sums(h=H3, g_at_zero=np.zeros(3), plan=plan)
    points = points + np.where(np.arange(STEPS) < STEPS // 8, 5.0, 0.0)[:, None]
    sums = sums_of(points, gradients, plan)
    regression = fit_regression(sums, plan, STANDARD_NORMAL)
    np.testing.assert_array_equal(regression.used, np.arange(NUM_WINDOWS) >= NUM_WINDOWS // 8)


def test_a_short_run_is_refused():
    plan = plan_of()
    sums, _, _ = quadratic_sums(h=H3, g_at_zero=np.zeros(3), plan=plan, steps=8)
    with pytest.raises(ValueError, match="too few"):
        fit_regression(sums, plan, STANDARD_NORMAL)


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
