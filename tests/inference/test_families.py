from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_family, random_params, some_eta
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dpvim._extras import MissingExtraError
from dpvim.inference.families import (
    SCALE_TRANSFORMS,
    Layout,
    block_diagonal,
    family,
    full_rank,
    low_rank,
    mean_field,
    standard_deviations,
)
from dpvim.inference.variants import served_variants


def as_matrix(factor):
    return np.diag(factor) if factor.ndim == 1 else np.asarray(factor)


@given(st.floats(-30, 30))
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


def draws_of(family, params, number=100_000):
    etas = jax.vmap(family.base_draw)(jax.random.split(jax.random.key(0), number))
    return etas, jax.vmap(lambda eta: family.reparametrise(params, eta))(etas)


def log_density_of(family, params, latents):
    """Of a Gaussian from its factor, by scipy; of others as they say themselves."""
    if family.is_gaussian:
        tril = as_matrix(np.asarray(family.factor(params), float))
        return stats.multivariate_normal(params.loc, tril @ tril.T).logpdf(latents)
    return jax.jit(jax.vmap(lambda latent: family.log_density(params, latent)))(latents)


def test_draws_have_the_moments_that_a_family_states(family_name, scale_transform):
    family = make_family(family_name, 3, scale_transform)
    params = random_params(family)
    _, latents = draws_of(family, params)
    sds = standard_deviations(family, params)
    np.testing.assert_allclose(latents.std(axis=0), sds, rtol=0.015 if family.is_gaussian else 0.1)
    if family.is_gaussian:
        tril = as_matrix(family.factor(params))
        np.testing.assert_allclose(jnp.cov(latents.T), tril @ tril.T, atol=0.05)
        np.testing.assert_allclose(latents.mean(axis=0), params.loc, atol=0.03)


def test_entropy_is_minus_the_mean_log_density(family_name, scale_transform):
    family = make_family(family_name, 3, scale_transform)
    params = random_params(family, scale=0.3)  # larger weights make a flow with heavy tails
    etas, latents = draws_of(family, params, 20_000)
    entropies = jax.vmap(lambda eta: family.entropy(params, eta))(etas)
    minus_log_q = -log_density_of(family, params, latents)
    error = float(np.std(entropies - minus_log_q)) / np.sqrt(len(etas))
    assert abs(np.mean(entropies) - np.mean(minus_log_q)) < 4 * error
    assert error < 0.02


def test_entropy_is_the_gaussian_one(family_name, scale_transform):
    family = make_family(family_name, 3, scale_transform)
    if not family.is_gaussian:
        pytest.skip("the family is not Gaussian")
    params = random_params(family)
    tril = as_matrix(np.asarray(family.factor(params), float))
    _, log_det = np.linalg.slogdet(2 * np.pi * np.e * tril @ tril.T)
    np.testing.assert_allclose(family.entropy(params, some_eta(family)), 0.5 * log_det, rtol=1e-5)


def test_densities_integrate_to_one(family_name, scale_transform):
    family = make_family(family_name, 2, scale_transform)
    params = random_params(family, seed=4, scale=0.3)
    _, latents = draws_of(family, params, 20_000)
    # Importance sampling from a wide Gaussian around the draws.
    proposal = stats.multivariate_normal(latents.mean(axis=0), 4 * np.cov(np.asarray(latents).T))
    points = proposal.rvs(20_000, random_state=0)
    ratio = np.exp(log_density_of(family, params, points) - proposal.logpdf(points))
    assert abs(ratio.mean() - 1) < 0.05


def test_pack_and_unpack_are_inverse(family_name):
    family = make_family(family_name, 4)
    flat = jnp.arange(1.0, family.num_params + 1)
    np.testing.assert_array_equal(family.pack(family.unpack(flat)), flat)


def test_init_has_the_scale_asked_for(family_name, scale_transform):
    family = make_family(family_name, 2, scale_transform)
    params = family.init(jnp.array([1.0, 2.0]), 0.25)
    if family.is_gaussian:
        np.testing.assert_allclose(as_matrix(family.factor(params)), 0.25 * jnp.eye(2), rtol=1e-5)
    else:
        np.testing.assert_allclose(standard_deviations(family, params), 0.25, rtol=0.1)
    assert (
        np.abs(family.reparametrise(params, jnp.zeros(family.base_size)) - params.loc).max() < 0.05
    )


def test_block_diagonal_is_full_rank_within_a_block_and_mean_field_of_single_entries():
    whole, apart = block_diagonal(3), block_diagonal(Layout((1, 1, 1)))
    assert whole.num_params == full_rank(3).num_params
    assert apart.num_params == mean_field(3).num_params
    for blocks, like in ((whole, full_rank(3)), (apart, mean_field(3))):
        params, same = random_params(blocks), random_params(like)
        latent = blocks.reparametrise(params, some_eta(blocks))
        np.testing.assert_allclose(latent, like.reparametrise(same, some_eta(like)), rtol=1e-6)


def test_blocks_are_independent_of_each_other():
    family = block_diagonal(Layout((2, 3, 1)))
    tril = np.asarray(family.factor(random_params(family)))
    block = np.repeat([0, 1, 2], [2, 3, 1])
    assert (tril[block[:, None] != block] == 0).all()
    assert (tril[np.tril(block[:, None] == block)] != 0).all()


def test_full_rank_has_the_derivative_that_jax_finds_by_itself():
    """Its diagonal brings a derivative of its own."""
    made = full_rank(5)
    params, eta = random_params(made), some_eta(made)
    weights = jnp.arange(1.0, 6.0)

    def by_jax(params):
        diagonal = jax.nn.softplus(jnp.diagonal(params.raw_tril))
        tril = jnp.tril(params.raw_tril, -1) + jnp.diag(diagonal)
        return weights @ (params.loc + tril @ eta)

    def ours(params):
        return weights @ made.reparametrise(params, eta)

    assert ours(params) == by_jax(params)
    for found, wanted in zip(jax.grad(ours)(params), jax.grad(by_jax)(params), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_a_low_rank_family_has_numpyros_default_rank():
    assert low_rank(100).options == {"rank": 10}
    assert family("low_rank", rank=3).make(7).options == {"rank": 3}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("low_rank", {"rank": 0}, "rank"),
        ("flow", {"width": 10**6}, "at most"),
        ("flow", {"layers": 10**6}, "at most"),
    ],
)
def test_bad_options_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        family(name, **options).make(3)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "flowjax.flows", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'dpvim\[flows\]'"):
        family("flow").make(3)
    assert served_variants("flow") == []


def test_dimension_one(scale_transform):
    small, wide = mean_field(1, scale_transform), full_rank(1, scale_transform)
    assert small.num_params == wide.num_params == 2


def test_unknown_scale_transform():
    with pytest.raises(ValueError, match="Did you mean 'softplus'"):
        mean_field(2, "softpluss")
