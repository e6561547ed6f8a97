"""Structured clipped sums against a gradient for each record by autodiff, in the same process.

    python benchmarks/structured_sums.py

Two problems of the paper's size, on made-up data: logistic regression (d 96, as Adult) and a
mixture of 16 components over six categorical columns with a Poisson regression (d 747, as UKB).
Reported for the aligned and the vanilla variant, on one thread: CPU microseconds of the clipped
sum alone (rows gathered, expected batch size), and of a whole step of DPSVI (sampling, gather, sum,
noise, prior, Adam), and how many steps that makes a CPU second. Writes
benchmarks/results/structured_sums.csv.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault(
    "XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
)

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd

import dpvim
from dpvim.family import mean_field
from dpvim.models.bridge import bridge
from dpvim.models.columns import CategoricalColumn, Response
from dpvim.models.data import prepare
from dpvim.models.mixture import Mixture
from dpvim.models.regression import Regression
from dpvim.variants import VARIANTS

RESULTS = Path(__file__).parent / "results" / "structured_sums.csv"
SAMPLING_PROB = 0.01
CLIP_NORM = 2.0
LEVELS = (8, 2, 5, 5, 7, 22)


class Case(NamedTuple):
    name: str
    model: Callable[..., Any]
    data: tuple[Any, ...]
    num_rows: int


def logistic_case() -> Case:
    rng = np.random.default_rng(0)
    X = (rng.random((30162, 96)) < 0.15).astype(np.float32)
    y = (rng.random(30162) < 0.25).astype(np.int32)
    return Case("logistic, d 96", Regression("logistic", intercept=False), (X, y), 30162)


def mixture_case() -> Case:
    rng = np.random.default_rng(0)
    rows = 58261
    columns = [CategoricalColumn(f"x{i}", levels) for i, levels in enumerate(LEVELS)]
    values = {c.name: rng.integers(0, c.num_levels, rows).astype(np.int32) for c in columns}
    values["y"] = (rng.random(rows) < 0.05).astype(np.int32)
    model = Mixture([*columns, CategoricalColumn("y", 2)], 16, Response("y", "poisson"))
    return Case("mixture, d 747", model, (values,), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="CPU time a measurement")
    options = parser.parse_args()
    warnings.simplefilter("ignore", dpvim.NotForReleaseWarning)
    rows = []
    for case in (logistic_case(), mixture_case()):
        for variant in ("aligned", "vanilla"):
            row: dict[str, Any] = {"problem": case.name, "variant": variant}
            for path, model in (("structured", case.model), ("autodiff", plain(case.model))):
                row |= {
                    f"{path}_sum_us": microseconds_of_sum(case, model, variant, options.seconds),
                    f"{path}_step_us": microseconds_of_step(case, model, variant, options.seconds),
                }
            row["sum_ratio"] = row["autodiff_sum_us"] / row["structured_sum_us"]
            row["step_ratio"] = row["autodiff_step_us"] / row["structured_step_us"]
            row["structured_steps_a_second"] = 1e6 / row["structured_step_us"]
            rows.append(row)
            print(pd.DataFrame([row]).round(1).to_string(index=False), flush=True)
    RESULTS.parent.mkdir(exist_ok=True)
    pd.DataFrame(rows).round(1).to_csv(RESULTS, index=False)


def plain(model: Callable[..., Any]) -> Callable[..., Any]:
    """The same model without its own clipped sum."""
    return lambda *args, **kwargs: model(*args, **kwargs)


def microseconds_of_sum(
    case: Case, model: Callable[..., Any], variant: str, seconds: float
) -> float:
    inputs = prepare(case.data, {})
    problem = bridge(model, inputs).problem
    size = round(SAMPLING_PROB * case.num_rows)
    # Other rows every time, as in a run: what does not change could be worked out once for all.
    rows = jnp.asarray(np.random.default_rng(0).integers(0, case.num_rows, (8, size)), jnp.int32)
    family = mean_field(problem.dim)
    loc = 0.1 * jax.random.normal(jax.random.key(0), (problem.dim,))
    params = family.init(loc, 0.1)
    weights = VARIANTS[variant](family).weights(params, loc)

    @jax.jit
    def repeat(count: Any, data: Any, rows: Any, length: Any) -> Any:
        def once(i: Any, latent: Any) -> Any:  # every sum depends on the last one
            nothing = jnp.arange(size) >= length
            batch = jax.tree.map(lambda leaf: leaf[rows[i % 8]], data)
            total = problem.likelihood.clipped_sum(latent, weights, batch, nothing, CLIP_NORM)
            return loc + 1e-6 * total.astype(jnp.float32)

        return jax.lax.fori_loop(0, count, once, loc)

    def run(count: int) -> float:
        began = time.process_time()
        jax.block_until_ready(repeat(count, inputs.records, rows, size))
        return time.process_time() - began

    run(1)
    count = max(10, round(seconds / 5 / (run(20) / 20)))
    return 1e6 * min(run(count) for _ in range(5)) / count


def microseconds_of_step(
    case: Case, model: Callable[..., Any], variant: str, seconds: float
) -> float:
    plan = dpvim.PrivacyPlan(
        num_examples=case.num_rows,
        sampling_prob=SAMPLING_PROB,
        num_steps=10**7,
        clip_norm=CLIP_NORM,
        noise_multiplier=2.0,
    )
    svi = dpvim.DPSVI(model, "mean_field", optax.adam(1e-3), plan, variant=variant, seed=0)

    def run(count: int) -> float:
        began = time.process_time()
        svi.run(jax.random.key(0), count, *case.data, progress_bar=False, trace_every=10**6)
        return time.process_time() - began

    run(2)
    short = 200
    base = min(run(short) for _ in range(2))  # most of it is the compiler's
    probe = short * 5
    per_step = max((run(probe) - base) / (probe - short), 1e-5)
    count = short + round(seconds / per_step)
    return 1e6 * (min(run(count) for _ in range(2)) - base) / (count - short)


if __name__ == "__main__":
    main()
