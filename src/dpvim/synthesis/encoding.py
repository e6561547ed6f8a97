"""From a table to arrays that a model can be fitted to, and back, by the rules of a schema.

Each value is read by itself: what a record becomes depends on no other record, and no record is an
error. The only error is a column whose type, for all records, cannot be what the schema says. That
holds for types that were guessed, too: readers of files take "01" for the number 1 unless another
record holds a text, so that numbers are refused where the levels are texts.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from dpvim._extras import LazyModule
from dpvim.synthesis.formulas import quoted
from dpvim.synthesis.schema import (
    MISSING,
    AnyColumn,
    Date,
    Level,
    Levelled,
    Numeric,
    Real,
    Schema,
)
from dpvim.synthesis.schema.moments import UNITS, read_moment, units_of
from dpvim.synthesis.tables import TableError, check_names, is_any_of
from dpvim.synthesis.values import LEVEL_OF_TEXT, are_markers, is_text, text_of, to_number

if TYPE_CHECKING:
    import pyarrow as pa
else:
    pa = LazyModule("pyarrow", extra="tables")


@dataclass(frozen=True, eq=False)
class EncodedTable:
    """A table as arrays with an entry for each record.

    Attributes:
        values: For each column the index of the level (int32), the whole number (int32; of dates
            that of units since the lower bound), or the place between the bounds, from 0 to 1 on
            the declared scale (float32). Where a value is missing it is the smallest one.
        missing: For each nullable column, where values are missing (bool).
    """

    values: dict[str, np.ndarray]
    missing: dict[str, np.ndarray]

    @property
    def num_rows(self) -> int:
        return len(next(iter(self.values.values())))


class Status(enum.IntEnum):
    """Validity of a value by the schema's entry for its column."""

    INSIDE = 0
    OUTSIDE = 1
    NOT_A_NUMBER = 2
    MISSING = 3


def encode(frame: pd.DataFrame, schema: Schema) -> EncodedTable:
    """Read a table by its schema; what does not fit is mapped by the declared rules."""
    table = EncodedTable({}, {})
    for column, numbers, status in _read_columns(frame, schema):
        if isinstance(column, Levelled):
            values, missing = _map_levels(column, numbers, status)
        else:
            values, missing = _map_numbers(column, numbers, status)
        table.values[column.name] = values
        if column.nullable:
            table.missing[column.name] = missing
    return table


def decode(table: EncodedTable, schema: Schema) -> pd.DataFrame:
    """The inverse of `encode`: names, order, types and labels as declared, nothing outside."""
    _check_encoded(table, schema)
    return pd.DataFrame(
        {
            column.name: _decoded(
                column,
                np.asarray(table.values[column.name]),
                np.asarray(table.missing[column.name], bool) if column.nullable else None,
            )
            for column in schema.columns
        }
    )


def obey(table: EncodedTable, schema: Schema) -> np.ndarray:
    """For each constraint of the schema, mark the rows of a table that obey it."""
    _check_encoded(table, schema)
    rules = schema.rules
    columns = {name: schema.column(name) for rule in rules for name in rule.names}
    values = {name: _in_domain(column, table.values[name]) for name, column in columns.items()}
    held = [rule.holds(values, table.missing) for rule in rules]
    return np.array(held, bool).reshape(len(rules), table.num_rows)


def in_file(frame: pd.DataFrame, schema: Schema, *, as_text: bool) -> pd.DataFrame:
    """A decoded table with its dates as they are to stand in a file.

    Args:
        frame: From `decode`.
        schema: Its columns.
        as_text: Whether dates are texts in their declared format, for CSV files, or of Arrow's
            types, for Parquet files.
    """
    columns = dict(frame.items())
    for column in schema.columns:
        if isinstance(column, Date):
            columns[column.name] = _date_in_file(column, frame[column.name], as_text=as_text)
    return pd.DataFrame(columns)


def validation_counts(frame: pd.DataFrame, schema: Schema) -> pd.DataFrame:
    """Count the values of each column that are inside, outside, not a number or missing.

    The counts are exact. They tell the holder whether a schema suits its table, and must not be
    released.
    """
    names = [status.name.lower() for status in Status]
    counts = {
        column.name: np.bincount(status, minlength=len(names))
        for column, _, status in _read_columns(frame, schema)
    }
    return pd.DataFrame.from_dict(counts, orient="index", columns=names)


