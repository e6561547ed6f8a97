"""What is publicly known about a sensitive table: its columns, their levels and their bounds.

A schema is declared by the holder of the table, in TOML (``docs/schema.md``). It also declares
what becomes of a value that does not fit, so that no record, whatever it holds, is an error.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from dpvim.synthesis.values import LEVEL_OF_TEXT

VERSION = 1
MISSING = "missing"
"""As a value of ``outside``: what does not fit is written off as missing."""
CLAMP = "clamp"
"""As a value of ``outside``: a number that is too small or too large becomes the nearest bound."""
DEFAULT_MARKERS = ("", "NA", "NaN", "null")
MAX_LEVELS = 1000
LARGEST_INTEGER = 2**31 - 1  # encoded tables hold integers of 32 bits
LARGEST_REAL = 1e300  # differences of bounds stay finite
LARGEST_LEVEL = 2**53  # beyond, a number that was read may be one of several integers
_MAX_DECIMALS = 15

Level: TypeAlias = str | int | bool


class SchemaError(ValueError):
    """The schema does not say what it should."""


class NotReviewedError(SchemaError):
    """Levels and bounds that nobody has yet said to be public knowledge."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """What every kind of column has.

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
            raise _error("name", "a text that is not blank", self.name, "Copy it from the header.")
        for key in ("nullable", "reviewed"):
            if not isinstance(getattr(self, key), bool):
                raise self._error(key, "true or false", getattr(self, key), "Write no quotes.")

    def _error(self, key: str, expected: str, given: object, hint: str) -> SchemaError:
        return _error(f"column {self.name!r}: {key}", expected, given, hint)

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
            hint = _did_you_mean(self.outside, texts) or "Values may only become declared levels."
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
            if key in _keys(type(self)):
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
    """How often something happened: 0, 1, 2, ... up to a bound."""

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
            hint = _did_you_mean(self.scale, ["linear", "log"]) or "Leave it out for linear."
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


