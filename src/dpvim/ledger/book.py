"""`Ledger`: every release from a data set, booked before it is made, within one budget.

>>> import tempfile
>>> from dpvim.privacy.plan import PrivacyPlan
>>> folder = tempfile.TemporaryDirectory()
>>> path = f"{folder.name}/patients.ledger"
>>> ledger = Ledger.create(path, name="patients", epsilon=1.0, delta=1e-5)
>>> plan = PrivacyPlan(num_examples=5000, sampling_prob=1.0, num_steps=100, clip_norm=1.0)
>>> plan = plan.calibrate(epsilon=0.5, delta=1e-5)
>>> booking = ledger.book(plan, purpose="a first look")
>>> booking.settle(60)  # it was stopped after 60 of its 100 steps
>>> ledger.spent() < 0.5 < ledger.left()
True
>>> ledger.releases[0].state
'stopped'
>>> folder.cleanup()
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import warnings
from collections.abc import Callable, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple, Self

from dpvim import _html, _validate
from dpvim._extras import require
from dpvim.files import as_path
from dpvim.ledger import cost, storage
from dpvim.ledger.chain import Problem
from dpvim.ledger.cost import Price
from dpvim.ledger.entries import (
    UNITS,
    Booked,
    BookedSelection,
    Bound,
    Declared,
    Entry,
    LedgerError,
    Settled,
    now,
)
from dpvim.ledger.fingerprint import digest_of, key_path, make_key, read_key
from dpvim.ledger.state import Release, State, prices_of, problems_of, state_of
from dpvim.ledger.storage import Contents
from dpvim.privacy.plan import PrivacyPlan
from dpvim.privacy.selection import Selection
from dpvim.privacy.statement import COUNTS, GRADIENTS
from dpvim.types import BudgetExceededError, PrivacyWarning, Relation

RECORD = "record"
"""The default unit of privacy: what neighbouring data sets differ in."""


class Job(NamedTuple):
    """A plan that is to be carried out in so many runs, by a mechanism if it is not that of all."""

    plan: PrivacyPlan
    runs: int = 1
    mechanism: str | None = None


class Ledger:
    """The record of a data set's releases, and of their budget.

    Args:
        path: A file that `Ledger.create` or ``dpvim ledger init`` made.
        data: The data set, as a file, a table or arrays, if fits are given another form of it (a
            file that was encoded, say): bookings are then checked against this one.
        allow_seeds: Book runs with a given seed as well. Such runs have no guarantee; they are
            counted as if they had, and marked.

    Guarantees:
        When a booking returns it is on the disk, and is counted at its full price until it is
        settled, whatever happens to the process. At no time do bookings cost more than the budget
        together, by any number of processes that use the same file. Costs are computed anew from
        the plans; a number in the file is believed only as far as its line is as it was written.
        The total holds for plans that were not chosen by looking at earlier releases from these
        data; if all of them use all records in every step it holds for those, too
        (docs/ledger.md).
    """

    def __init__(
        self, path: str | os.PathLike[str], *, data: Any = None, allow_seeds: bool = False
    ) -> None:
        self.path = as_path("path", path)
        self.allow_seeds = allow_seeds
        self._declared = state_of(self.path, self._contents()).declared
        self._source = None if data is None else digest_of(data)
        if self._source is not None:
            with storage.opened(self.path) as file:
                _check_data(self.path, state_of(self.path, file.contents), self._source)

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        *,
        name: str,
        epsilon: float,
        delta: float,
        relation: str = Relation.ZERO_OUT,
        unit: str = RECORD,
        data: Any = None,
    ) -> Self:
        """Declare the budget of a data set, in a new file.

        Args:
            path: The file; ``<path>.head`` and ``<path>.key`` lie beside it.
            name: Of the data set; public.
            epsilon, delta: What all releases together may cost.
            relation: Which data sets are neighbours; all releases must have this one.
            unit: Of privacy: ``record`` or ``person``.
            data: The data set, to bind the ledger to it; default: that of the first booking.
        """
        declared = Declared(
            name=_text("name", name),
            epsilon=_validate.epsilon("epsilon", epsilon),
            delta=_validate.open_unit("delta", delta),
            relation=_validate.one_of("relation", relation, [each.value for each in Relation]),
            unit=_validate.one_of("unit", unit, UNITS),
            time=now(),
        )
        digest = None if data is None else digest_of(data)
        storage.create(as_path("path", path), declared)
        ledger = cls(path)
        if digest is not None:
            ledger._bind(digest, "the data set")
        return ledger

    @classmethod
    def of(cls, given: Any) -> Ledger:
        """A ledger, or the one in the file that is named."""
        if isinstance(given, Ledger):
            return given
        if isinstance(given, str | os.PathLike):
            return cls(given)
        raise TypeError(
            f"ledger: expected a dpvim.Ledger or the name of its file, got {type(given).__name__}."
        )

    def about(self, data: Any) -> Ledger:
        """The ledger for fits to another form of `data`; as it is if it was told already."""
        if self._source is not None:
            return self
        return Ledger(self.path, data=data, allow_seeds=self.allow_seeds)

    # -- what is declared -------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Name of the data set."""
        return self._declared.name

    @property
    def epsilon(self) -> float:
        """The most that all releases together may cost, at `delta`."""
        return self._declared.epsilon

    @property
    def delta(self) -> float:
        return self._declared.delta

    @property
    def relation(self) -> Relation:
        return Relation(self._declared.relation)

    @property
    def unit(self) -> str:
        """Whom the guarantee is for: ``record`` or ``person``."""
        return self._declared.unit

    @property
    def budget(self) -> cost.Budget:
        """Epsilon, delta and relation."""
        return cost.Budget(self.epsilon, self.delta, self.relation)

    # -- what was spent ---------------------------------------------------------------------------

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All entries, as they are in the file now."""
        return tuple(entry for _, entry in self._contents().entries)

    @property
    def releases(self) -> tuple[Release, ...]:
        """All releases, in the order of their bookings."""
        return state_of(self.path, self._contents()).releases

    @property
    def prices(self) -> list[Price]:
        """Plans of the steps that are paid for, and of trials."""
        return prices_of(self.releases)

    def spent(self) -> float:
        """Epsilon of all releases together, at the ledger's delta."""
        return self.budget.total(self.prices)

    def left(self) -> float:
        """Epsilon that one more release on all records may have, at the ledger's delta.

        This is more than `epsilon` less `spent()`: epsilons do not add up.
        """
        return cost.epsilon_left(self.budget, self.prices)

    def check(self) -> list[Problem]:
        """All that is wrong with the file, line by line; nothing is repaired."""
        with storage.opened(self.path) as file:
            return problems_of(file.contents)

    # -- booking ----------------------------------------------------------------------------------

    def book(
        self,
        plan: PrivacyPlan,
        *,
        purpose: str,
        data: Any = None,
        delta: float | None = None,
        runs: int = 1,
        mechanism: str = GRADIENTS,
        seeded: bool = False,
    ) -> Booking:
        """Pay for a release before it is made.

        Args:
            plan: Of the release, calibrated.
            purpose: For people who read the ledger; public.
            data: What the release is made from, to be compared with the ledger's data set.
            delta: At which epsilon of this release by itself is noted. Default: the ledger's.
            runs: Number of runs of the plan.
            mechanism: ``gradients`` or ``counts``.
            seeded: Whether batches and noise come from a given seed.

        Raises:
            BudgetExceededError: It would cost more than is left; says what could be had.
            LedgerError: The data are not the ledger's, or the file is damaged.
        """
        (booking,) = self.book_all(
            [Job(plan, runs)],
            purpose=purpose,
            data=data,
            delta=delta,
            mechanism=mechanism,
            seeded=seeded,
        )
        return booking

    def book_all(
        self,
        jobs: Sequence[Job],
        *,
        purpose: str,
        data: Any = None,
        delta: float | None = None,
        mechanism: str = GRADIENTS,
        seeded: bool = False,
        ids: Sequence[str] | None = None,
    ) -> list[Booking]:
        """Pay for several releases at once, or for none of them; arguments as in `book`.

        With `ids` of the caller's, which are random, a release that is booked under one already
        is paid for: the process that booked it may have been killed before it knew.
        """
        purpose = _text("purpose", purpose)
        _validate.one_of("mechanism", mechanism, (GRADIENTS, COUNTS))
        jobs = [job._replace(runs=_validate.positive_int("runs", job.runs)) for job in jobs]
        for job in jobs:
            self._check_plan(job.plan)
        plans = [job.plan.with_steps(job.runs * job.plan.num_steps) for job in jobs]

        def entry(number: int, **facts: Any) -> Booked:
            job = jobs[number]
            return Booked(
                id=secrets.token_hex(8) if ids is None else ids[number],
                purpose=purpose,
                mechanism=job.mechanism or mechanism,
                plan=dataclasses.asdict(job.plan),
                runs=job.runs,
                **facts,
            )

        def found(state: State) -> list[Booking] | None:
            return None if ids is None else self._found(state, ids, jobs)

        return self._book(plans, entry, data=data, delta=delta, seeded=seeded, known=found)

    def book_selection(
        self,
        selection: Selection,
        *,
        purpose: str,
        data: Any = None,
        delta: float | None = None,
        seeded: bool = False,
    ) -> Booking:
        """Pay for the best of a random number of trials; arguments as in `book`.

        It has one step. How many trials there were is secret: whatever becomes of them, all are
        paid for.
        """
        purpose = _text("purpose", purpose)
        for plan in selection.trial:
            self._check_plan(plan)

        def entry(number: int, **facts: Any) -> BookedSelection:
            return BookedSelection(
                id=secrets.token_hex(8),
                purpose=purpose,
                trial=[dataclasses.asdict(plan) for plan in selection.trial],
                mean=selection.repeats.mean,
                shape=selection.repeats.shape,
                **facts,
            )

        (booking,) = self._book([selection], entry, data=data, delta=delta, seeded=seeded)
        return booking

    def _book(
        self,
        prices: Sequence[Price],
        entry: Callable[..., Booked | BookedSelection],
        *,
        data: Any,
        delta: float | None,
        seeded: bool,
        known: Callable[[State], list[Booking] | None] = lambda state: None,
    ) -> list[Booking]:
        """Book all prices or none; `entry` makes the line of each."""
        if seeded and not self.allow_seeds:
            raise ValueError(
                "seed: expected none with a ledger. Whoever knows a seed can take the noise away: "
                "such a release has no price that could be booked. Leave out the seed, or the "
                "ledger."
            )
        delta = self.delta if delta is None else _validate.open_unit("delta", delta)
        digest = self._source
        if digest is None and data is not None:
            digest = digest_of(data)
        own = [price.epsilon(delta) for price in prices]
        with storage.opened(self.path, write=True) as file:
            state = state_of(self.path, file.contents)
            if (before := known(state)) is not None:
                return before
            new: list[Entry] = []
            if digest is not None and not _check_data(self.path, state, digest):
                new.append(_bound(self.path, digest, "the data of the first booking"))
            spent = prices_of(state.releases)
            total = self.budget.total([*spent, *prices])
            affordable = total <= self.epsilon
            if affordable:
                last = len(prices) - 1
                booked = [
                    entry(
                        i,
                        epsilon=epsilon,
                        delta=delta,
                        total=total if i == last else self.budget.total([*spent, *prices[: i + 1]]),
                        seeded=seeded,
                        time=now(),
                    )
                    for i, epsilon in enumerate(own)
                ]
                file.append([*new, *booked])
        if not affordable:
            raise BudgetExceededError(self._refusal(spent, prices, total, delta))
        return [Booking(self, each.id, each.steps) for each in booked]

    def _found(self, state: State, ids: Sequence[str], jobs: Sequence[Job]) -> list[Booking] | None:
        """Bookings that were made under these ids before; None if there are none."""
        found = {each.booked.id: each for each in state.releases if each.booked.id in ids}
        if len(set(ids)) != len(jobs) or len(found) not in (0, len(jobs)):
            raise LedgerError(
                f"{self.path}: expected a new name for each of {len(jobs)} bookings, or "
                "those of bookings that were made together, got others."
            )
        if not found:
            return None
        return [self._same(found[id], job) for id, job in zip(ids, jobs, strict=True)]

    def _same(self, release: Release, job: Job) -> Booking:
        """A booking that was made before, for the very same release."""
        booked, settled = release.booked, release.settled
        if settled is not None and settled.steps < booked.steps:
            raise LedgerError(
                f"{self.path}: the booking {booked.id} was settled at {settled.steps:,} of "
                f"{booked.steps:,} steps, and the others are no longer paid for. The run cannot go "
                "on; remove its checkpoint, and begin a new one."
            )
        same = isinstance(booked, Booked) and (
            (booked.plan, booked.runs) == (dataclasses.asdict(job.plan), job.runs)
        )
        if not same:
            raise LedgerError(
                f"{self.path}: the booking {booked.id} is that of a release with another plan. Use "
                "another checkpoint for this one."
            )
        return Booking(self, booked.id, booked.steps)

    def check_affordable(self, plan: PrivacyPlan, *, delta: float | None = None) -> float:
        """The total after a release with this plan. Nothing is booked.

        Raises:
            BudgetExceededError: As `book` would.
        """
        self._check_plan(plan)
        spent = self.prices
        total = self.budget.total([*spent, plan])
        if total > self.epsilon:
            delta = self.delta if delta is None else delta
            raise BudgetExceededError(self._refusal(spent, [plan], total, delta))
        return total

    def booking(self, id: str) -> Booking:
        """A booking by its id, to go on with a run that was killed, or to settle it."""
        for release in self.releases:
            if release.booked.id == id:
                return Booking(self, id, release.booked.steps)
        raise LedgerError(f"{self.path}: there is no booking {id!r}. `entries` has them all.")

    def bind(self, data: Any, note: str) -> None:
        """Say that `data` are the ledger's data set, too: a recoding of it, or a part.

        Args:
            data: A file, a table or arrays.
            note: For people who read the ledger; public.
        """
        self._bind(digest_of(data), _text("note", note))

    # -- inside -----------------------------------------------------------------------------------

    def _bind(self, digest: bytes, note: str) -> None:
        with storage.opened(self.path, write=True) as file:
            state_of(self.path, file.contents)
            file.append([_bound(self.path, digest, note)])

    def _settle(self, id: str, steps: int) -> None:
        with storage.opened(self.path, write=True) as file:
            state = state_of(self.path, file.contents)
            (release,) = [each for each in state.releases if each.booked.id == id]
            if release.settled is not None:
                if release.settled.steps == steps:
                    return
                raise LedgerError(
                    f"{self.path}: the booking {id} was settled at {release.settled.steps:,} steps "
                    f"and cannot be at {steps:,}: what it did not use may have been spent. Book "
                    "more steps anew."
                )
            price = release.booked.price(steps)
            others = prices_of([each for each in state.releases if each.booked.id != id])
            settled = Settled(
                id=id,
                steps=steps,
                epsilon=0.0 if price is None else price.epsilon(release.booked.delta),
                total=self.budget.total(others if price is None else [*others, price]),
            )
            file.append([settled])

    def _check_plan(self, plan: PrivacyPlan) -> None:
        if not isinstance(plan, PrivacyPlan):
            raise TypeError(
                f"plan: expected a dpvim.PrivacyPlan, got {type(plan).__name__}. A fit without "
                "noise has no price that could be booked."
            )
        plan.noise_stddev  # noqa: B018 -- refuse a plan that was not calibrated
        if plan.relation is not self.relation:
            raise ValueError(
                f"relation: expected {self.relation.value!r}, which the ledger {self.path} "
                f"declares, got {plan.relation.value!r}. Costs of different relations do not "
                "compose: give all releases the same one."
            )
        unit = plan.unit.value
        if unit != self.unit:
            raise ValueError(
                f"unit: expected a plan whose unit of privacy is a {self.unit}, which the ledger "
                f"{self.path} declares, got one for a {unit}. A ledger has one unit, "
                "which is chosen when it is made (dpvim ledger init --unit)."
            )

    def _refusal(
        self, spent: Sequence[Price], prices: Sequence[Price], total: float, delta: float
    ) -> str:
        budget = self.budget
        before = cost.spelled(budget.total(spent), self.delta)
        left = cost.epsilon_left(budget, spent)
        some = "this release" if len(prices) == 1 else f"these {len(prices)} releases"
        text = (
            f"{self.path}: {some} would bring the total of {self.name!r} to "
            f"{cost.spelled(total, self.delta)}; its budget is "
            f"{cost.spelled(self.epsilon, self.delta)}, of which {before} are spent. One release "
            f"of epsilon = {int(left * 1e4) / 1e4:.4g} at delta = {self.delta:g} is left. "
        )
        if len(prices) == 1 and isinstance(prices[0], PrivacyPlan):
            text += cost.offers(budget, spent, prices[0], delta)
        return text + " Nothing was released."

    def _contents(self) -> Contents:
        with storage.opened(self.path) as file:
            return file.contents

    def plot(self) -> Any:
        """Draw what was spent on what, and how it adds up; see `dpvim.ledger.picture.draw`."""
        return require("dpvim.ledger.picture", extra="plots").draw(self)

    def _repr_html_(self) -> str:
        releases = self.releases
        prices = prices_of(releases)
        spent, left = self.budget.total(prices), cost.epsilon_left(self.budget, prices)
        of_budget = cost.spelled(self.epsilon, self.delta)
        rows = [
            (
                each.booked.time[:10],
                each.booked.purpose,
                each.booked.mechanism,
                f"{each.epsilon:.4g}",
                each.state + (" (seeded)" if each.booked.seeded else ""),
            )
            for each in releases
        ]
        text = f"epsilon {spent:.4g} spent of {of_budget} for each {self.unit}"
        return _html.card(
            f"Ledger of {self.name}",
            _html.paragraph(text),
            _html.meter(spent / self.epsilon, text),
            _html.paragraph(f"One release of epsilon {int(left * 1e4) / 1e4:.4g} is left."),
            _html.table(["day", "purpose", "mechanism", "epsilon", "state"], rows),
        )

    def __repr__(self) -> str:
        return f"<Ledger {str(self.path)!r} of {self.name!r}: {self.epsilon:g} at {self.delta:g}>"


