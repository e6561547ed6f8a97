"""A first draft of a schema, from a table's header and values, for its holder to review.

A draft is read off the data and is therefore private: every entry is marked as not reviewed, and
nothing is fitted with it until the holder has replaced the guesses by public knowledge.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from dpvim.synthesis.encoding import has_time_zone, value_counts
from dpvim.synthesis.schema import (
    DEFAULT_MARKERS,
    LARGEST_INTEGER,
    LARGEST_LEVEL,
    LARGEST_REAL,
    AnyColumn,
    Binary,
    Categorical,
    Count,
    Date,
    Integer,
    Level,
    Levelled,
    Real,
    Schema,
    SchemaError,
)
from dpvim.synthesis.schema.moments import read_moment
from dpvim.synthesis.tables import TableError, check_names
from dpvim.synthesis.values import are_markers, to_number

_FEW_NUMBERS = 10  # as many distinct integers are taken for codes
_FEW_TEXTS = 50
_ENOUGH_TO_TELL = 20  # with so many rows, integers that all differ are taken for identifiers
_MOSTLY = 0.9
_WIDE_RANGE = 1000  # positive reals whose largest is so many times the smallest: log scale
_MAX_DECIMALS = 6
_SMALLEST_STEP = 1e-300  # divisions by it stay finite
# Ways to write dates that are tried, the first one that fits all; None is ISO 8601.
_FORMATS = (
    None,
    "%d.%m.%Y",
    "%d/%m/%Y",
    "%m/%d/%Y",
    "%d-%m-%Y",
    "%d.%m.%Y %H:%M",
    "%d/%m/%Y %H:%M",
)
_LEADING_ZERO = re.compile(r"[+-]?0\d")  # codes such as 01, whose zero is part of the label

_HEADER = """\
A draft of a schema, read off the data. It is as private as they are.

