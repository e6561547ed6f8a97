"""Small ledgers for tests."""

from __future__ import annotations

from pathlib import Path

from dpvim.ledger.book import Ledger
from dpvim.privacy.plan import PrivacyPlan

DELTA = 1e-5


def plan_of(noise: float = 20.0, **changes: object) -> PrivacyPlan:
    """One release on all records: epsilon is 0.176 at delta 1e-5 with this noise."""
    settings = {"num_examples": 1000, "sampling_prob": 1.0, "num_steps": 1, "clip_norm": 1.0}
    return PrivacyPlan(**{**settings, "noise_multiplier": noise, **changes})  # type: ignore[arg-type]


def make_ledger(folder: Path, epsilon: float = 1.0, **changes: object) -> Ledger:
    settings = {"name": "people", "delta": DELTA, **changes}
    return Ledger.create(folder / "people.ledger", epsilon=epsilon, **settings)  # type: ignore[arg-type]


def some_entries(folder: Path) -> Ledger:
    """A declaration, three bookings and a settlement: five lines."""
    ledger = make_ledger(folder)
    for purpose in ("first", "second", "third"):
        booking = ledger.book(plan_of(num_steps=4, noise=40.0), purpose=purpose)
    booking.settle(3)
    return ledger


def lines_of(ledger: Ledger) -> list[bytes]:
    return ledger.path.read_bytes().splitlines(keepends=True)
