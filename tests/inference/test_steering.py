"""Steering: regressions of a window, the belief after it, and quadratics that it must find."""

from __future__ import annotations

import numpy as np
import pytest
from steered_cases import (
    NUM_STEPS,
    OPTIMUM,
    PRECISION,
    new_steering,
    releases_at,
    run_to_the_end,
)

from dpvim.inference.steering import (
    Belief,
    Spectrum,
    SteeredReleases,
    measure,
    shrunk_curvature,
)


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


def test_a_run_finds_optimum_and_curvature_at_scales_that_differ_by_thousands():
    found = run_to_the_end(new_steering())
    assert found.is_complete
    error = np.linalg.solve(
        np.linalg.cholesky(np.linalg.inv(PRECISION)), found.centre[-1] - OPTIMUM
    )
    assert np.abs(error).max() < 6  # in standard deviations; the noise of the last window is 2.4
    whitened = found.factor.T @ PRECISION @ found.factor
    assert np.linalg.eigvalsh(whitened).min() > 0.4
    assert np.linalg.eigvalsh(whitened).max() < 2.5


def test_the_cut_into_chunks_does_not_matter():
    whole, pieces = run_to_the_end(new_steering()), run_to_the_end(new_steering(), chunk=7)
    for one, other in zip(whole, pieces, strict=True):
        np.testing.assert_array_equal(one, other)


def test_coordinates_without_information_stay_at_their_prior():
    informed = np.array([True, True, False, True])
    steering = new_steering(informed)
    found = run_to_the_end(steering)
    assert found.factor.shape == (3, 3)
    centre, factor = steering.place()
    assert centre[2] == 0
    np.testing.assert_array_equal(factor[2], [0, 0, 1.0, 0])
    np.testing.assert_array_equal(factor[:, 2], [0, 0, 1.0, 0])


def test_an_unfinished_run_has_windows_without_steps():
    steering = new_steering()
    rng = np.random.default_rng(0)
    assert steering.steps_left(0) == steering.steps_left(5) + 5 == NUM_STEPS // 64
    points = rng.normal(size=(10, 4))
    assert not steering.add(0, 10, points, releases_at(steering, points, rng))
    found = steering.releases()
    assert not found.is_complete
    assert not found.steps.any()
    for part, zeros in zip(found, SteeredReleases.zeros(4, 4), strict=True):
        assert np.shape(part) == np.shape(zeros)
