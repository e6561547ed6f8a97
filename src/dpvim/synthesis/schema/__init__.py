"""Public knowledge about a sensitive table: its columns, their levels and their bounds.

A schema is declared by the holder of the table, in TOML (``docs/schema.md``). It also declares
what becomes of a value that does not fit, so that no record, whatever it holds, is an error.

``levels`` and ``columns`` have the kinds of columns (``moments`` what dates are), ``constraints``
the rules between columns, ``schema`` the list of both, ``toml`` reads and writes files, ``errors``
says what is wrong.
"""

from dpvim.synthesis.schema.base import MISSING
from dpvim.synthesis.schema.columns import (
    LARGEST_INTEGER,
    LARGEST_REAL,
    AnyColumn,
    Count,
    Date,
    Integer,
    Numeric,
    Real,
)
from dpvim.synthesis.schema.errors import NotReviewedError, SchemaError
from dpvim.synthesis.schema.levels import (
    LARGEST_LEVEL,
    Binary,
    Categorical,
    Level,
    Levelled,
    Ordinal,
)
from dpvim.synthesis.schema.schema import DEFAULT_MARKERS, Schema

__all__ = [
    "DEFAULT_MARKERS",
    "LARGEST_INTEGER",
    "LARGEST_LEVEL",
    "LARGEST_REAL",
    "MISSING",
    "AnyColumn",
    "Binary",
    "Categorical",
    "Count",
    "Date",
    "Integer",
    "Level",
    "Levelled",
    "NotReviewedError",
    "Numeric",
    "Ordinal",
    "Real",
    "Schema",
    "SchemaError",
]
