"""Every variant of every family: encode, decode and the weights between them."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DIM, make_parts, random_params, some_eta, standard_normal_log_prior

from dpvim.inference.families import FAMILIES, SCALE_TRANSFORMS, pull_back
from dpvim.inference.gradient import make_private_gradient
from dpvim.inference.variants import (
    UnservedVariantError,
    make_variant,
    served_variants,
    whitened_clip_norm,
)
from dpvim.privacy.norm_counts import COUNT_SHARE, NUM_NORM_BINS
from dpvim.types import Whitening

GRADIENT = jnp.array([1.5, -0.2, 0.7])


# The paper's variants: how many numbers each of them noises.
NUMBERS_NOISED = {
    **dict.fromkeys(("aligned", "aligned_natural"), lambda family: family.dim),
    **dict.fromkeys(("vanilla", "preconditioned", "natural"), lambda family: family.num_params),
}


def preconditioner_of(family, variant, params):
    """What turns a plain gradient into the variant's direction: F^-1 or nothing."""
    if "natural" in variant.name:
        return family.preconditioners.inverse_fisher(params)
    return jax.tree.map(jnp.ones_like, params)


def test_decode_of_encode_is_the_exact_direction(family_name, variant_name, scale_transform):
    family, variant = make_parts(family_name, variant_name, transform=scale_transform)
    params = random_params(family)
    free = family.unpack(jnp.linspace(-1, 1, family.num_params))
    release = variant.encode(params, some_eta(family), GRADIENT)
    direction = variant.decode(params, some_eta(family), release, free)
    plain = jax.tree.map(jnp.add, pull_back(family, params, some_eta(family), GRADIENT), free)
    expected = jax.tree.map(jnp.multiply, preconditioner_of(family, variant, params), plain)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), direction, expected
    )


def test_release_has_the_stated_length(family_name, variant_name):
    family, variant = make_parts(family_name, variant_name)
    encoded = variant.encode(random_params(family), some_eta(family), GRADIENT)
    assert encoded.shape == (variant.num_released,)
    if variant_name in NUMBERS_NOISED:
        assert variant.num_released == NUMBERS_NOISED[variant_name](family)


def test_weighted_norm_is_the_norm_of_the_explicit_gradient(
    family_name, variant_name, scale_transform
):
    family, variant = make_parts(family_name, variant_name, transform=scale_transform)
    params = random_params(family, seed=1)
    gradients = jax.random.normal(jax.random.key(0), (20, DIM)) * 3
    explicit = jax.vmap(lambda g: variant.encode(params, some_eta(family), g))(gradients)
    weights = variant.weights(params, some_eta(family))
    if isinstance(weights, Whitening):
        factor = jnp.diag(weights.factor) if weights.factor.ndim == 1 else weights.factor
        moved = jnp.linalg.norm(gradients @ factor, axis=1) * math.sqrt(1 - COUNT_SHARE)
        np.testing.assert_allclose(jnp.linalg.norm(explicit, axis=1), moved, rtol=1e-5)
        return
    if weights is None:
        weights = jnp.ones(DIM)
    weighted = jnp.sqrt(jnp.square(gradients) @ weights)
    np.testing.assert_allclose(jnp.linalg.norm(explicit, axis=1), weighted, rtol=1e-5)


def test_explicit_gradient_is_the_scaled_gradient_by_autodiff(family_name, variant_name):
    """Encode against jax.grad through the reparametrisation, not against our own slopes."""
    if variant_name not in NUMBERS_NOISED:
        pytest.skip("not one of the paper's, which are known from their definitions")
    family, variant = make_parts(family_name, variant_name)
    params = random_params(family)
    by_autodiff = jax.grad(lambda p: family.reparametrise(p, some_eta(family)) @ GRADIENT)(params)
    if variant_name == "aligned":
        expected = GRADIENT
    elif variant_name == "aligned_natural":
        expected = family.preconditioners.inverse_fisher(params).loc * GRADIENT
    else:
        scaling = {
            "vanilla": lambda p: jax.tree.map(jnp.ones_like, p),
            "preconditioned": family.preconditioners.unit_slope,
            "natural": family.preconditioners.inverse_fisher,
        }[variant_name](params)
        expected = family.pack(jax.tree.map(jnp.multiply, scaling, by_autodiff))
    np.testing.assert_allclose(
        variant.encode(params, some_eta(family), GRADIENT), expected, rtol=1e-5
    )


