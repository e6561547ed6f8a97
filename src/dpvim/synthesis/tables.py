"""Tables as files: CSV and Parquet, read whole and written piece by piece.

Errors come from what a file is: its header, its form, its encoding. They are for the holder of the
table, and quote names of columns but no values.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import difflib
import gzip
import os
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import pandas as pd

from dpvim._extras import LazyModule
from dpvim._validate import shown
from dpvim.files import as_path, existing_file, new_file
from dpvim.synthesis.formulas import SIGNS, check_rule, is_formula, quoted, refusal

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.csv as pyarrow_csv
    import pyarrow.parquet as pq
else:
    pa = LazyModule("pyarrow", extra="tables")
    pc = LazyModule("pyarrow.compute", extra="tables")
    pyarrow_csv = LazyModule("pyarrow.csv", extra="tables")
    pq = LazyModule("pyarrow.parquet", extra="tables")

_DELIMITERS = {",": "a comma", ";": "a semicolon", "\t": "a tab", "|": "a bar"}
_NO_TEXTS = ("integer", "floating", "decimal", "boolean", "null", "temporal")
# Rows of a piece of a table that is read piece by piece.
_PIECE_ROWS = 250_000
_SUFFIXES = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".parquet")
# A file of a few kilobytes could unfold to more than the memory. Compressed tables are five to
# fifty times as large; those that unfold to less than the first number are read in any case.
_ALWAYS_READ = 256 * 2**20
_MOST_EXPANSION = 200
_BLOCK = 2**20
_BOUND_OF_DEFLATE = 1032  # it makes nothing smaller than by this


class TableError(ValueError):
    """The table, as a whole, is not what was asked for."""


def read_table(
    path: str | os.PathLike[str],
    *,
    columns: Sequence[str] | None = None,
    delimiter: str | None = None,
    encoding: str | None = None,
) -> pd.DataFrame:
    r"""Read a table from a CSV, TSV (both may be gzipped) or Parquet file.

    Values of CSV files stay texts: what they mean is for the schema to say. Names lose the blanks
    around them; columns without a name are left out.

    Args:
        path: The suffix says what the file is.
        columns: Names of the columns to read; all of them if None.
        delimiter: What separates fields; a comma for .csv, a tab for .tsv if None.
        encoding: Of the text; UTF-8 if None.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "codes.csv"
    ...     _ = path.write_text("code,age\n01,30\n")
    ...     read_table(path)["code"].tolist()
    ['01']
    """
    source = as_path("path", path)
    suffix = table_suffix(source)
    existing_file(source, error=TableError)
    columns = _wanted(columns)
    if suffix == ".parquet":
        table = _read_parquet(source, columns)
    else:
        table = _read_csv(source, columns, delimiter or _delimiter(suffix), encoding or "utf-8")
    if table.num_rows == 0:
        raise TableError(f"{source}: expected at least one record, got a header and no rows.")
    if columns is not None:
        table = table.select(list(columns))
    return _frame(source, table)


def read_pieces(
    path: str | os.PathLike[str],
    *,
    columns: Sequence[str] | None = None,
    delimiter: str | None = None,
    encoding: str | None = None,
) -> Iterator[pd.DataFrame]:
    """Read a table piece by piece: Parquet files need not fit the memory. Others are read whole.

    Args:
        path, columns, delimiter, encoding: As for `read_table`.
    """
    source = as_path("path", path)
    if table_suffix(source) != ".parquet" or not source.is_file():
        yield read_table(path, columns=columns, delimiter=delimiter, encoding=encoding)
        return
    columns = _wanted(columns)
    with _parquet_errors_explained(source):
        file = _opened_parquet(source, columns)
        names = list(columns) if columns is not None else file.schema_arrow.names
        if file.metadata.num_rows == 0:
            raise TableError(f"{source}: expected at least one record, got a header and no rows.")
        for batch in file.iter_batches(_PIECE_ROWS, columns=names):
            yield _frame(source, pa.table(batch).select(names))


def write_table(
    frames: pd.DataFrame | Iterable[pd.DataFrame],
    path: str | os.PathLike[str],
    *,
    delimiter: str | None = None,
    missing: str = "",
    formulas: str = "refuse",
) -> None:
    """Write a table, or its pieces one after the other, as CSV, TSV or Parquet.

    An existing file is replaced only when the new one is complete.

    Args:
        frames: All pieces have the same columns.
        path: The suffix says what to write, as for `read_table`.
        delimiter: As for `read_table`.
        missing: The text that stands for a missing value in CSV files.
        formulas: What becomes of texts in CSV files that spreadsheets would run: ``refuse``,
            ``quote`` (an apostrophe before them) or ``allow``.
    """
    check_rule(formulas)
    target = Path(path)
    suffix = table_suffix(target)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{target.parent}: there is no such folder. Create it first.")
    pieces = _pieces(target, [frames] if isinstance(frames, pd.DataFrame) else frames)
    with new_file(target) as incomplete:
        if suffix == ".parquet":
            _write_parquet(pieces, incomplete)
            return
        marker = missing
        if formulas != "allow":
            pieces = (_without_formulas(target, piece, missing, formulas) for piece in pieces)
            marker = quoted(missing)
        with _opened(incomplete, "wt", "utf-8") as stream:
            stream.writelines(_csv_lines(pieces, delimiter or _delimiter(suffix), marker))


def is_any_of(arrow_type: pa.DataType, kinds: Iterable[str]) -> bool:
    """Test a type of Arrow's against kinds such as "integer" or "string"."""
    return any(getattr(pa.types, f"is_{kind}")(arrow_type) for kind in kinds)


