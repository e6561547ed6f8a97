"""Entries of a schema as fields of a form, and back."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any

from dpvim.synthesis.schema import DEFAULT_MARKERS, Schema, SchemaError

LEVELS = ("binary", "categorical", "ordinal")
NUMBERS = ("count", "integer", "real")
"""Kinds with the same fields, of which a form offers the others."""


def entries_of(schema: Schema) -> list[dict[str, Any]]:
    """The columns' entries as a file holds them."""
    return tomllib.loads(schema.to_toml())["columns"]


def schema_of(
    entries: list[dict[str, Any]], like: Schema | None, constraints: tuple[str, ...] = ()
) -> Schema:
    """The schema with these entries, and the markers of another one or the usual ones."""
    content = {
        "dpvim_schema": 1,
        "missing": list(DEFAULT_MARKERS if like is None else like.missing),
        "constraints": list(constraints),
        "columns": entries,
    }
    return Schema.from_dict(content)


def fields_of(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What a form shows of an entry: texts, and the kinds that it may have."""
    kind = entry["kind"]
    group = next((group for group in (LEVELS, NUMBERS) if kind in group), (kind,))
    return {
        "name": entry["name"],
        "kind": kind,
        "kinds": group,
        "levels": "\n".join(map(_spelt, entry["levels"])) if "levels" in entry else None,
        "lower": _spelt(entry.get("lower", 0)) if "upper" in entry else None,
        "upper": _spelt(entry["upper"]) if "upper" in entry else None,
        "nullable": entry.get("nullable", False),
        "reviewed": entry["reviewed"],
    }


def changed(
    entry: Mapping[str, Any], form: Mapping[str, str], like: Schema | None = None
) -> dict[str, Any]:
    """An entry with what was typed into a form.

    Args:
        entry: As it was.
        form: Fields of this column: ``kind``, ``levels`` or ``lower`` and ``upper``, and
            ``nullable`` and ``reviewed`` if they are ticked.
        like: A schema with the markers of missing values; default the usual ones.

    Raises:
        SchemaError: It is none that a schema could have; says why.
    """
    new = dict(entry)
    allowed = fields_of(entry)["kinds"]
    kind = form.get("kind", entry["kind"])
    if kind not in allowed:
        raise SchemaError(f"kind: expected one of {', '.join(allowed)}, got another.")
    new["kind"] = kind
    new["nullable"], new["reviewed"] = "nullable" in form, "reviewed" in form
    if "levels" in entry:
        _change_levels(new, form.get("levels", ""))
    else:
        _change_bounds(new, form.get("lower", ""), form.get("upper", ""))
    # Rules for what does not fit that were chosen for the entry as it was.
    outside = new.get("outside")
    no_level = "levels" in entry and outside not in new["levels"]
    if no_level or (outside == "missing" and not new["nullable"]):
        new.pop("outside", None)
    schema_of([new], like)  # which refuses what no schema has
    return new


def _change_levels(new: dict[str, Any], text: str) -> None:
    typed = [line.strip() for line in text.splitlines() if line.strip()]
    kinds = {type(level) for level in new["levels"]}
    if kinds == {int}:
        new["levels"] = [_integer("levels", line) for line in typed]
    elif kinds == {bool}:
        if typed != [_spelt(level) for level in new["levels"]]:
            raise SchemaError("levels: expected false and true, which cannot be changed.")
    else:
        new["levels"] = typed
    if new["kind"] in ("binary", "categorical"):
        new["kind"] = "binary" if len(new["levels"]) == 2 else "categorical"


def _change_bounds(new: dict[str, Any], lower: str, upper: str) -> None:
    read = {"real": _number, "date": lambda name, text: text.strip()}.get(new["kind"], _integer)
    typed = {"lower": read("lower bound", lower), "upper": read("upper bound", upper)}
    moved = any(new.get(name) != value for name, value in typed.items())
    if new["kind"] == "count":
        if typed.pop("lower") != 0:
            raise SchemaError("lower bound: expected 0 for a count. Choose integer otherwise.")
        new.pop("lower", None)
    new.update(typed)
    if moved or new["nullable"]:
        new.pop("not_a_number", None)  # the lower bound, or missing
    if new["kind"] != "real":
        for name in ("scale", "decimals"):
            new.pop(name, None)


def _integer(name: str, text: str) -> int:
    try:
        return int(text.strip())
    except ValueError:
        raise SchemaError(f"{name}: expected a whole number, got {text.strip()[:40]!r}.") from None


def _number(name: str, text: str) -> float:
    try:
        return float(text.strip())
    except ValueError:
        raise SchemaError(f"{name}: expected a number, got {text.strip()[:40]!r}.") from None


def _spelt(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
