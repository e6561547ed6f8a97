"""The belief about place and curvature: regressions of a window, and what noise does to them."""

from __future__ import annotations

import numpy as np
import pytest
from steered_cases import NUM_STEPS, PRECISION, new_steering, plan_of, run_to_the_end

from dpvim.inference.belief import Belief, _as_it_may_have_changed, measure
from dpvim.inference.windows import windows_of
from dpvim.privacy.norm_counts import COUNT_SHARE


def test_measure_is_a_regression_with_known_errors():
    rng = np.random.default_rng(0)
    curvature = np.array([[2.0, 0.5], [0.5, 1.0]])
    estimates = []
    for _ in range(400):
        points = 3 * rng.normal(size=(60, 2))
        gradients = np.array([1.0, -2.0]) - points @ curvature + 4 * rng.normal(size=(60, 2))
        estimates.append(measure(points, gradients, 16.0))
    found = np.stack([one.curvature for one in estimates])
    np.testing.assert_allclose(found.mean(axis=0), curvature, atol=0.05)
    claimed = np.mean([one.variance for one in estimates], axis=0)
    np.testing.assert_allclose(found.var(axis=0), claimed, rtol=0.3)
    noise = np.mean([one.noise for one in estimates])
    assert 16.0 <= noise < 18.0
    assert np.mean([one.residual for one in estimates]) == pytest.approx(16.0, rel=0.03)


def test_noise_is_never_taken_to_be_less_than_what_is_known():
    rng = np.random.default_rng(0)
    points = rng.normal(size=(50, 2))
    found = measure(points, 0.1 * rng.normal(size=(50, 2)), 1.0)
    np.testing.assert_array_equal(found.noise, 1.0)


def test_a_curvature_that_has_changed_is_believed_less():
    """Three times as large as it was, and the same."""
    rng, dim = np.random.default_rng(0), 8
    known = Belief(np.zeros(dim), np.eye(dim), np.eye(dim), np.full((dim, dim), 0.01), np.eye(dim))
    points = 4 * rng.normal(size=(500, dim))
    noise = rng.normal(size=points.shape)
    changed = measure(points, -3 * points + noise, 1.0)
    same = measure(points, -points + noise, 1.0)
    assert np.median(_as_it_may_have_changed(known, changed).variance) > 0.2
    np.testing.assert_array_equal(_as_it_may_have_changed(known, same).variance, known.variance)


def test_what_was_measured_before_a_change_of_units_is_kept():
    """Errors are those of the whole run, not of its last windows."""
    plan, windows = plan_of(300.0), windows_of(NUM_STEPS)
    found = run_to_the_end(new_steering(plan=plan), plan=plan)
    wide = [each for each in windows if each.is_wide and not each.searches]
    steps = sum(each.length for each in wide)
    noise = (300.0 * plan.clip_norm) ** 2 / (1 - COUNT_SHARE) / (steps * found.width**2)
    assert np.median(np.diagonal(found.variance)) < 1.5 * noise
    error = found.curvature - found.factor.T @ PRECISION @ found.factor
    assert 0.4 < np.mean(error**2 / found.variance) < 2.5
