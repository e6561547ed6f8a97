"""Options of `jax.jit`: single precision whatever JAX is set to, fast compilation of programs that
do not run long, and for those that do wide vectors, and one thread if they are too small for two.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax

P = ParamSpec("P")
T = TypeVar("T")

# XLA's older code generator for fused operations, which takes half as long and is often as good.
_FAST_COMPILATION: dict[str, Any] = {"xla_cpu_use_fusion_emitters": False}
# Vectors as wide as the processor has them: XLA takes half of 512 bits unless it is told.
_WIDE: dict[str, Any] = {"xla_cpu_prefer_vector_width": 512}
# The pass of XLA's that cuts an operation into parts for several threads: from 256 KB on, or from
# some 10 us of work. Handing a part over takes about as long.
_ONE_THREAD: dict[str, Any] = {"xla_disable_hlo_passes": "cpu-parallel-task-assigner"}


def single_precision(function: Callable[P, T]) -> Callable[P, T]:
    """Run a function in single precision, whatever ``jax_enable_x64`` says.

    The clip, its margins and the lattice are made for single precision, with double precision in a
    few named places (`privacy.clipping`, `privacy.lattice`). A user who works in double precision
    elsewhere gets the same releases as everybody.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with jax.enable_x64(False):
            return function(*args, **kwargs)

    return call


def jit_quickly(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`jax.jit` for a program that is optimised, but does not run often enough to be worth the
    best that the compiler can do."""
    return _jit(function, _FAST_COMPILATION, **options)


def jit_once(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`jax.jit` for a program that runs a few times: it is compiled as it stands.

    Optimising such a program takes two to three times as long as compiling it, and saves nothing.
    """
    return _jit(function, _FAST_COMPILATION | {"xla_backend_optimization_level": 0}, **options)


def jit_widely(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`jax.jit` for a program that runs long, with the widest vectors that there are."""
    return _jit(function, _WIDE, **options)


def jit_on_one_thread(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`jit_widely` for a program of many small operations, none of which is shared among threads.

    The numbers are the same to the last bit.
    """
    return _jit(function, _WIDE | _ONE_THREAD, **options)


def _jit(
    function: Callable[..., Any], compiler_options: dict[str, Any], **options: Any
) -> Callable[..., Any]:
    compiled = jax.jit(function, compiler_options=compiler_options, **options)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        # Within another program it is part of that one, which has options of its own.
        leaves = jax.tree.leaves((args, kwargs))
        part_of_another = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
        return (function if part_of_another else compiled)(*args, **kwargs)

    return call
