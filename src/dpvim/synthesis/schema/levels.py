"""Columns of levels: categorical, ordinal and binary; levels may be groups of many values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from dpvim.synthesis.schema.base import MISSING, Column
from dpvim.synthesis.schema.errors import SchemaError, did_you_mean

MAX_LEVELS = 1000
LARGEST_LEVEL = 2**53  # beyond, a number that was read may be one of several integers

Level: TypeAlias = str | int | bool
Groups: TypeAlias = tuple[tuple[str, tuple[str, ...]], ...]
"""By level the values that belong to it."""


@dataclass(frozen=True, kw_only=True)
class Levelled(Column):
    """A column with a few declared levels, all of them texts, integers or booleans.

    Attributes:
        levels: All values that the column can have.
        outside: The level that any other value becomes, or "missing". If not given: missing where
            the column is nullable, else the first level.
        prefix: If given, levels are groups: a value belongs to the level that its first so many
            characters are.
        groups: If given, levels are groups: by level the values that belong to it. A value that
            ends in ``*`` stands for all that begin so; the longest one counts.
    """

    levels: tuple[Level, ...]
    outside: Level | None = None
    prefix: int | None = None
    groups: Groups | Mapping[str, Sequence[str]] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.levels, list | tuple):
            raise self._error("levels", "a list", self.levels, 'Write levels = ["a", "b"].')
        self._set("levels", tuple(self.levels))
        self._check_levels()
        if self.outside is None:
            self._set("outside", MISSING if self.nullable else self.levels[0])
        self._check_outside()
        if self.groups is not None:
            self._set("groups", self._as_groups(self.groups))
        self._check_grouping()

    @property
    def level_type(self) -> type:
        return type(self.levels[0])

    @property
    def outside_code(self) -> int | None:
        """The index of the level that other values become; None if they become missing."""
        return self.levels.index(self.outside) if self.outside in self.levels else None

    @property
    def read_levels(self) -> tuple[Level, ...]:
        """The levels, and the values that are listed in groups of them."""
        return (*self.levels, *(value for _, values in self._pairs for value in values))

    def grouping(self) -> Callable[[str], str | None]:
        """A function from a value to the level that it belongs to by the rule; None if to none.

        The names of levels stand for themselves, whatever this says.
        """
        size = self.prefix
        if size is not None:
            return lambda text: text[:size]
        level_of = {value: level for level, values in self._pairs for value in values}

        def group_of(text: str) -> str | None:
            beginnings = (f"{text[:length]}*" for length in range(len(text), -1, -1))
            return next((level_of[t] for t in (text, *beginnings) if t in level_of), None)

        return group_of

    @property
    def _pairs(self) -> Groups:
        return tuple(self.groups) if isinstance(self.groups, tuple) else ()

    def _as_groups(self, given: object) -> Groups:
        """The table of groups in its final form: pairs that cannot change."""
        if isinstance(given, tuple) and all(isinstance(e, tuple) and len(e) == 2 for e in given):
            given = dict(given)
        if not (given and isinstance(given, Mapping)) or not all(
            isinstance(values, list | tuple) and all(isinstance(value, str) for value in values)
            for values in given.values()
        ):
            hint = 'Write [columns.groups] and below it lines such as east = ["01", "02*"].'
            raise self._error("groups", "a table with a list of texts by level", given, hint)
        return tuple((level, tuple(values)) for level, values in given.items())

    def _check_grouping(self) -> None:
        if self.prefix is None and self.groups is None:
            return
        if self.prefix is not None and self.groups is not None:
            raise self._error("prefix", "no groups beside it", self.prefix, "Remove one of them.")
        key = "prefix" if self.groups is None else "groups"
        if self.level_type is not str:
            hint = "Write the levels in quotes, and read the column as text."
            raise self._error(key, "levels that are texts", self.level_type.__name__, hint)
        if self.prefix is not None:
            if isinstance(self.prefix, bool) or not isinstance(self.prefix, int) or self.prefix < 1:
                hint = "Write the number of characters that name a group."
                raise self._error("prefix", "a positive integer", self.prefix, hint)
            if not any(len(str(level)) == self.prefix for level in self.levels):
                expected = f"levels of {self.prefix} characters"
                raise self._error("prefix", expected, "none", "Declare the groups as levels.")
            return
        for level, values in self._pairs:
            if level not in self.levels:
                hint = did_you_mean(level, [*map(str, self.levels)]) or "Declare it."
                raise self._error("groups", "declared levels", level, hint)
            if padded := [value for value in values if value != value.strip()]:
                raise self._error("groups", "no blanks around a value", padded, "Remove them.")
            if others := [value for value in values if value in self.levels and value != level]:
                hint = "The name of a level stands for itself."
                raise self._error("groups", f"no other level in {level!r}", others, hint)
        listed = Counter(value for _, values in self._pairs for value in values)
        if repeated := sorted(value for value, number in listed.items() if number > 1):
            raise self._error("groups", "every value once", repeated, "Remove the repetitions.")

    def _check_levels(self) -> None:
        if not 2 <= len(self.levels) <= MAX_LEVELS:
            hint = "Leave out a constant column; put rare levels together under one name."
            raise self._error("levels", f"2 to {MAX_LEVELS} levels", len(self.levels), hint)
        types = {type(level) for level in self.levels}
        if len(types) > 1 or not types <= {str, int, bool}:
            given = ", ".join(sorted(kind.__name__ for kind in types))
            raise SchemaError(
                f"column {self.name!r}: levels: expected only texts, only integers or only "
                f"booleans, got {given}. Write all of them in quotes if in doubt."
            )
        if large := [v for v in self.levels if isinstance(v, int) and abs(v) > LARGEST_LEVEL]:
            hint = "Write them as texts, in quotes."
            raise self._error("levels", "integers of at most 2^53 in size", large, hint)
        if repeated := sorted({level for level in self.levels if self.levels.count(level) > 1}):
            raise self._error("levels", "every level once", repeated, "Remove the repetitions.")
        if padded := [v for v in self.levels if isinstance(v, str) and v != v.strip()]:
            hint = "Blanks around a value are ignored when the table is read: remove them."
            raise self._error("levels", "no blanks around a level", padded, hint)

    def _check_outside(self) -> None:
        if self.outside in self.levels and type(self.outside) is self.level_type:
            return
        if self.outside == MISSING and self.nullable:
            return
        if self.outside == MISSING:
            hint = "Name a level, or set nullable = true."
        else:
            texts = [str(level) for level in self.levels]
            hint = did_you_mean(self.outside, texts) or "Values may only become declared levels."
        raise self._error("outside", 'a declared level, or "missing"', self.outside, hint)


@dataclass(frozen=True, kw_only=True)
class Categorical(Levelled):
    """Levels without an order."""

    kind = "categorical"


@dataclass(frozen=True, kw_only=True)
class Ordinal(Levelled):
    """Levels in the order in which they are declared."""

    kind = "ordinal"


@dataclass(frozen=True, kw_only=True)
class Binary(Levelled):
    """Two levels, the negative one first."""

    kind = "binary"

    def _check_levels(self) -> None:
        if len(self.levels) != 2:
            hint = 'Use kind = "categorical" for more.'
            raise self._error("levels", "two levels", len(self.levels), hint)
        super()._check_levels()
