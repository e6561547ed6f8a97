"""Exact sums and the lattice: one record moves the integers of a release by a bounded amount."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DIM, make_parts, random_params, some_eta
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from nasty_rows import (
    NUM_EXAMPLES,
    clip_norms,
    factors_of_rows,
    nasty,
    plan_of,
    rows,
    sum_of,
    total,
)

from dpvim.privacy.lattice import Lattice, add_noise, exact_sum, on_grid
from dpvim.privacy.plan import NonPrivatePlan


def counts_of(gradients, variant, params, eta, lattice):
    """The integers that noise is added to, for one batch."""
    value = total(gradients, variant.weights(params, eta), lattice.row_bound)
    with jax.enable_x64(True):
        encoded = value if variant.whitens else variant.encode(params, eta, value)
    return np.asarray(on_grid(encoded, lattice.grid))


@given(rows, hnp.arrays(np.float32, DIM, elements=nasty), clip_norms)
@settings(max_examples=NUM_EXAMPLES)
def test_one_row_moves_the_integers_by_at_most_the_sensitivity(
    family_name, variant_name, gradients, other, clip_norm
):
    """No slack: the bound covers clip, sum, encoding and rounding as they are computed."""
    family, variant = make_parts(family_name, variant_name)
    params = random_params(family)
    plan = plan_of(clip_norm)
    lattice = Lattice.of(plan, dim=DIM, num_released=variant.num_released)
    units = clip_norm / lattice.grid

    def counts(g):
        value = counts_of(g, variant, params, some_eta(family), lattice)
        assert np.isfinite(value).all()
        return value

    whole = counts(gradients)
    zeroed = gradients.copy()
    zeroed[0] = np.nan if variant.whitens else 0  # a row of zeros is counted
    replaced = gradients.copy()
    replaced[0] = other
    assert np.linalg.norm(whole - counts(zeroed)) <= units
    assert np.linalg.norm(whole - counts(replaced)) <= 2 * units
    if len(gradients) > 1:
        assert np.linalg.norm(whole - counts(gradients[1:])) <= units


def worst_batches(num_rows, dim):
    """Batches whose sums are hard on floating point."""
    rng = np.random.default_rng(0)
    axis = np.zeros((num_rows, dim), np.float32)
    axis[:, 0] = 1e3
    spread = np.ones((num_rows, dim), np.float32)
    signs = np.where(np.arange(num_rows) % 2, 1, -1)[:, None].astype(np.float32)
    return {
        "all along one axis": axis,
        "all along the diagonal": spread,
        "alternating signs": signs * spread,
        "random directions": rng.normal(size=(num_rows, dim)).astype(np.float32) * 100,
        "random signs, odd sizes": rng.normal(size=(num_rows, 1)).astype(np.float32) * spread,
        "a third of the grid": spread * np.float32(1 / 3e5),
    }


@pytest.mark.parametrize("variant_name", ["aligned", "vanilla", "natural"])
@pytest.mark.parametrize(("num_rows", "dim"), [(50_000, 7), (4097, 96), (300, 500)])
def test_worst_batches_stay_within_the_sensitivity(variant_name, num_rows, dim):
    """Many rows at exactly C: a single-precision sum of 50 000 of them is off by 0.2 % of C."""
    family, variant = make_parts("mean_field", variant_name, dim)
    params, eta = random_params(family), jax.random.normal(jax.random.key(1), (dim,))
    lattice = Lattice.of(plan_of(num_examples=num_rows), dim=dim, num_released=variant.num_released)

    @jax.jit
    def counts(gradients, is_padding):
        weights = variant.weights(params, eta)
        value = sum_of(gradients, weights, is_padding, lattice.row_bound)
        with jax.enable_x64(True):
            return on_grid(variant.encode(params, eta, value), lattice.grid)

    def shift(gradients, row):
        """The row is really absent: all later ones move up."""
        absent = np.concatenate([np.delete(gradients, row, axis=0), gradients[:1]])
        last = np.arange(num_rows) == num_rows - 1
        with_it = counts(gradients, np.zeros(num_rows, bool))
        return np.asarray(with_it) - np.asarray(counts(absent, last))

    for name, gradients in worst_batches(num_rows, dim).items():
        for row in (0, num_rows // 2, num_rows - 1):
            assert np.linalg.norm(shift(gradients, row)) <= 1 / lattice.grid, name


def singles(factors, gradients):
    return ((factors[i : i + 1], gradients[i : i + 1]) for i in range(len(gradients)))


def test_the_sum_is_exact_in_any_order():
    rng = np.random.default_rng(1)
    gradients = rng.normal(size=(3000, 5)).astype(np.float32)
    factors = np.asarray(factors_of_rows(gradients))
    quantum = 2.0**-20
    one_by_one = np.concatenate(
        [
            exact_sum(jnp.asarray(f), jnp.asarray(g), 1.0)[None]
            for f, g in singles(factors, gradients)
        ]
    )
    np.testing.assert_array_equal(one_by_one % quantum, 0)
    np.testing.assert_allclose(
        one_by_one, factors[:, None] * gradients, rtol=0, atol=quantum / 2 * (1 + 1e-3)
    )
    by_hand = one_by_one.sum(axis=0)
    order = rng.permutation(len(gradients))
    for index in (slice(None), order):
        value = exact_sum(jnp.asarray(factors[index]), jnp.asarray(gradients[index]), 1.0)
        np.testing.assert_array_equal(value, by_hand)


def test_full_blocks_of_rows_at_the_bound_do_not_overflow():
    gradients = jnp.ones((3 * 1024, 2)) * jnp.array([1.0, 0.0])
    value = exact_sum(jnp.ones(len(gradients)), gradients, 1.0)
    np.testing.assert_array_equal(value, [3 * 1024, 0])


def test_nothing_is_clipped_or_rounded_without_privacy():
    plan = NonPrivatePlan(num_examples=2, sampling_prob=1.0, num_steps=1)
    lattice = Lattice.of(plan, dim=3, num_released=3)
    gradients = jnp.array([[3.0, 4.0, 1 / 3], [0.0, jnp.nan, 0.0]], jnp.float32)
    value = total(gradients, jnp.ones(3), lattice.row_bound)
    release = add_noise(value, jnp.zeros(3, jnp.int32), lattice.grid)
    np.testing.assert_array_equal(release, gradients[0])


def test_a_release_is_sum_plus_noise_on_the_grid():
    release = add_noise(jnp.array([1.0, -0.3]), jnp.array([5, -8], jnp.int32), 0.25)
    np.testing.assert_array_equal(release, [2.25, -2.25])


@given(st.floats(-1e6, 1e6), st.integers(-(2**31), 2**31 - 1), st.sampled_from([2**-20, 0.25, 4]))
def test_no_bits_of_a_release_are_finer_than_the_grid(value, noise, grid):
    with jax.enable_x64(True):
        encoded = jnp.array([value], jnp.float64)
    release = add_noise(encoded, jnp.array([noise], jnp.int32), grid)
    assert release.dtype == jnp.float32
    assert float(release[0]) % grid == 0


@pytest.mark.parametrize("noise_multiplier", [0.3, 5.0, 400.0])
def test_the_margin_is_small(noise_multiplier):
    """Rounding costs well under a tenth of a percent at sizes people use."""
    plan = plan_of(noise_multiplier=noise_multiplier, num_examples=30_000)
    margin = 1 - Lattice.of(plan, dim=100, num_released=200).row_bound
    assert 0 < margin < 5e-4


def test_a_lattice_that_would_cost_much_is_refused():
    plan = plan_of(num_examples=200_000_000, noise_multiplier=400.0)
    with pytest.raises(ValueError, match="Use smaller batches"):
        Lattice.of(plan, dim=100, num_released=100)
