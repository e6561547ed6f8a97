"""A table in a database, opened where it is: one snapshot that all queries of a run see.

Files that DuckDB or Spark reads are looked at before and after a query: if their sizes or times
changed, there is an error.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from dpvim._extras import LazyModule, require
from dpvim.fingerprint import data_digest
from dpvim.privacy.counts import Cells, Marginal
from dpvim.synthesis.databases.addresses import Address, without_password
from dpvim.synthesis.databases.counting import queries
from dpvim.synthesis.databases.engines import (
    ENGINES,
    POSTGRES,
    SPARK,
    row_hashes,
    told,
)
from dpvim.synthesis.databases.errors import (
    DatabaseError,
    InterruptedReadError,
    changed,
    errors_explained,
)
from dpvim.synthesis.databases.files import FilesAsTable
from dpvim.synthesis.databases.reading import Reader, layers
from dpvim.synthesis.databases.snapshots import Snapshot, SnapshotInTransaction
from dpvim.synthesis.databases.spark import (
    SnapshotInSpark,
    check_session,
    table_at,
    there_is,
    without_a_word,
)
from dpvim.synthesis.databases.spark_sessions import checked_pyspark, options_of, started
from dpvim.synthesis.marginals.grids import Grid
from dpvim.synthesis.schema import Schema
from dpvim.synthesis.tables import TableError, check_names

if TYPE_CHECKING:
    import ibis
else:
    ibis = LazyModule("ibis", extra="databases")

_WAIT = 15  # seconds for a connection, unless the address says otherwise
_UNCERTAIN = """
SELECT a.attname FROM pg_catalog.pg_attribute a
JOIN pg_catalog.pg_collation c ON c.oid = a.attcollation
WHERE a.attrelid = to_regclass(%s) AND a.attnum > 0 AND NOT c.collisdeterministic
"""


class DatabaseTable:
    """A table in a database, at the moment at which it was opened; see `open_table`.

    Args:
        name: For messages; without a password.
        expression: The table, as Ibis has it.
        files: That the table is read from, if it is.
        close: Called at the end.
    """

    def __init__(
        self,
        name: str,
        expression: Any,
        *,
        files: FilesAsTable | None = None,
        close: Callable[[], object] = lambda: None,
    ) -> None:
        self.name = name
        self._files, self._close = files, close
        self._backend = expression.get_backend()
        self.engine: str = self._backend.name
        self._is_open = True
        self._snapshot: Snapshot | None = None
        try:
            with errors_explained(name):
                self._snapshot = self._snapshot_of(expression)
                self.expression = self._snapshot.expression
                self.types: dict[str, Any] = dict(self.expression.schema().items())
            check_names(name, [*self.types])
            self.num_rows = int(self.query(self.expression.count().as_table())[0][0])
            if self.num_rows == 0:
                raise DatabaseError(f"{name}: expected at least one record, got a table of none.")
        except BaseException:
            self.close()
            raise

    def query(self, expression: Any) -> list[tuple[Any, ...]]:
        """The rows of an expression; private, and to be few."""
        if not self._is_open or self._snapshot is None:
            raise DatabaseError(f"{self.name}: expected a table that is open, got a closed one.")
        with errors_explained(self.name):
            self._check_unchanged(self._snapshot)
            with _layered():
                text = self._backend.compile(expression)
            rows = self._snapshot.rows(text)
            self._check_unchanged(self._snapshot)
        return [tuple(row) for row in rows]

    def readers(self, schema: Schema) -> list[Reader]:
        """Readers of the schema's columns; refuses those of other types."""
        check_names(self.name, [*self.types], schema.names)
        return [
            Reader.of(self.engine, place, column, schema, self.types[column.name])
            for place, column in enumerate(schema.columns)
        ]

    def counted(self, schema: Schema, grids: Sequence[Grid]) -> CountedByQueries:
        """The table as a source of counts; all that can be refused without counting is."""
        return CountedByQueries(self, self.readers(schema), grids)

    def digest(self) -> bytes:
        """A digest of what the table holds, whatever the order of its rows; private.

        Files are known by their bytes. Else hashes of rows are added up by the engine.
        """
        if self._files is not None:
            return self._files.digest()
        try:
            texts = [
                _told(self.engine, self.expression[name], dtype)
                for name, dtype in self.types.items()
            ]
            row: Any = texts[0]
            for text in texts[1:]:
                row = row + text
            hashed = self.expression.select(row=row)
            sums = hashed.aggregate(
                **{
                    f"h{i}": each.cast("decimal(38, 0)").sum()
                    for i, each in enumerate(row_hashes(self.engine, hashed.row))
                }
            )
            found = self.query(sums)[0]
        except InterruptedReadError:
            raise
        except TableError as error:
            raise DatabaseError(
                f"{error} A ledger or checkpoint knows a table by all of its columns: make a view "
                "of those that can be read."
            ) from None
        about = [f"{name}: {dtype}" for name, dtype in self.types.items()]
        return data_digest([self.engine, about, self.num_rows, [str(each) for each in found]])

    def close(self) -> None:
        """End the snapshot, and the connection if it was made here."""
        if not self._is_open:
            return
        self._is_open = False
        with contextlib.suppress(Exception):  # it may be lost
            if self._snapshot is not None:
                self._snapshot.close()
        with contextlib.suppress(Exception):
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"DatabaseTable({self.name!r})"

    def __reduce__(self) -> Any:
        raise TypeError("a table in a database is not copied or stored: it is a connection.")

    def _snapshot_of(self, expression: Any) -> Snapshot:
        if self.engine == SPARK:
            text = self._backend.compile(expression)
            return SnapshotInSpark(self.name, self._backend._session, text)
        return SnapshotInTransaction(self.name, expression, self._files)

    def _check_unchanged(self, snapshot: Snapshot) -> None:
        if not snapshot.are_unchanged():
            raise changed(self.name)


