"""Clip, sum and lattice: what one record can do to a release is bounded, whatever the record is."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DIM, make_parts, random_params, some_eta
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dpvim.privacy.clipping import clip_factors, clipped_sum
from dpvim.privacy.lattice import Lattice, add_noise, exact_sum, on_grid
from dpvim.privacy.plan import NonPrivatePlan, PrivacyPlan

nasty = st.one_of(
    st.floats(-10, 10, width=32),
    st.sampled_from([0.0, np.nan, np.inf, -np.inf, 1e30, -1e30, 1e-30, 3e38, 1e19]),
)
rows = hnp.arrays(np.float32, st.tuples(st.integers(1, 6), st.just(DIM)), elements=nasty)
clip_norms = st.sampled_from([0.01, 1.0, 30.0])


def sum_of(gradients, weights, is_padding, bound):
    return clipped_sum(lambda: gradients, weights, is_padding, bound)


jitted_sum = jax.jit(sum_of, static_argnums=3)


def plan_of(clip_norm=1.0, noise_multiplier=0.7, num_examples=100, sampling_prob=1.0):
    return PrivacyPlan(
        num_examples=num_examples,
        sampling_prob=sampling_prob,
        num_steps=1,
        clip_norm=clip_norm,
        noise_multiplier=noise_multiplier,
    )


def total(gradients, weights, bound):
    padding = jnp.zeros(len(gradients), bool)
    return jitted_sum(jnp.asarray(gradients), weights, padding, bound)


def factors_of_rows(gradients):
    rows = jnp.asarray(gradients)
    return clip_factors(jnp.linalg.norm(rows, axis=1), jnp.zeros(len(rows), bool), 1.0)


def counts_of(gradients, variant, params, eta, lattice):
    """The integers that noise is added to, for one batch."""
    value = total(gradients, variant.weights(params, eta), lattice.row_bound)
    with jax.enable_x64(True):
        encoded = variant.encode(params, eta, value)
    return np.asarray(on_grid(encoded, lattice.grid))


@given(rows, hnp.arrays(np.float32, DIM, elements=nasty), clip_norms)
@settings(deadline=None, max_examples=200)
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
    zeroed[0] = 0
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


@given(rows, clip_norms)
@settings(deadline=None, max_examples=200)
def test_shares_of_single_rows_stay_below_the_threshold(gradients, clip_norm):
    plan = plan_of(clip_norm)
    lattice = Lattice.of(plan, dim=DIM, num_released=DIM)
    for row in gradients:
        share = np.asarray(total(row[None], jnp.ones(DIM), lattice.row_bound))
        assert np.linalg.norm(share) <= clip_norm


def test_small_gradients_are_untouched():
    gradients = jnp.array([[0.125, 0.25, 0.0], [0.0, 0.0, 0.0]])
    np.testing.assert_array_equal(total(gradients, jnp.ones(3), 1.0), [0.125, 0.25, 0.0])


def test_large_gradients_keep_their_direction():
    value = total(jnp.array([[30.0, 40.0, 0.0]]), jnp.ones(3), 1.0)
    np.testing.assert_allclose(value, [0.6, 0.8, 0.0], rtol=1e-5)


def test_weights_decide_how_much_a_coordinate_counts():
    value = total(jnp.array([[3.0, 4.0, 5.0]]), jnp.array([1.0, 4.0, 0.0]), 1.0)
    np.testing.assert_allclose(value, [3 / 73**0.5, 4 / 73**0.5, 0.0], rtol=1e-4)


def test_padding_and_nonfinite_rows_contribute_nothing():
    gradients = jnp.array([[0.5, 0, 0], [jnp.nan, 0, 0], [0, jnp.inf, 0], [0.3, 0.3, 0.3]])
    padding = jnp.array([False, False, False, True])
    np.testing.assert_array_equal(sum_of(gradients, jnp.ones(3), padding, 1.0), [0.5, 0, 0])
    nothing = sum_of(gradients, jnp.ones(3), jnp.ones(4, bool), 1.0)
    np.testing.assert_array_equal(nothing, np.zeros(3))


@pytest.mark.parametrize("big", [1e10, 1e19, 1e25, 3e38])
def test_overflow_is_the_same_eagerly_and_compiled(big):
    gradients = jnp.full((1, 3), big, jnp.float32)
    padding = jnp.zeros(1, bool)
    eager = sum_of(gradients, jnp.ones(3), padding, 1.0)
    argument = jitted_sum(gradients, jnp.ones(3), padding, 1.0)
    constant = jax.jit(lambda: sum_of(gradients, jnp.ones(3), padding, 1.0))()
    for value in (eager, argument, constant):
        assert np.linalg.norm(value) == pytest.approx(1.0, rel=1e-5)


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
@settings(deadline=None)
def test_no_bits_of_a_release_are_finer_than_the_grid(value, noise, grid):
    with jax.enable_x64(True):
        encoded = jnp.array([value], jnp.float64)
    release = add_noise(encoded, jnp.array([noise], jnp.int32), grid)
    assert release.dtype == jnp.float32
    assert float(release[0]) % grid == 0


@pytest.mark.parametrize("noise_multiplier", [0.3, 5.0, 400.0])
def test_the_margin_is_small(noise_multiplier):
    """What rounding costs: well under a tenth of a percent at sizes people use."""
    plan = plan_of(noise_multiplier=noise_multiplier, num_examples=30_000)
    margin = 1 - Lattice.of(plan, dim=100, num_released=200).row_bound
    assert 0 < margin < 5e-4


def test_a_lattice_that_would_cost_much_is_refused():
    plan = plan_of(num_examples=200_000_000, noise_multiplier=400.0)
    with pytest.raises(ValueError, match="Use smaller batches"):
        Lattice.of(plan, dim=100, num_released=100)


@pytest.mark.parametrize("runs", [None, 4])
def test_norm_and_sum_see_the_same_gradients(runs):
    """Gradients that cancel are stored before norm and sum use them: in the compiled program they
    are what a branch returns, and the program cannot tell which branch is taken. That must hold
    for vectorised runs, where a choice may become the evaluation of both branches."""

    def program(x, is_padding):
        return clipped_sum(lambda: (x * 1.1 - x) * 1e8, jnp.ones(3), is_padding, 1.0)

    arguments = jnp.ones((64, 3)), jnp.zeros(64, bool)
    if runs is not None:
        program = jax.vmap(program)
        arguments = jax.tree.map(lambda leaf: jnp.stack([leaf] * runs), arguments)
    compiled = jax.jit(program).lower(*arguments).compile()
    assert " conditional(" in compiled.as_text()


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_gradients_of_half_precision_are_clipped_in_single(dtype):
    rng = np.random.default_rng(2)
    rows = jnp.asarray(rng.normal(scale=30, size=(50, 1, 40)), dtype)
    one = jax.jit(lambda row: clipped_sum(lambda: row, None, jnp.zeros(1, bool), 0.1))
    norms = [np.linalg.norm(one(row)) for row in rows]
    np.testing.assert_allclose(norms, 0.1, rtol=1e-5)


def test_clip_factors_are_one_inside_and_shrink_outside():
    factors = factors_of_rows([[0.3, 0.4], [0.0, 0.0], [30.0, 40.0]])
    np.testing.assert_allclose(factors, [1.0, 1.0, 0.02], rtol=1e-6)


@pytest.mark.parametrize("bound", [1.0, np.inf])
def test_clip_factors_leave_out_padding_and_rows_that_are_not_finite(bound):
    norms = jnp.array([0.5, 0.5, np.nan, np.inf])
    factors = clip_factors(norms, jnp.array([False, True, False, False]), bound)
    np.testing.assert_array_equal(factors, [1.0, 0.0, 0.0, 0.0])


def test_vectorised_runs_release_the_same_numbers():
    rng = np.random.default_rng(2)
    gradients = jnp.asarray(rng.normal(size=(4, 30, 3)), jnp.float32)
    padding = jnp.zeros((4, 30), bool)
    sums = functools.partial(sum_of, weights=jnp.ones(3), bound=1.0)
    together = jax.vmap(lambda g, p: sums(g, is_padding=p))(gradients, padding)
    for one, batch in zip(together, gradients, strict=True):
        np.testing.assert_array_equal(one, sums(batch, is_padding=padding[0]))