class Booking:
    """A release that is paid for.

    Attributes:
        ledger: Where it is booked.
        id: Its name there; `Ledger.booking` finds it.
        steps: Number of steps that are paid for.
    """

    def __init__(self, ledger: Ledger, id: str, steps: int) -> None:
        self.ledger, self.id, self.steps = ledger, id, steps

    def settle(self, steps: int) -> None:
        """Say how many steps were begun in the end; the rest is free for other releases.

        To settle once more at the same number does nothing.
        """
        given: Any = steps
        is_number = isinstance(given, Integral) and not isinstance(given, bool)
        if not is_number or not 0 <= given <= self.steps:
            raise ValueError(
                f"steps: expected 0 to {self.steps:,}, which are booked, got "
                f"{_validate.shown(steps)}. More steps "
                "are booked before they are taken."
            )
        self.ledger._settle(self.id, int(steps))

    def settle_or_warn(self, steps: int) -> None:
        """`settle`, where a result must not be lost for a ledger that cannot be written to.

        A booking that is not settled counts at its full price, which is safe.
        """
        try:
            self.settle(steps)
        except (OSError, LedgerError) as error:
            warnings.warn(
                f"the booking {self.id} could not be settled at {steps:,} steps, and counts at its "
                f"full price: {error} Settle it later: ledger.booking({self.id!r}).settle({steps})",
                PrivacyWarning,
                stacklevel=2,
            )

    def __repr__(self) -> str:
        return f"<Booking {self.id}: {self.steps:,} steps in {str(self.ledger.path)!r}>"


