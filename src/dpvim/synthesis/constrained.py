"""Rows that obey the schema's constraints: the model, given what is publicly known.

Rows that break a constraint are drawn again from the same draw of the model: what is left is the
model's distribution, given the constraints. None of this looks at data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from dpvim.synthesis.encoding import EncodedTable, obey
from dpvim.synthesis.marginals.grids import grid_of
from dpvim.synthesis.schema import Schema, SchemaError

RowsOf: TypeAlias = Callable[[int], EncodedTable]
"""Draws so many rows, others at every call."""
# Rows are drawn again in numbers that are powers of two: to a compiled model each is a shape.
_LEAST_ROWS, _MOST_ROWS = 2**10, 2**18
_ROUNDS = 16
_TRIED_ROWS = 2**16


class ConstraintError(ValueError):
    """The model draws no row that obeys the schema's constraints."""


def given_constraints(rows_of: RowsOf, schema: Schema) -> RowsOf:
    """Rows of a model, given that they obey the constraints of a schema.

    Where so few rows obey that `_ROUNDS` rounds do not find enough of them, those that were found
    are repeated.
    """
    if not schema.constraints:
        return rows_of

    def rows(num_rows: int) -> EncodedTable:
        table = rows_of(num_rows)
        broken = np.flatnonzero(~obey(table, schema).all(axis=0))
        wanted = len(broken)
        for _ in range(_ROUNDS):
            if not len(broken):
                return table
            fresh = rows_of(_size(wanted))
            found = np.flatnonzero(obey(fresh, schema).all(axis=0))[: len(broken)]
            table = _replaced(table, broken[: len(found)], fresh, found)
            broken, wanted = broken[len(found) :], 2 * wanted
        good = np.setdiff1d(np.arange(num_rows), broken)
        if not len(good):
            raise ConstraintError(
                "constraints: expected ones that the model gives some probability, got "
                f"{', '.join(map(repr, schema.constraints))}, which none of many rows obeys. "
                "Do they contradict each other or the table? The fit is not lost: remove "
                "constraints from the schema.toml beside it, and sample."
            )
        return _replaced(table, broken, table, np.resize(good, len(broken)))

    return rows


def check_possible(schema: Schema) -> None:
    """Refuse constraints that declared values hardly can obey, before anything is spent."""
    if not schema.constraints:
        return
    rng = np.random.default_rng(0)
    table = EncodedTable({}, {})
    for column in schema.columns:
        grid = grid_of(column)
        cells = rng.integers(0, grid.num_values, _TRIED_ROWS)
        table.values[column.name], missing = grid.values(cells, rng)
        if missing is not None:
            table.missing[column.name] = missing
    for text, held in zip(schema.constraints, obey(table, schema), strict=True):
        if not held.any():
            raise SchemaError(
                f"{schema.source}: constraints: expected ones that declared values can obey, got "
                f"{text!r}, which none of {_TRIED_ROWS:,} rows does that are spread over all of "
                "them. Correct it; leave out a column that follows from others, and compute it."
            )


def broken_shares(rows_of: RowsOf, schema: Schema, num_rows: int) -> dict[str, float]:
    """By constraint, the share of a model's rows that break it and are drawn again."""
    held = obey(rows_of(num_rows), schema)
    return dict(zip(schema.constraints, (~held).mean(axis=1).tolist(), strict=True))


def _size(wanted: int) -> int:
    return int(np.clip(2 ** (wanted - 1).bit_length(), _LEAST_ROWS, _MOST_ROWS))


def _replaced(
    table: EncodedTable, rows: np.ndarray, source: EncodedTable, found: np.ndarray
) -> EncodedTable:
    """The table with some of its rows replaced by rows of another one."""

    def put(values: np.ndarray, others: np.ndarray) -> np.ndarray:
        values = np.array(values)
        values[rows] = np.asarray(others)[found]
        return values

    return EncodedTable(
        {name: put(values, source.values[name]) for name, values in table.values.items()},
        {name: put(values, source.missing[name]) for name, values in table.missing.items()},
    )