Levels, bounds and whether values are missing are guesses from the table. A schema is published
without noise, so each of them must be replaced by what is known without the table: the
questionnaire, the code book, the law. Then set reviewed = true for that column.
Columns that are not described here are left out of the twin."""
_LEVELS = "Levels were read off the data: declare all that can occur, also those that did not."
_BOUNDS = "Bounds were read off the data: declare a range that is known without them."
_DATES = f"{_BOUNDS}\nThe format was guessed: is the day where it says %d, and the month at %m?"
_CONSTANT = "the same value in every row, or none."
_MIXED = "Some values are not numbers: see not_a_number, or set nullable = true."


class Draft(NamedTuple):
    """A schema to be reviewed.

    Attributes:
        schema: A guess for every column that could be described, none of them reviewed.
        comments: What the holder should know about these guesses, by column.
        left_out: Why the other columns have no entry, by column.
    """

    schema: Schema
    comments: dict[str, str]
    left_out: dict[str, str]

    def to_toml(self) -> str:
        """The draft as TOML, with what is to be done about it in comments."""
        text = self.schema.to_toml(header=_HEADER, comments=self.comments)
        if self.left_out:
            text += "\n# Left out:\n"
            text += "".join(f"#   {name!r}: {why}\n" for name, why in self.left_out.items())
        return text


def draft(frame: pd.DataFrame, *, missing: Sequence[str] = DEFAULT_MARKERS) -> Draft:
    """Guess a schema from a table as `tables.read_table` reads it.

    Args:
        frame: The table. Its values are looked at: a draft is private.
        missing: Texts that stand for a missing value.
    """
    check_names("table", list(frame.columns))
    return draft_from({name: _look_at(name, frame[name]) for name in frame.columns}, missing)


class ColumnValues(NamedTuple):
    """All that a draft looks at in a column: counts of its values, by their texts.

    Attributes:
        counts: None is for nulls.
        are_booleans: True for a column of booleans.
    """

    counts: dict[str | None, int]
    are_booleans: bool = False


def draft_from(
    values: Mapping[str, ColumnValues | str], missing: Sequence[str] = DEFAULT_MARKERS
) -> Draft:
    """Guess a schema from the values of a table's columns.

    Args:
        values: By column; or the reason why there are none.
        missing: Texts that stand for a missing value.
    """
    columns: list[AnyColumn] = []
    comments, left_out = {}, {}
    for name, found in values.items():
        try:
            if isinstance(found, str):
                raise _CannotGuessError(found)
            seen = _distinct_values(found, missing)
            column, comments[name] = _guess(name, seen, are_booleans=found.are_booleans)
            columns.append(column)
        except _CannotGuessError as reason:
            left_out[name] = str(reason)
    if not columns:
        reasons = " ".join(f"{name!r}: {why}" for name, why in left_out.items())
        raise SchemaError(
            f"draft: expected a column that can be described, got none. {reasons} Write the "
            "schema by hand."
        )
    return Draft(Schema(tuple(columns), tuple(missing)), comments, left_out)


class _CannotGuessError(Exception):
    """The message says why a column is left out."""


class _DistinctValues(NamedTuple):
    """The distinct values of a column that are not missing, as texts and as numbers (or NaN)."""

    texts: list[str]
    numbers: np.ndarray
    counts: np.ndarray
    nullable: bool

    @property
    def num_rows(self) -> int:
        return int(self.counts.sum())

    def only(self, wanted: np.ndarray) -> _DistinctValues:
        texts = [text for text, keep in zip(self.texts, wanted, strict=True) if keep]
        return _DistinctValues(texts, self.numbers[wanted], self.counts[wanted], self.nullable)


def _look_at(name: str, series: pd.Series) -> ColumnValues | str:
    try:
        counts = value_counts(name, series)
    except TableError:
        return cannot_look_at(series.dtype, has_time_zone=has_time_zone(series))
    are_booleans = pd.api.types.infer_dtype(series, skipna=True) == "boolean"
    return ColumnValues(counts, are_booleans)


def cannot_look_at(kind: object, *, has_time_zone: bool) -> str:
    """The reason why a column of some type is left out of a draft."""
    return f"values of type {kind}." + " Dates must be without a time zone." * has_time_zone


def _distinct_values(found: ColumnValues, markers: Sequence[str]) -> _DistinctValues:
    counts = found.counts
    is_gap = are_markers([*counts], markers, as_numbers=True)
    present = {
        text: counts[text]
        for text, gap in zip(counts, is_gap, strict=True)
        if text is not None and not gap
    }
    texts = sorted(present)  # not by how often they occur, which nobody needs to know
    numbers = np.array([to_number(text) for text in texts])
    nullable = sum(counts.values()) > sum(present.values())
    return _DistinctValues(texts, numbers, np.array([present[text] for text in texts]), nullable)


def _guess(name: str, seen: _DistinctValues, *, are_booleans: bool) -> tuple[AnyColumn, str]:
    """A column and what to say about it."""
    if are_booleans:
        return _levelled(name, [False, True], seen), _LEVELS
    if (dates := _date(name, seen)) is not None:
        return dates, _DATES if dates.format else _BOUNDS
    readable = np.abs(seen.numbers) <= LARGEST_REAL
    if readable.all() and not any(_LEADING_ZERO.match(text) for text in seen.texts):
        column = _guess_from_numbers(name, seen)
        return column, _LEVELS if isinstance(column, Levelled) else _BOUNDS
    numbers = seen.only(readable)
    if len(numbers.texts) > _FEW_NUMBERS and numbers.num_rows >= _MOSTLY * seen.num_rows:
        return _guess_from_numbers(name, numbers), f"{_BOUNDS}\n{_MIXED}"
    if len(seen.texts) > max(2, min(_FEW_TEXTS, seen.num_rows / 2)):
        raise _CannotGuessError(
            "many different texts. An identifier or free text must stay out; numbers need a "
            "decimal point and no other signs; many codes can be put into groups (prefix, groups)."
        )
    return _levelled(name, list(seen.texts), seen), _LEVELS


def _date(name: str, seen: _DistinctValues) -> Date | None:
    """Dates from the first day of a year to the last one of another: no exact extremes."""
    for format in _FORMATS:
        moments = [read_moment(text, "day", format) for text in seen.texts]
        days = [moment for moment in moments if moment is not None]
        if not days or len(days) < len(moments):
            continue
        if len(days) < 2:
            raise _CannotGuessError(_CONSTANT)
        has_time = any((day.hour, day.minute, day.second) != (0, 0, 0) for day in days)
        resolution = "minute" if has_time else "day"
        if any(day.second for day in days):
            resolution = "second"
        lower = f"{min(days).year:04}-01-01"
        upper = f"{max(days).year:04}-12-31" + "T23:59:59" * has_time
        try:
            return Date(
                name=name,
                lower=lower,
                upper=upper,
                resolution=resolution,
                format=format,
                nullable=seen.nullable,
            )
        except SchemaError:  # more seconds than there are integers, or a format too coarse
            continue
    return None


def _guess_from_numbers(name: str, seen: _DistinctValues) -> AnyColumn:
    if len(set(seen.numbers)) < 2:  # the same number, written in several ways
        raise _CannotGuessError(_CONSTANT)
    if not (seen.numbers == np.rint(seen.numbers)).all():
        return _real(name, seen)
    if len(seen.texts) <= _FEW_NUMBERS and np.abs(seen.numbers).max() <= LARGEST_LEVEL:
        return _levelled(name, sorted({int(number) for number in seen.numbers}), seen)
    if len(seen.texts) == seen.num_rows >= _ENOUGH_TO_TELL:
        raise _CannotGuessError(
            "a different number in every row. An identifier must stay out; describe it if it is a "
            "measurement."
        )
    lower, upper = _rounded_outward(seen.numbers)
    if max(abs(lower), abs(upper)) > LARGEST_INTEGER:
        return Real(name=name, lower=lower, upper=upper, decimals=0, nullable=seen.nullable)
    low_share = seen.counts[seen.numbers <= upper / 4].sum() / seen.num_rows
    if lower == 0 and low_share >= 0.5:  # counts pile up near zero, other numbers rarely do
        return Count(name=name, upper=int(upper), nullable=seen.nullable)
    return Integer(name=name, lower=int(lower), upper=int(upper), nullable=seen.nullable)


def _real(name: str, seen: _DistinctValues) -> Real:
    smallest, largest = seen.numbers.min(), seen.numbers.max()
    if smallest > 0 and largest >= _WIDE_RANGE * smallest:
        lower = max(10.0 ** math.floor(math.log10(smallest)), _SMALLEST_STEP)
        upper = 10.0 ** math.ceil(math.log10(largest))
        return Real(name=name, lower=lower, upper=upper, scale="log", nullable=seen.nullable)
    lower, upper = _rounded_outward(seen.numbers)
    needed = max(_decimals(text) for text in (*seen.texts, repr(lower), repr(upper)))
    decimals = needed if needed <= _MAX_DECIMALS else None
    return Real(name=name, lower=lower, upper=upper, decimals=decimals, nullable=seen.nullable)


def _levelled(name: str, levels: Sequence[Level], seen: _DistinctValues) -> Levelled:
    if len(seen.texts) < 2:
        raise _CannotGuessError(_CONSTANT)
    kind = Binary if len(levels) == 2 else Categorical
    return kind(name=name, levels=tuple(levels), nullable=seen.nullable)


def _rounded_outward(numbers: np.ndarray) -> tuple[float, float]:
    """Bounds with one digit of the range's size: a draft need not carry exact extremes."""
    smallest, largest = float(numbers.min()), float(numbers.max())
    step = max(10.0 ** math.floor(math.log10(largest - smallest)), _SMALLEST_STEP)
    digits = -round(math.log10(step))
    lower = round(math.floor(smallest / step) * step, digits)
    upper = round(math.ceil(largest / step) * step, digits)
    return min(lower, smallest), max(upper, largest)


def _decimals(text: str) -> int:
    """Digits after the point; numbers with an exponent count as having very many."""
    if "e" in text.lower():
        return _MAX_DECIMALS + 1
    return len(text.partition(".")[2])
