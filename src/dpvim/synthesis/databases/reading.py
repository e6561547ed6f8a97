"""Columns of a table in a database: from values to cells, by the rules of a schema.

This is `dpvim.synthesis.encoding.encode` and `Grid.codes`, as expressions. A value is looked at by
itself, every value ends in a cell, and no value is an error of the engine's. Expressions come in
layers, each a query around the one before, so that none is written or computed many times.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dpvim._extras import LazyModule
from dpvim.synthesis.databases.dates import seconds_of_text
from dpvim.synthesis.databases.engines import (
    POSTGRES,
    number,
    number_of_decimal,
    number_of_text,
    stripped,
    with_plain_digits,
)
from dpvim.synthesis.databases.steps import choose, first_of_each
from dpvim.synthesis.encoding import Status, codes_of_levels, encode_numbers, markers_of
from dpvim.synthesis.marginals.grids import Grid
from dpvim.synthesis.schema import AnyColumn, Date, Levelled, Numeric, Schema
from dpvim.synthesis.schema.columns import CLAMP
from dpvim.synthesis.schema.moments import UNITS, read_moment
from dpvim.synthesis.tables import TableError
from dpvim.synthesis.values import to_number

if TYPE_CHECKING:
    import ibis
else:
    ibis = LazyModule("ibis", extra="databases")

_OUTSIDE, _GAP = -1, -2  # codes of values that are no level
_MORE_THAN_THERE_ARE = 2**62
_TRUE, _FALSE = "^[tT][rR][uU][eE]$", "^[fF][aA][lL][sS][eE]$"


class Reader:
    """Reads one column inside of an engine.

    Args:
        engine: That has the table.
        place: Of the column among those that are read; its expressions are named by it.
        column: Its entry in the schema.
        markers: Texts for missing values.
        dtype: The column's type, as Ibis names it.
    """

    def __init__(
        self, engine: str, place: int, column: AnyColumn, markers: tuple[str, ...], dtype: Any
    ) -> None:
        self.engine, self.place, self.column = engine, place, column
        self.markers, self.dtype = markers, dtype
        self.value, self.gap = f"v{place}", f"g{place}"
        _check_type(column, dtype)

    @classmethod
    def of(cls, engine: str, place: int, column: AnyColumn, schema: Schema, dtype: Any) -> Reader:
        """The reader for a kind of column."""
        kinds: dict[type, type[Reader]] = {Levelled: LevelReader, Date: DateReader}
        kind = next((kinds[each] for each in kinds if isinstance(column, each)), NumberReader)
        markers = markers_of(column, schema)
        texts = [*markers]
        if isinstance(column, Levelled):
            texts += [level for level in column.read_levels if isinstance(level, str)]
        if not all(map(_can_be_told, texts)):
            raise TableError(
                f"column {column.name!r}: expected levels and markers that are texts for a "
                "database, got one with a zero byte or half of a character. Take it out."
            )
        return kind(engine, place, column, markers, dtype)

    # Layers: texts without blanks; numbers in them; what they are.

    def stripped(self, table: Any) -> dict[str, Any]:
        value = table[self.column.name]
        if self.dtype.is_string():
            value = stripped(self.engine, ibis.literal("") + value)  # enumerations are texts, too
        return {self.value: value}

    def with_plain_digits(self, table: Any) -> dict[str, Any]:
        return {self.value: table[self.value]}

    def read(self, table: Any) -> dict[str, Any]:
        raise NotImplementedError

    def cell(self, table: Any, grid: Grid, of_code: np.ndarray) -> Any:
        """The cell that a value is in, by the layer that `read` makes."""
        raise NotImplementedError

    def status(self, table: Any) -> Any:
        """The validity of a value, a `Status`."""
        raise NotImplementedError

    def _is_marker(self, text: Any) -> Any:
        return text.isnull() | text.isin(self.markers)

    def _numeric_markers(self) -> list[Any]:
        found = {to_number(marker) for marker in self.markers}
        return [number(each) for each in sorted(found) if not np.isnan(each)]


class LevelReader(Reader):
    """Levels: a value becomes the level's code, or says that it is missing, or outside."""

    column: Levelled

    def with_plain_digits(self, table: Any) -> dict[str, Any]:
        value = table[self.value]
        if not self._are_texts and self.dtype.is_string():
            return {self.value: value, self.gap: with_plain_digits(value)}
        return {self.value: value}

    def read(self, table: Any) -> dict[str, Any]:
        value = table[self.value]
        if self._are_texts:
            return {self.value: self._code_of_text(value)}
        if self.dtype.is_boolean():
            return {
                self.value: _cases(
                    [(value.isnull(), _GAP), (value, self._code(True))], self._code(False)
                )
            }
        if not self.dtype.is_string():
            read, _ = _number_of(self.engine, value, self.dtype)
            is_gap = read.isnull() | _is_nan(read)
            return {self.value: self._code_of_number(read, is_gap, [])}
        read = number_of_text(self.engine, table[self.gap])
        words = [
            (value.re_search(_TRUE), self._code(True)),
            (value.re_search(_FALSE), self._code(False)),
        ]
        is_boolean = self.column.level_type is bool
        return {
            self.value: self._code_of_number(
                read, self._is_marker(value), words if is_boolean else []
            )
        }

    @property
    def _are_texts(self) -> bool:
        return self.column.level_type is str

    def _code(self, level: Any) -> int:
        return self.column.levels.index(level) if level in self.column.levels else _OUTSIDE

    def _code_of_text(self, text: Any) -> Any:
        codes: dict[Any, int] = codes_of_levels(self.column)
        grouped: list[tuple[Any, int]] = []
        if self.column.prefix is not None:
            beginning = text.left(self.column.prefix)
            grouped = [(beginning == level, code) for level, code in codes.items()]
        elif self.column.groups is not None:
            groups: Any = self.column.groups
            level_of = {v: level for level, values in groups for v in values}
            exact = [v for v in level_of if v not in codes]
            beginnings = sorted((v for v in level_of if v.endswith("*")), key=len, reverse=True)
            # A text that is listed is that one; of beginnings the longest counts.
            grouped = [(text == v, codes[level_of[v]]) for v in exact]
            grouped += [(text.startswith(v[:-1]), codes[level_of[v]]) for v in beginnings]
        known = [(text == level, code) for level, code in codes.items()]
        return _cases([(self._is_marker(text), _GAP), *known, *grouped], _OUTSIDE)

    def _code_of_number(self, read: Any, is_gap: Any, words: list[tuple[Any, int]]) -> Any:
        levels = {float(level): code for code, level in enumerate(self.column.levels)}
        markers = self._numeric_markers()
        gaps = [(is_gap, _GAP)]
        gaps += [(read.isin(markers), _GAP)] if markers else []
        known = [(read == number(level), code) for level, code in levels.items()]
        return _cases([*gaps, *words, *known], _OUTSIDE)

    def cell(self, table: Any, grid: Grid, of_code: np.ndarray) -> Any:
        column, code = self.column, table[self.value]
        gap, outside = column.outside_code, column.outside_code
        if column.nullable:
            gap = grid.num_values
        if outside is None:
            outside = grid.num_values
        cells = [int(of_code[each]) for each in (gap, outside, *range(grid.num_values))]
        thresholds = [*range(_GAP + 1, grid.num_values)]
        return _integer(choose(lambda t: code < t, thresholds, cells, _if_else))

    def status(self, table: Any) -> Any:
        code = table[self.value]
        return _cases(
            [(code == _GAP, int(Status.MISSING)), (code == _OUTSIDE, int(Status.OUTSIDE))],
            int(Status.INSIDE),
        )


