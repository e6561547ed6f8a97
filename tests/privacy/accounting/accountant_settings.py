"""Settings that the accountant is tried at, with tight values from elsewhere."""

from __future__ import annotations

import csv
from pathlib import Path

from dpvim.privacy import accounting
from dpvim.privacy.plan import PrivacyPlan
from dpvim.types import Relation

# 100 settings that fill the box of the tests, see benchmarks/accounting_reference.py.
REFERENCE = Path(__file__).with_name("accounting_reference.csv")

RANGES = {
    "epsilon": (0.01, 100.0),
    "delta": (1e-12, 1e-2),
    "sampling_prob": (1e-5, 1.0),
    "num_steps": (1, 10**7),
}

USUAL = {"sampling_prob": 0.02, "num_steps": 2_000, "num_examples": 1, "max_batch_size": 1}


def reference_rows():
    with REFERENCE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [
        {key: value if key == "relation" else float(value) for key, value in row.items()}
        for row in rows
    ]


ROWS = reference_rows()


def facts_of(row):
    prob, steps = row["sampling_prob"], int(row["num_steps"])
    return USUAL | {"sampling_prob": prob, "num_steps": steps}


def with_cap(row, num_examples):
    """Facts of a plan for so many records: most of its batches can be cut to size."""
    facts = facts_of(row) | {"num_examples": num_examples}
    plan = PrivacyPlan(
        num_examples=num_examples,
        sampling_prob=facts["sampling_prob"],
        num_steps=facts["num_steps"],
        clip_norm=1.0,
    )
    return facts | {"max_batch_size": plan.max_batch_size}


def cost(noise, *, delta=1e-6, relation="zero_out", **facts):
    event = accounting.dp_event(noise_multiplier=noise, **(USUAL | facts))
    return accounting.epsilon_of(event, delta=delta, relation=Relation(relation))


def calibrated(*, epsilon=1.0, delta=1e-6, relation="zero_out", **facts):
    return accounting.calibrate_noise(
        epsilon=epsilon, delta=delta, relation=Relation(relation), **(USUAL | facts)
    )
