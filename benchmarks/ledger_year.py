"""A year of releases in one ledger: what it costs together, and what the sum would have said.

    python benchmarks/ledger_year.py

Books and settles plans; no data and no fits are needed for that. Writes results/ledger_year.csv and
results/ledger_year.png, which docs/ledger.md shows.
"""

from __future__ import annotations

import calendar
import tempfile
from pathlib import Path

import matplotlib
import pandas as pd

import dpvim
from dpvim.ledger import picture
from dpvim.privacy.counts import counts_plan
from dpvim.privacy.statement import COUNTS, GRADIENTS

matplotlib.use("Agg")

RESULTS = Path(__file__).parent / "results"
ROWS, EPSILON, DELTA, OWN_DELTA = 58_261, 2.5, 1e-6, 1e-7
MONTHS = calendar.month_name[1:]
# The regression of this quarter is stopped after so many of its steps.
STOPPED, STEPS_TAKEN = "September", 1000


def regression() -> dpvim.PrivacyPlan:
    """Four thousand steps on a tenth of the records each."""
    plan = dpvim.PrivacyPlan(num_examples=ROWS, sampling_prob=0.1, num_steps=4000, clip_norm=1.0)
    return plan.calibrate(epsilon=0.8, delta=OWN_DELTA)


def counts(epsilon: float) -> dpvim.PrivacyPlan:
    """Counts of all records, in one release."""
    plan = counts_plan(num_examples=ROWS, relation="zero_out")
    return plan.calibrate(epsilon=epsilon, delta=OWN_DELTA)


def book_a_year(ledger: dpvim.Ledger) -> None:
    """A table every month, a regression every quarter, a twin in summer."""
    for month in MONTHS:
        booking = ledger.book(
            counts(0.3), purpose=f"{month}: counts", delta=OWN_DELTA, mechanism=COUNTS
        )
        booking.settle(1)
        if month in ("March", "June", "September", "December"):
            booking = ledger.book(
                regression(), purpose=f"{month}: regression", delta=OWN_DELTA, mechanism=GRADIENTS
            )
            booking.settle(STEPS_TAKEN if month == STOPPED else booking.steps)
        if month == "July":
            booking = ledger.book(
                counts(1.0), purpose="July: synthetic twin", delta=OWN_DELTA, mechanism=COUNTS
            )
            booking.settle(1)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        ledger = dpvim.Ledger.create(
            f"{folder}/patients.ledger", name="patients 2026", epsilon=EPSILON, delta=DELTA
        )
        book_a_year(ledger)
        releases = ledger.releases
        totals = picture.running_totals(ledger.budget, releases)
        rows = [
            {
                "purpose": release.booked.purpose,
                "steps": release.steps,
                "epsilon": release.epsilon,
                "delta": release.booked.delta,
                "total": total,
                "sum": sum(each.epsilon for each in releases[: i + 1]),
            }
            for i, (release, total) in enumerate(zip(releases, totals, strict=True))
        ]
        table = pd.DataFrame(rows)
        table.to_csv(RESULTS / "ledger_year.csv", index=False, float_format="%.4g")
        picture.draw(ledger).savefig(RESULTS / "ledger_year.png", dpi=110)
        print(table.to_string(index=False))
        print(f"left: one release of ({ledger.left():.4g}, {DELTA:g})")
        try:
            ledger.book(counts(2.0), purpose="one twin more", delta=OWN_DELTA, mechanism=COUNTS)
        except dpvim.BudgetExceededError as refusal:
            print(str(refusal).replace(folder + "/", ""))


if __name__ == "__main__":
    main()
