"""Addresses of tables in databases, as one text: a place, and after ``#`` the name of a table.

>>> Address.of("postgresql://reader@db.example/clinic#public.patients").table
('public', 'patients')
>>> Address.of("clinic.duckdb#patients").engine
'duckdb'
>>> Address.of("spark://spark.example:7077#clinic.patients").table
('clinic', 'patients')
>>> without_password("postgresql://reader:secret@db.example/clinic#patients")
'postgresql://reader:***@db.example/clinic#patients'
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from dpvim.synthesis.databases.engines import DUCKDB, POSTGRES, SPARK
from dpvim.synthesis.tables import TableError

_POSTGRES = ("postgres://", "postgresql://")
_DUCKDB = "duckdb:"
_DATABASE_FILES = (".duckdb", ".ddb")
_SPARK = "spark:"
# Where Spark may run: else what follows is a path, which Spark reads on this machine.
_MASTER = re.compile(r"spark://[^/]+|local(\[[^]]*\])?|yarn|k8s://.+")
_HERE = "local[*]"
# Also of a URL that was taken for a path, which has one slash less.
_PASSWORD = re.compile(r"(\w+:/{1,2}[^\s/:@#?]*:)[^\s]*(?=@)")
_AS_OPTION = re.compile(
    r"([?&\s][\w.-]*(?:password|secret|token|key)[\w.-]*=)[^\s&#]*", re.IGNORECASE
)


class Address(NamedTuple):
    """A table's place.

    Attributes:
        engine: That reads it.
        location: A URL, or the name of a file or folder.
        table: Its name, after that of its schema if that was given; empty for files that are one
            table.
        master: Where Spark runs.
        options: Of Spark's, as they were written.
    """

    engine: str
    location: str
    table: tuple[str, ...]
    master: str = ""
    options: str = ""

    @classmethod
    def of(cls, text: str) -> Address:
        """Read an address."""
        location, _, name = text.partition("#")
        if location.startswith(_POSTGRES):
            table = _table(text, name)
            if not table:
                raise TableError(
                    f"{without_password(text)}: expected the name of a table after the address, "
                    "got none. Write postgresql://user@host/database#schema.table."
                )
            return cls(POSTGRES, location, table)
        if location.startswith(_SPARK):
            return _in_spark(text, location, name)
        location = location.removeprefix(_DUCKDB)
        if location.lower().endswith(_DATABASE_FILES):
            table = _table(text, name)
            if not table:
                raise TableError(
                    f"{text}: expected the name of a table after that of the database, got none. "
                    f"Write {Path(location).name}#table."
                )
            return cls(DUCKDB, location, table)
        return cls(DUCKDB, text.removeprefix(_DUCKDB), ())

    def __repr__(self) -> str:
        return f"Address({without_password(self.location)!r}, {self.table!r})"


def is_database(source: Any) -> bool:
    """True for what is read by queries: addresses, folders, and tables of Ibis'."""
    if isinstance(source, str | os.PathLike):
        text = os.fspath(source)
        if not isinstance(text, str):
            return False
        place = text.partition("#")[0]
        is_address = text.startswith((*_POSTGRES, _DUCKDB, _SPARK))
        return is_address or place.lower().endswith(_DATABASE_FILES) or _is_folder(text)
    return type(source).__module__.startswith("ibis.")


def without_password(text: str) -> str:
    """A text in which the passwords of addresses are replaced by stars."""
    return _AS_OPTION.sub(r"\1***", _PASSWORD.sub(r"\1***", text))


def _is_folder(text: str) -> bool:
    try:
        return os.path.isdir(text)
    except ValueError:
        return False


def _in_spark(text: str, location: str, name: str) -> Address:
    """``spark:path``, or ``spark:master?options#table``, the master of a URL being the URL."""
    place = location if location.startswith(f"{_SPARK}//") else location.removeprefix(_SPARK)
    master, _, options = place.partition("?")
    if not _MASTER.fullmatch(master):
        if place.startswith(_SPARK) or not place:
            raise TableError(
                f"{without_password(text)}: expected spark://host:7077#table, or spark: and a "
                "folder of Parquet files, got another address."
            )
        return Address(SPARK, text.removeprefix(_SPARK), (), _HERE)
    if "/" in name:
        return Address(SPARK, name, (), master, options)
    table = _table(text, name, most=3)
    if not table:
        raise TableError(
            f"{without_password(text)}: expected the name of a table after the address, got none. "
            "Write spark://host:7077#schema.table, or a path with a slash instead of the name."
        )
    return Address(SPARK, master, table, master, options)


def _table(text: str, name: str, most: int = 2) -> tuple[str, ...]:
    """Schema and table; a point or another sign within a name is written as in URLs: %2E."""
    parts = tuple(unquote(part) for part in name.split(".")) if name else ()
    if len(parts) > most or not all(parts) or any("\0" in part for part in parts):
        raise TableError(
            f"{without_password(text)}: expected table or schema.table after the #, got "
            f"{name!r}. Write a point within a name as %2E."
        )
    return parts