def _check_data(path: Path, state: State, digest: bytes) -> bool:
    """True if data are bound to the ledger, False if none are yet.

    Raises:
        LedgerError: Others are.
    """
    if not state.bound:
        return False
    key = read_key(path)
    known = {each.fingerprint for each in state.bound if key is not None and each.key == key.name}
    if key is None or not known:
        raise LedgerError(
            f"{key_path(path)}: expected the key with which the ledger knows its data, "
            f"{'got another one' if key else 'there is none'}. Restore it from a copy; or, if it "
            "is lost and you are sure of the data, bind them anew: ledger.bind(data, note)."
        )
    if key.fingerprint(digest) not in known:
        raise LedgerError(
            f"data: expected the data set of {path} ({state.declared.name!r}), got data with "
            "another fingerprint. Other people's records have a ledger of their own. If these are "
            "the same records in another form or a part of them, say so once: ledger.bind(data, "
            "note), or name the data set that they were made from: Ledger(path, data=...)."
        )
    return True


def _bound(path: Path, digest: bytes, note: str) -> Bound:
    """The entry that binds data, with the ledger's key, which is made if there is none."""
    key = read_key(path) or make_key(path)
    return Bound(fingerprint=key.fingerprint(digest), key=key.name, note=note, time=now())


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(
            f"{name}: expected a few words, got {_validate.shown(value)}. It is public."
        )
    return " ".join(_validate.text(name, value).split())
