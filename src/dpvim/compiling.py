"""Programs that run once, when a fit is set up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def jit_once(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`jax.jit` for a program that runs a few times on small arrays: it is compiled as it stands.

    Optimising such a program takes two to three times as long as compiling it, and saves nothing.
    """
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0}, **options)
