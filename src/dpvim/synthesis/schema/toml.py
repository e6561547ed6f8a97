"""Schemas as TOML: read columns from what a file holds, and write them."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from dpvim._validate import shown
from dpvim.files import MOST_TEXT, existing_file
from dpvim.synthesis.schema.base import Column
from dpvim.synthesis.schema.columns import KINDS, AnyColumn, field_names
from dpvim.synthesis.schema.errors import SchemaError, did_you_mean, mismatch

VERSION = 1


def read_toml(source: Path) -> dict[str, Any]:
    """Parse a file, or say what is wrong with it."""
    existing_file(source, most=MOST_TEXT, error=SchemaError)
    try:
        text = source.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise SchemaError(f"{source}: expected UTF-8, got other bytes. Save it so.") from error
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also numbers of many digits, and deep nests
        raise SchemaError(
            f"{source}: expected TOML, got something else ({error!s:.300}). Texts need quotes, "
            "lists need brackets, and every column starts with [[columns]]."
        ) from error


def read_columns(content: Mapping[str, Any], source: str) -> tuple[AnyColumn, ...]:
    """The columns that the content of a file declares; ``source`` is named in errors."""
    if not isinstance(content, Mapping):
        raise mismatch(source, "a table of keys", content, "Start with dpvim_schema = 1.")
    _check_keys(source, content, ["dpvim_schema", "missing", "constraints", "columns"])
    version = content.get("dpvim_schema")
    if type(version) is not int or version != VERSION:
        hint = f"Start the file with dpvim_schema = {VERSION}; newer ones need a newer dpvim."
        raise mismatch(f"{source}: dpvim_schema", str(VERSION), version, hint)
    entries = content.get("columns")
    if not isinstance(entries, list) or not all(isinstance(e, Mapping) for e in entries):
        hint = "Start every column with a line [[columns]]."
        raise mismatch(f"{source}: columns", "a list of tables", entries, hint)
    return tuple(_column(source, number, e) for number, e in enumerate(entries, start=1))


def format_toml(
    columns: Iterable[AnyColumn],
    missing: tuple[str, ...],
    *,
    constraints: tuple[str, ...] = (),
    header: str = "",
    comments: Mapping[str, str] | None = None,
) -> str:
    """A schema as TOML, with a comment on top and one above each column that has one."""
    lines = [*_commented(header), f"dpvim_schema = {VERSION}", _assign("missing", missing)]
    if constraints:
        lines.append(_assign("constraints", constraints))
    for column in columns:
        lines += ["", *_commented((comments or {}).get(column.name, "")), "[[columns]]"]
        lines += [_assign(key, value) for key, value in _entries(column).items()]
        if groups := getattr(column, "groups", None):  # a table of its own, so it stands last
            lines += ["[columns.groups]", *(_assign(_literal(key), value) for key, value in groups)]
    return "\n".join(lines) + "\n"


def _column(source: str, number: int, entry: Mapping[str, Any]) -> AnyColumn:
    where = f"{source}: column {shown(entry.get('name', number))}"
    kind = entry.get("kind")
    if kind not in list(KINDS):  # a list: what TOML holds need not be hashable
        hint = did_you_mean(kind, KINDS) or "Add it to the entry."
        raise mismatch(f"{where}: kind", "one of " + ", ".join(map(repr, KINDS)), kind, hint)
    cls = KINDS[kind]
    _check_keys(where, entry, ["kind", *field_names(cls)])
    required = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]
    if absent := [key for key in required if key not in entry]:
        expected = f"{', '.join(required)} for kind {kind!r}"
        raise SchemaError(f"{where}: expected {expected}, got no {', '.join(absent)}. Add it.")
    try:
        return cls(**{key: value for key, value in entry.items() if key != "kind"})
    except SchemaError as error:
        raise SchemaError(f"{source}: {error}") from None


def _check_keys(where: str, content: Mapping[str, Any], known: Collection[str]) -> None:
    for key in content:
        if key not in known:
            hint = did_you_mean(key, known) or "Known here: " + ", ".join(known) + "."
            raise SchemaError(f"{where}: unknown key {shown(key)}. {hint}")


def _entries(column: Column) -> dict[str, Any]:
    """The entry of a column; rules are spelt out, other defaults are left out."""
    base = ("name", "nullable", "reviewed", "groups")
    own = {key: getattr(column, key) for key in field_names(type(column)) if key not in base}
    # Bounds first, then the rules for what is outside.
    rules: dict[str, Any] = {key: own.pop(key) for key in ("outside", "not_a_number") if key in own}
    for key, default in (("scale", "linear"), ("resolution", "day")):
        if own.get(key) == default:
            del own[key]
    entries: dict[str, Any] = {
        "name": column.name,
        "kind": column.kind,
        **own,
        **rules,
        "nullable": column.nullable or None,
        "reviewed": column.reviewed,
    }
    return {key: value for key, value in entries.items() if value is not None}


def _assign(key: str, value: Any) -> str:
    line = f"{key} = {_literal(value)}"
    if len(line) <= 100 or not isinstance(value, tuple):
        return line
    return f"{key} = [\n" + "".join(f"    {_literal(item)},\n" for item in value) + "]"


def _literal(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_literal, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # TOML's basic strings are those of json, but for one character that must be escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def _commented(text: str) -> list[str]:
    """Lines of a comment; TOML allows no control characters there."""
    printable = ("".join(c if c.isprintable() else " " for c in s) for s in text.splitlines())
    return [f"# {line}".rstrip() for line in printable]