def table_suffix(path: Path) -> str:
    """The suffix that says what a file of a table is."""
    name = path.name.lower()
    for suffix in _SUFFIXES:
        if name.endswith(suffix):
            return suffix
    raise TableError(
        f"{path}: expected a file that ends in one of {', '.join(_SUFFIXES)}, got "
        f"{''.join(path.suffixes[-2:]) or 'no suffix'!r}. Rename or convert it."
    )


def _opened(path: Path, mode: str, encoding: str) -> IO[str]:
    """A file as text, compressed if its name says so."""
    opener: Any = partial(gzip.open, compresslevel=6) if _is_compressed(path) else open
    options = {"encoding": encoding, "errors": "surrogateescape", "newline": ""}
    return cast(IO[str], opener(path, mode, **options))


def _is_compressed(path: Path) -> bool:
    return path.name.lower().endswith(".gz")


def _delimiter(suffix: str) -> str:
    return "\t" if suffix.startswith(".tsv") else ","


def _read_parquet(source: Path, columns: Sequence[str] | None) -> pa.Table:
    with _parquet_errors_explained(source):
        file = _opened_parquet(source, columns)
        return file.read(columns=None if columns is None else list(columns))


def _opened_parquet(source: Path, columns: Sequence[str] | None) -> pq.ParquetFile:
    """A file whose names and sizes are what they should be; nothing of its rows is read yet."""
    file = pq.ParquetFile(source)
    about, size = file.metadata, source.stat().st_size
    # Runs of equal values are kept as their length: what is read has a byte for each at least.
    groups = (about.row_group(i).total_byte_size for i in range(about.num_row_groups))
    unfolded = max(sum(groups), about.num_rows * about.num_columns)
    _check_unfolded(source, unfolded, size)
    check_names(source, file.schema_arrow.names, columns)
    return file


def _check_unfolded(source: Path, unfolded: int, size: int) -> None:
    if unfolded > max(_ALWAYS_READ, _MOST_EXPANSION * size):
        raise TableError(
            f"{source}: expected a table, got a file of {size / 2**20:,.1f} MB that unfolds to "
            f"{unfolded / 2**20:,.0f} MB or more. It is not read; if it is what it should be, "
            "write it as CSV without compression."
        )


def _check_gzip(source: Path) -> None:
    """Refuse a file that unfolds to far more than a table does, before any of it is kept.

    What gzip says of its size it says modulo 4 GB, and may be a lie: it is counted.
    """
    size, unfolded = source.stat().st_size, 0
    if size * _BOUND_OF_DEFLATE <= _ALWAYS_READ:
        return
    with gzip.open(source, "rb") as stream:
        while block := stream.read(_BLOCK):
            unfolded += len(block)
            _check_unfolded(source, unfolded, size)


