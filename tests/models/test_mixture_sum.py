"""The structured sum of a mixture: it is the general one, and no row exceeds the bound."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mixtures import MODELS, NUM_ROWS, latent_of, setting

from dpvim.inference.families import mean_field
from dpvim.inference.variants import VARIANTS
from dpvim.models import level_tables

BOUND = 0.8


def weights_of(variant_name, dim):
    rng = np.random.default_rng(0)
    family = mean_field(dim)
    params = family.unpack(jnp.asarray(rng.normal(scale=0.7, size=2 * dim), jnp.float32))
    eta = jnp.asarray(rng.normal(size=dim), jnp.float32)
    return VARIANTS[variant_name](family).weights(params, eta)


@functools.cache
def compiled(likelihood):
    return jax.jit(likelihood.clipped_sum, static_argnums=4)


@pytest.mark.parametrize("name", MODELS)
def test_the_structured_sum_is_the_general_one(name):
    found, general, batch = setting(name)
    latent, is_padding = latent_of(found.space), jnp.arange(NUM_ROWS) % 7 == 3
    sums = compiled(found.problem.likelihood), compiled(general)
    for bound in (BOUND, float("inf")) if name == "counts" else (BOUND,):
        for variant_name in VARIANTS.keys() - {"whitened"}:
            weights = weights_of(variant_name, found.space.dim)
            scale = 1.0 if weights is None else np.sqrt(weights)
            ours, wanted = (
                np.asarray(s(latent, weights, batch, is_padding, bound)) * scale for s in sums
            )
            # The general sum rounds each row to 2^-18 of the bound.
            quantum = 0 if np.isinf(bound) else bound / 2**18 * np.sqrt(NUM_ROWS)
            tolerance = 1e-5 * np.abs(wanted).max() + quantum
            np.testing.assert_allclose(ours, wanted, rtol=1e-5, atol=tolerance)


def test_levels_in_great_number_are_read_from_tables(monkeypatch):
    found, _, batch = setting("paper")
    arguments = (latent_of(found.space), jnp.ones(found.space.dim), batch)
    nothing = jnp.zeros(NUM_ROWS, bool)
    wanted = compiled(found.problem.likelihood)(*arguments, nothing, BOUND)
    monkeypatch.setattr(level_tables, "_MOST_INDICATORS", 0)
    clipped_sum = found.problem.likelihood.clipped_sum
    ours = jax.jit(lambda *arguments: clipped_sum(*arguments, BOUND))(*arguments, nothing)
    np.testing.assert_allclose(ours, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["paper", "mixed"])
def test_what_is_not_finite_contributes_nothing(name):
    found, _, batch = setting(name)
    dim = found.space.dim
    clipped_sum = compiled(found.problem.likelihood)
    latent, nothing = latent_of(found.space), jnp.zeros(NUM_ROWS, bool)
    ones = jnp.ones(dim)
    assert not np.any(clipped_sum(latent, ones, batch, ~nothing, BOUND))
    for bad in (jnp.nan, jnp.inf):
        for at in (0, dim // 2, dim - 1):
            total = clipped_sum(latent.at[at].set(bad), ones, batch, nothing, BOUND)
            assert np.isfinite(total).all()
        assert not np.any(clipped_sum(jnp.full(dim, bad), ones, batch, nothing, BOUND))
    strange = jnp.ones(dim).at[1].set(jnp.nan).at[3].set(jnp.inf).at[4].set(0.0)
    total = np.asarray(clipped_sum(latent, strange, batch, nothing, BOUND))
    assert np.isfinite(total).all()
    assert not np.any(total[[1, 3, 4]])


def test_a_row_that_is_not_finite_leaves_the_others_alone():
    found, _, batch = setting("mixed")
    clipped_sum = compiled(found.problem.likelihood)
    latent, ones = latent_of(found.space), jnp.ones(found.space.dim)
    is_third = jnp.arange(NUM_ROWS) == 3
    for bad in (jnp.nan, jnp.inf):
        odd = [
            leaf.at[3].set(bad) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
            for leaf in batch
        ]
        present = [leaf.at[3].set(False) if leaf.dtype == bool else leaf for leaf in odd]
        ours = clipped_sum(latent, ones, present, jnp.zeros(NUM_ROWS, bool), BOUND)
        wanted = clipped_sum(latent, ones, batch, is_third, BOUND)
        np.testing.assert_array_equal(ours, wanted)


def allowed(dim, rows):
    """The share of the bound that `Lattice` sets aside, less the rounding of rows."""
    return 1 + (2 * dim + 32) * 2.0**-24 + 2 * (rows + 16) * rows * 2.0**-53


def extremes(dim, cases, seed=5):
    """Latents and weights of all sizes, some of them saturated."""
    rng = np.random.default_rng(seed)
    latents = rng.normal(size=(cases, dim)) * 10.0 ** rng.uniform(-2, 3, (cases, 1))
    latents *= 10.0 ** (rng.uniform(-2, 1, (cases, dim)) * (rng.random((cases, 1)) < 0.5))
    weights = 10.0 ** (rng.uniform(-12, 8, (cases, dim)) * (rng.random((cases, 1)) < 0.7))
    return latents.astype(np.float32), weights.astype(np.float32)


def norms_of(shares, weights):
    shares, weights = np.asarray(shares, np.float64), np.asarray(weights, np.float64)
    assert np.isfinite(shares).all()
    return np.sqrt((shares**2 * weights).sum(axis=-1))


@pytest.mark.parametrize("name", MODELS)
def test_no_row_by_itself_exceeds_the_bound(name):
    found, _, batch = setting(name)
    dim, cases = found.space.dim, 2000
    latents, weights = extremes(dim, cases)
    picked = [leaf[np.random.default_rng(1).integers(0, NUM_ROWS, cases)] for leaf in batch]

    @jax.jit
    @jax.vmap
    def alone(latent, weights, row):
        rows = [leaf[None] for leaf in row]
        return found.problem.likelihood.clipped_sum(
            latent, weights, rows, jnp.zeros(1, bool), BOUND
        )

    norms = norms_of(alone(latents, weights, picked), weights)
    assert norms.max() <= BOUND * allowed(dim, 1)
    assert (norms > 0.999 * BOUND).mean() > 0.1  # the bound was put to the test


@pytest.mark.parametrize("name", ["paper", "mixed", "counts"])
def test_no_row_of_a_batch_exceeds_the_bound(name):
    """What the sum changes by if a row is left out, in the compiled form that a run has."""
    found, _, batch = setting(name)
    dim, cases = found.space.dim, 40
    latents, weights = extremes(dim, cases, seed=6)
    clipped_sum = compiled(found.problem.likelihood)
    left_out = jnp.eye(NUM_ROWS, dtype=bool)
    largest = 0.0
    for latent, weight in zip(latents, weights, strict=True):
        whole = clipped_sum(latent, weight, batch, jnp.zeros(NUM_ROWS, bool), BOUND)
        for i in range(0, NUM_ROWS, 7):
            rest = clipped_sum(latent, weight, batch, left_out[i], BOUND)
            share = np.asarray(whole) - np.asarray(rest)
            largest = max(largest, norms_of(share, weight))
    assert 0.99 * BOUND < largest <= BOUND * allowed(dim, NUM_ROWS)


def test_norm_and_sum_see_numbers_that_are_stored():
    """The branch that keeps the compiler from working them out twice is still there."""
    found, _, batch = setting("mixed")
    arguments = (latent_of(found.space), jnp.ones(found.space.dim), batch)
    is_padding = jnp.zeros(NUM_ROWS, bool)
    program = compiled(found.problem.likelihood).lower(*arguments, is_padding, BOUND).compile()
    assert " conditional(" in program.as_text()


def test_the_sum_is_in_double_precision():
    found, _, batch = setting("paper")
    total = compiled(found.problem.likelihood)(
        latent_of(found.space), jnp.ones(found.space.dim), batch, jnp.zeros(NUM_ROWS, bool), BOUND
    )
    assert total.dtype == np.float64
