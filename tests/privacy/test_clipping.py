"""The clip: a record's share of a sum is bounded, whatever the record is."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DIM
from hypothesis import given, settings
from nasty_rows import (
    NUM_EXAMPLES,
    clip_norms,
    factors_of_rows,
    jitted_sum,
    plan_of,
    rows,
    sum_of,
    total,
)

from dpvim.privacy.clipping import _squared_norms, clip_factors, clipped_sum, scales_of
from dpvim.privacy.lattice import Lattice
from dpvim.privacy.norm_counts import COUNT_SHARE, NORM_BIN_ENDS, NUM_NORM_BINS
from dpvim.types import Whitening


@given(rows, clip_norms)
@settings(max_examples=NUM_EXAMPLES)
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


def whitened(gradients, bound=1.0, factor=None):
    factor = jnp.eye(gradients.shape[1]) if factor is None else factor
    return np.asarray(total(gradients, Whitening(factor), bound))


def test_whitened_rows_are_multiplied_clipped_and_counted():
    factor = jnp.array([[2.0, 0.0], [1.0, 0.5]])  # L, so that a row g becomes L' g
    gradients = np.array([[0.1, 0.2], [3.0, -1.0], [np.nan, 0.0], [0.0, 0.0]], np.float32)
    rows = gradients[[0, 1]] @ np.asarray(factor)
    shares = rows * np.minimum(1, 1 / np.linalg.norm(rows, axis=1))[:, None]
    found = whitened(gradients, factor=factor)
    np.testing.assert_allclose(found[:2], np.sqrt(1 - COUNT_SHARE) * shares.sum(axis=0), atol=2e-5)
    counts = found[2:] / np.sqrt(COUNT_SHARE)
    # Norms 0.41, 5.02, none, 0: from a quarter to a half, from four to eight, below an eighth.
    assert np.linalg.norm(rows, axis=1) == pytest.approx([0.412, 5.025], abs=1e-3)
    np.testing.assert_allclose(counts, [1, 0, 1, 0, 0, 0, 1, 0, 0])


@pytest.mark.parametrize("norm", [0.0, 1e-20, 0.124, 0.126, 0.99, 1.01, 7.9, 8.1, 15.9, 17.0, 1e30])
def test_a_record_is_in_one_bin_and_its_share_has_at_most_the_bound(norm):
    share = whitened(np.array([[0.6, -0.8]], np.float32) * np.float32(norm), bound=0.7)
    counts = share[2:] / (0.7 * np.sqrt(COUNT_SHARE))
    place = np.searchsorted(NORM_BIN_ENDS, norm / 0.7, side="right") - 1
    np.testing.assert_allclose(counts, np.eye(NUM_NORM_BINS)[place], rtol=1e-6)
    assert np.linalg.norm(share) <= 0.7 * (1 + 1e-6)


def test_whitening_needs_a_sum_that_knows_it():
    with pytest.raises(TypeError, match="cannot whiten"):
        scales_of(Whitening(jnp.eye(2)))


@pytest.mark.parametrize(
    "shape", [(0, 5), (300, 96), (352, 96), (1024, 96), (2000, 96), (3, 20_000)]
)
def test_norms_in_blocks_are_those_of_whole_sums(shape):
    rows = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    whole = jax.jit(lambda rows: jnp.sum(rows * rows, axis=1))(rows)
    np.testing.assert_array_equal(jax.jit(_squared_norms)(rows), whole)
    several = jax.jit(jax.vmap(_squared_norms))(np.stack([rows, rows]))
    np.testing.assert_array_equal(several, jnp.stack([whole, whole]))
