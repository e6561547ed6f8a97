"""A chunk of steps by itself, compiled with several options of XLA's: what each does to a step.

    python benchmarks/compile_options.py [--works 0 1 2 4 6 7] [--steps 1024] [--rounds 12]

The programs run in turn in one process with XLA's default threads (or `NPROC`), with batches and
noise drawn beforehand; the table has the least and the median of CPU time and time on the clock,
and whether the parameters are those of the first program to the last bit. Options that XLA takes
for a whole process only are given as `XLA_FLAGS`. Works are those of `benchmarks/speed.py`, by
number. `one piece` is the whole loop as one piece of machine code, for regressions: others have
operations that XLA cannot put into one. The library does not do it: docs/performance.md says why.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
import speed
from jax.experimental.xla_metadata import set_xla_metadata

from dpvim.bridge.data import prepare
from dpvim.bridge.model import bridge
from dpvim.inference.engine import make_engine
from dpvim.inference.families import FAMILIES
from dpvim.inference.variants import make_variant
from dpvim.privacy.randomness import SecretStreams

RESULTS = Path(__file__).parent / "results" / "compile_options.csv"
ONE_THREAD: dict[str, Any] = {"xla_disable_hlo_passes": "cpu-parallel-task-assigner"}
OPTIONS: dict[str, dict[str, Any]] = {
    "XLA's own": {},
    "one thread": ONE_THREAD,
    "one thread, 512 bits": ONE_THREAD | {"xla_cpu_prefer_vector_width": 512},
    "one thread, no YNN": ONE_THREAD | {"xla_cpu_experimental_ynn_fusion_type": ""},
    "Eigen on one thread": {"xla_cpu_multi_thread_eigen": False},
}
NO_YNN = OPTIONS["one thread, no YNN"]
IN_ONE_PIECE = {
    "one piece": NO_YNN,
    "one piece, 512 bits": NO_YNN | {"xla_cpu_prefer_vector_width": 512},
}


def in_one_piece(program: Callable[..., Any]) -> Callable[..., Any]:
    """The mark that XLA gives to small loops, for which it has no option but for a process."""
    part = jax.jit(program)
    mark = {"xla_cpu_small_call": "true", "inlineable": "false"}
    return lambda *given: set_xla_metadata(part(*given), **mark)


def measure(number: int, steps: int, rounds: int) -> list[dict[str, Any]]:
    work = speed.WORKS[number]
    model, data = work.make()
    inputs = prepare(data, {})
    problem = bridge(model, inputs).problem
    plan, family = speed.plan_for(inputs.num_rows), FAMILIES[work.family](problem.dim)
    variant = make_variant(work.variant, family)
    engine = make_engine(problem, family, variant, optax.adam(1e-3), plan)
    records = engine.prepare(inputs.records)
    drawn = engine.source(inputs.num_rows, SecretStreams(0)).draw(steps, steps)
    start = engine.init(jax.random.key(0), jnp.zeros(problem.dim), 0.1)
    given = (start, records, *map(jnp.asarray, drawn), jnp.array([0, steps], jnp.int32))
    lowered = jax.jit(engine.run_chunk).lower(*given)
    programs = {name: lowered.compile(options or None) for name, options in OPTIONS.items()}
    if "Adult" in work.name:
        lowered = jax.jit(in_one_piece(engine.run_chunk)).lower(*given)
        programs |= {name: lowered.compile(options) for name, options in IN_ONE_PIECE.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in programs}
    ends: dict[str, np.ndarray] = {}
    for _ in range(rounds + 1):  # the first one touches the memory
        for name, program in programs.items():
            began = time.process_time(), time.perf_counter()
            state = jax.block_until_ready(program(*given))[0]
            took = time.process_time() - began[0], time.perf_counter() - began[1]
            times[name].append((1e6 * took[0] / steps, 1e6 * took[1] / steps))
            ends[name] = np.concatenate([np.ravel(leaf) for leaf in state.params])
    first = next(iter(ends.values()))
    rows = []
    for name, found in times.items():
        (least_cpu, least_clock), (cpu, clock) = (f(found[1:], axis=0) for f in (np.min, np.median))
        rows.append(
            {
                "work": work.name,
                "variant": work.variant,
                "options": name,
                "least_cpu_us": round(least_cpu, 1),
                "cpu_us": round(cpu, 1),
                "least_clock_us": round(least_clock, 1),
                "clock_us": round(clock, 1),
                "same": np.array_equal(ends[name], first),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--works", type=int, nargs="*", default=[0, 1, 2, 4, 6, 7])
    parser.add_argument("--steps", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for number in options.works:
        found = measure(number, options.steps, options.rounds)
        rows += found
        print(pd.DataFrame(rows[-len(found) :]).to_string(index=False), flush=True)
        pd.DataFrame(rows).to_csv(RESULTS, index=False)


if __name__ == "__main__":
    main()
