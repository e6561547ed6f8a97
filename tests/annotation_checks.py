"""Annotations of functions, array shapes among them, as they are checked while tests run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from beartype import BeartypeConf, beartype
from beartype.door import is_bearable
from beartype.roar import BeartypeDecorHintException

# An int is a float, as mypy has it.
_CONF = BeartypeConf(is_pep484_tower=True)


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check arguments and result on every call, as far as the annotations can be checked.

    Constructors are left alone: they have errors of their own for what users give them.
    """
    if function.__name__ == "__init__":
        return function
    hints = function.__annotations__.items()
    function.__annotations__ = {name: hint for name, hint in hints if _is_checkable(hint)}
    return beartype(function, conf=_CONF)


def _is_checkable(hint: Any) -> bool:
    """False for `Self`, for protocols, and for names that only mypy imports or that come later."""
    if isinstance(hint, str):
        return False
    try:
        is_bearable(None, hint, conf=_CONF)
    except BeartypeDecorHintException:
        return False
    return True
