"""Random plans with caps on their batches: how loose the accountant is, and how long it takes.

    DPVIM_CACHE=off python benchmarks/accounting_plans.py > plans.csv

Plans fill the box of the tests evenly on logarithmic scales, with 10 to 10^7 records. `tight` is
the integral of `accounting_reference.py` for batches without a cap. If all other records are zero,
the cap does nothing but leave the record out with probability 1e-22 or less, so that this is a
lower bound on the tight value with the cap, to its own precision of 1e-5. `monotone` says whether
epsilon goes the right way when noise, delta, steps or sampling probability grow by 1 % (by one step
at least). A summary goes to standard error. Takes a quarter of an hour.
"""

from __future__ import annotations

import csv
import dataclasses
import itertools
import math
import sys
import time
from collections.abc import Iterator

import numpy as np
from accounting_reference import LOG10_RANGES, shorter, steps_of, tight_epsilon
from scipy.stats import qmc

from dpvim.privacy.plan import PrivacyPlan
from dpvim.types import Relation

NUM_PLANS = 400
FACTS = [
    "relation",
    "num_examples",
    "sampling_prob",
    "num_steps",
    "max_batch_size",
    "noise",
    "delta",
]
RESULTS = ["epsilon", "tight", "calibration_seconds", "epsilon_seconds", "monotone"]


def plans() -> Iterator[tuple[PrivacyPlan, float, float]]:
    """Plans without noise, with the epsilon and delta to calibrate them to."""
    for number, point in enumerate(qmc.Halton(len(LOG10_RANGES) + 1, seed=7).random(8 * NUM_PLANS)):
        ends = np.array([*LOG10_RANGES.values(), (1, 7)])
        drawn = 10 ** (ends[:, 0] + np.diff(ends)[:, 0] * point)
        epsilon, delta, prob, num_steps, num_examples = (shorter(value) for value in drawn)
        plan = PrivacyPlan(
            num_examples=round(num_examples),
            sampling_prob=prob,
            num_steps=round(num_steps),
            clip_norm=1.0,
            relation=list(Relation)[number % len(Relation)],
        )
        # A delta above the probability of being in a batch needs no noise.
        needs_noise = delta < -math.expm1(plan.num_steps * math.log1p(-prob))
        if needs_noise and plan.max_batch_size < plan.num_examples:
            yield plan, epsilon, delta


def is_monotone(plan: PrivacyPlan, delta: float) -> bool:
    here, noise = plan.epsilon(delta), plan.noise_stddev
    more_steps = math.ceil(1.01 * plan.num_steps)
    more_often = min(1.0, 1.01 * plan.sampling_prob)
    return (
        dataclasses.replace(plan, noise_multiplier=1.01 * noise).epsilon(delta) < here
        and plan.epsilon(1.01 * delta) < here
        and plan.with_steps(more_steps).epsilon(delta) > here
        and dataclasses.replace(plan, sampling_prob=more_often).epsilon(delta) > here
    )


def main() -> None:
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(FACTS + RESULTS)
    results = []
    for uncalibrated, epsilon, delta in itertools.islice(plans(), NUM_PLANS):
        start = time.perf_counter()
        plan = uncalibrated.calibrate(epsilon=epsilon, delta=delta)
        middle = time.perf_counter()
        found = plan.epsilon(delta)
        end = time.perf_counter()
        noise = plan.noise_stddev
        steps = steps_of(plan.sampling_prob, noise, plan.relation)
        tight = max(tight_epsilon(step, plan.num_steps, delta, epsilon) for step in steps)
        result = (found, tight, middle - start, end - middle, is_monotone(plan, delta))
        facts = (plan.relation.value, plan.num_examples, plan.sampling_prob, plan.num_steps)
        numbers = [f"{value:.6g}" for value in result[:-1]]
        table.writerow([*facts, plan.max_batch_size, noise, delta, *numbers, result[-1]])
        sys.stdout.flush()
        results.append(result)

    found, tight, calibration, once, monotone = np.array(results).T
    looseness = found / tight - 1
    print(
        f"{len(results)} plans: {looseness.min():.4%} to {looseness.max():.3%} above the tight "
        f"value; calibration at most {calibration.max():.1f} s, epsilon {once.max():.1f} s; "
        f"monotone {monotone.mean():.1%}",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
