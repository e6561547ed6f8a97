"""Many fits at once, and what is not a step: planning, accounting, posteriors.

    python benchmarks/many_fits.py     # benchmarks/results/many_fits.csv, overheads.csv

`fit_many` against one fit of the same work, in CPU time and in time on the clock for each step of
each fit. Both are measured after everything was compiled: the same call, made twice.
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

import pandas as pd
from speed import mixture, ready_made_logistic

import dpvim

RESULTS = Path(__file__).parent / "results"
# A model with data, steps of one fit, how many fits, and steps of each of them.
WORKS: dict[str, tuple[Callable[[], Any], int, int, int]] = {
    "Adult logistic, d 96, batch 301": (ready_made_logistic, 20_000, 32, 2500),
    "mixture, d 747, batch 583": (mixture, 5000, 4, 4000),
}


def seconds(call: Callable[[], Any]) -> tuple[float, float]:
    """On the clock, and of the processor."""
    clock, processor = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - clock, time.process_time() - processor


def lengths(call: Callable[[int], Any], steps: int) -> tuple[float, float]:
    """Microseconds a step, without compilation and other things that do not grow with the steps."""
    (short, short_cpu), (long, long_cpu) = (
        seconds(lambda: call(steps)),
        seconds(lambda: call(5 * steps)),
    )
    return (long - short) / (4 * steps) * 1e6, (long_cpu - short_cpu) / (4 * steps) * 1e6


def many() -> pd.DataFrame:
    rows = []
    for name, (make, steps, count, many_steps) in WORKS.items():
        model, data = make()
        options: dict[str, Any] = {
            "delta": 1e-6,
            "sampling_prob": 0.01,
            "clip_norm": 2.0,
            "noise_multiplier": 10.0,
        }

        def one(steps: int) -> Any:
            return dpvim.fit(model, *data, num_steps=steps, **options)  # noqa: B023

        def together(steps: int) -> Any:
            each: list[dict[str, Any]] = [{}] * count  # noqa: B023
            return dpvim.fit_many(model, *data, each=each, num_steps=steps, **options)  # noqa: B023

        alone, all_of_them = lengths(one, steps), lengths(together, many_steps)
        rows.append(
            {
                "work": name,
                "fits": count,
                "one_fit_cpu_us": round(alone[1], 1),
                "many_cpu_us": round(all_of_them[1] / count, 1),
                "one_fit_clock_us": round(alone[0], 1),
                "many_clock_us": round(all_of_them[0] / count, 1),
                "times_faster": round(alone[0] / (all_of_them[0] / count), 2),
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
    from_trace = seconds(lambda: fit.posterior_at())
    from_releases = seconds(lambda: fit.posterior_at(noise_aware="releases"))
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