class NumberReader(Reader):
    """Numbers: a value becomes a double, or NULL; beside it, whether it stands for a gap."""

    column: Numeric

    def with_plain_digits(self, table: Any) -> dict[str, Any]:
        if not self.dtype.is_string():
            return {self.value: table[self.value]}
        text = table[self.value]
        return {self.value: with_plain_digits(text), self.gap: self._is_marker(text)}

    def read(self, table: Any) -> dict[str, Any]:
        value = table[self.value]
        if self.dtype.is_string():
            read, is_gap = number_of_text(self.engine, value), table[self.gap]
        else:
            read, is_gap = _number_of(self.engine, value, self.dtype)
        if markers := self._numeric_markers():
            is_gap = is_gap | read.isin(markers).fill_null(False)
        return {self.value: read, self.gap: is_gap}

    def cell(self, table: Any, grid: Grid, of_code: np.ndarray) -> Any:
        codes, thresholds = self._codes(grid)
        inside = choose(
            self._is_below(table), thresholds, [int(of_code[code]) for code in codes], _if_else
        )
        gap = int(of_code[self._code_of_gap(grid)])
        return _if_else(self._is_no_number(table), gap, inside)

    def status(self, table: Any) -> Any:
        statuses, thresholds = self._statuses()
        inside = choose(self._is_below(table), thresholds, statuses, _if_else)
        return _cases(
            [
                (table[self.gap], int(Status.MISSING)),
                (self._is_no_number(table), int(Status.NOT_A_NUMBER)),
            ],
            inside,
        )

    def _is_no_number(self, table: Any) -> Any:
        value = table[self.value]
        return table[self.gap] | value.isnull() | _is_nan(value)

    def _is_below(self, table: Any) -> Callable[[float], Any]:
        return lambda threshold: table[self.value] < number(threshold)

    def _code_of_gap(self, grid: Grid) -> int:
        if self.column.nullable:
            return grid.num_values
        values, _, _ = encode_numbers(self.column, np.array([float(self.column.substitute)]))
        return int(grid.codes(values, None)[0])

    def _codes(self, grid: Grid) -> tuple[list[int], list[float]]:
        """Codes of numbers from the smallest on, and where each but the first begins."""

        clamped = dataclasses.replace(self.column, outside=CLAMP)

        def step(numbers: np.ndarray) -> np.ndarray:
            values, _, _ = encode_numbers(clamped, numbers)
            return grid.codes(values, None)

        firsts = first_of_each(step, grid.num_values - 1)
        points = sorted({*firsts[~np.isnan(firsts)].tolist(), *self._statuses()[1]})
        values, missing, _ = encode_numbers(self.column, np.array([-np.inf, *points]))
        return grid.codes(values, missing).tolist(), points

    def _statuses(self) -> tuple[list[int], list[float]]:
        """Statuses of numbers from the smallest on: outside, inside, outside."""
        lower = self.column.bounds[0]

        def step(numbers: np.ndarray) -> np.ndarray:
            _, _, status = encode_numbers(self.column, numbers)
            return np.where(status == Status.INSIDE, 1, np.where(numbers < lower, 0, 2))

        ends = first_of_each(step, 2)
        return [int(Status.OUTSIDE), int(Status.INSIDE), int(Status.OUTSIDE)], ends.tolist()


