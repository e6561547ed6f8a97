"""Paying for runs: booked before the first step, settled at the steps that were begun."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from dpvim.ledger.book import Booking, Job, Ledger
from dpvim.privacy.statement import GRADIENTS


class Account(NamedTuple):
    """A ledger, and what is noted with the releases of a fit: their purpose and their delta."""

    ledger: Ledger
    purpose: str
    delta: float


class Tally:
    """Steps on data that were begun, by any number of threads, whatever became of them."""

    def __init__(self) -> None:
        self.steps = 0
        self._lock = threading.Lock()

    def add(self, steps: int) -> None:
        with self._lock:
            self.steps += steps


def book_once(
    account: Account,
    job: Job,
    *,
    id: str,
    data: Any,
    seeded: bool = False,
    mechanism: str = GRADIENTS,
) -> Booking:
    """Book a run that several processes may continue; they find its booking under `id`."""
    (booking,) = account.ledger.book_all(
        [job],
        purpose=account.purpose,
        data=data,
        delta=account.delta,
        mechanism=mechanism,
        seeded=seeded,
        ids=[id],
    )
    return booking


@contextmanager
def paid(
    account: Account | None,
    jobs: Sequence[Job],
    tallies: Sequence[Tally],
    *,
    data: Any,
    seeded: bool = False,
    mechanism: str = GRADIENTS,
) -> Iterator[None]:
    """Book jobs, let the block do them, and settle each at the steps of its tally.

    However the block ends, steps that were not begun are not paid for. A process that is killed
    settles nothing: what it booked stays paid for. Without an account this does nothing.
    """
    if account is None:
        yield
        return
    bookings = account.ledger.book_all(
        jobs,
        purpose=account.purpose,
        data=data,
        delta=account.delta,
        mechanism=mechanism,
        seeded=seeded,
    )
    try:
        yield
    finally:
        for booking, tally in zip(bookings, tallies, strict=True):
            booking.settle_or_warn(tally.steps)