def broken_counts(frame: pd.DataFrame, schema: Schema) -> pd.Series:
    """Count the rows of a table that break each constraint; exact, and not for release either."""
    held = obey(encode(frame, schema), schema)
    return pd.Series((~held).sum(axis=1), index=list(schema.constraints), dtype=int)


def value_counts(name: str, series: pd.Series) -> dict[str | None, int]:
    """Count each text in a column; None is for nulls."""
    readable = _READABLE if has_time_zone(series) else (*_READABLE, *_DATES)
    indices, texts = _distinct(_arrow_array(name, series, readable))
    counts: dict[str | None, int] = {}
    for text, count in zip(texts, np.bincount(indices, minlength=len(texts)), strict=True):
        counts[text] = counts.get(text, 0) + int(count)
    return counts


def has_time_zone(series: pd.Series) -> bool:
    """True for a column of moments with a time zone, of pandas' or of Arrow's types."""
    return getattr(series.dtype, "tz", None) is not None or "tz=" in str(series.dtype)


# Reading: a number (or the index of a level) for each value, and how it fits


def _read_columns(
    frame: pd.DataFrame, schema: Schema
) -> Iterator[tuple[AnyColumn, np.ndarray, np.ndarray]]:
    check_names("table", list(frame.columns), schema.names)
    for column in schema.columns:
        markers = markers_of(column, schema)
        if isinstance(column, Date):
            yield column, *_read_dates(column, frame[column.name], markers)
            continue
        array = _arrow_array(column.name, frame[column.name])
        _check_type(column, frame[column.name], array)
        if isinstance(column, Levelled):
            numbers, status = _read_levels(column, array, markers)
        else:
            numbers, status = _read_numbers(column, array, markers)
        yield column, numbers, status


def _check_type(column: AnyColumn, series: pd.Series, array: pa.Array) -> None:
    """Refuse a column whose values are, as a whole, of another type than the schema says."""
    level_type = column.level_type if isinstance(column, Levelled) else None
    where = f"column {column.name!r}: expected"
    if pa.types.is_boolean(array.type) and level_type is not bool:
        raise TableError(
            f"{where} {column.kind} values as the schema says, got a column of booleans. Declare "
            'kind = "binary" and levels = [false, true], or, if the levels are texts, read the '
            f"column as text: {_READ_AS_TEXT}."
        )
    if level_type is not str:
        return
    if is_any_of(array.type, _NUMBERS):
        given = f"a column of numbers ({series.dtype})"
    elif _holds_objects(series) and not all(map(is_text, series.astype(object))):
        given = "a column in which some values are no texts, but numbers or other objects"
    else:
        return
    raise TableError(
        f"{where} texts, as the declared levels are, got {given}. A type that was guessed from the "
        f"values takes 01 for 1, unless another record holds a text. Read the column as text: "
        f"{_READ_AS_TEXT}. Or declare the levels as integers, without quotes."
    )


def _read_levels(
    column: Levelled, array: pa.Array, markers: tuple[str, ...]
) -> tuple[np.ndarray, np.ndarray]:
    codes = codes_of_levels(column)
    as_level = LEVEL_OF_TEXT[column.level_type]

    # Each distinct text is read once. -1 is for what is no level.
    indices, texts = _distinct(array)
    read = np.array([-1 if text is None else codes.get(as_level(text), -1) for text in texts])
    if column.prefix is not None or column.groups is not None:
        group_of = column.grouping()
        for i in np.flatnonzero(read < 0):
            text = texts[i]
            read[i] = -1 if text is None else codes.get(group_of(text), -1)
    status = np.where(read < 0, Status.OUTSIDE, Status.INSIDE)
    is_missing = are_markers(texts, markers, as_numbers=column.level_type is not str)
    status[is_missing] = Status.MISSING
    return read[indices], status[indices]


