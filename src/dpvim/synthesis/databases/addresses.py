"""Addresses of tables in databases, as one text: a place, and after ``#`` the name of a table.

>>> Address.of("postgresql://reader@db.example/clinic#public.patients").table
('public', 'patients')
>>> Address.of("clinic.duckdb#patients").engine
'duckdb'
>>> without_password("postgresql://reader:secret@db.example/clinic#patients")
'postgresql://reader:***@db.example/clinic#patients'
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from dpvim.synthesis.databases.engines import DUCKDB, POSTGRES
from dpvim.synthesis.tables import TableError

_POSTGRES = ("postgres://", "postgresql://")
_DUCKDB = "duckdb:"
_DATABASE_FILES = (".duckdb", ".ddb")
# Also of a URL that was taken for a path, which has one slash less.
_PASSWORD = re.compile(r"(\w+:/{1,2}[^\s/:@#?]*:)[^\s]*(?=@)")
_AS_OPTION = re.compile(r"([?&\s](?:ssl)?password=)[^\s&#]*", re.IGNORECASE)


class Address(NamedTuple):
    """A table's place.

    Attributes:
        engine: That reads it.
        location: A URL, or the name of a file or folder.
        table: Its name, after that of its schema if that was given; empty for files that are one
            table.
    """

    engine: str
    location: str
    table: tuple[str, ...]

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
        is_address = text.startswith((*_POSTGRES, _DUCKDB))
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


def _table(text: str, name: str) -> tuple[str, ...]:
    """Schema and table; a point or another sign within a name is written as in URLs: %2E."""
    parts = tuple(unquote(part) for part in name.split(".")) if name else ()
    if len(parts) > 2 or not all(parts) or any("\0" in part for part in parts):
        raise TableError(
            f"{without_password(text)}: expected table or schema.table after the #, got "
            f"{name!r}. Write a point within a name as %2E."
        )
    return parts
