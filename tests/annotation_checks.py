"""Shapes and types of arrays in annotations, as they are checked while tests run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

from beartype import BeartypeConf, beartype
from jaxtyping import AbstractArray

# An int is a float, as mypy has it.
_CONF = BeartypeConf(is_pep484_tower=True)


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check arrays among the arguments and the result on every call.

    Other types are mypy's business. Constructors have errors of their own for what users give.
    """
    annotations = function.__annotations__.items()
    shaped = {name: hint for name, hint in annotations if _has_shape(hint)}
    if not shaped or function.__name__ == "__init__":
        return function
    function.__annotations__ = shaped
    return beartype(function, conf=_CONF)


def _has_shape(hint: Any) -> bool:
    is_shaped = isinstance(hint, type) and issubclass(hint, AbstractArray)
    return is_shaped or any(map(_has_shape, get_args(hint)))
