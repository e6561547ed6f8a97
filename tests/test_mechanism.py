"""The clip: what one record can do to a sum is bounded, whatever the record is."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DIM, make_parts, random_params
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dpvim.mechanism import add_noise, clip_factors, clipped_sum

ETA = jnp.array([0.4, -1.3, 2.1])
nasty = st.one_of(
    st.floats(-10, 10, width=32),
    st.sampled_from([0.0, np.nan, np.inf, -np.inf, 1e30, -1e30, 1e-30, 3e38, 1e19]),
)
rows = hnp.arrays(np.float32, st.tuples(st.integers(1, 6), st.just(DIM)), elements=nasty)
clip_norms = st.sampled_from([0.01, 1.0, 30.0])
jitted_sum = jax.jit(clipped_sum)


def total(gradients, weights, clip_norm):
    padding = jnp.zeros(len(gradients), bool)
    return jitted_sum(jnp.asarray(gradients), weights, padding, clip_norm)


@given(rows, hnp.arrays(np.float32, DIM, elements=nasty), clip_norms)
@settings(deadline=None, max_examples=300)
def test_one_row_moves_the_encoded_sum_by_at_most_the_sensitivity(
    family_name, variant_name, gradients, other, clip_norm
):
    family, variant = make_parts(family_name, variant_name)
    params = random_params(family)
    weights = variant.weights(params, ETA)

    def encoded(g):
        value = total(g, weights, clip_norm)
        assert jnp.isfinite(value).all()
        return np.asarray(variant.encode(params, ETA, value), np.float64)

    whole = encoded(gradients)
    zeroed = gradients.copy()
    zeroed[0] = 0
    replaced = gradients.copy()
    replaced[0] = other
    # Summation order is the same in all worlds, so a few units in the last place are all.
    slack = 1e-6 * clip_norm * len(gradients)
    assert np.linalg.norm(whole - encoded(zeroed)) <= clip_norm + slack
    assert np.linalg.norm(whole - encoded(replaced)) <= 2 * clip_norm + slack
    if len(gradients) > 1:
        removed = gradients[1:]
        assert np.linalg.norm(whole - encoded(removed)) <= clip_norm + slack


@given(rows, clip_norms)
@settings(deadline=None, max_examples=200)
def test_single_precision_norms_stay_below_the_threshold(gradients, clip_norm):
    weights = jnp.ones(DIM)
    for row in gradients:
        norm = np.linalg.norm(np.asarray(total(row[None], weights, clip_norm), np.float64))
        assert norm <= clip_norm


def test_small_gradients_are_untouched():
    gradients = jnp.array([[0.1, 0.2, 0.0], [0.0, 0.0, 0.0]])
    np.testing.assert_allclose(total(gradients, jnp.ones(3), 1.0), [0.1, 0.2, 0.0])


def test_large_gradients_keep_their_direction():
    value = total(jnp.array([[30.0, 40.0, 0.0]]), jnp.ones(3), 1.0)
    np.testing.assert_allclose(value, [0.6, 0.8, 0.0], rtol=1e-5)


def test_padding_and_nonfinite_rows_contribute_nothing():
    gradients = jnp.array([[0.1, 0, 0], [jnp.nan, 0, 0], [0, jnp.inf, 0], [0.3, 0.3, 0.3]])
    padding = jnp.array([False, False, False, True])
    np.testing.assert_allclose(clipped_sum(gradients, jnp.ones(3), padding, 1.0), [0.1, 0, 0])
    nothing = clipped_sum(gradients, jnp.ones(3), jnp.ones(4, bool), 1.0)
    np.testing.assert_array_equal(nothing, np.zeros(3))


@pytest.mark.parametrize("big", [1e10, 1e19, 1e25, 3e38])
def test_overflow_is_the_same_eagerly_and_compiled(big):
    gradients = jnp.full((1, 3), big, jnp.float32)
    padding = jnp.zeros(1, bool)
    eager = clipped_sum(gradients, jnp.ones(3), padding, 1.0)
    argument = jitted_sum(gradients, jnp.ones(3), padding, 1.0)
    constant = jax.jit(lambda: clipped_sum(gradients, jnp.ones(3), padding, 1.0))()
    for value in (eager, argument, constant):
        assert np.linalg.norm(value) == pytest.approx(1.0, rel=1e-5)
        assert np.linalg.norm(np.asarray(value, float)) <= 1.0


def test_no_clip_when_the_threshold_is_infinite():
    gradients = jnp.array([[3.0, 4.0, 0.0], [0.0, 0.0, 0.0]])
    np.testing.assert_array_equal(clip_factors(gradients, jnp.ones(3), jnp.inf), [1.0, 1.0])


def test_release_is_sum_plus_noise():
    np.testing.assert_array_equal(add_noise(jnp.array([1.0]), jnp.array([0.5])), [1.5])


def test_no_bits_of_the_sum_are_finer_than_the_noise():
    with jax.enable_x64(True):
        exact = jnp.array([1.0 + 2.0**-40], jnp.float64)
        release = add_noise(exact, jnp.array([0.5], jnp.float32))
        assert release.dtype == jnp.float32
        assert float(release[0]) == 1.5