class DateReader(NumberReader):
    """Dates: moments, or seconds since 1970 of texts, are compared with where cells begin."""

    column: Date

    def with_plain_digits(self, table: Any) -> dict[str, Any]:
        return Reader.with_plain_digits(self, table)

    def read(self, table: Any) -> dict[str, Any]:
        value, gaps = table[self.value], self._gaps()
        if self.dtype.is_string():
            seconds = seconds_of_text(self.column, value)
            is_gap = self._is_marker(value)
            if gaps:
                known = [int(each.astype(np.int64)) for each in gaps]
                is_gap = is_gap | seconds.isin(known).fill_null(False)
            return {self.value: seconds, self.gap: is_gap}
        is_gap = value.isnull()
        for moment in gaps:  # to the second
            later = moment + np.timedelta64(1, "s")
            within = ~self._before(value, moment) & self._before(value, later)
            is_gap = is_gap | within.fill_null(False)
        return {self.value: value, self.gap: is_gap}

    def _gaps(self) -> list[np.datetime64]:
        column = self.column
        found = (read_moment(each, column.resolution, column.format) for each in self.markers)
        return [np.datetime64(moment, "s") for moment in found if moment is not None]

    def _is_no_number(self, table: Any) -> Any:
        return table[self.gap] | table[self.value].isnull()

    def _is_below(self, table: Any) -> Callable[[Any], Any]:
        return lambda units: self._before(table[self.value], self._moment(units))

    def _moment(self, units: float) -> Any:
        """The first second of a unit, by its number from the lower bound on."""
        unit = UNITS[self.column.resolution]
        found = np.array(int(units) + self.column.origin).astype(f"datetime64[{unit}]")
        return found.astype("datetime64[s]")[()]

    def _before(self, value: Any, moment: Any) -> Any:
        if self.dtype.is_string():
            return value < int(moment.astype(np.int64))
        # As texts: Python has no year 10000, which may be the first moment after the last.
        if self.dtype.is_date():
            day = moment.astype("datetime64[D]")
            first = ibis.literal(str(day)).cast("date")
            return value < first if day == moment else value <= first  # a date is its midnight
        return value < ibis.literal(str(moment)).cast("timestamp")

    def _codes(self, grid: Grid) -> tuple[list[int], list[Any]]:
        codes = [*range(grid.num_values)]
        thresholds = [float(each) for each in grid.first[1:]]
        if self.column.outside != "missing":
            return codes, thresholds
        _, (first, end) = self._statuses()
        missing = grid.num_values
        return [missing, *codes, missing], [first, *thresholds, end]

    def _statuses(self) -> tuple[list[int], list[Any]]:
        lower, upper = self.column.bounds
        outside, inside = int(Status.OUTSIDE), int(Status.INSIDE)
        return [outside, inside, outside], [lower, upper + 1]


