"""Checks of user input. Every message says what was expected, what was given and what to do."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from numbers import Integral, Real

_MOST_SHOWN = 300
LARGEST_INTEGER = 2**53
"""The accountant computes in floats, which hold integers up to here."""
SMALLEST_EPSILON, LARGEST_EPSILON = 1e-6, 1e6
"""Beyond them its grids end: no noise would do, or none would be noticed."""


def positive(name: str, value: object, *, hint: str = "") -> float:
    """A finite number greater than zero."""
    number = _number(name, value, "a positive number", hint)
    if not (number > 0 and math.isfinite(number)):
        raise ValueError(_message(name, "a positive finite number", value, hint))
    return number


def epsilon(name: str, value: object) -> float:
    """An epsilon that the accountant can calibrate to."""
    number = positive(name, value)
    if not SMALLEST_EPSILON <= number <= LARGEST_EPSILON:
        hint = "Useful ones lie between 0.01 and 10."
        raise ValueError(_message(name, "a number between 1e-6 and 1e6", value, hint))
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
    if not 1 <= int(value) <= LARGEST_INTEGER:
        raise ValueError(_message(name, "a positive integer, at most 2**53", value, hint))
    return int(value)


def seed(name: str, value: object) -> int | None:
    """None, or an integer that a generator can begin with."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(_message(name, "an integer, or None", value, "Leave it out for privacy."))
    if not 0 <= int(value) < 2**63:
        raise ValueError(_message(name, "an integer from 0 to 2**63 - 1", value, ""))
    return int(value)


def text(name: str, value: object) -> str:
    """A text that can be written to a file."""
    if not isinstance(value, str):
        raise TypeError(_message(name, "a text", value, ""))
    if not value.strip():
        raise ValueError(_message(name, "a text that is not blank", value, ""))
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a character
        raise ValueError(_message(name, "a text that can be written", value, "")) from None
    return value


def an_instance(name: str, value: object, kinds: type | tuple[type, ...], expected: str) -> None:
    """Refuse what is not of a kind, which `expected` puts into words."""
    if not isinstance(value, kinds):
        raise TypeError(f"{name}: expected {expected}, got {type(value).__name__}.")


def many(name: str, value: object, expected: str) -> None:
    """Refuse what has no elements, such as an array without an axis."""
    has_no_axis = getattr(value, "shape", None) == ()
    if has_no_axis or not isinstance(value, Iterable):
        raise TypeError(f"{name}: expected {expected}, got {shown(value)}.")


def one_of(name: str, value: object, options: Iterable[str]) -> str:
    """One of a few strings; a near miss is pointed out."""
    choices = list(options)
    if isinstance(value, str) and value in choices:
        return value
    close = difflib.get_close_matches(shown(value).strip("'"), choices, n=1)
    hint = f"Did you mean {close[0]!r}?" if close else "Use one of these."
    raise ValueError(_message(name, "one of " + ", ".join(map(repr, choices)), value, hint))


def _number(name: str, value: object, expected: str, hint: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(_message(name, expected, value, hint))
    try:
        number = float(value)
    except OverflowError:  # an integer that no float can hold
        raise ValueError(_message(name, expected, value, hint)) from None
    if math.isnan(number):
        raise ValueError(_message(name, expected, value, hint))
    return number


def _message(name: str, expected: str, given: object, hint: str) -> str:
    return f"{name}: expected {expected}, got {shown(given)}." + (f" {hint}" if hint else "")


def shown(given: object) -> str:
    """A value as errors show it: whatever it is, in a few lines at most.

    >>> shown(0.5), shown("x" * 1000)[-3:]
    ('0.5', '...')
    """
    try:
        text = repr(given)
    except Exception:  # an integer with too many digits, a class of somebody else's
        return f"a value of type {type(given).__name__}"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