def _wanted(columns: Sequence[str] | None) -> Sequence[str] | None:
    """Names of columns to read: at least one, every one once."""
    if columns is None:
        return None
    given = [] if isinstance(columns, str) or not isinstance(columns, Iterable) else [*columns]
    if not given or not all(isinstance(name, str) for name in given):
        raise TableError(f"columns: expected a list of names, at least one, got {shown(columns)}.")
    if len(set(given)) < len(given):
        raise TableError(f"columns: expected every name once, got {shown(columns)}.")
    return given


def _frame(source: Path, table: pa.Table) -> pd.DataFrame:
    """A table for pandas.

    Arrow's types tell integers with gaps from reals; pandas' own would make them the same.
    """
    try:
        table.validate(full=True)  # what a damaged file holds may point anywhere
        return table.to_pandas(types_mapper=pd.ArrowDtype)
    except (pa.ArrowException, ValueError, TypeError, NotImplementedError) as error:
        raise TableError(
            f"{source}: expected columns of texts, numbers, dates or booleans, got others "
            f"({type(error).__name__}). Copy or write it again."
        ) from None


@contextlib.contextmanager
def _parquet_errors_explained(source: Path) -> Iterator[None]:
    try:
        yield
    except TableError:
        raise
    except (pa.ArrowException, OSError, ValueError, TypeError, LookupError, OverflowError) as error:
        raise TableError(
            f"{source}: expected a Parquet file, got one that cannot be read "
            f"({type(error).__name__}). Copy or write it again."
        ) from None


def _read_csv(
    source: Path, columns: Sequence[str] | None, delimiter: str, encoding: str
) -> pa.Table:
    encoding = _check_form(delimiter, encoding)
    with _csv_errors_explained(source, encoding):
        if _is_compressed(source):
            _check_gzip(source)
        names = [name.strip() for name in _header(source, delimiter, encoding)]
        names = _without_apostrophes(names, columns or ())
        _check_delimiter(source, names, columns, delimiter)
        check_names(source, [name for name in names if name], columns)
        # Arrow knows the columns by their place: it might read the header in another way.
        wanted = {
            str(place): name
            for place, name in enumerate(names)
            if name and (columns is None or name in columns)
        }
        broken: list[int] = []

        def note(row: pyarrow_csv.InvalidRow) -> str:
            broken.append(row.actual_columns)
            return "skip"

        table = pyarrow_csv.read_csv(
            pa.input_stream(str(source), compression="gzip" if _is_compressed(source) else None),
            **csv_options(len(names), [*wanted], delimiter, encoding, broken=note),
        )
    if broken:
        found = ", ".join(map(str, sorted(set(broken))[:3]))
        raise TableError(
            f"{source}: expected {len(names)} fields in every row, as in the header, got "
            f"{len(broken)} rows with another number ({found}). Put texts that hold the delimiter "
            f"{delimiter!r} into quotes."
        )
    return table.rename_columns([*wanted.values()])


def _check_form(delimiter: str, encoding: str) -> str:
    """Refuse what is no delimiter or encoding; the name of the encoding."""
    if (
        not isinstance(delimiter, str)
        or len(delimiter) != 1
        or not (delimiter == "\t" or (delimiter.isascii() and delimiter.isprintable()))
        or delimiter == '"'
    ):
        raise TableError(
            f"delimiter: expected one character such as ',' or ';', got "
            f"{shown(delimiter)}. A tab is '\\t'."
        )
    try:
        encoding = codecs.lookup(encoding).name
        "".encode(encoding)  # some codecs are not of texts
    except (LookupError, ValueError, TypeError):
        raise TableError(
            f"encoding: expected a name such as 'utf-8' or 'latin-1', got {shown(encoding)}."
        ) from None
    return encoding


