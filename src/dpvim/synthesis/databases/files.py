"""Files as a table for DuckDB: CSV, Parquet, or a folder of Parquet files."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any, NamedTuple

from dpvim.files import as_path, existing_file
from dpvim.fingerprint import data_digest, file_digest
from dpvim.synthesis.tables import TableError, csv_names, delimiter_of, table_suffix

_ENCODINGS = {"utf-8": "utf-8", "utf8": "utf-8", "latin-1": "latin-1", "iso-8859-1": "latin-1"}


class _Seen(NamedTuple):
    """A file as it is now, as far as the system tells without reading it."""

    path: str
    size: int
    changed: int
    number: int


class FilesAsTable:
    """Files that DuckDB reads as one table.

    Args:
        place: The file, or the folder.
        paths: The files, in their order.
        query: The table, as DuckDB's SQL.
        names: Of the columns, by those in the query; None if they are the same.
    """

    VIEW = "table_in_files"

    def __init__(
        self, place: Path, paths: list[Path], query: str, names: dict[str, str] | None
    ) -> None:
        self._place, self._query, self._names = place, query, names
        self._seen = _look_at(paths)

    @classmethod
    def of(cls, place: str, *, delimiter: str | None, encoding: str | None) -> FilesAsTable:
        """The files at a place."""
        folder = as_path("table", place)
        paths = _in_folder(folder) if folder.is_dir() else [existing_file(place, error=TableError)]
        if folder.is_dir() or table_suffix(paths[0]) == ".parquet":
            if not (delimiter is None and encoding is None):
                raise TableError("delimiter, encoding: expected with a CSV file, got Parquet.")
            listed = ", ".join(_literal(str(path)) for path in paths)
            return cls(folder, paths, f"read_parquet([{listed}], hive_partitioning = false)", None)
        return cls(folder, paths, *_csv(paths[0], delimiter, encoding))

    def as_view(self) -> str:
        """A statement that makes the table."""
        return f"CREATE VIEW {self.VIEW} AS SELECT * FROM {self._query}"

    def columns_of(self, table: Any) -> Any:
        """The table with its columns' names."""
        if self._names is None:
            return table
        return table.select(**{name: table[place] for place, name in self._names.items()})

    def are_unchanged(self) -> bool:
        """True if the files are as they were, as far as their sizes and times tell."""
        paths = _in_folder(self._place) if self._place.is_dir() else [self._place]
        try:
            return _look_at(paths) == self._seen
        except OSError:
            return False

    def digest(self) -> bytes:
        """Of a file as `file_digest`; of a folder that of its files' names and digests."""
        if not self._place.is_dir():
            return file_digest(self._place)
        return data_digest([[path.name, file_digest(path)] for path in _in_folder(self._place)])


def _in_folder(folder: Path) -> list[Path]:
    """Parquet files in a folder; hidden ones, and marks of programs, are none."""
    found = sorted(
        path
        for path in folder.iterdir()
        if path.name.lower().endswith(".parquet")
        and not path.name.startswith((".", "_"))
        and path.is_file()
    )
    if not found:
        raise TableError(f"{folder}: expected a folder of .parquet files, got one with none.")
    return found


def _look_at(paths: list[Path]) -> list[_Seen]:
    found = [(path, os.stat(path)) for path in paths]
    return [_Seen(str(path), s.st_size, s.st_mtime_ns, s.st_ino) for path, s in found]


def _csv(path: Path, delimiter: str | None, encoding: str | None) -> tuple[str, dict[str, str]]:
    known = _ENCODINGS.get((encoding or "utf-8").lower())
    if known is None:
        raise TableError(
            f"encoding: expected 'utf-8' or 'latin-1', which DuckDB reads, got {encoding!r}. Give "
            "the file without duckdb: before it."
        )
    delimiter = delimiter or delimiter_of(path)
    names = csv_names(path, delimiter, encoding or "utf-8")
    columns = ", ".join(f"'c{place}': 'VARCHAR'" for place in range(len(names)))
    options = {
        "delim": _literal(delimiter),
        "columns": f"{{{columns}}}",
        "header": "true",
        "auto_detect": "false",  # what a value is must not depend on others
        "quote": "'\"'",
        "escape": "'\"'",
        "nullstr": _literal(secrets.token_hex(16)),  # an empty text is a text
        "encoding": _literal(known),
        "compression": "'gzip'" if path.name.lower().endswith(".gz") else "'none'",
    }
    listed = ", ".join(f"{name} = {value}" for name, value in options.items())
    named = {f"c{place}": name for place, name in enumerate(names) if name}
    return f"read_csv({_literal(str(path))}, {listed})", named


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