def codes_of_levels(column: Levelled) -> dict[Level | None, int]:
    """The code of each level, also with the apostrophe that makes a formula harmless."""
    codes: dict[Level | None, int] = {level: code for code, level in enumerate(column.levels)}
    texts = [level for level in column.levels if isinstance(level, str)]
    return {quoted(text): codes[text] for text in texts} | codes


def markers_of(column: AnyColumn, schema: Schema) -> tuple[str, ...]:
    """Texts for missing values, also with the apostrophe that makes a formula harmless."""
    levels = column.read_levels if isinstance(column, Levelled) else ()
    return (*schema.missing, *(m for m in map(quoted, schema.missing) if m not in levels))


def _read_numbers(
    column: Numeric, array: pa.Array, markers: tuple[str, ...]
) -> tuple[np.ndarray, np.ndarray]:
    if is_any_of(array.type, _BINARY_NUMBERS):
        numbers = array.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        status = np.where(np.isnan(numbers), Status.MISSING, Status.INSIDE)
        status[np.isin(numbers, [to_number(marker) for marker in markers])] = Status.MISSING
    else:
        indices, texts = _distinct(array)
        read = np.array([np.nan if text is None else to_number(text) for text in texts])
        read_status = np.where(np.isnan(read), Status.NOT_A_NUMBER, Status.INSIDE)
        read_status[are_markers(texts, markers, as_numbers=True)] = Status.MISSING
        numbers, status = read[indices], read_status[indices]
    numbers = np.rint(numbers) if column.integral else numbers
    return numbers, _with_outside(column, numbers, status)


