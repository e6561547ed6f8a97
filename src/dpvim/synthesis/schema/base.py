"""Entries of columns: what all kinds have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dpvim._validate import shown
from dpvim.synthesis.schema.errors import SchemaError, mismatch

MISSING = "missing"
"""As a value of ``outside``: what does not fit is written off as missing."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """Entry of one column: what all kinds have.

    Attributes:
        name: As in the table's header.
        nullable: Whether values may be missing, in the table and in its twin.
        reviewed: Whether the holder has said that this entry is public knowledge.
    """

    kind: ClassVar[str]
    name: str
    nullable: bool = False
    reviewed: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise mismatch(
                "name", "a text that is not blank", self.name, "Copy it from the header."
            )
        for key in ("nullable", "reviewed"):
            if not isinstance(getattr(self, key), bool):
                raise self._error(key, "true or false", getattr(self, key), "Write no quotes.")

    def _error(self, key: str, expected: str, given: object, hint: str) -> SchemaError:
        return mismatch(f"column {shown(self.name)}: {key}", expected, given, hint)

    def _set(self, key: str, value: object) -> None:
        """Put a value into its final form, once, while the frozen object is made."""
        object.__setattr__(self, key, value)
