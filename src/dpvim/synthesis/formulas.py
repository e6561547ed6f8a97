"""Texts that a spreadsheet would run as formulas when it opens a CSV file.

>>> [text for text in ("=1+1", "-9", "+1.5e3", "-", "@home", "a=b") if is_formula(text)]
['=1+1', '@home']
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable

from dpvim.synthesis.schema import Levelled, Schema

FORMULAS = ("refuse", "quote", "allow")
"""What becomes of them: an error, an apostrophe before them, nothing."""
SIGNS = "=+-@\t\r\n\uff1d\uff0b\uff0d\uff20"  # the last ones are the first ones in wide
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


class FormulaError(ValueError):
    """A CSV file would hold texts that spreadsheets run."""


def is_formula(text: str) -> bool:
    """True if a spreadsheet would run a text: a sign at its start, but no number and not alone."""
    return len(text) > 1 and text[0] in SIGNS and not _NUMBER.fullmatch(text)


def quoted(text: str) -> str:
    """A text with an apostrophe before it if it is a formula: spreadsheets then leave it alone.

    >>> quoted("=1+1"), quoted("-9")
    ("'=1+1", '-9')
    """
    return f"'{text}" if is_formula(text) else text


def formulas_of(schema: Schema) -> list[str]:
    """List names, levels and markers of a schema that spreadsheets would run, for a message.

    >>> from dpvim.synthesis.schema import Binary
    >>> formulas_of(Schema((Binary(name="@home", levels=("-x", "+y")),)))
    ["the name '@home'", "levels of '@home'"]
    """
    found = []
    for column in schema.columns:
        if is_formula(column.name):
            found.append(f"the name {column.name!r}")
        if any(map(is_formula, _texts(column))):
            found.append(f"levels of {column.name!r}")
    if any(column.nullable for column in schema.columns) and is_formula(schema.missing[0]):
        found.append(f"the text for missing values, {schema.missing[0]!r}")
    return found


def check_schema(schema: Schema, formulas: str) -> None:
    """Refuse a schema whose tables cannot be written as CSV by the rule."""
    check_rule(formulas)
    found = formulas_of(schema)
    if found and formulas == "refuse":
        raise refusal(schema.source, found)
    if found and formulas == "quote":
        for texts in (schema.names, *([*_texts(c), schema.missing[0]] for c in schema.columns)):
            _check_distinct(schema, texts)


def check_rule(formulas: str) -> None:
    """Refuse a rule that there is not."""
    if formulas not in FORMULAS:
        close = difflib.get_close_matches(str(formulas), FORMULAS, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else "Use one of these."
        options = ", ".join(map(repr, FORMULAS))
        raise ValueError(f"formulas: expected one of {options}, got {formulas!r}. {hint}")


def refusal(where: object, found: Iterable[str]) -> FormulaError:
    """The error that names what would be run."""
    return FormulaError(
        f"{where}: expected a table that spreadsheets can open safely, got texts that they take "
        f"for formulas, since they begin with =, +, - or @: {'; '.join(found)}. Rename them, write "
        "Parquet, or choose formulas='quote' (an apostrophe before each) or 'allow'; on the "
        "command line --formulas."
    )


def _texts(column: object) -> list[str]:
    levels = column.levels if isinstance(column, Levelled) else ()
    return [level for level in levels if isinstance(level, str)]


def _check_distinct(schema: Schema, texts: Collection[str]) -> None:
    if clash := {quoted(text) for text in texts if is_formula(text)} & set(texts):
        raise FormulaError(
            f"{schema.source}: expected texts that differ when formulas have an apostrophe before "
            f"them, got {', '.join(map(repr, sorted(clash)))} with and without it. Rename one."
        )
