"""Texts of a table as numbers, integers or booleans.

Every value of a table is read as the text that it would be in a CSV file, so that what it means
does not depend on the type of the column that holds it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd

_NO_TEXT = "\N{REPLACEMENT CHARACTER}"
_BEYOND_FLOAT = 10**400
LONGEST_NUMBER = 1000
"""Characters of the longest text that is a number. Databases cannot read numbers of any length."""


def to_number(text: str) -> float:
    """The number that a text stands for, NaN if none.

    It is Python's float, 1_0 included: pandas reads that as 10 in a column of very large integers,
    where it cannot be told from 10 any more. Texts of more than `LONGEST_NUMBER` characters are
    no numbers.
    """
    if len(text) > LONGEST_NUMBER:
        return math.nan
    try:
        return float(text)
    except ValueError:
        return math.nan


def to_integer(text: str) -> int | None:
    """The integer that a text stands for, None if none.

    >>> to_integer("+1.0"), to_integer("1.5")
    (1, None)
    """
    number = to_number(text)
    return int(number) if number.is_integer() else None


def to_boolean(text: str) -> bool | None:
    """The boolean that a text stands for, None if none.

    >>> to_boolean("TRUE"), to_boolean("0.0"), to_boolean("yes")
    (True, False, None)
    """
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    number = to_number(text)
    return bool(number) if number in (0, 1) else None


LEVEL_OF_TEXT: dict[type, Callable[[str], Any]] = {str: str, int: to_integer, bool: to_boolean}
"""By the type of the declared levels, how a text is read as one of them."""


def are_markers(
    texts: Sequence[str | None], markers: Sequence[str], *, as_numbers: bool
) -> np.ndarray:
    """Mark the texts that stand for a missing value; None always does.

    Args:
        texts: Values of a table.
        markers: What the schema declares.
        as_numbers: Whether the marker -9 is also one that is written -9.0, as in columns of
            numbers; texts are only themselves.
    """
    written = map(to_number, markers if as_numbers else ())
    numbers = {number for number in written if not math.isnan(number)}
    return np.array(
        [text is None or text in markers or to_number(text) in numbers for text in texts], bool
    )


def text_of(value: Any) -> str | None:
    """A value as it would stand in a CSV file, without blanks around it; None if missing.

    >>> text_of(2.0), text_of(True), text_of(" a "), text_of(float("nan"))
    ('2', 'true', 'a', None)
    """
    if value is None or value is pd.NA or value is pd.NaT:
        return None
    try:
        if isinstance(value, str):
            text = value
        elif isinstance(value, bool | np.bool_):
            text = str(value).lower()
        elif isinstance(value, Decimal) and value.is_nan():
            return None
        elif isinstance(value, float | np.floating):
            number = float(value)
            if math.isnan(number):
                return None
            text = str(int(number)) if number.is_integer() else repr(number)
        elif isinstance(value, int) and abs(value) >= _BEYOND_FLOAT:
            text = "inf" if value > 0 else "-inf"  # Python writes no integers of any length
        else:
            text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
        if not text.isascii():  # lone halves of surrogate pairs are no text for Arrow
            text = text.encode("utf-8", "replace").decode()
        return text.strip()
    except Exception:  # an object without a text: no record is an error
        return _NO_TEXT


def is_text(value: Any) -> bool:
    """True for texts and missing values, False for other objects that can be written as text."""
    return isinstance(value, str | bytes) or text_of(value) is None
