"""Errors of databases, in words of ours: those of engines may quote values, and are not shown."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

from dpvim.synthesis.databases.addresses import without_password
from dpvim.synthesis.databases.spark import (
    CHANGED,
    FORBIDDEN,
    LOST,
    MISSING,
    is_sparks,
    trouble_of,
)
from dpvim.synthesis.tables import TableError


class DatabaseError(TableError):
    """A database does not give what was asked for."""


class InterruptedReadError(DatabaseError):
    """A table changed, or its connection was lost, while it was read."""


def changed(name: str) -> InterruptedReadError:
    """The error for a table that is not what it was when it was opened."""
    return InterruptedReadError(
        f"{name}: expected a table that stays as it is, got one that changed during the run. Run "
        "again when nobody writes to it. No counts of it were released."
    )


def within_transaction(name: str) -> DatabaseError:
    """The error for a connection whose transaction is somebody else's."""
    return DatabaseError(
        f"{name}: expected a connection outside of a transaction, as Ibis makes them, since all "
        "queries are to see one snapshot, got one within. End it first."
    )


@contextlib.contextmanager
def errors_explained(name: str) -> Iterator[None]:
    """Say what is wrong with a database in words of ours: those of engines may quote values."""
    try:
        with warnings.catch_warnings():
            # Ibis calls its engines in ways that newer ones deprecate.
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    except (TableError, FileNotFoundError):
        raise
    except Exception as error:
        explained = _explanation(name, error)
        if explained is None:
            raise
        raise explained from None


def _explanation(name: str, error: Exception) -> DatabaseError | None:
    kinds = {each.__name__: each.__module__ for each in type(error).__mro__}
    state = getattr(error, "sqlstate", None)
    trouble = trouble_of(error) if is_sparks(error) else None
    if trouble == CHANGED:
        return changed(name)
    if trouble == FORBIDDEN or "InsufficientPrivilege" in kinds or "PermissionException" in kinds:
        return DatabaseError(
            f"{name}: may not be read by this user. Ask for the right: GRANT SELECT on the table, "
            "or on the columns of the schema."
        )
    if trouble == MISSING or kinds.keys() & {
        "TableNotFound",
        "UndefinedTable",
        "CatalogException",
        "InvalidSchemaName",
    }:
        return DatabaseError(
            f"{name}: there is no such table, or this user may not see it. Correct the name after "
            "the #; it is spelt as the database spells it."
        )
    if trouble == LOST:
        return InterruptedReadError(
            f"{name}: the connection to Spark was lost. Check that its master and workers run, and "
            "run again. Nothing was released by this query."
        )
    if "TransactionException" in kinds and "within a transaction" in str(error):
        return within_transaction(name)
    if "OperationalError" in kinds and kinds["OperationalError"].startswith("psycopg"):
        return InterruptedReadError(
            f"{name}: the connection failed or was lost ({_first_line(error)}). Check address, "
            "user and password, and run again. Nothing was released by this query."
        )
    ours = ("psycopg", "duckdb", "_duckdb", "pyspark", "py4j", "ibis", "sqlglot")
    if any(module.split(".")[0] in ours for module in kinds.values()) or isinstance(
        error, OSError | OverflowError | TypeError | ValueError
    ):
        about = type(error).__name__ + (f", {state}" if state else "")
        return DatabaseError(
            f"{name}: expected a table that can be queried, got an error of the engine ({about}). "
            "Its message may quote values and is not shown; the engine's log has it."
        )
    return None


def _first_line(error: Exception) -> str:
    """The sentence about a connection; it names host and user, no values."""
    text = without_password(str(error)).strip() or type(error).__name__
    return text.splitlines()[0][:200]
