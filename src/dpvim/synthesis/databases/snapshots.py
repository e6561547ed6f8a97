"""A table in a database at one moment, which all queries of a run see.

PostgreSQL has transactions that read one state of the database and can write nothing; so has
DuckDB. What Spark has instead is in `dpvim.synthesis.databases.spark`.
"""

from __future__ import annotations

from typing import Any, Protocol

from dpvim._extras import require
from dpvim.synthesis.databases.engines import DUCKDB, POSTGRES
from dpvim.synthesis.databases.errors import within_transaction
from dpvim.synthesis.databases.files import FilesAsTable

_BEGIN = {
    DUCKDB: ("BEGIN TRANSACTION",),
    POSTGRES: (
        "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY",
        # Texts of numbers and dates are the same whatever the user has set.
        "SET LOCAL extra_float_digits = 1",
        "SET LOCAL datestyle = 'ISO'",
        "SET LOCAL bytea_output = 'hex'",
        "SET LOCAL standard_conforming_strings = on",
    ),
}


class Snapshot(Protocol):
    """A table that stays as it is, or says that it does not."""

    @property
    def expression(self) -> Any:
        """The table, for Ibis."""

    def rows(self, text: str) -> list[Any]:
        """The rows of a query; private, and to be few."""

    def are_unchanged(self) -> bool:
        """True if files that the table is read from are as they were."""

    def close(self) -> None:
        """End it."""


class SnapshotInTransaction:
    """A table as a transaction of DuckDB's or PostgreSQL's sees it.

    Args:
        name: For messages.
        expression: The table, for Ibis.
        files: That DuckDB reads, if it does: a transaction does not hold them.
    """

    def __init__(self, name: str, expression: Any, files: FilesAsTable | None) -> None:
        self.expression, self._files = expression, files
        backend = expression.get_backend()
        self._connection = backend.con
        if backend.name == POSTGRES and not _is_idle(self._connection):
            raise within_transaction(name)
        first, *others = _BEGIN[backend.name]
        self._connection.execute(first)
        try:
            for statement in others:
                self._connection.execute(statement)
        except BaseException:
            self.close()
            raise

    def rows(self, text: str) -> list[Any]:
        """The rows of a query; private, and to be few."""
        return list(self._connection.execute(text).fetchall())

    def are_unchanged(self) -> bool:
        """True if the files are as they were, as far as their sizes and times tell."""
        return self._files is None or self._files.are_unchanged()

    def close(self) -> None:
        """End the transaction, which wrote nothing."""
        self._connection.execute("ROLLBACK")


def _is_idle(connection: Any) -> bool:
    psycopg = require("psycopg", extra="databases")
    idle = psycopg.pq.TransactionStatus.IDLE
    return bool(connection.info.transaction_status == idle and connection.autocommit)
