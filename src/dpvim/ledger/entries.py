"""Entries of a ledger: what is declared, bound, booked, settled and repaired. All of it public."""

from __future__ import annotations

import dataclasses
import datetime
import json
from typing import Any, ClassVar, TypeAlias

from dpvim import _validate
from dpvim.privacy.accounting.selection import Repeats
from dpvim.privacy.plan import PrivacyPlan
from dpvim.privacy.selection import Selection
from dpvim.types import Relation, Unit

FORMAT, VERSION = "dpvim ledger", 1
UNITS = tuple(unit.value for unit in Unit)
"""Units of privacy."""


class LedgerError(ValueError):
    """The ledger cannot be used: damaged, of another data set, or not one at all."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Declared:
    """The first entry: the data set's name, its budget, and for whom the guarantee is."""

    name: str
    epsilon: float
    delta: float
    relation: str
    unit: str
    time: str
    format: str = FORMAT
    version: int = VERSION


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bound:
    """A form of the data that the ledger is about: its keyed fingerprint, and the key's name."""

    fingerprint: str
    key: str
    note: str
    time: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Booked:
    """A release that is paid for, before it is made.

    Attributes:
        id: Its name, for `Settled`.
        purpose: In the words of who made it.
        mechanism: ``gradients`` or ``counts``.
        plan: The fields of its `PrivacyPlan`.
        runs: Number of runs of the plan.
        epsilon, delta: The cost of this release by itself.
        total: The composed epsilon of all releases with this one, at the ledger's delta.
        seeded: Whether its noise came from a given seed: such a release has no guarantee.
        time: Of the booking. No entry says when a run ended: how long it took may tell of the data.
    """

    id: str
    purpose: str
    mechanism: str
    plan: dict[str, Any]
    runs: int
    epsilon: float
    delta: float
    total: float
    seeded: bool
    time: str

    @property
    def steps(self) -> int:
        """Steps that are paid for."""
        return self.runs * int(self.plan["num_steps"])

    def price(self, steps: int | None = None) -> PrivacyPlan | None:
        """The plan of so many steps (default: all that were booked); None for no step."""
        steps = self.steps if steps is None else steps
        return PrivacyPlan(**self.plan).with_steps(steps) if steps else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class BookedSelection:
    """The best of a random number of trials, paid for before the first.

    Attributes:
        trial: The fields of the `PrivacyPlan` of each release of a trial.
        mean, shape: Of the number of trials (`Repeats`).
        id, purpose, epsilon, delta, total, seeded, time: As in `Booked`.
    """

    id: str
    purpose: str
    trial: list[Any]
    mean: float
    shape: float
    epsilon: float
    delta: float
    total: float
    seeded: bool
    time: str

    mechanism: ClassVar[str] = "selection"
    steps: ClassVar[int] = 1

    def price(self, steps: int | None = None) -> Selection | None:
        """All trials; None for no step."""
        if steps == 0:
            return None
        trial = tuple(PrivacyPlan(**plan) for plan in self.trial)
        return Selection(trial, Repeats(self.mean, self.shape))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settled:
    """The end of a booked release: the steps that were begun, and the costs after it."""

    id: str
    steps: int
    epsilon: float
    total: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Repaired:
    """A note that the line before was cut short by a crash; `torn` is its SHA-256."""

    torn: str
    note: str
    time: str


Entry: TypeAlias = Declared | Bound | Booked | BookedSelection | Settled | Repaired
KINDS: dict[str, type[Entry]] = {
    "declared": Declared,
    "bound": Bound,
    "booked": Booked,
    "booked selection": BookedSelection,
    "settled": Settled,
    "repaired": Repaired,
}
_NAMES = {kind: name for name, kind in KINDS.items()}
_TYPES: dict[str, type | tuple[type, ...]] = {
    "str": str,
    "int": int,
    "float": (int, float),
    "bool": bool,
    "dict[str, Any]": dict,
    "list[Any]": list,
}


def to_fields(entry: Entry) -> dict[str, Any]:
    """The entry in values that json has, its kind first."""
    return {"entry": _NAMES[type(entry)], **dataclasses.asdict(entry)}


def from_fields(fields: dict[str, Any]) -> Entry:
    """The entry with these fields.

    Raises:
        ValueError: They are none of an entry.
    """
    given = dict(fields)
    kind = KINDS.get(given.pop("entry", ""))
    names = None if kind is None else {field.name for field in dataclasses.fields(kind)}
    if kind is None or names != set(given):
        raise ValueError("expected the fields of an entry; a newer dpvim may have written it")
    entry = kind(**given)
    _check_types(entry)
    if isinstance(entry, Declared):
        if (entry.format, entry.version) != (FORMAT, VERSION):
            raise ValueError(
                f"written in version {entry.version} of {entry.format!r}, this dpvim reads "
                f"version {VERSION} of {FORMAT!r}"
            )
        Relation(entry.relation)
        _validate.one_of("unit", entry.unit, UNITS)
        _validate.epsilon("epsilon", entry.epsilon)
        _validate.open_unit("delta", entry.delta)
    if isinstance(entry, Booked):
        # What is counted must be a price: a plan with steps and noise, carried out at least once.
        PrivacyPlan(**entry.plan).noise_stddev  # noqa: B018
        _validate.positive_int("runs", entry.runs)
    if isinstance(entry, BookedSelection):
        if not all(isinstance(plan, dict) for plan in entry.trial):
            raise ValueError("trial: expected plans")
        entry.price()
    if isinstance(entry, Booked | BookedSelection):
        _validate.open_unit("delta", entry.delta)
    return entry


def as_text(entry: Entry) -> str:
    """One line of json for people to read."""
    return json.dumps(to_fields(entry), ensure_ascii=False, allow_nan=False)


def _check_types(entry: Entry) -> None:
    """Refuse a value that is no text, number or object where the entry has one."""
    for field in dataclasses.fields(entry):
        value = getattr(entry, field.name)
        wanted = str(field.type)  # the annotation, as it is written
        is_flag = isinstance(value, bool) and wanted != "bool"
        if is_flag or not isinstance(value, _TYPES[wanted]):
            raise ValueError(f"{field.name}: expected {wanted}, got {_validate.shown(value)}")


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
