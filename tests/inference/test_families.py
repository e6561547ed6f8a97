from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import random_params
from hypothesis import given, settings
from hypothesis import strategies as st

from dpvim.inference.families import FAMILIES, SCALE_TRANSFORMS, full_rank, mean_field


def as_matrix(factor):
    return np.diag(factor) if factor.ndim == 1 else np.asarray(factor)


@given(st.floats(-30, 30))
@settings(deadline=None)
def test_derivative_of_the_scale_transform_is_at_most_the_scale(raw):
    """Appendix C of the paper."""
    for transform in SCALE_TRANSFORMS.values():
        value, slope = transform.forward(jnp.float32(raw)), transform.derivative(jnp.float32(raw))
        assert slope <= value * (1 + 1e-6)


@pytest.mark.parametrize("name", SCALE_TRANSFORMS)
def test_scale_transform_derivative_and_inverse(name):
    transform = SCALE_TRANSFORMS[name]
    raw = jnp.linspace(-6, 6, 25)
    by_autodiff = jax.vmap(jax.grad(transform.forward))(raw)
    np.testing.assert_allclose(transform.derivative(raw), by_autodiff, rtol=1e-5)
    np.testing.assert_allclose(transform.inverse(transform.forward(raw)), raw, atol=1e-4)


def test_draws_have_the_covariance_of_the_factor(family_name, scale_transform):
    family = FAMILIES[family_name](3, scale_transform)
    params = random_params(family)
    etas = jax.vmap(family.base_draw)(jax.random.split(jax.random.key(0), 100_000))
    latents = jax.vmap(lambda eta: family.reparametrise(params, eta))(etas)
    tril = as_matrix(family.factor(params))
    np.testing.assert_allclose(jnp.cov(latents.T), tril @ tril.T, atol=0.05)
    np.testing.assert_allclose(latents.mean(axis=0), params.loc, atol=0.03)


def test_entropy_is_the_gaussian_one(family_name, scale_transform):
    family = FAMILIES[family_name](3, scale_transform)
    params = random_params(family)
    tril = as_matrix(np.asarray(family.factor(params), float))
    _, log_det = np.linalg.slogdet(2 * np.pi * np.e * tril @ tril.T)
    np.testing.assert_allclose(family.entropy(params), 0.5 * log_det, rtol=1e-5)


def test_pack_and_unpack_are_inverse(family_name):
    family = FAMILIES[family_name](4)
    flat = jnp.arange(1.0, family.num_params + 1)
    np.testing.assert_array_equal(family.pack(family.unpack(flat)), flat)


def test_init_has_the_scale_asked_for(family_name, scale_transform):
    family = FAMILIES[family_name](2, scale_transform)
    params = family.init(jnp.array([1.0, 2.0]), 0.25)
    np.testing.assert_allclose(as_matrix(family.factor(params)), 0.25 * jnp.eye(2), rtol=1e-5)


def test_dimension_one(scale_transform):
    small, wide = mean_field(1, scale_transform), full_rank(1, scale_transform)
    assert small.num_params == wide.num_params == 2


def test_unknown_scale_transform():
    with pytest.raises(ValueError, match="Did you mean 'softplus'"):
        mean_field(2, "softpluss")
