"""Tables in engines, and what they are compared with: the encoder of this process."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import spark_session

from dpvim.privacy.counts import Cells, Marginal, count_cells
from dpvim.synthesis.encoding import encode
from dpvim.synthesis.marginals.grids import grid_of
from dpvim.synthesis.marginals.release import codes_of
from dpvim.synthesis.schema import Schema

TYPES = {
    "string": "text",
    "int64": "bigint",
    "double": "double precision",
    "float": "real",
    "bool": "boolean",
    "date32[day]": "date",
    "timestamp[us]": "timestamp",
}


def frame_of(table: pa.Table) -> pd.DataFrame:
    """A table as `read_table` gives it."""
    return table.to_pandas(types_mapper=pd.ArrowDtype)


def in_postgres(server: str, table: pa.Table, name: str = "records") -> str:
    """Put a table into a server; its address."""
    quoted = '"' + name.replace('"', '""') + '"'
    columns = []
    for field in table.schema:
        kind = "numeric" if pa.types.is_decimal(field.type) else TYPES[str(field.type)]
        columns.append('"' + field.name.replace('"', '""') + f'" {kind}')
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"DROP TABLE IF EXISTS {quoted}")
        connection.execute(f"CREATE TABLE {quoted} ({', '.join(columns)})")
        with connection.cursor() as cursor, cursor.copy(f"COPY {quoted} FROM STDIN") as copy:
            for row in zip(*(column.to_pylist() for column in table.columns), strict=True):
                copy.write_row(row)
    return f"{server}#{name.replace('%', '%25').replace('.', '%2E')}"


def in_parquet(folder: Path, table: pa.Table) -> str:
    """Put a table into a folder of two Parquet files; its address."""
    folder.mkdir(parents=True, exist_ok=True)
    half = table.num_rows // 2
    pq.write_table(table.slice(0, half), folder / "a.parquet")
    pq.write_table(table.slice(half), folder / "b.parquet")
    return str(folder)


def in_spark(folder: Path, table: pa.Table) -> str:
    """Put a table into a folder for the session of the tests; its address."""
    return spark_session.address(in_parquet(folder, table))


def questions(schema: Schema, intervals: int = 20) -> tuple[list[Any], Cells, list[Marginal]]:
    """Grids, fine cells, and all columns and pairs of neighbours."""
    grids = [grid_of(column, intervals) for column in schema.columns]
    cells = Cells(tuple(np.arange(grid.num_cells) for grid in grids))
    places = range(len(grids))
    asked = [Marginal((i,)) for i in places]
    asked += [Marginal(pair) for pair in itertools.pairwise(places)]
    return grids, cells, asked


def expected(frame: pd.DataFrame, schema: Schema, intervals: int = 20) -> list[np.ndarray]:
    """Counts by the encoder of this process."""
    grids, cells, asked = questions(schema, intervals)
    return count_cells([codes_of(encode(frame, schema), schema, grids)], cells, asked)


def counted(table: Any, schema: Schema, intervals: int = 20) -> list[np.ndarray]:
    """Counts by an engine."""
    grids, cells, asked = questions(schema, intervals)
    return table.counted(schema, grids).count(cells, asked)


def differing(schema: Schema, found: list[np.ndarray], wanted: list[np.ndarray]) -> list[Any]:
    """Columns, or pairs of them, whose counts are not the same, and where."""
    _, _, asked = questions(schema)
    return [
        ([schema.names[c] for c in each.columns], np.argwhere(a != b).tolist())
        for each, a, b in zip(asked, found, wanted, strict=True)
        if not np.array_equal(a, b)
    ]
