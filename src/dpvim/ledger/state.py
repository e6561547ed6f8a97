"""The entries of a ledger, understood: its releases, and all that makes no sense."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dpvim.ledger.chain import Problem
from dpvim.ledger.cost import Price
from dpvim.ledger.entries import Booked, BookedSelection, Bound, Declared, LedgerError, Settled
from dpvim.ledger.storage import Contents


class Release(NamedTuple):
    """A release in the ledger: its booking, and how it ended.

    Attributes:
        line: Of the booking.
        booked: The booking.
        settled: Its end; None for one that is under way, or whose process was killed.
    """

    line: int
    booked: Booked | BookedSelection
    settled: Settled | None

    @property
    def steps(self) -> int:
        """Steps that are paid for: all that were booked until the release is settled."""
        return self.booked.steps if self.settled is None else self.settled.steps

    @property
    def price(self) -> Price | None:
        """The plan of these steps, or of all trials; None if there are none."""
        return self.booked.price(self.steps)

    @property
    def epsilon(self) -> float:
        """The cost of this release by itself, at its own delta."""
        return (self.settled or self.booked).epsilon

    @property
    def state(self) -> str:
        """``open``, ``done``, ``stopped`` or ``not made``."""
        if self.settled is None:
            return "open"
        if self.settled.steps == 0:
            return "not made"
        return "done" if self.settled.steps == self.booked.steps else "stopped"


class State(NamedTuple):
    """A ledger's entries, understood."""

    declared: Declared
    bound: list[Bound]
    releases: tuple[Release, ...]


def problems_of(contents: Contents) -> list[Problem]:
    """All that is wrong with a file: lines that were changed, and entries that make no sense."""
    problems = list(contents.problems)
    return problems or _understand(contents)[1]


def state_of(path: Path, contents: Contents) -> State:
    """The entries of a file in which nothing is wrong."""
    problems = list(contents.problems)
    state = None
    if not problems:
        state, problems = _understand(contents)
    if problems or state is None:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise LedgerError(
            f"{path}: the ledger is damaged: {problems[0]}{more}. Nothing is booked in it before "
            "it is as it was: restore it from a copy. `dpvim ledger check` has all that is wrong."
        )
    return state


def _understand(contents: Contents) -> tuple[State | None, list[Problem]]:
    entries = contents.entries
    if not entries or not isinstance(entries[0][1], Declared):
        text = "expected a budget that is declared; the file was cut short or is no ledger"
        return None, [Problem(1, text)]
    bound: list[Bound] = []
    booked: dict[str, tuple[int, Booked | BookedSelection]] = {}
    settled: dict[str, Settled] = {}
    problems = []
    for line, entry in entries[1:]:
        if isinstance(entry, Declared):
            problems.append(Problem(line, "declares a second budget"))
        elif isinstance(entry, Bound):
            bound.append(entry)
        elif isinstance(entry, Booked | BookedSelection):
            if entry.id in booked:
                problems.append(Problem(line, f"books {entry.id} a second time"))
            booked[entry.id] = (line, entry)
        elif isinstance(entry, Settled):
            known = booked.get(entry.id)
            if known is None or entry.id in settled or not 0 <= entry.steps <= known[1].steps:
                text = f"settles {entry.id}, which is not booked, is settled, or has fewer steps"
                problems.append(Problem(line, text))
            settled[entry.id] = entry
    releases = tuple(Release(line, entry, settled.get(entry.id)) for line, entry in booked.values())
    return State(entries[0][1], bound, releases), problems


def prices_of(releases: Sequence[Release]) -> list[Price]:
    """Plans of all that is paid for."""
    return [release.price for release in releases if release.price is not None]
