"""Gradients taken wider than the approximation: same mean step, schedule, refusals."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import gaussian_log_likelihood, standard_normal_log_prior
from release_cases import X, Y, linear_fit

from dpvim.inference.families import mean_field
from dpvim.inference.gradient import (
    Problem,
    default_width,
    make_private_gradient,
    width_schedule,
)
from dpvim.inference.variants import make_variant
from dpvim.privacy.clipping import Likelihood
from dpvim.privacy.plan import NonPrivatePlan


def test_probing_wider_leaves_the_mean_step_of_a_quadratic_alone():
    """Linear regression, no noise: means over many eta agree, spread of the scales' part falls."""
    family = mean_field(3)
    likelihood = Likelihood.from_log_prob(gaussian_log_likelihood)
    problem = Problem(3, likelihood, standard_normal_log_prior)
    plan = NonPrivatePlan(num_examples=len(X), sampling_prob=1.0, num_steps=1)
    gradient = make_private_gradient(problem, family, make_variant("aligned", family), plan)
    params = family.init(jnp.array([0.4, -0.7, 0.3]), 0.2)
    data = {"x": jnp.asarray(X, jnp.float32), "y": jnp.asarray(Y, jnp.float32)}
    nothing = jnp.zeros(3, jnp.int32)

    def one(key, width):
        eta = family.base_draw(key)
        everyone = jnp.arange(len(X))
        release = gradient.release(params, eta, data, everyone, nothing, width)
        return gradient.direction(params, eta, release, width)

    keys = jax.random.split(jax.random.key(0), 4000)
    many = jax.jit(jax.vmap(one, (0, None)))
    near, far = (many(keys, width) for width in (1.0, 4.0))
    for a, b in zip(near, far, strict=True):
        error = np.asarray(a.std(axis=0) + b.std(axis=0)) / np.sqrt(len(keys))
        assert (np.abs(np.asarray(a.mean(axis=0) - b.mean(axis=0))) < 4 * error).all()


def test_probes_are_wide_in_the_first_three_quarters():
    width_at = width_schedule(5.0, 8)
    assert [float(width_at(jnp.asarray(step))) for step in (0, 5, 6, 7)] == [5, 5, 1, 1]
    sums = linear_fit(probe_width="auto", learning_rate=1e-6, num_steps=2000).releases
    count = sums.steps[:, None]
    spread = np.einsum("wii->wi", sums.point_point) / count - (sums.point / count) ** 2
    ratio = np.sqrt(spread[:12].mean(axis=0) / spread[12:].mean(axis=0))
    np.testing.assert_allclose(ratio, default_width(num_examples=2000, dim=3), rtol=0.1)


def test_variants_that_cannot_probe_elsewhere_have_a_width_of_one():
    usual, given = (linear_fit(variant="natural", probe_width=width) for width in ("auto", 1.0))
    np.testing.assert_array_equal(usual.trace.loc, given.trace.loc)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"probe_width": 0.5}, "at least 1"),
        ({"probe_width": "wide"}, "probe_width"),
        ({"probe_width": 2.0, "variant": "vanilla"}, "'aligned' can probe wider"),
    ],
)
def test_bad_widths_are_refused(changes, message):
    with pytest.raises((ValueError, TypeError), match=message):
        linear_fit(**changes)
