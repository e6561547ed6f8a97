"""Checks of user input. Every message says what was expected, what was given and what to do."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from numbers import Integral, Real


def positive(name: str, value: object, *, hint: str = "") -> float:
    """A finite number greater than zero."""
    number = _number(name, value, "a positive number", hint)
    if not (number > 0 and math.isfinite(number)):
        raise ValueError(_message(name, "a positive finite number", value, hint))
    return number


def open_unit(name: str, value: object, *, hint: str = "") -> float:
    """A number strictly between 0 and 1."""
    number = _number(name, value, "a number between 0 and 1", hint)
    if not 0 < number < 1:
        raise ValueError(_message(name, "a number strictly between 0 and 1", value, hint))
    return number


def probability(name: str, value: object, *, hint: str = "") -> float:
    """A number in (0, 1]."""
    number = _number(name, value, "a number in (0, 1]", hint)
    if not 0 < number <= 1:
        raise ValueError(_message(name, "a number in (0, 1]", value, hint))
    return number


def positive_int(name: str, value: object, *, hint: str = "") -> int:
    """An integer of at least one."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(_message(name, "a positive integer", value, hint))
    if value < 1:
        raise ValueError(_message(name, "a positive integer", value, hint))
    return int(value)


def one_of(name: str, value: object, options: Iterable[str]) -> str:
    """One of a few strings; a near miss is pointed out."""
    choices = list(options)
    if isinstance(value, str) and value in choices:
        return value
    close = difflib.get_close_matches(str(value), choices, n=1)
    hint = f"Did you mean {close[0]!r}?" if close else "Use one of these."
    raise ValueError(_message(name, "one of " + ", ".join(map(repr, choices)), value, hint))


def _number(name: str, value: object, expected: str, hint: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(_message(name, expected, value, hint))
    number = float(value)
    if math.isnan(number):
        raise ValueError(_message(name, expected, value, hint))
    return number


def _message(name: str, expected: str, given: object, hint: str) -> str:
    return f"{name}: expected {expected}, got {given!r}." + (f" {hint}" if hint else "")