def encode_numbers(
    column: Numeric, numbers: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values, where they are missing, and how they fit, of numbers that are there.

    Args:
        column: Their entry.
        numbers: In double precision, none of them NaN; of dates, units since the lower bound.
    """
    numbers = np.rint(numbers) if column.integral else numbers
    status = _with_outside(column, numbers, np.full(len(numbers), Status.INSIDE))
    return *_map_numbers(column, numbers, status), status


def _with_outside(column: Numeric, numbers: np.ndarray, status: np.ndarray) -> np.ndarray:
    lower, upper = column.bounds
    is_outside = (status == Status.INSIDE) & ((numbers < lower) | (numbers > upper))
    return np.where(is_outside, Status.OUTSIDE, status)


def _read_dates(
    column: Date, series: pd.Series, markers: tuple[str, ...]
) -> tuple[np.ndarray, np.ndarray]:
    found = [read_moment(marker, column.resolution, column.format) for marker in markers]
    gaps = [moment for moment in found if moment is not None]
    if _holds_objects(series):
        _check_dates(column, series, series.astype(object))
        numbers, status = _read_moments(column, series.astype(object), markers, gaps)
    else:
        array = _arrow_array(column.name, series, (*_TEXTS, *_DATES))
        if is_any_of(array.type, _TEXTS):
            indices, texts = _distinct(array)
            read, read_status = _read_moments(column, texts, markers, gaps)
            numbers, status = read[indices], read_status[indices]
        else:
            _check_dates(column, series, [])
            moments = array.to_numpy(zero_copy_only=False)
            units = moments.astype(f"datetime64[{UNITS[column.resolution]}]").astype(np.int64)
            is_gap = np.isnat(moments) | np.isin(moments.astype("datetime64[s]"), _as_numpy(gaps))
            status = np.where(is_gap, Status.MISSING, Status.INSIDE)
            numbers = units.astype(float) - column.origin
    return numbers, _with_outside(column, numbers, status)


def _check_dates(column: Date, series: pd.Series, objects: Iterable[Any]) -> None:
    """Refuse a column with a time zone, or with objects that are neither texts nor dates."""
    if has_time_zone(series):
        raise TableError(
            f"column {column.name!r}: expected dates without a time zone, got a column of type "
            f"{series.dtype}. Convert it to the clock that is meant, as with "
            "frame[name].dt.tz_convert(zone).dt.tz_localize(None)."
        )
    if not all(isinstance(value, date) or is_text(value) for value in objects):
        raise TableError(
            f"column {column.name!r}: expected texts or dates, got a column in which some values "
            "are numbers or other objects. A type that was guessed from the values takes 01022020 "
            f"for 1022020, unless another record holds a text. Read the column as text: "
            f"{_READ_AS_TEXT}."
        )


def _read_moments(
    column: Date, values: Iterable[Any], markers: tuple[str, ...], gaps: list[datetime]
) -> tuple[np.ndarray, np.ndarray]:
    """Units since the lower bound, and how they fit, of texts and of dates."""
    numbers, status = [], []
    for value in values:
        text = text_of(value)
        moment = _moment(column, value, text)
        if text is None or text in markers or (moment is not None and moment in gaps):
            status.append(Status.MISSING)
        else:
            status.append(Status.NOT_A_NUMBER if moment is None else Status.INSIDE)
        units = math.nan if moment is None else units_of(moment, column.resolution) - column.origin
        numbers.append(units)
    return np.array(numbers, float), np.array(status, int)


def _moment(column: Date, value: Any, text: str | None) -> datetime | None:
    if text is None:
        return None
    if not isinstance(value, date):
        return read_moment(text, column.resolution, column.format)
    if isinstance(value, datetime):  # one with a time zone is no date here
        return None if value.tzinfo else datetime(*value.timetuple()[:6])
    return datetime(value.year, value.month, value.day)


def _as_numpy(moments: list[datetime]) -> np.ndarray:
    return np.array(moments, "datetime64[s]")


# Mapping: what becomes of values that do not fit


def _map_levels(
    column: Levelled, codes: np.ndarray, status: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    missing = (status == Status.MISSING) if column.nullable else np.zeros(len(status), bool)
    mapped = (status != Status.INSIDE) & ~missing
    if column.outside_code is None:
        missing |= mapped
    else:
        codes = np.where(mapped, column.outside_code, codes)
    return np.where(missing, 0, codes).astype(np.int32), missing


def _map_numbers(
    column: Numeric, numbers: np.ndarray, status: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    lower, upper = column.bounds
    missing = (status == Status.MISSING) | (status == Status.NOT_A_NUMBER)
    if column.outside == MISSING:
        missing |= status == Status.OUTSIDE
    inside = np.clip(np.where(missing, column.substitute, numbers), lower, upper)
    if isinstance(column, Real):
        return _to_unit(column, inside).astype(np.float32), missing
    return inside.astype(np.int32), missing


def _to_unit(column: Real, numbers: np.ndarray) -> np.ndarray:
    lower, upper = column.bounds
    if column.scale == "log":
        # One by one: NumPy's logarithm may round by where in memory a number stands.
        numbers = np.array([*map(math.log, numbers.tolist())])
        lower, upper = math.log(lower), math.log(upper)
    return (numbers - lower) / (upper - lower)


def _from_unit(column: Real, unit: np.ndarray) -> np.ndarray:
    if column.scale == "log":
        lower, upper = np.log(column.lower), np.log(column.upper)
        numbers = np.exp((1 - unit) * lower + unit * upper)
        # exp(log(x)) need not be x; the bounds are to come back as they are.
        return np.select([unit == 0, unit == 1], [column.lower, column.upper], numbers)
    return (1 - unit) * column.lower + unit * column.upper


# Writing


def _check_encoded(table: EncodedTable, schema: Schema) -> None:
    check_names("encoded table", list(table.values), schema.names)
    nullable = [column.name for column in schema.columns if column.nullable]
    check_names("masks of the encoded table", list(table.missing), nullable)


def _in_domain(column: AnyColumn, values: np.ndarray) -> np.ndarray:
    """Indices of levels, numbers, or units of a date: what is written, whatever was drawn."""
    values = np.asarray(values)
    if isinstance(column, Levelled):
        return _whole(values, 0, len(column.levels) - 1)
    if not isinstance(column, Real):
        return _whole(values, *column.bounds)
    unit = np.clip(np.nan_to_num(values.astype(float), posinf=1, neginf=0), 0, 1)
    numbers = np.clip(_from_unit(column, unit), column.lower, column.upper)
    return numbers if column.decimals is None else np.round(numbers, column.decimals)


def _decoded(
    column: AnyColumn, values: np.ndarray, missing: np.ndarray | None
) -> np.ndarray | pd.api.extensions.ExtensionArray:
    inside = _in_domain(column, values)
    if isinstance(column, Levelled):
        dtype = {str: "string", int: "Int64", bool: "boolean"}[column.level_type]
        levels = pd.array(list(column.levels), dtype=dtype)
        decoded = levels.take(inside)
    elif isinstance(column, Real):
        return np.where(missing, np.nan, inside) if missing is not None else inside
    elif isinstance(column, Date):
        moments = (inside + column.origin).astype(f"datetime64[{UNITS[column.resolution]}]")
        dates = moments.astype("datetime64[s]")
        return dates if missing is None else np.where(missing, np.datetime64("NaT", "s"), dates)
    else:
        decoded = pd.array(inside, dtype="Int64")
    if missing is None:
        # Without gaps the types are NumPy's, but for texts.
        return decoded if decoded.dtype == "string" else decoded.to_numpy(dtype=decoded.dtype.type)
    decoded[missing] = pd.NA
    return decoded


def _date_in_file(column: Date, dates: pd.Series, *, as_text: bool) -> pd.Series:
    moments = dates.to_numpy("datetime64[s]")
    if not as_text:
        # Days, and what is coarser, are dates; others have a time.
        has_time = [*UNITS].index(column.resolution) > [*UNITS].index("day")
        kind = pa.timestamp("s") if has_time else pa.date32()
        array = pa.array(moments, pa.timestamp("s"), from_pandas=True).cast(kind)
        return pd.Series(pd.arrays.ArrowExtensionArray(array), index=dates.index)
    units = moments.astype(f"datetime64[{UNITS[column.resolution]}]").astype(np.int64)
    # Each distinct date is written once.
    distinct, indices = np.unique(np.where(np.isnat(moments), 0, units), return_inverse=True)
    texts = np.array([column.text(each - column.origin) for each in distinct], object)[indices]
    texts[np.isnat(moments)] = None
    return pd.Series(pd.array(texts, dtype="string"), index=dates.index)


def _whole(values: np.ndarray, lower: float, upper: float) -> np.ndarray:
    rounded = np.rint(np.nan_to_num(values.astype(float), nan=lower))
    return np.clip(rounded, lower, upper).astype(np.int64)


# Types

_BINARY_NUMBERS = ("integer", "floating")
# Decimals are read as texts: Arrow turns them into floats that are not always the nearest ones.
_NUMBERS = (*_BINARY_NUMBERS, "decimal")
# Some programs store texts as bytes in Parquet files.
_TEXTS = ("string", "large_string", "binary", "large_binary")
_READABLE = (*_NUMBERS, *_TEXTS, "boolean")
_DATES = ("date", "timestamp")
_READ_AS_TEXT = "dpvim.read_table(path), or pandas.read_csv(path, dtype=str, keep_default_na=False)"


def _arrow_array(name: str, series: pd.Series, readable: tuple[str, ...] = _READABLE) -> pa.Array:
    """A column in one of Arrow's types; what pandas holds as objects becomes text."""
    try:
        if _holds_objects(series):
            array = pa.array([*map(text_of, series.astype(object))], pa.string())
        else:
            array = pa.array(series, from_pandas=True)
    except (pa.ArrowException, TypeError, NotImplementedError):
        array = None
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if array is not None and pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if array is not None and pa.types.is_null(array.type):
        array = array.cast(pa.string())
    if array is None or not is_any_of(array.type, readable):
        expected = "texts or dates" if "date" in readable else "texts, numbers or booleans"
        raise TableError(
            f"column {name!r}: expected {expected}, got a column of type {series.dtype}. Declare "
            f'kind = "date" for dates, read texts as such ({_READ_AS_TEXT}), or leave the column '
            "out."
        )
    return array


def _holds_objects(series: pd.Series) -> bool:
    """True if each value, or each category, may be of a type of its own."""
    return getattr(series.dtype, "categories", series).dtype == object


def _distinct(array: pa.Array) -> tuple[np.ndarray, list[str | None]]:
    """Distinct values as texts (None is a null or NaN), and for each value its text's index."""
    encoded = array.dictionary_encode()
    texts = [*map(text_of, encoded.dictionary.to_pylist()), None]
    return encoded.indices.fill_null(len(texts) - 1).to_numpy(zero_copy_only=False), texts
