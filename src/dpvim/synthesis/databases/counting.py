"""Counts of a table's cells by one query: each record adds one to a cell of each marginal."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dpvim._extras import LazyModule
from dpvim.privacy.counts import Cells, Marginal
from dpvim.synthesis.databases.reading import Reader, layers
from dpvim.synthesis.marginals.grids import Grid

if TYPE_CHECKING:
    import ibis
else:
    ibis = LazyModule("ibis", extra="databases")

# So many marginals are counted by one query: what is in flight for a record are their cells.
_AT_ONCE = 64


class Query(NamedTuple):
    """A query, and the numbers of cells of the marginals that it counts.

    Attributes:
        expression: Rows of a cell's number and its count; cells without records may be left out.
        shapes: Cells of each marginal, one axis for each column. They are numbered one after the
            other.
    """

    expression: Any
    shapes: list[tuple[int, ...]]

    @property
    def ends(self) -> list[int]:
        """For each marginal the number of the first cell after it."""
        return [*itertools.accumulate(map(math.prod, self.shapes))]

    def arrays(self, rows: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """The counts, from what the query found."""
        totals = np.zeros(self.ends[-1], np.int64)
        for cell, count in rows:
            totals[int(cell)] += int(count)
        parts = np.split(totals, self.ends[:-1])
        return [part.reshape(shape) for part, shape in zip(parts, self.shapes, strict=True)]


def queries(
    table: Any,
    readers: Sequence[Reader],
    grids: Sequence[Grid],
    cells: Cells,
    marginals: Sequence[Marginal],
) -> list[Query]:
    """Queries that count all marginals, a part of them each.

    Args:
        table: With the columns that the readers read.
        readers, grids, cells: Of each column of the schema.
        marginals: What is counted.
    """
    return [
        _query(table, readers, grids, cells, marginals[first : first + _AT_ONCE])
        for first in range(0, len(marginals), _AT_ONCE)
    ]


def _query(
    table: Any,
    readers: Sequence[Reader],
    grids: Sequence[Grid],
    cells: Cells,
    marginals: Sequence[Marginal],
) -> Query:
    wanted = sorted({column for each in marginals for column in each.columns})
    read = layers(table, [readers[column] for column in wanted])
    placed = read.select(
        **{
            f"c{column}": readers[column].cell(read, grids[column], cells.of_code[column])
            for column in wanted
        }
    )
    shapes = [tuple(cells.sizes[column] for column in each.columns) for each in marginals]
    starts = [0, *itertools.accumulate(map(math.prod, shapes))]
    numbers = []
    for marginal, shape, start in zip(marginals, shapes, starts, strict=False):
        number: Any = placed[f"c{marginal.columns[0]}"].cast("int64")
        for column, size in zip(marginal.columns[1:], shape[1:], strict=True):
            number = number * size + placed[f"c{column}"]
        numbers.append(number + start)
    one_by_one = placed.select(cell=ibis.array(numbers).unnest())
    counted = one_by_one.group_by("cell").aggregate(records=one_by_one.count())
    return Query(counted, shapes)
