"""A look at a table in a database, for its holder: counts by the schema's rules, and a draft.

All of it is exact and as private as the table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from dpvim._extras import LazyModule
from dpvim.synthesis.databases.connection import DatabaseTable
from dpvim.synthesis.databases.reading import layers
from dpvim.synthesis.draft import ColumnValues, Draft, cannot_look_at, draft_from
from dpvim.synthesis.encoding import Status
from dpvim.synthesis.schema import Schema
from dpvim.synthesis.values import text_of

if TYPE_CHECKING:
    import ibis
else:
    ibis = LazyModule("ibis", extra="databases")

# Of a column with more distinct values so many are looked at.
MOST_VALUES = 100_000


def validation_counts_in(table: DatabaseTable, schema: Schema) -> pd.DataFrame:
    """Counts as `dpvim.synthesis.encoding.validation_counts` makes them, by one query."""
    readers = table.readers(schema)
    read = layers(table.expression, readers)
    placed = read.select(**{f"c{each.place}": each.status(read) for each in readers})
    names = [status.name.lower() for status in Status]
    numbers = [placed[f"c{each.place}"] + len(names) * each.place for each in readers]
    cells = placed.select(cell=ibis.array(numbers).unnest())
    counts = np.zeros((len(readers), len(names)), int)
    for cell, count in table.query(cells.group_by("cell").aggregate(records=cells.count())):
        counts[divmod(int(cell), len(names))] += int(count)
    return pd.DataFrame(counts, index=schema.names, columns=names)


def draft_of(table: DatabaseTable) -> Draft:
    """A draft of a schema, as `dpvim.synthesis.draft.draft` makes it, by a query a column."""
    return draft_from({name: _values(table, name, dtype) for name, dtype in table.types.items()})


def _values(table: DatabaseTable, name: str, dtype: Any) -> ColumnValues | str:
    is_zoned = dtype.is_timestamp() and dtype.timezone is not None
    is_number = dtype.is_integer() or dtype.is_floating() or dtype.is_decimal()
    has_order = is_number or dtype.is_date() or dtype.is_timestamp()
    if is_zoned or not (has_order or dtype.is_string() or dtype.is_boolean()):
        return cannot_look_at(dtype, has_time_zone=is_zoned)
    value = table.expression.select(value=table.expression[name])
    grouped = value.group_by("value").aggregate(records=value.count())
    found = table.query(grouped.limit(MOST_VALUES + 1))
    if len(found) > MOST_VALUES:
        if not has_order:
            return (
                f"more than {MOST_VALUES:,} different texts. An identifier or free text must "
                "stay out."
            )
        # A part of the values tells most, and the extremes the rest.
        extremes = value.aggregate(low=value.value.min(), high=value.value.max())
        nulls = value.aggregate(records=value.value.isnull().sum())
        found += [(each, 1) for each in table.query(extremes)[0]]
        found += [(None, 1)] * bool(table.query(nulls)[0][0])
    counts: dict[str | None, int] = {}
    for each, count in found:
        text = text_of(each)
        counts[text] = counts.get(text, 0) + int(count)
    return ColumnValues(counts, dtype.is_boolean())