@contextlib.contextmanager
def _csv_errors_explained(source: Path, encoding: str) -> Iterator[None]:
    """Say what is wrong with a file, without the rows that the parser's messages quote."""
    other = "latin-1" if encoding == "utf-8" else "utf-8"
    hint = f"Pass the encoding that it was saved in, such as {other!r} or 'utf-16'."
    undecodable = f"{source}: expected text in {encoding}, got bytes that are none. {hint}"
    try:
        yield
    except UnicodeError:
        raise TableError(undecodable) from None
    except pa.ArrowInvalid as error:
        if "UTF8" in str(error):
            raise TableError(undecodable) from None
        raise TableError(
            f"{source}: expected rows of fields, got something that cannot be read as CSV. Is a "
            "quote left open, or the file of another kind?"
        ) from None
    except (OSError, EOFError, csv.Error, zlib.error, pa.ArrowException) as error:
        raise TableError(
            f"{source}: expected a CSV file that can be read, got one that cannot "
            f"({type(error).__name__}). Copy or write it again."
        ) from None


def csv_names(source: Path, delimiter: str, encoding: str) -> list[str]:
    """Names of a CSV file's columns, in their order; empty for a column without one."""
    _check_form(delimiter, encoding)
    with _csv_errors_explained(source, encoding):
        names = [name.strip() for name in _header(source, delimiter, encoding)]
    _check_delimiter(source, names, None, delimiter)
    check_names(source, [name for name in names if name])
    return names


def csv_options(
    num_columns: int,
    wanted: Sequence[str],
    delimiter: str,
    encoding: str,
    *,
    broken: Callable[[pyarrow_csv.InvalidRow], str] | None = None,
) -> dict[str, Any]:
    """Options of Arrow's reader of CSV files; columns are named by their place, and are texts.

    Args:
        num_columns: That the header has.
        wanted: Names of the columns that are read.
        delimiter, encoding: As for `read_table`.
        broken: What is done with rows of another number of fields; an error if None.
    """
    return {
        "read_options": pyarrow_csv.ReadOptions(
            encoding=encoding,
            column_names=[str(place) for place in range(num_columns)],
            skip_rows_after_names=1,
        ),
        "parse_options": pyarrow_csv.ParseOptions(
            delimiter=delimiter,
            newlines_in_values=True,
            # In a table with one column an empty line is an empty value.
            ignore_empty_lines=num_columns > 1,
            invalid_row_handler=broken,
        ),
        "convert_options": pyarrow_csv.ConvertOptions(
            column_types=dict.fromkeys(wanted, pa.string()), include_columns=[*wanted]
        ),
    }


def delimiter_of(path: Path) -> str:
    """The delimiter that a file's suffix stands for."""
    return _delimiter(table_suffix(path))


def _header(source: Path, delimiter: str, encoding: str) -> list[str]:
    if encoding == "utf-8":
        encoding = "utf-8-sig"  # a byte-order mark is no part of the first name
    with _opened(source, "rt", encoding) as stream:
        header = next(csv.reader(stream, delimiter=delimiter), [])
    "".join(header).encode()  # bytes that are no text are an error in names, and only there
    if not any(name.strip() for name in header):
        raise TableError(
            f"{source}: expected a header in the first line, got "
            f"{'an empty line' if source.stat().st_size else 'an empty file'}."
        )
    return header


def _without_apostrophes(names: list[str], wanted: Iterable[str]) -> list[str]:
    """Names in a header; those that `write_table` put an apostrophe before are as they were."""
    original = {quoted(name): name for name in wanted if name not in names}
    return [original.get(name, name) for name in names]


def _check_delimiter(
    source: Path, names: Collection[str], columns: Collection[str] | None, delimiter: str
) -> None:
    if len(names) > 1 or (columns is not None and set(columns) <= set(names)):
        return
    for other, name in _DELIMITERS.items():
        if other != delimiter and any(other in column for column in names):
            raise TableError(
                f"{source}: expected fields that {_DELIMITERS.get(delimiter, repr(delimiter))} "
                f"separates, got one column whose name holds {name}. Pass the delimiter "
                f"{other!r}."
            )


def check_names(where: object, names: Sequence[str], wanted: Iterable[str] | None = None) -> None:
    """Refuse names that occur twice and say which wanted ones are not there."""
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise TableError(
            f"{where}: expected every column's name once, got {', '.join(map(repr, repeated))} "
            "more than once. Rename them."
        )
    absent = [name for name in wanted or () if name not in names]
    if absent:
        spelt = {str(name).lower(): name for name in names}
        close = {name: difflib.get_close_matches(name.lower(), spelt, n=1) for name in absent}
        hints = [
            f"{name!r}" + (f" (did you mean {spelt[match[0]]!r}?)" if match else "")
            for name, match in close.items()
        ]
        raise TableError(
            f"{where}: expected all columns of the schema, got none named {', '.join(hints)}. "
            "Correct the schema or the header."
        )


