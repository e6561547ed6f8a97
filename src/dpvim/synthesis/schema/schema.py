"""The schema of a table: its columns, and the texts that stand for missing values."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dpvim._html import card, details, paragraph, table
from dpvim.files import as_path, new_file
from dpvim.synthesis.schema.columns import AnyColumn, Date
from dpvim.synthesis.schema.constraints import Constraint, parse_constraint
from dpvim.synthesis.schema.errors import NotReviewedError, SchemaError, did_you_mean, mismatch
from dpvim.synthesis.schema.levels import Levelled
from dpvim.synthesis.schema.toml import format_toml, read_columns, read_toml
from dpvim.synthesis.values import LEVEL_OF_TEXT

DEFAULT_MARKERS = ("", "NA", "NaN", "null")
_FEW = 8  # levels that a notebook shows


@dataclass(frozen=True)
class Schema:
    """The columns of a table, in the order in which its twin has them.

    Attributes:
        columns: One entry each; columns of the table that have none are left out of the twin.
        missing: Texts that stand for a missing value. The first of them is what is written.
        source: The file or the like that the schema comes from; errors start with it.
        constraints: Rules between columns that are publicly known, which every row of the twin
            obeys: ``age >= years_married``.

    >>> column = {"name": "sex", "kind": "categorical", "levels": ["f", "m"], "reviewed": True}
    >>> schema = Schema.from_dict({"dpvim_schema": 1, "columns": [column]})
    >>> schema.names, schema.unreviewed
    (['sex'], [])
    """

    columns: tuple[AnyColumn, ...]
    missing: tuple[str, ...] = DEFAULT_MARKERS
    source: str = dataclasses.field(default="schema", compare=False)
    constraints: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", tuple(self.columns))
        if not self.columns:
            raise self._error("columns", "at least one column", "none", "Add [[columns]] entries.")
        if repeated := sorted({n for n in self.names if self.names.count(n) > 1}):
            raise self._error("columns", "every name once", repeated, "Remove the repetitions.")
        self._check_missing()
        self._check_constraints()

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Schema:
        """Read a schema, or say what is wrong with the file."""
        source = as_path("path", path)
        return cls.from_dict(read_toml(source), source=str(source))

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], *, source: str = "schema") -> Schema:
        """A schema from what a TOML file holds; ``source`` is named in errors."""
        columns = read_columns(content, source)
        markers = content.get("missing", DEFAULT_MARKERS)
        return cls(columns, markers, source, content.get("constraints", ()))

    @property
    def names(self) -> list[str]:
        return [column.name for column in self.columns]

    def column(self, name: str) -> AnyColumn:
        """The entry of one column."""
        for column in self.columns:
            if column.name == name:
                return column
        hint = did_you_mean(name, self.names) or "It has: " + ", ".join(map(repr, self.names))
        raise self._error("columns", "the name of a declared column", name, hint)

    @property
    def rules(self) -> list[Constraint]:
        """The constraints, parsed."""
        return [parse_constraint(text, self.columns) for text in self.constraints]

    @property
    def dates(self) -> dict[str, tuple[str, str]]:
        """By column of dates, how these are written in files, and the date that counts as 0."""
        dates = [column for column in self.columns if isinstance(column, Date)]
        return {column.name: (column.written_format, column.text(0)) for column in dates}

    @property
    def unreviewed(self) -> list[str]:
        """Names of the columns that nobody has yet said to be public knowledge."""
        return [column.name for column in self.columns if not column.reviewed]

    def check_reviewed(self) -> None:
        """Refuse a schema with entries that may have been read off the data."""
        if self.unreviewed:
            raise NotReviewedError(
                f"{self.source}: expected reviewed = true for every column, got false for "
                f"{', '.join(map(repr, self.unreviewed))}. Levels and bounds are published as they "
                "are, without noise. For each of these columns, replace what was read off the data "
                "by what is known without it (a questionnaire, a code book, the law), then set "
                "reviewed = true."
            )

    def to_toml(self, *, header: str = "", comments: Mapping[str, str] | None = None) -> str:
        """The schema as TOML, with a comment on top and one above each column that has one."""
        return format_toml(
            self.columns,
            self.missing,
            constraints=self.constraints,
            header=header,
            comments=comments,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the schema as TOML; an existing file is replaced when the new one is complete."""
        with new_file(path) as partial:
            partial.write_text(self.to_toml(), encoding="utf-8")

    def _repr_html_(self) -> str:
        parts = []
        if self.unreviewed:
            text = f"{len(self.unreviewed)} not reviewed: a draft is as private as the data."
            parts.append(paragraph(text, is_bad=True))
        rows = [
            (
                column.name,
                column.kind,
                _values(column),
                "may be missing" if column.nullable else "",
                "" if column.reviewed else "not reviewed",
            )
            for column in self.columns
        ]
        parts.append(table(["column", "kind", "values", "", ""], rows))
        if self.constraints:
            parts.append(details("Constraints", self.constraints))
        title = f"Schema of {len(self.columns)} columns"
        return card(title, *parts, is_bad=bool(self.unreviewed))

    def _check_constraints(self) -> None:
        given = self.constraints
        if not isinstance(given, list | tuple) or not all(isinstance(text, str) for text in given):
            hint = 'Write constraints = ["age >= years_married"].'
            raise self._error("constraints", "a list of texts", given, hint)
        object.__setattr__(self, "constraints", tuple(given))
        try:
            _ = self.rules
        except SchemaError as error:
            raise SchemaError(f"{self.source}: {error}") from None

    def _error(self, key: str, expected: str, given: object, hint: str) -> SchemaError:
        return mismatch(f"{self.source}: {key}", expected, given, hint)

    def _check_missing(self) -> None:
        markers = self.missing
        if (
            not isinstance(markers, list | tuple)
            or not markers
            or not all(isinstance(marker, str) and marker == marker.strip() for marker in markers)
        ):
            expected = "a list of texts without blanks around them, at least one"
            raise self._error("missing", expected, markers, 'Write missing = ["", "NA"].')
        object.__setattr__(self, "missing", tuple(markers))
        for column in self.columns:
            if not isinstance(column, Levelled):
                continue
            # However a number is written: the marker 1.0 is the level 1.
            marked = {LEVEL_OF_TEXT[column.level_type](marker) for marker in markers}
            if clash := [level for level in column.read_levels if level in marked]:
                raise SchemaError(
                    f"{self.source}: column {column.name!r}: levels: expected none that stands for "
                    f"a missing value, got {clash}. Take it out of the levels, or declare the "
                    'markers, such as missing = [""].'
                )


def _values(column: AnyColumn) -> str:
    """The declared values in a few words."""
    if isinstance(column, Levelled):
        shown = ", ".join(map(str, column.levels[:_FEW]))
        more = len(column.levels) - _FEW
        return f"{shown} and {more} more" if more > 0 else shown
    if isinstance(column, Date):
        return f"{column.lower} to {column.upper}"
    lower, upper = column.bounds
    return f"{lower} to {upper}"
