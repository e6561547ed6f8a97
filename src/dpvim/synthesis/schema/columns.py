"""Kinds of columns: those of levels, and count, integer, real and date.

Each entry declares the values a column can have, and what becomes of a value that does not fit.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from datetime import date
from typing import ClassVar, TypeAlias

from dpvim.synthesis.schema.base import MISSING, Column
from dpvim.synthesis.schema.errors import did_you_mean
from dpvim.synthesis.schema.levels import Binary, Categorical, Levelled, Ordinal
from dpvim.synthesis.schema.moments import (
    DIRECTIVES,
    UNITS,
    iso_format,
    missing_units,
    read_moment,
    units_of,
    unknown_directives,
    write_moment,
)

CLAMP = "clamp"
"""As a value of ``outside``: a number that is too small or too large becomes the nearest bound."""
LARGEST_INTEGER = 2**31 - 1  # encoded tables hold integers of 32 bits
LARGEST_REAL = 1e300  # differences of bounds stay finite
_MAX_DECIMALS = 15


@dataclass(frozen=True, kw_only=True)
class Numeric(Column):
    """A column of numbers between declared bounds.

    Attributes:
        outside: What a number outside of the bounds becomes: "clamp" (the nearest bound) or
            "missing".
        not_a_number: What anything else becomes (text, or a missing value) where the column is not
            nullable; the lower bound if not given. In a nullable column it is missing.
    """

    integral: ClassVar[bool] = True
    _noun: ClassVar[str] = "number"
    outside: str = CLAMP
    not_a_number: float | str | None = None

    @property
    def substitute(self) -> float:
        """The number that what is no number becomes, missing or not."""
        return self.bounds[0] if self.not_a_number is None else float(self.not_a_number)

    @property
    def bounds(self) -> tuple[float, float]:
        """The smallest and the largest value."""
        raise NotImplementedError

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("lower", "upper"):
            if key in field_names(type(self)):
                self._set(key, self._number(key))
        lower, upper = self.bounds
        if not lower < upper:
            hint = "Declare a range that is known without looking at the table."
            expected = f"more than the lower bound {self._spelt(lower)}"
            raise self._error("upper", expected, self._spelt(upper), hint)
        if self.outside not in (CLAMP, MISSING) or (self.outside == MISSING and not self.nullable):
            hint = 'Write "clamp", or set nullable = true.'
            raise self._error("outside", '"clamp", or "missing" if nullable', self.outside, hint)
        self._check_not_a_number()

    def _check_not_a_number(self) -> None:
        lower, upper = self.bounds
        if self.not_a_number is None:
            self._set("not_a_number", None if self.nullable else self._spelt(lower))
            return
        if self.nullable:
            hint = "In a nullable column what is not a number is missing: remove the line."
            raise self._error("not_a_number", "nothing", self.not_a_number, hint)
        self._set("not_a_number", self._number("not_a_number"))
        if not lower <= self.substitute <= upper:
            expected = f"a {self._noun} from {self._spelt(lower)} to {self._spelt(upper)}"
            raise self._error("not_a_number", expected, self.not_a_number, "Choose one of these.")

    def _spelt(self, number: float) -> object:
        """A number as it is declared."""
        return number

    def _number(self, key: str) -> float | str:
        value = getattr(self, key)
        if self.integral:
            if isinstance(value, bool) or not isinstance(value, int):
                raise self._error(key, "an integer", value, "Write it without quotes and point.")
            if abs(value) > LARGEST_INTEGER:
                expected = f"an integer of at most {LARGEST_INTEGER} in size"
                raise self._error(key, expected, value, 'Use kind = "real" for larger ones.')
            return value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._error(key, "a number", value, "Write it without quotes.")
        if not abs(value) <= LARGEST_REAL:
            raise self._error(key, "a finite number", value, "Choose a bound.")
        return float(value)


@dataclass(frozen=True, kw_only=True)
class Integer(Numeric):
    """Whole numbers between two bounds."""

    kind = "integer"
    lower: int
    upper: int

    @property
    def bounds(self) -> tuple[float, float]:
        return self.lower, self.upper


@dataclass(frozen=True, kw_only=True)
class Count(Numeric):
    """Numbers of events: 0, 1, 2, ... up to a bound."""

    kind = "count"
    upper: int

    @property
    def bounds(self) -> tuple[float, float]:
        return 0, self.upper


@dataclass(frozen=True, kw_only=True)
class Real(Numeric):
    """Numbers between two bounds.

    Attributes:
        scale: "linear", or "log" for positive values of very different size.
        decimals: With how many digits after the point values are written; None for all.
    """

    kind = "real"
    integral = False
    lower: float
    upper: float
    scale: str = "linear"
    decimals: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale not in ("linear", "log"):
            hint = did_you_mean(self.scale, ["linear", "log"]) or "Leave it out for linear."
            raise self._error("scale", '"linear" or "log"', self.scale, hint)
        if self.scale == "log" and self.lower <= 0:
            hint = "Declare the smallest value that matters, or leave out the scale."
            raise self._error("lower", "more than 0 on a log scale", self.lower, hint)
        if self.scale == "log" and not math.log(self.lower) < math.log(self.upper):
            hint = "Widen the bounds, or leave out the scale."
            raise self._error("upper", f"well above the lower bound {self.lower}", self.upper, hint)
        if self.decimals is not None:
            self._check_decimals(self.decimals)

    @property
    def bounds(self) -> tuple[float, float]:
        return self.lower, self.upper

    def _check_decimals(self, decimals: object) -> None:
        if (
            isinstance(decimals, bool)
            or not isinstance(decimals, int)
            or not 0 <= decimals <= _MAX_DECIMALS
        ):
            expected = f"an integer from 0 to {_MAX_DECIMALS}"
            raise self._error("decimals", expected, decimals, "Leave it out to write all digits.")
        # A value that is rounded after it was clamped could otherwise leave the domain.
        for key in ("lower", "upper", "not_a_number"):
            value = getattr(self, key)
            if value is not None and round(value, decimals) != value:
                hint = "Round it, or raise decimals."
                raise self._error(key, f"at most {decimals} decimals", value, hint)


@dataclass(frozen=True, kw_only=True)
class Date(Numeric):
    """Dates and times between two bounds, without a time zone: whole units since the lower bound.

    Attributes:
        lower, upper: In ISO 8601: "2020-01-31", "2020-01-31T13:45".
        resolution: The unit: "year", "month", "day", "hour", "minute" or "second". What is finer
            is cut off.
        format: How texts in the table and in its twin are written, as for `datetime.strptime`;
            ISO 8601 if None.
    """

    kind = "date"
    _noun = "date"
    lower: str
    upper: str
    resolution: str = "day"
    format: str | None = None

    def __post_init__(self) -> None:
        if self.resolution not in list(UNITS):
            hint = did_you_mean(self.resolution, UNITS) or "Leave it out for days."
            expected = "one of " + ", ".join(map(repr, UNITS))
            raise self._error("resolution", expected, self.resolution, hint)
        self._check_format()
        super().__post_init__()
        if self.bounds[1] > LARGEST_INTEGER:
            hint = "Narrow the bounds, or declare a coarser resolution."
            given = f"{self.bounds[1]} of them"
            raise self._error("upper", f"at most {LARGEST_INTEGER} {self.resolution}s", given, hint)
        if self.format is None:
            return
        for key in ("lower", "upper"):  # two digits of a year are those of 1969 to 2068
            declared = self._since_1970(key)
            moment = read_moment(self.text(declared - self.origin), self.resolution, self.format)
            if moment is None or units_of(moment, self.resolution) != declared:
                hint = "Write years in four digits: %Y."
                raise self._error("format", f"one that {key} can be read from", self.format, hint)

    @property
    def bounds(self) -> tuple[float, float]:
        """Zero, and the number of units from the lower bound to the upper one."""
        return 0, self._since_1970("upper") - self.origin

    @property
    def origin(self) -> int:
        """Whole units from 1970 to the lower bound."""
        return self._since_1970("lower")

    @property
    def written_format(self) -> str:
        """The format of texts that are written: the declared one, or that of ISO 8601."""
        return self.format or iso_format(self.resolution)

    @property
    def substitute(self) -> float:
        return 0 if self.not_a_number is None else self._since_1970("not_a_number") - self.origin

    def text(self, units: float) -> str:
        """A date as it is written, by its units from the lower bound."""
        return write_moment(self.origin + int(units), self.resolution, self.format)

    def _since_1970(self, key: str) -> int:
        moment = read_moment(getattr(self, key), self.resolution)
        assert moment is not None
        return units_of(moment, self.resolution)

    def _spelt(self, number: float) -> object:
        return write_moment(self.origin + int(number), self.resolution)

    def _number(self, key: str) -> str:
        """A date of the schema in ISO 8601, as TOML has it or as a text."""
        value = getattr(self, key)
        text = value.isoformat() if isinstance(value, date) else value
        moment = read_moment(text, self.resolution) if isinstance(text, str) else None
        if moment is None:
            expected = f"a {self.resolution} in ISO 8601 without a time zone"
            hint = f'Write it like "{write_moment(0, self.resolution)}".'
            raise self._error(key, expected, value, hint)
        return write_moment(units_of(moment, self.resolution), self.resolution)

    def _check_format(self) -> None:
        if self.format is None:
            return
        # Spreadsheets take what begins with other signs for formulas.
        if (
            not isinstance(self.format, str)
            or self.format != self.format.strip()
            or not (self.format[:1] == "%" or self.format[:1].isalnum())
        ):
            hint = 'Write format = "%d.%m.%Y", or leave it out.'
            expected = "a text that begins with %, a letter or a digit, without blanks around it"
            raise self._error("format", expected, self.format, hint)
        if unknown := unknown_directives(self.format):
            hint = "Names of months and time zones cannot be read: convert such columns first."
            raise self._error("format", f"only {DIRECTIVES}", unknown, hint)
        if absent := missing_units(self.format, self.resolution):
            hint = f"Add {', '.join(absent)}, or declare a coarser resolution."
            raise self._error("format", f"one that tells {self.resolution}s", self.format, hint)


AnyColumn: TypeAlias = Levelled | Numeric
KINDS: dict[str, type[AnyColumn]] = {
    cls.kind: cls for cls in (Categorical, Ordinal, Binary, Count, Integer, Real, Date)
}


def field_names(cls: type[Column]) -> list[str]:
    """Keys that an entry of this kind may have, besides ``kind``."""
    return [field.name for field in dataclasses.fields(cls)]