def _pieces(target: Path, frames: Iterable[pd.DataFrame]) -> Iterator[pa.Table]:
    names = None
    for frame in frames:
        piece = _arrow_table(target, frame)
        names = names or piece.column_names
        if piece.column_names != names:
            raise TableError(
                f"{target}: expected pieces with the same columns, got {piece.column_names} after "
                f"{names}. Bring them into the same order."
            )
        yield piece
    if names is None:
        raise TableError(f"{target}: expected at least one piece of a table, got none.")


def _arrow_table(target: Path, frame: pd.DataFrame) -> pa.Table:
    try:
        return pa.Table.from_pandas(frame, preserve_index=False).replace_schema_metadata()
    except (pa.ArrowException, TypeError):  # whose messages quote values
        raise TableError(
            f"{target}: expected columns of texts, numbers or booleans, got one with values of "
            "different types. Convert it, as with frame[name].astype(str)."
        ) from None


def _without_formulas(target: Path, piece: pa.Table, missing: str, formulas: str) -> pa.Table:
    """A piece of a table in which no text is a formula; refused if it has one, or quoted."""
    found = [f"the name {name!r}" for name in piece.column_names if is_formula(name)]
    columns = []
    for name, column in zip(piece.column_names, piece.columns, strict=True):
        texts = _formulas_in(column)
        if texts or (column.null_count and is_formula(missing)):
            found.append(f"values of {name!r}")
        columns.append(_quoted_where(column, texts))
    if found and formulas == "refuse":
        raise refusal(target, found)
    return pa.table(columns, names=[*map(quoted, piece.column_names)])


def _formulas_in(column: pa.ChunkedArray) -> list[str]:
    """The distinct formulas in a column; numbers are none, however they are written."""
    if is_any_of(column.type, _NO_TEXTS):
        return []
    texts = column.cast(pa.string())
    suspect = pc.match_substring_regex(texts, f"^[{re.escape(SIGNS)}]")
    return [text for text in pc.unique(texts.filter(suspect)).to_pylist() if is_formula(text)]


def _quoted_where(column: pa.ChunkedArray, formulas: list[str]) -> pa.ChunkedArray:
    if not formulas:
        return column
    texts = column.cast(pa.string())
    with_apostrophe = pc.binary_join_element_wise("'", texts, "")
    return pc.if_else(pc.is_in(texts, pa.array(formulas, pa.string())), with_apostrophe, texts)


def _write_parquet(pieces: Iterable[pa.Table], path: Path) -> None:
    with contextlib.ExitStack() as stack:
        writer = None
        for piece in pieces:
            if writer is None:
                # pandas has texts as Arrow's large strings, which not everyone reads.
                types = {pa.large_string(): pa.string()}
                schema = pa.schema([(f.name, types.get(f.type, f.type)) for f in piece.schema])
                writer = stack.enter_context(pq.ParquetWriter(path, schema))
            writer.write_table(piece.cast(schema))


def _csv_lines(pieces: Iterable[pa.Table], delimiter: str, missing: str) -> Iterator[str]:
    """The header, then the rows of each piece; only fields that need quotes have them."""
    special = f'[\\x{ord(delimiter):02x}"\\r\\n]'

    def quoted(texts: pa.Array) -> pa.Array:
        needed = pc.match_substring_regex(texts, special)
        if not pc.any(needed).as_py():
            return texts
        doubled = pc.replace_substring(texts, '"', '""')
        in_quotes = pc.binary_join_element_wise('"', doubled, '"', "")
        return pc.if_else(needed, in_quotes, texts)

    for number, piece in enumerate(pieces):
        if number == 0:
            yield delimiter.join(quoted(pa.array(piece.column_names)).to_pylist()) + "\n"
        fields = [
            quoted(pc.fill_null(column.cast(pa.string()), missing)) for column in piece.columns
        ]
        rows = pc.binary_join_element_wise(*fields, delimiter)
        yield "".join(row + "\n" for row in rows.to_pylist())
