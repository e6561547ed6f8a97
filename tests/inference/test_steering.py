"""Steering: quadratics that a run must find, whatever their units."""

from __future__ import annotations

import numpy as np
from steered_cases import (
    NUM_STEPS,
    OPTIMUM,
    PRECISION,
    new_steering,
    releases_at,
    run_to_the_end,
)

from dpvim.inference.steering import SteeredReleases


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
    np.testing.assert_allclose(factor[2], [0, 0, 1.0, 0], atol=1e-12)
    np.testing.assert_allclose(factor[:, 2], [0, 0, 1.0, 0], atol=1e-12)


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
