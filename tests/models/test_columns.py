"""Columns: values on the standardised scale and back, and bins."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from dpvim.models.columns import NormalColumn


def test_large_integers_stay_in_the_domain():
    column = NormalColumn("id", lower=-(2**31 - 1), upper=2**31 - 1, integral=True)
    values = np.array([-(2**31 - 1), 0, 2**31 - 1], np.int32)
    standard = column.standardised(jnp.asarray(values))
    np.testing.assert_allclose(standard, [-np.sqrt(3), 0, np.sqrt(3)], atol=1e-6)
    back = np.asarray(column.unstandardised(jnp.array([-9.0, 0.0, 9.0])), int)
    assert back[0] >= -(2**31 - 1)
    assert back[1] == 0
    assert back[2] > 2**31 - 200


@pytest.mark.parametrize("lower", [1_700_000_000, -(2**31 - 1)])
def test_large_integers_that_lie_close_together_are_told_apart(lower):
    column = NormalColumn("second", lower=lower, upper=lower + 100, integral=True)
    values = jnp.arange(lower, lower + 101, dtype=jnp.int32)
    standard = column.standardised(values)
    np.testing.assert_allclose(standard, np.linspace(-1, 1, 101) * np.sqrt(3), atol=1e-6)
    np.testing.assert_array_equal(column.unstandardised(standard), values)
    ends = column.unstandardised(jnp.array([-9.0, 9.0]))
    np.testing.assert_array_equal(ends, [lower, lower + 100])


def test_bins_of_a_histogram():
    """Whole numbers have bins of their own where there are as many; draws stay in their bins."""
    whole = NormalColumn("k", lower=-3, upper=1, integral=True, num_bins=5)
    assert whole.bin_of(jnp.arange(-3, 2)).tolist() == [0, 1, 2, 3, 4]
    real = NormalColumn("x", lower=10.0, upper=20.0, num_bins=4)
    assert real.bin_of(jnp.array([10.0, 12.4, 12.6, 20.0])).tolist() == [0, 0, 1, 3]
    for column in (whole, real):
        code = jnp.repeat(jnp.arange(column.num_bins), 50)
        place = jnp.tile(jnp.linspace(0.02, 0.98, 50), column.num_bins)
        values = column.unstandardised(column.within_bin(code, place))
        assert values.min() >= column.lower
        assert values.max() <= column.upper
        # Numbers that are rounded may land on the other side of an edge.
        assert jnp.abs(column.bin_of(values) - code).max() <= (1 if column.integral else 0)
