"""Counts that a database makes: the same release as from memory, and one record's share of it.

The engine is DuckDB, in this process; without the extra ``databases`` there is nothing to attack.
Others can be given.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from dpvim._extras import require
from dpvim.audit.counts.target import CHECK, SLACK, make_plan
from dpvim.audit.findings import Finding
from dpvim.privacy.counts import (
    Cells,
    CountMechanism,
    InPieces,
    Marginal,
    SourceOfCounts,
    count_cells,
    record_weights,
)
from dpvim.privacy.randomness import SecretStreams
from dpvim.synthesis.databases.connection import open_table
from dpvim.synthesis.databases.errors import errors_explained
from dpvim.synthesis.encoding import encode
from dpvim.synthesis.marginals.grids import grid_of
from dpvim.synthesis.marginals.release import codes_of
from dpvim.synthesis.schema import Categorical, Integer, Real, Schema

_SCHEMA = Schema(
    (
        Categorical(name="region", levels=("north", "o'east", "south"), nullable=True),
        Integer(name="age", lower=0, upper=9, not_a_number=4),
        Real(name="grade", lower=0.0, upper=1.0, decimals=1, nullable=True),
    )
)
# A table of Arrow's, for a block, as `open_table` takes it.
Put: TypeAlias = Callable[[Any], AbstractContextManager[Any]]
_GRIDS = [grid_of(column) for column in _SCHEMA.columns]
_CELLS = Cells(tuple(np.arange(grid.num_cells) for grid in _GRIDS))
_MARGINALS = [
    Marginal(columns, 2.0 if 0 in columns else 1.0)
    for size in (1, 2)
    for columns in itertools.combinations(range(len(_GRIDS)), size)
]
# Text, number as text, and number: such as engines read differently, or leave out.
_CANARIES: dict[str, tuple[Any, Any, Any]] = {
    "ordinary": ("south", "7", 0.5),
    "nothing": (None, None, None),
    "an unknown level": ("West", "12", 1.5),
    "texts that are none": ("", "1e400", -math.inf),
    "no number": ("'; DROP TABLE people; --", "x", math.nan),
}
_OTHERS = [("north", "1", 0.1), ("o'east", "5", 0.95), (None, "9.5", 0.5), ("?", "", None)]


def database_checks(put: Put | None = None) -> Iterator[Finding]:
    """Rules that hold for every table, if there is an engine to ask.

    Args:
        put: Puts a table into an engine, for a block; into DuckDB if it is not given.
    """
    if put is None and not all(map(_is_installed, ("ibis", "duckdb"))):
        return
    yield _same_release(put or _in_duckdb)
    yield _share_of_one_record(put or _in_duckdb)


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:
        return False


def _same_release(put: Put) -> Finding:
    """Counts by queries and by pieces are the same, without noise and with it."""
    rows = [*_OTHERS, *_CANARIES.values()]
    pieces = _in_pieces(rows)
    try:
        by_queries = _released(put, rows, None)
        exact = np.concatenate(
            [each.ravel() for each in count_cells(pieces.pieces(), _CELLS, _MARGINALS)]
        )
        same = np.array_equal(by_queries, _released(put, rows, pieces))
        # Noise of a standard deviation above one leaves few counts as they are.
        kept = float(np.mean(by_queries == exact))
        observed = f"{'the same' if same else 'another'} release, {kept:.0%} of counts exact"
        holds = same and kept < 0.5
    except (ValueError, IndexError) as error:
        observed, holds = type(error).__name__, False
    return Finding.rule(CHECK, "a database's counts", observed, holds=holds)


def _share_of_one_record(put: Put) -> Finding:
    """With a record and without it, the noise being the same."""
    plan = make_plan(100)
    weights = record_weights(_MARGINALS, share=1.0, norm=plan.clip_norm)
    sizes = [math.prod(_CELLS.sizes[c] for c in each.columns) for each in _MARGINALS]
    scale = np.repeat(weights, sizes)
    found = {}
    without = _released_or_error(put, _OTHERS)
    for name, canary in _CANARIES.items():
        shift = scale * (_released_or_error(put, [*_OTHERS, canary]) - without)
        found[name] = float(np.linalg.norm(shift))
    name = max(found, key=lambda each: math.inf if math.isnan(found[each]) else found[each])
    observed = f"at most {found[name]:.6f} C ({name})"
    holds = found[name] <= 1 + SLACK
    return Finding.rule(CHECK, "share of one record in a database", observed, holds=holds)


def _released_or_error(put: Put, rows: Sequence[tuple[Any, ...]]) -> np.ndarray:
    """A release; a table that is an error is far from all."""
    try:
        return _released(put, rows, None)
    except (ValueError, IndexError):
        return np.array(np.nan)


def _released(
    put: Put, rows: Sequence[tuple[Any, ...]], source: SourceOfCounts | None
) -> np.ndarray:
    """All counts with noise that is the same at every call; by queries if no source is given."""
    if source is not None:
        mechanism = CountMechanism(make_plan(100), SecretStreams(0), source)
        answer = mechanism.release(_CELLS, _MARGINALS, share=1.0)
        return np.concatenate([each.counts.ravel() for each in answer]).astype(float)
    pa = require("pyarrow", extra="tables")
    names, types = _SCHEMA.names, ("string", "string", "float64")
    columns = zip(*rows, strict=True)
    arrays = [pa.array(each, kind) for each, kind in zip(columns, types, strict=True)]
    with put(pa.table(arrays, names=names)) as people, open_table(people) as table:
        return _released(put, rows, table.counted(_SCHEMA, _GRIDS))


@contextlib.contextmanager
def _in_duckdb(table: Any) -> Iterator[Any]:
    connection = require("duckdb", extra="databases").connect()
    try:
        connection.register("given", table)
        connection.execute("CREATE TABLE people AS SELECT * FROM given")
        with errors_explained("people"):
            people = require("ibis", extra="databases").duckdb.from_connection(connection)
            people = people.table("people")
        yield people
    finally:
        connection.close()


def _in_pieces(rows: Sequence[tuple[Any, ...]]) -> InPieces:
    frame = pd.DataFrame(rows, columns=_SCHEMA.names)
    frame = frame.astype({"region": "string", "age": "string", "grade": float})
    return InPieces(lambda: [codes_of(encode(frame, _SCHEMA), _SCHEMA, _GRIDS)])
