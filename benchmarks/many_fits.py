"""Many fits at once, and what is not a step: planning, accounting, posteriors.

    python benchmarks/many_fits.py     # benchmarks/results/many_fits.csv, overheads.csv

`fit_many` against one fit of the same work, in CPU time and in time on the clock for each step of
each fit, when everything is compiled.
"""

from __future__ import annotations

import os
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault(
    "XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
)
os.environ["DPVIM_CACHE"] = tempfile.mkdtemp()  # plans are not known from another day

import jax
import pandas as pd
from speed import mixture, ready_made_logistic

import dpvim
from dpvim import fitting
from dpvim.bridge.data import prepare
from dpvim.inference.monitor import UNMONITORED
from dpvim.options import FitOptions
from dpvim.prepared import PreparedFit

RESULTS = Path(__file__).parent / "results"
# A model with data, steps of a fit, and how many fits.
WORKS: dict[str, tuple[Callable[[], Any], int, int]] = {
    "Adult logistic, d 96, batch 301": (ready_made_logistic, 20_000, 32),
    "mixture, d 747, batch 583": (mixture, 5000, 4),
}


def seconds(call: Callable[[], Any]) -> tuple[float, float]:
    """On the clock, and of the processor."""
    clock, processor = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - clock, time.process_time() - processor


def many() -> pd.DataFrame:
    rows = []
    for name, (make, steps, count) in WORKS.items():
        model, data = make()
        plan = dpvim.PrivacyPlan(
            num_examples=len(jax.tree.leaves(data)[0]),
            sampling_prob=0.01,
            num_steps=steps,
            clip_norm=2.0,
            noise_multiplier=10.0,
        )
        inputs = prepare(data, {})
        prepared = PreparedFit(model, plan, FitOptions().by_hand(), inputs)

        def fits(number: int) -> tuple[float, float]:
            """Seconds that so many fits take as `fit_many` takes them, when all is compiled."""

            def run() -> None:
                each = [FitOptions().by_hand()] * number
                fitting.in_parallel(fitting.programs(prepared, each, inputs, UNMONITORED))  # noqa: B023

            run()
            return seconds(run)

        alone, together = fits(1), fits(count)
        one_us, many_us = (
            [each / (number * steps) * 1e6 for each in found]
            for found, number in ((alone, 1), (together, count))
        )
        rows.append(
            {
                "work": name,
                "fits": count,
                "one_fit_cpu_us": round(one_us[1], 1),
                "many_cpu_us": round(many_us[1], 1),
                "one_fit_clock_us": round(one_us[0], 1),
                "many_clock_us": round(many_us[0], 1),
                "times_faster": round(one_us[0] / many_us[0], 2),
            }
        )
        print(pd.DataFrame(rows[-1:]).to_string(index=False), flush=True)
    return pd.DataFrame(rows)


def overheads() -> pd.DataFrame:
    """What a fit does besides its steps, for the plan of the paper's Adult runs."""
    plan = dpvim.PrivacyPlan(
        num_examples=30_162, sampling_prob=0.01, num_steps=400_000, clip_norm=2.0
    )
    cold = seconds(lambda: plan.calibrate(epsilon=1.0, delta=1e-5))
    cached = seconds(lambda: plan.calibrate(epsilon=1.0, delta=1e-5))
    model, data = ready_made_logistic()
    fit = dpvim.fit(
        model, *data, delta=1e-6, sampling_prob=0.01, num_steps=20_000, noise_multiplier=10.0
    )
    from_trace = seconds(lambda: fit.posterior_from("trace"))
    from_releases = seconds(lambda: fit.posterior_from("releases"))
    rows = {
        "a plan for (epsilon 1, delta 1e-5), 400 000 steps": cold,
        "the same again": cached,
        "posterior from the trace, d 96": from_trace,
        "posterior from the releases, d 96": from_releases,
    }
    return pd.DataFrame(
        [{"what": k, "clock_s": round(v[0], 2), "cpu_s": round(v[1], 2)} for k, v in rows.items()]
    )


def main() -> None:
    warnings.simplefilter("ignore")
    overheads_table = overheads()
    print(overheads_table.to_string(index=False), flush=True)
    overheads_table.to_csv(RESULTS / "overheads.csv", index=False)
    many().to_csv(RESULTS / "many_fits.csv", index=False)


if __name__ == "__main__":
    main()
