"""Directions: what a likelihood depends on, apart from what the prior alone tells."""

from __future__ import annotations

import numpy as np
import pytest

from dpvim.inference.directions import Directions

SCALE = np.array([3.0, 1000.0, 1.0, 4.0])
LOC = np.array([1.0, 50.0, -2.0, 0.0])
SUMS = np.array([[1.0, 0, 1.0, 0], [0, 1.0, 0, 0]]).T
COORDINATES = np.eye(4)[:, [0, 1, 3]]


@pytest.fixture(params=[SUMS, COORDINATES, np.eye(4)], ids=["sums", "coordinates", "all"])
def directions(request):
    return Directions.of(request.param, LOC, SCALE)


def test_known_and_unknown_together_are_the_prior(directions):
    loc, scale = directions.prior(LOC, SCALE)
    unknown = directions.unknown(SCALE)
    covariance = (directions.basis * scale**2) @ directions.basis.T + unknown @ unknown.T
    np.testing.assert_allclose(covariance, np.diag(SCALE**2), atol=1e-9)
    np.testing.assert_allclose(directions.rest(LOC, SCALE) + directions.basis @ loc, LOC)
    np.testing.assert_allclose((directions.basis / SCALE[:, None] ** 2).T @ unknown, 0, atol=1e-12)


def test_the_prior_may_be_another_than_the_one_that_directions_were_made_with(directions):
    elsewhere = LOC + np.array([1.0, -20.0, 3.0, 2.0])
    loc, _ = directions.prior(elsewhere, SCALE)
    found = directions.rest(elsewhere, SCALE) + directions.basis @ loc
    np.testing.assert_allclose(found, elsewhere)


def test_what_a_whole_factor_whitens_is_turned_into_what_is_known(directions):
    rng, known = np.random.default_rng(0), directions.basis.shape[1]
    factor = np.linalg.cholesky(np.eye(known) + 0.5) * 0.01
    lower, rotation = directions.whole(factor, SCALE)
    np.testing.assert_array_equal(lower, np.tril(lower))
    assert (np.diagonal(lower) > 0).all()
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(4), atol=1e-12)
    # A gradient of the likelihood, and a point.
    gradient = np.linalg.pinv(directions.basis).T @ rng.normal(size=known)
    gradient -= (unknown := directions.unknown(SCALE)) @ np.linalg.lstsq(
        unknown, gradient, rcond=None
    )[0]
    turned = rotation @ lower.T @ gradient
    np.testing.assert_allclose(turned[:known], factor.T @ directions.basis.T @ gradient)
    np.testing.assert_allclose(turned[known:], 0, atol=1e-9)
    eta = rng.normal(size=4)
    z, w = factor @ (rotation @ eta)[:known], (rotation @ eta)[known:]
    np.testing.assert_allclose(lower @ eta, directions.basis @ z + unknown @ w)


def test_coordinates_are_themselves():
    directions = Directions.of(COORDINATES, LOC, SCALE)
    np.testing.assert_array_equal(directions.basis, COORDINATES)
    np.testing.assert_array_equal(directions.origin, 0)
    lower, rotation = Directions.of(np.eye(4), LOC, SCALE).whole(np.diag(SCALE), SCALE)
    np.testing.assert_array_equal(lower, np.diag(SCALE))
    np.testing.assert_array_equal(rotation, np.eye(4))


def test_directions_that_are_none_are_known_as_such():
    assert Directions.of(SUMS, LOC, SCALE).are_orthogonal(SCALE)
    assert not Directions(LOC, np.ones((4, 2))).are_orthogonal(SCALE)
    assert not Directions(LOC, np.zeros((4, 1))).are_orthogonal(SCALE)
    assert not Directions(LOC, np.ones((4, 1))).are_orthogonal(np.zeros(4))
