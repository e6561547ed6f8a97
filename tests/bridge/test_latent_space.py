"""The latent space: log-Jacobians, gradients through Jacobian blocks, and the way back."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro_models import MODELS, at_random, setting

from dpvim._compile import single_precision


@pytest.mark.parametrize("name", MODELS)
@single_precision
def test_log_jacobian_is_the_determinant_of_the_transform(name):
    """Against autodiff, for supports whose dimension the transform keeps."""
    found, _ = setting(name)
    for site in found.space.sites:
        if site.shape != site.raw_shape:
            continue
        raw = jax.random.normal(jax.random.key(1), site.raw_shape) * 0.5
        jacobian = jax.jit(
            jax.jacobian(lambda u, s=site: s.constrain(u.reshape(s.raw_shape)).ravel())
        )(raw.ravel())
        wanted = np.linalg.slogdet(jacobian)[1]
        np.testing.assert_allclose(site.log_det(raw), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
@single_precision
def test_gradient_through_jacobian_blocks_is_the_gradient_through_the_transform(name):
    found, inputs = setting(name)
    latent = at_random(found.space)
    direct = jax.jit(jax.vmap(jax.grad(found.problem.likelihood.log_prob), (None, 0)))
    gradients = np.asarray(direct(latent, inputs.records), float)
    ones, padding = jnp.ones(found.space.dim), jnp.zeros(30, bool)
    clipped_sum = jax.jit(found.problem.likelihood.clipped_sum, static_argnums=4)
    for clip in (float("inf"), 0.3):
        factors = np.minimum(1, clip / np.linalg.norm(gradients, axis=1))
        ours = clipped_sum(latent, ones, inputs.records, padding, clip)
        np.testing.assert_allclose(ours, factors @ gradients, rtol=1e-3, atol=2e-4)


def test_constrain_and_unconstrain_are_inverse():
    found, _ = setting("mixture")
    latent = at_random(found.space)
    again = found.space.unconstrain(found.space.constrain(latent))
    np.testing.assert_allclose(again, latent, atol=1e-4)
