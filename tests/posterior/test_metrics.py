from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpvim.posterior.metrics import l2_error, mpae

INITIAL, OPTIMUM = np.array([0.0, 4.0, -2.0]), np.array([2.0, 3.0, -6.0])


def test_mpae_is_the_mean_of_proportions():
    params = np.array([1.0, 3.25, -9.0])
    assert mpae(params, INITIAL, OPTIMUM) == pytest.approx((1 / 2 + 1 / 4 + 3 / 4) / 3)


def test_mpae_is_one_at_the_start_and_zero_at_the_optimum():
    assert mpae(INITIAL, INITIAL, OPTIMUM) == 1
    assert mpae(OPTIMUM, INITIAL, OPTIMUM) == 0


@given(scale=st.floats(1e-3, 1e3), shift=st.floats(-10, 10), seed=st.integers(0, 100))
def test_mpae_has_no_units(scale, shift, seed):
    params = np.random.default_rng(seed).normal(size=3)
    moved = [shift + scale * x for x in (params, INITIAL, OPTIMUM)]
    assert mpae(*moved) == pytest.approx(mpae(params, INITIAL, OPTIMUM), rel=1e-6)


def test_a_trace_has_one_number_for_each_snapshot():
    trace = np.random.default_rng(1).normal(size=(5, 3))
    np.testing.assert_array_equal(
        mpae(trace, INITIAL, OPTIMUM), [mpae(params, INITIAL, OPTIMUM) for params in trace]
    )
    np.testing.assert_array_equal(l2_error(trace, OPTIMUM), [l2_error(p, OPTIMUM) for p in trace])


def test_a_parameter_that_started_at_its_optimum_is_left_out():
    initial = np.array([2.0, 4.0, -2.0])
    params = np.array([100.0, 3.5, -4.0])
    assert mpae(params, initial, OPTIMUM) == 0.5


def test_if_all_started_at_the_optimum_they_are_there_or_infinitely_far():
    trace = np.stack([OPTIMUM, OPTIMUM + np.array([0, 0, 1e-9])])
    np.testing.assert_array_equal(mpae(trace, OPTIMUM, OPTIMUM), [0, np.inf])
    assert mpae(OPTIMUM, OPTIMUM, OPTIMUM) == 0


def test_what_is_not_a_number_shows():
    assert np.isnan(mpae(np.array([np.nan, 3.0, -6.0]), INITIAL, OPTIMUM))
    assert np.isnan(l2_error(np.array([np.nan, 3.0, -6.0]), OPTIMUM))


def test_l2_error_is_the_euclidean_distance():
    assert l2_error(OPTIMUM + np.array([3, 0, 4]), OPTIMUM) == 5
    assert l2_error(OPTIMUM, OPTIMUM) == 0


@pytest.mark.parametrize("wrong", [np.zeros(2), np.zeros(1), np.float64(0), np.zeros((5, 3))])
def test_shapes_are_not_broadcast(wrong):
    with pytest.raises(ValueError, match="optimum: expected one number for each"):
        mpae(np.zeros((5, 3)), INITIAL, wrong)
    with pytest.raises(ValueError, match="initial: expected one number for each"):
        mpae(np.zeros((5, 3)), wrong, OPTIMUM)
    with pytest.raises(ValueError, match="optimum: expected one number for each"):
        l2_error(np.zeros((5, 3)), wrong)
