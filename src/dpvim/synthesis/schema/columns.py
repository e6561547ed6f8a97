"""Kinds of columns: categorical, ordinal, binary, count, integer and real.

Each entry declares the values a column can have, and what becomes of a value that does not fit.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from dpvim.synthesis.schema.errors import SchemaError, did_you_mean, mismatch

MISSING = "missing"
"""As a value of ``outside``: what does not fit is written off as missing."""
CLAMP = "clamp"
"""As a value of ``outside``: a number that is too small or too large becomes the nearest bound."""
MAX_LEVELS = 1000
LARGEST_INTEGER = 2**31 - 1  # encoded tables hold integers of 32 bits
LARGEST_REAL = 1e300  # differences of bounds stay finite
LARGEST_LEVEL = 2**53  # beyond, a number that was read may be one of several integers
_MAX_DECIMALS = 15

Level: TypeAlias = str | int | bool


@dataclass(frozen=True, kw_only=True)
class Column:
    """Entry of one column: what all kinds have.

    Attributes:
        name: As in the table's header.
        nullable: Whether values may be missing, in the table and in its twin.
        reviewed: Whether the holder has said that this entry is public knowledge.
    """

    kind: ClassVar[str]
    name: str
    nullable: bool = False
    reviewed: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise mismatch(
                "name", "a text that is not blank", self.name, "Copy it from the header."
            )
        for key in ("nullable", "reviewed"):
            if not isinstance(getattr(self, key), bool):
                raise self._error(key, "true or false", getattr(self, key), "Write no quotes.")

    def _error(self, key: str, expected: str, given: object, hint: str) -> SchemaError:
        return mismatch(f"column {self.name!r}: {key}", expected, given, hint)

    def _set(self, key: str, value: object) -> None:
        """Put a value into its final form, once, while the frozen object is made."""
        object.__setattr__(self, key, value)


@dataclass(frozen=True, kw_only=True)
class Levelled(Column):
    """A column with a few declared levels, all of them texts, integers or booleans.

    Attributes:
        levels: All values that the column can have.
        outside: The level that any other value becomes, or "missing". If not given: missing where
            the column is nullable, else the first level.
    """

    levels: tuple[Level, ...]
    outside: Level | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.levels, list | tuple):
            raise self._error("levels", "a list", self.levels, 'Write levels = ["a", "b"].')
        self._set("levels", tuple(self.levels))
        self._check_levels()
        if self.outside is None:
            self._set("outside", MISSING if self.nullable else self.levels[0])
        self._check_outside()

    @property
    def level_type(self) -> type:
        return type(self.levels[0])

    @property
    def outside_code(self) -> int | None:
        """The index of the level that other values become; None if they become missing."""
        return self.levels.index(self.outside) if self.outside in self.levels else None

    def _check_levels(self) -> None:
        if not 2 <= len(self.levels) <= MAX_LEVELS:
            hint = "Leave out a constant column; put rare levels together under one name."
            raise self._error("levels", f"2 to {MAX_LEVELS} levels", len(self.levels), hint)
        types = {type(level) for level in self.levels}
        if len(types) > 1 or not types <= {str, int, bool}:
            given = ", ".join(sorted(kind.__name__ for kind in types))
            raise SchemaError(
                f"column {self.name!r}: levels: expected only texts, only integers or only "
                f"booleans, got {given}. Write all of them in quotes if in doubt."
            )
        if large := [v for v in self.levels if isinstance(v, int) and abs(v) > LARGEST_LEVEL]:
            hint = "Write them as texts, in quotes."
            raise self._error("levels", "integers of at most 2^53 in size", large, hint)
        if repeated := sorted({level for level in self.levels if self.levels.count(level) > 1}):
            raise self._error("levels", "every level once", repeated, "Remove the repetitions.")
        if padded := [v for v in self.levels if isinstance(v, str) and v != v.strip()]:
            hint = "Blanks around a value are ignored when the table is read: remove them."
            raise self._error("levels", "no blanks around a level", padded, hint)

    def _check_outside(self) -> None:
        if self.outside in self.levels and type(self.outside) is self.level_type:
            return
        if self.outside == MISSING and self.nullable:
            return
        if self.outside == MISSING:
            hint = "Name a level, or set nullable = true."
        else:
            texts = [str(level) for level in self.levels]
            hint = did_you_mean(self.outside, texts) or "Values may only become declared levels."
        raise self._error("outside", 'a declared level, or "missing"', self.outside, hint)


@dataclass(frozen=True, kw_only=True)
class Categorical(Levelled):
    """Levels without an order."""

    kind = "categorical"


@dataclass(frozen=True, kw_only=True)
class Ordinal(Levelled):
    """Levels in the order in which they are declared."""

    kind = "ordinal"


@dataclass(frozen=True, kw_only=True)
class Binary(Levelled):
    """Two levels, the negative one first."""

    kind = "binary"

    def _check_levels(self) -> None:
        if len(self.levels) != 2:
            hint = 'Use kind = "categorical" for more.'
            raise self._error("levels", "two levels", len(self.levels), hint)
        super()._check_levels()


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
    outside: str = CLAMP
    not_a_number: float | None = None

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
            raise self._error("upper", f"more than the lower bound {lower}", upper, hint)
        if self.outside not in (CLAMP, MISSING) or (self.outside == MISSING and not self.nullable):
            hint = 'Write "clamp", or set nullable = true.'
            raise self._error("outside", '"clamp", or "missing" if nullable', self.outside, hint)
        self._check_not_a_number()

    def _check_not_a_number(self) -> None:
        lower, upper = self.bounds
        if self.not_a_number is None:
            self._set("not_a_number", None if self.nullable else lower)
            return
        if self.nullable:
            hint = "In a nullable column what is not a number is missing: remove the line."
            raise self._error("not_a_number", "nothing", self.not_a_number, hint)
        self._set("not_a_number", self._number("not_a_number"))
        if not lower <= self.not_a_number <= upper:
            expected = f"a number from {lower} to {upper}"
            raise self._error("not_a_number", expected, self.not_a_number, "Choose one of these.")

    def _number(self, key: str) -> float:
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


AnyColumn: TypeAlias = Levelled | Numeric
KINDS: dict[str, type[AnyColumn]] = {
    cls.kind: cls for cls in (Categorical, Ordinal, Binary, Count, Integer, Real)
}


def field_names(cls: type[Column]) -> list[str]:
    """Keys that an entry of this kind may have, besides ``kind``."""
    return [field.name for field in dataclasses.fields(cls)]
