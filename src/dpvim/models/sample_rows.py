"""Rows from a model of a table, with its parameters fixed at one draw of the posterior."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpyro
from jaxtyping import Array
from numpyro import handlers

from dpvim._compile import single_precision
from dpvim.bridge.handler_stack import numpyro_lock
from dpvim.models.columns import Rows
from dpvim.types import ModelError


@single_precision
@functools.partial(jax.jit, static_argnums=(0, 3))
def draw_rows(
    model: Callable[..., Any], key: Array, params: Mapping[str, Array], num_rows: int
) -> Rows:
    """Draw rows: call ``model(num_rows=num_rows)`` with its sites fixed at `params`.

    Args:
        model: Returns the columns' values by name, or a pair of those and of masks, which say
            where values of nullable columns are missing.
        key: For all that is drawn.
        params: A value for every site that was fitted.
        num_rows: The number of rows. It is a shape: one compilation serves all draws.
    """
    fixed = handlers.seed(handlers.substitute(model, data=dict(params)), key)
    with (
        numpyro_lock,
        numpyro.validation_enabled(False),
        handlers.block(),
        handlers.trace() as sites,
    ):
        drawn = fixed(num_rows=num_rows)
    if unused := sorted(set(params) - set(sites)):
        raise ModelError(
            f"model: expected the sites that were fitted, got one without {', '.join(unused)}. "
            "Give the model that the twin was made with."
        )
    if isinstance(drawn, Mapping):
        drawn = (drawn, {})
    if not isinstance(drawn, tuple) or len(drawn) != 2:
        raise ModelError(
            "model: expected it to return columns by name when it is called with num_rows, got "
            f"{type(drawn).__name__}. Return a dict of arrays, or one of values and one of masks."
        )
    return Rows(dict(drawn[0]), dict(drawn[1]))