@dataclass(frozen=True)
class Schema:
    """The columns of a table, in the order in which its twin has them.

    Attributes:
        columns: One entry each; columns of the table that have none are left out of the twin.
        missing: Texts that stand for a missing value. The first of them is what is written.
        source: Where the schema comes from; errors start with it.
    """

    columns: tuple[AnyColumn, ...]
    missing: tuple[str, ...] = DEFAULT_MARKERS
    source: str = dataclasses.field(default="schema", compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", tuple(self.columns))
        if not self.columns:
            raise self._error("columns", "at least one column", "none", "Add [[columns]] entries.")
        if repeated := sorted({n for n in self.names if self.names.count(n) > 1}):
            raise self._error("columns", "every name once", repeated, "Remove the repetitions.")
        self._check_missing()

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Schema:
        """Read a schema, or say what is wrong with the file."""
        source = Path(path)
        try:
            text = source.read_text(encoding="utf-8-sig")
        except FileNotFoundError:
            raise FileNotFoundError(f"{source}: there is no such file.") from None
        except UnicodeDecodeError as error:
            raise SchemaError(f"{source}: expected UTF-8, got other bytes. Save it so.") from error
        try:
            content = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise SchemaError(
                f"{source}: expected TOML, got something else ({error}). Texts need quotes, lists "
                "need brackets, and every column starts with [[columns]]."
            ) from error
        return cls.from_dict(content, source=str(source))

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], *, source: str = "schema") -> Schema:
        """A schema from what a TOML file holds; ``source`` is named in errors."""
        _check_keys(source, content, ["dpvim_schema", "missing", "columns"])
        version = content.get("dpvim_schema")
        if type(version) is not int or version != VERSION:
            hint = f"Start the file with dpvim_schema = {VERSION}; newer ones need a newer dpvim."
            raise _error(f"{source}: dpvim_schema", str(VERSION), version, hint)
        entries = content.get("columns")
        if not isinstance(entries, list) or not all(isinstance(e, Mapping) for e in entries):
            hint = "Start every column with a line [[columns]]."
            raise _error(f"{source}: columns", "a list of tables", entries, hint)
        columns = tuple(_column(source, number, e) for number, e in enumerate(entries, start=1))
        return cls(columns, content.get("missing", DEFAULT_MARKERS), source)

    @property
    def names(self) -> list[str]:
        return [column.name for column in self.columns]

    def column(self, name: str) -> AnyColumn:
        """The entry of one column."""
        for column in self.columns:
            if column.name == name:
                return column
        hint = _did_you_mean(name, self.names) or "It has: " + ", ".join(map(repr, self.names))
        raise self._error("columns", "the name of a declared column", name, hint)

    @property
    def unreviewed(self) -> list[str]:
        """Names of the columns that nobody has yet said to be public knowledge."""
        return [column.name for column in self.columns if not column.reviewed]

    def check_reviewed(self) -> None:
        """Refuse a schema with entries that may have been read off the data."""
        if self.unreviewed:
            raise NotReviewedError(
                f"{self.source}: expected reviewed = true for every column, got false for "
                f"{', '.join(map(repr, self.unreviewed))}. Levels and bounds are published as they "
                "are, without noise. For each of these columns, replace what was read off the data "
                "by what is known without it (a questionnaire, a code book, the law), then set "
                "reviewed = true."
            )

    def to_toml(self, *, header: str = "", comments: Mapping[str, str] | None = None) -> str:
        """The schema as TOML, with a comment on top and one above each column that has one."""
        lines = [*_commented(header), f"dpvim_schema = {VERSION}", _assign("missing", self.missing)]
        for column in self.columns:
            lines += ["", *_commented((comments or {}).get(column.name, "")), "[[columns]]"]
            lines += [_assign(key, value) for key, value in _entries(column).items()]
        return "\n".join(lines) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the schema as TOML."""
        Path(path).write_text(self.to_toml(), encoding="utf-8")

    def _error(self, key: str, expected: str, given: object, hint: str) -> SchemaError:
        return _error(f"{self.source}: {key}", expected, given, hint)

    def _check_missing(self) -> None:
        markers = self.missing
        if (
            not isinstance(markers, list | tuple)
            or not markers
            or not all(isinstance(marker, str) and marker == marker.strip() for marker in markers)
        ):
            expected = "a list of texts without blanks around them, at least one"
            raise self._error("missing", expected, markers, 'Write missing = ["", "NA"].')
        object.__setattr__(self, "missing", tuple(markers))
        for column in self.columns:
            if not isinstance(column, Levelled):
                continue
            # However a number is written: the marker 1.0 is the level 1.
            marked = {LEVEL_OF_TEXT[column.level_type](marker) for marker in markers}
            if clash := [level for level in column.levels if level in marked]:
                raise SchemaError(
                    f"{self.source}: column {column.name!r}: levels: expected none that stands for "
                    f"a missing value, got {clash}. Take it out of the levels, or declare the "
                    'markers, such as missing = [""].'
                )


def _column(source: str, number: int, entry: Mapping[str, Any]) -> AnyColumn:
    where = f"{source}: column {entry.get('name', number)!r}"
    kind = entry.get("kind")
    if kind not in list(KINDS):  # a list: what TOML holds need not be hashable
        hint = _did_you_mean(kind, KINDS) or "Add it to the entry."
        raise _error(f"{where}: kind", "one of " + ", ".join(map(repr, KINDS)), kind, hint)
    cls = KINDS[kind]
    _check_keys(where, entry, ["kind", *_keys(cls)])
    required = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]
    if absent := [key for key in required if key not in entry]:
        expected = f"{', '.join(required)} for kind {kind!r}"
        raise SchemaError(f"{where}: expected {expected}, got no {', '.join(absent)}. Add it.")
    try:
        return cls(**{key: value for key, value in entry.items() if key != "kind"})
    except SchemaError as error:
        raise SchemaError(f"{source}: {error}") from None


def _check_keys(where: str, content: Mapping[str, Any], known: Collection[str]) -> None:
    for key in content:
        if key not in known:
            hint = _did_you_mean(key, known) or "Known here: " + ", ".join(known) + "."
            raise SchemaError(f"{where}: unknown key {key!r}. {hint}")


def _keys(cls: type[Column]) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def _did_you_mean(given: object, known: Collection[str]) -> str:
    close = difflib.get_close_matches(str(given), list(known), n=1)
    return f"Did you mean {close[0]!r}?" if close else ""


def _error(key: str, expected: str, given: object, hint: str) -> SchemaError:
    return SchemaError(f"{key}: expected {expected}, got {given!r}. {hint}")


def _entries(column: Column) -> dict[str, Any]:
    """What the file says about a column; rules are spelt out, other defaults are left out."""
    base = ("name", "nullable", "reviewed")
    own = {key: getattr(column, key) for key in _keys(type(column)) if key not in base}
    # Bounds first, then the rules for what is outside.
    rules: dict[str, Any] = {key: own.pop(key) for key in ("outside", "not_a_number") if key in own}
    if own.get("scale") == "linear":
        del own["scale"]
    entries: dict[str, Any] = {
        "name": column.name,
        "kind": column.kind,
        **own,
        **rules,
        "nullable": column.nullable or None,
        "reviewed": column.reviewed,
    }
    return {key: value for key, value in entries.items() if value is not None}


def _assign(key: str, value: Any) -> str:
    line = f"{key} = {_literal(value)}"
    if len(line) <= 100 or not isinstance(value, tuple):
        return line
    return f"{key} = [\n" + "".join(f"    {_literal(item)},\n" for item in value) + "]"


def _literal(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_literal, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # TOML's basic strings are those of json, but for one character that must be escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def _commented(text: str) -> list[str]:
    """Lines of a comment; TOML allows no control characters there."""
    printable = ("".join(c if c.isprintable() else " " for c in s) for s in text.splitlines())
    return [f"# {line}".rstrip() for line in printable]