class CountedByQueries:
    """A source of counts: a table in a database, counted by one query for many marginals."""

    def __init__(
        self, table: DatabaseTable, readers: Sequence[Reader], grids: Sequence[Grid]
    ) -> None:
        self._table, self._readers, self._grids = table, readers, grids
        # Rights and types are checked by the engine when it plans a query, also one of no rows.
        table.query(layers(table.expression, readers).limit(0))

    def count(self, cells: Cells, marginals: Sequence[Marginal]) -> list[np.ndarray]:
        """Exact counts; private."""
        found: list[np.ndarray] = []
        table = self._table
        for query in queries(table.expression, self._readers, self._grids, cells, marginals):
            found += query.arrays(table.query(query.expression))
        if any(int(each.sum()) != table.num_rows for each in found):
            raise changed(table.name)
        return found


def open_table(
    source: Any, *, delimiter: str | None = None, encoding: str | None = None
) -> DatabaseTable:
    """Open a table where it is: all that is asked of it afterwards is of this moment.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> _ = Path(folder.name, "people.csv").write_text("age,smokes\\n31,no\\n45,yes\\n")
    >>> with open_table(f"duckdb:{folder.name}/people.csv") as table:
    ...     table.num_rows
    2
    >>> folder.cleanup()

    Args:
        source: ``postgresql://user@host/database#schema.table``; ``clinic.duckdb#table``; a folder
            of Parquet files, or ``duckdb:`` and a CSV or Parquet file, which DuckDB reads and
            which need not fit the memory; ``spark://host:7077#schema.table``, or ``spark:`` and a
            folder; or a table of Ibis' in DuckDB, PostgreSQL or Spark.
        delimiter, encoding: Of a CSV file, as for `dpvim.read_table`.

    Returns:
        A table for `dpvim.synthesize`, to be closed: ``with dpvim.open_table(...) as table:``.
    """
    if not isinstance(source, str | os.PathLike):
        return _of_ibis(source)
    text = os.fspath(source)
    if not isinstance(text, str):
        raise TypeError("table: expected an address or a table of Ibis', got bytes.")
    address = Address.of(text)
    if (address.table or address.engine == SPARK) and not (delimiter is None and encoding is None):
        raise TableError(
            "delimiter, encoding: expected with a CSV file, got them with a table in a database."
        )
    if address.engine == POSTGRES:
        return _in_postgres(address, without_password(text))
    if address.engine == SPARK:
        return _in_spark(address, without_password(text))
    if address.table:
        return _in_duckdb(address, text)
    files = FilesAsTable.of(address.location, delimiter=delimiter, encoding=encoding)
    with errors_explained(text):
        backend = _duckdb(":memory:", read_only=False)
        expression = files.table_in(backend)
    return DatabaseTable(text, expression, files=files, close=backend.disconnect)


@contextlib.contextmanager
def _layered() -> Iterator[None]:
    """Queries are compiled layer by layer: else what is used often would be written as often."""
    options = ibis.options.sql
    before, options.fuse_selects = options.fuse_selects, False
    try:
        yield
    finally:
        options.fuse_selects = before