def layers(table: Any, readers: Sequence[Reader]) -> Any:
    """The table with each column read: see `Reader`."""
    for step in ("stripped", "with_plain_digits", "read"):
        found = [getattr(reader, step)(table) for reader in readers]
        table = table.select(**functools.reduce(operator.or_, found))
    if any(each.engine == POSTGRES and each.dtype.is_string() for each in readers):
        # Else PostgreSQL would put the layers into each other, and read a text many times.
        table = table.limit(_MORE_THAN_THERE_ARE)
    return table


def _number_of(engine: str, value: Any, dtype: Any) -> tuple[Any, Any]:
    """A column of numbers in double precision, and where it has gaps."""
    read = number_of_decimal(engine, value) if dtype.is_decimal() else value.cast("float64")
    return read, read.isnull() | _is_nan(read)


def _is_nan(value: Any) -> Any:
    return value.isnan().fill_null(False)


def _can_be_told(text: str) -> bool:
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False


def _cases(cases: Sequence[tuple[Any, Any]], otherwise: Any) -> Any:
    return ibis.cases(*cases, else_=_integer(otherwise))


def _if_else(condition: Any, then: Any, otherwise: Any) -> Any:
    return condition.ifelse(_integer(then), _integer(otherwise))


def _integer(value: Any) -> Any:
    return ibis.literal(value, "int32") if isinstance(value, int) else value


def _check_type(column: AnyColumn, dtype: Any) -> None:
    """Refuse a type that the schema's entry cannot have, as `encode` does."""
    is_number = dtype.is_integer() or dtype.is_floating() or dtype.is_decimal()
    if isinstance(column, Date):
        zoned = dtype.is_timestamp() and dtype.timezone is not None
        fits = dtype.is_string() or dtype.is_date() or (dtype.is_timestamp() and not zoned)
        expected = "dates without a time zone, or texts"
    elif isinstance(column, Levelled) and column.level_type is str:
        fits, expected = dtype.is_string(), "texts, as the declared levels are"
    elif isinstance(column, Levelled) and column.level_type is bool:
        fits = dtype.is_string() or is_number or dtype.is_boolean()
        expected = "booleans, numbers or texts"
    else:
        fits, expected = dtype.is_string() or is_number, "numbers or texts"
    if not fits:
        raise TableError(
            f"column {column.name!r}: expected {expected}, got a column of type {dtype}. Correct "
            "the schema, or make a view in which the column has another type."
        )
