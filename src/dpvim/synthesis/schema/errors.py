"""Errors of schemas: what was expected, what was given, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from dpvim._validate import shown


class SchemaError(ValueError):
    """The schema does not say what it should."""


class NotReviewedError(SchemaError):
    """Levels and bounds that nobody has yet said to be public knowledge."""


def did_you_mean(given: object, known: Collection[str]) -> str:
    """A hint that names the closest of the known words; empty if none is close."""
    close = difflib.get_close_matches(shown(given).strip("'"), list(known), n=1)
    return f"Did you mean {close[0]!r}?" if close else ""


def mismatch(key: str, expected: str, given: object, hint: str) -> SchemaError:
    """An error on one key of a schema."""
    return SchemaError(f"{key}: expected {expected}, got {shown(given)}. {hint}")
