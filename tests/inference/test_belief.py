"""The belief about place and curvature: regressions of a window, and what noise does to them."""

from __future__ import annotations

import numpy as np
import pytest

from dpvim.inference.belief import Belief, Spectrum, measure, shrunk_curvature


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


def test_a_negative_eigenvalue_is_made_positive_within_its_error():
    belief = Belief(np.zeros(2), np.eye(2), np.diag([-0.2, 50.0]), np.full((2, 2), 0.04), np.eye(2))
    found = np.linalg.eigvalsh(Spectrum.of(belief).positive())
    assert 0 < found[0] < 0.4
    assert found[1] == pytest.approx(50, rel=0.02)
