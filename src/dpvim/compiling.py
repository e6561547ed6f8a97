"""Programs that run once, when a fit is set up."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax


def jit_once(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`jax.jit` for a program that runs a few times on small arrays: it is compiled as it stands.

    Optimising such a program takes two to three times as long as compiling it, and saves nothing.
    """
    compiled = jax.jit(function, compiler_options={"xla_backend_optimization_level": 0}, **options)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        # Within another program it is part of that one, which has options of its own.
        leaves = jax.tree.leaves((args, kwargs))
        part_of_another = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
        return (function if part_of_another else compiled)(*args, **kwargs)

    return call