def test_step_without_clip_and_noise_is_the_elbo_gradient(
    family_name, variant_name, scale_transform, problem, records, whole_data_plan
):
    family, variant = make_parts(family_name, variant_name, transform=scale_transform)
    params = random_params(family)
    gradient = make_private_gradient(problem, family, variant, whole_data_plan)
    no_noise = jnp.zeros(variant.num_released, jnp.int32)
    release = gradient.release(params, some_eta(family), records, jnp.arange(50), no_noise)
    direction = gradient.direction(params, some_eta(family), release)

    def one_draw_elbo(params):
        latent = family.reparametrise(params, some_eta(family))
        log_lik = jax.vmap(problem.likelihood.log_prob, (None, 0))(latent, records).sum()
        return (
            log_lik + standard_normal_log_prior(latent) + family.entropy(params, some_eta(family))
        ) / 50

    expected = jax.tree.map(
        jnp.multiply, preconditioner_of(family, variant, params), jax.grad(one_draw_elbo)(params)
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), direction, expected
    )


def test_inverse_fisher_is_the_inverse_of_the_fisher_matrix(scale_transform):
    """F from its definition, as the covariance of the score under q."""
    family = FAMILIES["mean_field"](2, scale_transform)
    params = random_params(family)
    flat = family.pack(params)

    def log_q(flat, latent):
        p = family.unpack(flat)
        scale = family.factor(p)
        return jnp.sum(-0.5 * jnp.square((latent - p.loc) / scale) - jnp.log(scale))

    etas = jax.random.normal(jax.random.key(0), (200_000, 2))
    latents = jax.vmap(lambda eta: family.reparametrise(params, eta))(etas)
    scores = jax.vmap(jax.grad(log_q), (None, 0))(flat, latents)
    fisher = scores.T @ scores / len(etas)
    inverse = family.pack(family.preconditioners.inverse_fisher(params))
    np.testing.assert_allclose(jnp.diag(fisher) * inverse, 1.0, atol=0.03)
    correlation = fisher / jnp.sqrt(jnp.outer(jnp.diag(fisher), jnp.diag(fisher)))
    np.testing.assert_allclose(correlation, jnp.eye(4), atol=0.02)


SERVED_BOTH = [f for f in FAMILIES if {"vanilla", "aligned"} <= set(served_variants(f))]


