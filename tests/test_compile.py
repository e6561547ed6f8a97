"""How programs are compiled."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import pytest

from dpvim import _compile

_PARTS = "outer_dimension_partitions"


@pytest.mark.skipif(os.cpu_count() == 1, reason="XLA shares nothing among one core")
def test_the_option_for_one_thread_means_that_to_xla():
    """XLA ignores the name of a pass that it does not know."""

    def program(options):
        function = jax.jit(lambda x: jnp.sin(x) * x, compiler_options=options)
        return function.lower(jnp.ones((1000, 1000))).compile().as_text()

    assert _PARTS in program({})
    assert _PARTS not in program(_compile._ONE_THREAD)