def _told(engine: str, value: Any, dtype: Any) -> Any:
    """A value as a text that no other value has, also before others."""
    text = told(engine, value, dtype)
    return text.isnull().ifelse("n", ibis.literal("v") + text.length().cast("string") + ":" + text)


def _in_postgres(address: Address, shown: str) -> DatabaseTable:
    psycopg = require("psycopg", extra="databases")
    require("ibis", extra="databases")
    try:
        options = psycopg.conninfo.conninfo_to_dict(address.location)
    except psycopg.Error:
        raise DatabaseError(
            f"{shown}: expected an address such as postgresql://user@host/database#table. Signs "
            "within a name or password are written as in URLs: %40 for @."
        ) from None
    options = {"connect_timeout": _WAIT, "application_name": "dpvim"} | options
    with errors_explained(shown), contextlib.ExitStack() as opened:
        connection = psycopg.connect(**options, client_encoding="UTF8", autocommit=True)
        opened.callback(connection.close)
        if connection.info.parameter_status("server_encoding") != "UTF8":
            raise DatabaseError(
                f"{shown}: expected a database in UTF8, got one in another encoding, whose texts "
                "would be other ones."
            )
        backend = ibis.postgres.from_connection(connection)
        *schema, name = address.table
        expression = backend.table(name, database=schema[0] if schema else None)
        _check_collations(connection, backend, address, shown)
        opened.pop_all()
    return DatabaseTable(shown, expression, close=connection.close)


def _check_collations(connection: Any, backend: Any, address: Address, shown: str) -> None:
    """Refuse columns for whose texts equal is not the same: their cells would be other ones."""
    quoted = ".".join('"' + part.replace('"', '""') + '"' for part in address.table)
    found = [row[0] for row in connection.execute(_UNCERTAIN, (quoted,)).fetchall()]
    if found:
        raise DatabaseError(
            f"{shown}: expected texts that are equal only if they are the same, got a collation "
            f"that says otherwise in {', '.join(map(repr, found))}. Make a view with COLLATE "
            '"C" for them.'
        )


def _duckdb(path: str, *, read_only: bool) -> Any:
    require("duckdb", extra="databases")
    backend = ibis.duckdb.connect(path, read_only=read_only)
    for setting in ("autoinstall_known_extensions", "autoload_known_extensions"):
        backend.con.execute(f"SET {setting} = false")  # nothing is fetched from elsewhere
    return backend


def _in_duckdb(address: Address, shown: str) -> DatabaseTable:
    if not Path(address.location).is_file():
        raise FileNotFoundError(f"{address.location}: there is no such file.")
    with errors_explained(shown), contextlib.ExitStack() as opened:
        backend = _duckdb(address.location, read_only=True)
        opened.callback(backend.disconnect)
        *schema, name = address.table
        expression = backend.table(name, database=schema[0] if schema else None)
        opened.pop_all()
    return DatabaseTable(shown, expression, close=backend.disconnect)


def _in_spark(address: Address, shown: str) -> DatabaseTable:
    require("ibis", extra="databases")
    options = options_of(address.options)
    if not address.table:
        there_is(address.location)
    checked_pyspark()
    with contextlib.ExitStack() as opened, errors_explained(shown), without_a_word():
        session = opened.enter_context(started(shown, address.master, options))
        backend = ibis.pyspark.connect(session)
        expression = table_at(shown, backend, address.table, address.location)
        return DatabaseTable(shown, expression, close=opened.pop_all().close)


def _of_ibis(source: Any) -> DatabaseTable:
    """A table of Ibis', on the connection that it is on."""
    require("ibis", extra="databases")
    if not isinstance(source, ibis.Table):
        raise TypeError(
            f"table: expected an address or a table of Ibis', got {type(source).__name__}."
        )
    operations = ibis.expr.operations
    unstable = [
        getattr(operations, name)
        for name in ("RandomScalar", "RandomUUID", "Sample", "Limit", "ShuffleScalar")
        if hasattr(operations, name)
    ]
    if source.op().find(tuple(unstable)):
        raise DatabaseError(
            "table: expected one that is the same for every query, got an expression with a limit, "
            "a sample or random numbers. Store it as a table first."
        )
    if source.op().find(operations.InMemoryTable):
        raise DatabaseError("table: expected one in a database, got one in memory: pass the frame.")
    backend = source.get_backend()
    if backend.name not in ENGINES:
        raise DatabaseError(
            f"table: expected one in {' or '.join(ENGINES)}, got one in {backend.name}, "
            "where it is not tested that its cells are the same."
        )
    if backend.name == SPARK:
        checked_pyspark()
        check_session(backend)
    return DatabaseTable("table of Ibis", source)
