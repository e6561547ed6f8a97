"""Files as a table for DuckDB: CSV, Parquet, or a folder of Parquet files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from dpvim._extras import require
from dpvim.files import as_path, existing_file
from dpvim.fingerprint import data_digest, file_digest
from dpvim.synthesis.tables import TableError, csv_names, csv_options, delimiter_of, table_suffix


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
        csv: Delimiter and encoding of a CSV file; None for Parquet files.
    """

    _VIEW = "table_in_files"

    def __init__(self, place: Path, paths: list[Path], csv: tuple[str, str] | None) -> None:
        self._place, self._paths, self._csv = place, paths, csv
        self._seen = _look_at(paths)

    @classmethod
    def of(cls, place: str, *, delimiter: str | None, encoding: str | None) -> FilesAsTable:
        """The files at a place."""
        folder = as_path("table", place)
        paths = _in_folder(folder) if folder.is_dir() else [existing_file(place, error=TableError)]
        if folder.is_dir() or table_suffix(paths[0]) == ".parquet":
            if not (delimiter is None and encoding is None):
                raise TableError("delimiter, encoding: expected with a CSV file, got Parquet.")
            return cls(folder, paths, None)
        return cls(folder, paths, (delimiter or delimiter_of(folder), encoding or "utf-8"))

    def table_in(self, backend: Any) -> Any:
        """The table, for Ibis."""
        if self._csv is None:
            listed = ", ".join(_literal(str(path)) for path in self._paths)
            source = f"read_parquet([{listed}], hive_partitioning = false)"
            backend.con.execute(f"CREATE VIEW {self._VIEW} AS SELECT * FROM {source}")
            return backend.table(self._VIEW)
        # By Arrow's reader, as elsewhere: DuckDB's own has other ideas of quotes and empty lines.
        (path,) = self._paths
        names = csv_names(path, *self._csv)
        named = {str(place): name for place, name in enumerate(names) if name}
        options = csv_options(len(names), [str(place) for place in range(len(names))], *self._csv)
        options["convert_options"].include_columns = []  # data sets choose columns by themselves
        datasets = require("pyarrow.dataset", extra="tables")
        whole = datasets.dataset(path, format=datasets.CsvFileFormat(**options))
        backend.con.register(self._VIEW, whole)
        table = backend.table(self._VIEW)
        return table.select(**{name: table[place] for place, name in named.items()})

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


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