@pytest.mark.parametrize("served", SERVED_BOTH)
def test_aligned_scale_gradient_has_less_variance_than_vanilla(problem, records, served):
    """Theorem 1, for a fixed batch, over the draw eta and the noise."""
    plan_noise, clip = 5.0, math.inf
    draws = 20_000
    keys = jax.random.split(jax.random.key(0), draws)
    spread = {}
    for name in ("vanilla", "aligned"):
        family, variant = make_parts(served, name)
        params = family.init(jnp.zeros(DIM), 0.1)

        def packed_gradient(key, variant=variant, family=family, params=params):
            key_eta, key_noise = jax.random.split(key)
            eta = family.base_draw(key_eta)
            total = problem.likelihood.clipped_sum(
                family.reparametrise(params, eta),
                variant.weights(params, eta),
                records,
                jnp.zeros(50, bool),
                clip,
            )
            release = variant.encode(params, eta, total)
            release += plan_noise * jax.random.normal(key_noise, release.shape)
            free = jax.tree.map(jnp.zeros_like, params)
            return family.pack(variant.decode(params, eta, release, free))

        spread[name] = np.asarray(jax.vmap(packed_gradient)(keys)).var(axis=0)
    vanilla, aligned = spread["vanilla"], spread["aligned"]
    # Appendix D: the noise's part falls from sigma^2 to s^2 sigma^2, with s the slope of the
    # parameter; the data's part stays. The slope of a scale is T' eta.
    slope = SCALE_TRANSFORMS["softplus"].derivative(SCALE_TRANSFORMS["softplus"].inverse(0.1))
    slopes = jax.vmap(lambda key: family.pack(family.slopes(params, family.base_draw(key))))(keys)
    squared = np.square(slopes).mean(axis=0)
    is_scale = squared < 0.5
    assert is_scale.sum() == DIM
    np.testing.assert_allclose(squared[is_scale], slope**2, rtol=0.1)
    assert (aligned < vanilla)[is_scale].all()
    difference = (vanilla - aligned)[is_scale]
    np.testing.assert_allclose(difference, plan_noise**2 * (1 - slope**2), rtol=0.1)
    # What correlates coordinates has the slope eta, whose square is one on average, and means have
    # one: the same variance at the same C, though vanilla needs a larger C for the same bias.
    np.testing.assert_allclose(aligned[~is_scale], vanilla[~is_scale], rtol=0.06)


def test_unserved_variant_is_refused_by_name():
    with pytest.raises(UnservedVariantError, match=r"'full_rank' cannot serve 'natural'") as error:
        make_variant("natural", FAMILIES["full_rank"](2))
    assert "'aligned'" in str(error.value)
    assert "'mean_field'" in str(error.value)


def test_aligned_serves_a_family_with_nothing_but_a_reparametrisation():
    family = dataclasses.replace(
        FAMILIES["mean_field"](DIM), slopes=None, preconditioners=None, name="odd"
    )
    make_variant("aligned", family)
    for name in ("vanilla", "preconditioned", "natural", "aligned_natural"):
        with pytest.raises(UnservedVariantError, match="'odd'"):
            make_variant(name, family)


def test_whitened_releases_the_gradient_of_the_standardised_latent(family_name):
    """L' g by autodiff through the reparametrisation, and room for the counts."""
    family = FAMILIES[family_name](DIM)
    if not family.is_gaussian:
        with pytest.raises(UnservedVariantError):
            make_variant("whitened", family)
        return
    variant, params = make_variant("whitened", family), random_params(family)
    assert variant.num_released == DIM + NUM_NORM_BINS
    encoded = variant.encode(params, some_eta(family), GRADIENT) / math.sqrt(1 - COUNT_SHARE)
    if family.base_size == DIM and family.name != "low_rank":
        expected = jax.grad(lambda eta: family.reparametrise(params, eta) @ GRADIENT)(
            some_eta(family)
        )
        np.testing.assert_allclose(encoded[:DIM], expected, rtol=1e-5)
    np.testing.assert_array_equal(encoded[DIM:], 0)


def test_whitened_clip_norm_is_a_few_root_mean_squares_of_a_linear_regression():
    """The information identity: with L L' = H^-1 the mean square of the norms is d / N."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(4000, 5)) @ rng.normal(size=(5, 5))
    residuals = rng.normal(size=4000)
    factor = np.linalg.cholesky(np.linalg.inv(X.T @ X))
    norms = np.linalg.norm(X * residuals[:, None] @ factor, axis=1)
    unit = np.sqrt(5 / 4000)
    assert np.sqrt(np.mean(norms**2)) == pytest.approx(unit, rel=0.05)
    clip_norm = whitened_clip_norm(num_examples=4000, dim=5, noise=3.7)
    assert 3 * unit < clip_norm < 4 * unit
    assert np.mean(norms > clip_norm) < 0.02


def test_less_noise_allows_a_larger_clip_norm():
    norms = [whitened_clip_norm(num_examples=4000, dim=5, noise=s) for s in (20.0, 3.7, 0.5, 0.01)]
    assert norms == sorted(norms)
    assert norms[0] < norms[-1]
