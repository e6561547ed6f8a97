"""A posterior that is known by its draws."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from scipy import stats

from dpvim.posterior.convergence import Windows
from dpvim.posterior.drawn import DrawnPosterior

COVARIANCE = np.array([[4.0, 1.2], [1.2, 1.0]])
LATENTS = np.random.default_rng(0).multivariate_normal([3.0, -1.0], COVARIANCE, size=4000)
DRAWN = DrawnPosterior(
    LATENTS, np.zeros(2), Windows(np.full(2, 10), np.ones(2, bool)), np.ones(2), (), 0.1
)


def test_moments_and_quantiles_are_those_of_the_draws():
    np.testing.assert_allclose(DRAWN.loc, LATENTS.mean(axis=0))
    np.testing.assert_allclose(DRAWN.scale, LATENTS.std(axis=0))
    np.testing.assert_allclose(np.diagonal(DRAWN.covariance), DRAWN.scale**2)
    low, high = DRAWN.quantiles(np.array([0.05, 0.95])).T
    assert np.mean((low < LATENTS) & (high > LATENTS), axis=0) == pytest.approx([0.9, 0.9])


def test_no_draw_comes_again_before_the_others():
    few = DRAWN.draw(jax.random.key(0), 1000)
    assert len(np.unique(few, axis=0)) == 1000
    assert not np.array_equal(few, DRAWN.draw(jax.random.key(1), 1000))
    many, counts = np.unique(DRAWN.draw(jax.random.key(0), 10_000), axis=0, return_counts=True)
    assert len(many) == 4000
    assert set(counts) == {2, 3}


def test_the_density_is_close_to_that_of_a_normal():
    exact = stats.multivariate_normal([3.0, -1.0], COVARIANCE)
    places = np.array([[3.0, -1.0], [5.0, -0.5], [1.0, -1.0]])
    found = DRAWN.log_density(places)
    np.testing.assert_allclose(found, exact.logpdf(places), atol=0.25)
    assert DRAWN.log_density(places[1]) == pytest.approx(found[1])


def test_the_density_has_a_total_of_one():
    x, y = np.meshgrid(np.linspace(-7, 13, 41), np.linspace(-6, 4, 41), indexing="ij")
    density = np.exp(DRAWN.log_density(np.column_stack([x.ravel(), y.ravel()])))
    assert density.sum() * (20 / 40) * (10 / 40) == pytest.approx(1, abs=0.01)
