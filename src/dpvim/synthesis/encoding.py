"""From a table to arrays that a model can be fitted to, and back, by the rules of a schema.

Each value is read by itself: what a record becomes depends on no other record, and no record is an
error. The only error is a column whose type, for all records, cannot be what the schema says. That
holds for types that were guessed, too: readers of files take "01" for the number 1 unless another
record holds a text, so that numbers are refused where the levels are texts.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from dpvim._extras import LazyModule
from dpvim.synthesis.formulas import quoted
from dpvim.synthesis.schema import MISSING, AnyColumn, Level, Levelled, Numeric, Real, Schema
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
        values: For each column the index of the level (int32), the whole number (int32), or the
            place between the bounds, from 0 to 1 on the declared scale (float32). Where a value is
            missing it is the smallest one.
        missing: For each nullable column, where values are missing (bool).
    """

    values: dict[str, np.ndarray]
    missing: dict[str, np.ndarray]

    @property
    def num_rows(self) -> int:
        return len(next(iter(self.values.values())))


class _Status(enum.IntEnum):
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
    check_names("encoded table", list(table.values), schema.names)
    nullable = [column.name for column in schema.columns if column.nullable]
    check_names("masks of the encoded table", list(table.missing), nullable)
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


def validation_counts(frame: pd.DataFrame, schema: Schema) -> pd.DataFrame:
    """Count the values of each column that are inside, outside, not a number or missing.

    The counts are exact. They tell the holder whether a schema suits its table, and must not be
    released.
    """
    names = [status.name.lower() for status in _Status]
    counts = {
        column.name: np.bincount(status, minlength=len(names))
        for column, _, status in _read_columns(frame, schema)
    }
    return pd.DataFrame.from_dict(counts, orient="index", columns=names)


def value_counts(name: str, series: pd.Series) -> dict[str | None, int]:
    """Count each text in a column; None is for nulls."""
    indices, texts = _distinct(_arrow_array(name, series))
    counts: dict[str | None, int] = {}
    for text, count in zip(texts, np.bincount(indices, minlength=len(texts)), strict=True):
        counts[text] = counts.get(text, 0) + int(count)
    return counts


# Reading: a number (or the index of a level) for each value, and how it fits


def _read_columns(
    frame: pd.DataFrame, schema: Schema
) -> Iterator[tuple[AnyColumn, np.ndarray, np.ndarray]]:
    check_names("table", list(frame.columns), schema.names)
    for column in schema.columns:
        array = _arrow_array(column.name, frame[column.name])
        _check_type(column, frame[column.name], array)
        markers = _markers_of(column, schema)
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
    codes = _codes_of(column)
    as_level = LEVEL_OF_TEXT[column.level_type]

    # Each distinct text is read once. -1 is for what is no level.
    indices, texts = _distinct(array)
    read = np.array([-1 if text is None else codes.get(as_level(text), -1) for text in texts])
    status = np.where(read < 0, _Status.OUTSIDE, _Status.INSIDE)
    is_missing = are_markers(texts, markers, as_numbers=column.level_type is not str)
    status[is_missing] = _Status.MISSING
    return read[indices], status[indices]


def _codes_of(column: Levelled) -> dict[Level | None, int]:
    """The code of each level, also with the apostrophe that makes a formula harmless."""
    codes: dict[Level | None, int] = {level: code for code, level in enumerate(column.levels)}
    texts = [level for level in column.levels if isinstance(level, str)]
    return {quoted(text): codes[text] for text in texts} | codes


def _markers_of(column: AnyColumn, schema: Schema) -> tuple[str, ...]:
    """Texts for missing values, also with the apostrophe that makes a formula harmless."""
    levels = column.levels if isinstance(column, Levelled) else ()
    return (*schema.missing, *(m for m in map(quoted, schema.missing) if m not in levels))


def _read_numbers(
    column: Numeric, array: pa.Array, markers: tuple[str, ...]
) -> tuple[np.ndarray, np.ndarray]:
    if is_any_of(array.type, _BINARY_NUMBERS):
        numbers = array.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        status = np.where(np.isnan(numbers), _Status.MISSING, _Status.INSIDE)
        status[np.isin(numbers, [to_number(marker) for marker in markers])] = _Status.MISSING
    else:
        indices, texts = _distinct(array)
        read = np.array([np.nan if text is None else to_number(text) for text in texts])
        read_status = np.where(np.isnan(read), _Status.NOT_A_NUMBER, _Status.INSIDE)
        read_status[are_markers(texts, markers, as_numbers=True)] = _Status.MISSING
        numbers, status = read[indices], read_status[indices]
    numbers = np.rint(numbers) if column.integral else numbers
    lower, upper = column.bounds
    status[(status == _Status.INSIDE) & ((numbers < lower) | (numbers > upper))] = _Status.OUTSIDE
    return numbers, status


# Mapping: what becomes of values that do not fit


def _map_levels(
    column: Levelled, codes: np.ndarray, status: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    missing = (status == _Status.MISSING) if column.nullable else np.zeros(len(status), bool)
    mapped = (status != _Status.INSIDE) & ~missing
    if column.outside_code is None:
        missing |= mapped
    else:
        codes = np.where(mapped, column.outside_code, codes)
    return np.where(missing, 0, codes).astype(np.int32), missing


def _map_numbers(
    column: Numeric, numbers: np.ndarray, status: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    lower, upper = column.bounds
    missing = (status == _Status.MISSING) | (status == _Status.NOT_A_NUMBER)
    if column.outside == MISSING:
        missing |= status == _Status.OUTSIDE
    substitute = lower if column.not_a_number is None else column.not_a_number
    inside = np.clip(np.where(missing, substitute, numbers), lower, upper)
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


def _decoded(
    column: AnyColumn, values: np.ndarray, missing: np.ndarray | None
) -> np.ndarray | pd.api.extensions.ExtensionArray:
    if isinstance(column, Levelled):
        codes = _whole(values, 0, len(column.levels) - 1)
        dtype = {str: "string", int: "Int64", bool: "boolean"}[column.level_type]
        levels = pd.array(list(column.levels), dtype=dtype)
        decoded = levels.take(codes)
    elif isinstance(column, Real):
        unit = np.clip(np.nan_to_num(values.astype(float), posinf=1, neginf=0), 0, 1)
        numbers = np.clip(_from_unit(column, unit), column.lower, column.upper)
        if column.decimals is not None:
            numbers = np.round(numbers, column.decimals)
        return np.where(missing, np.nan, numbers) if missing is not None else numbers
    else:
        decoded = pd.array(_whole(values, *column.bounds), dtype="Int64")
    if missing is None:
        # Without gaps the types are NumPy's, but for texts.
        return decoded if decoded.dtype == "string" else decoded.to_numpy(dtype=decoded.dtype.type)
    decoded[missing] = pd.NA
    return decoded


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
_READ_AS_TEXT = "dpvim.read_table(path), or pandas.read_csv(path, dtype=str, keep_default_na=False)"


def _arrow_array(name: str, series: pd.Series) -> pa.Array:
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
    if array is None or not is_any_of(array.type, _READABLE):
        raise TableError(
            f"column {name!r}: expected texts, numbers or booleans, got a column of type "
            f"{series.dtype}. Write dates as numbers (days, years), or leave the column out."
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
