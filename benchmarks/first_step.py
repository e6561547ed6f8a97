"""Seconds from a fresh process to the end of the first step: import, trace, compile, run.

    python benchmarks/first_step.py [--rounds 3]     # benchmarks/results/first_step.csv

Models and data are those of `speed.py`. Every round is a process of its own, and the fastest one
counts. `import_s` is `import dpvim` (with JAX and NumPyro), `cpu_s` and `clock_s` are everything
from the start of the process on, to the end of the first `DPSVI.update`; `run_cpu_s` and
`run_clock_s` the same to the end of a run of one step, which compiles the program of long runs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "first_step.csv"
# The name of a work, and of the function in `speed.py` that makes its model and data.
WORKS = {
    "Adult logistic, d 96, batch 301": "ready_made_logistic",
    "Adult logistic, d 96, batch 301, a model by hand": "logistic",
    "mixture, d 747, batch 583": "mixture",
    "mixture, d 747, batch 583, a model by hand": "mixture_by_hand",
}


def first_step(maker: str, began: float, *, by_run: bool) -> dict[str, float]:
    """What a process of its own does."""
    before = time.process_time()
    import dpvim

    imported = time.process_time() - before
    import jax
    import optax
    import speed

    model, data = getattr(speed, maker)()
    plan = speed.plan_for(len(jax.tree.leaves(data)[0]))
    svi = dpvim.DPSVI(model, "mean_field", optax.adam(1e-3), plan)
    key = jax.random.key(0)
    if by_run:
        svi.run(key, 1, *data, progress_bar=False)
        return {"run_cpu_s": time.process_time(), "run_clock_s": time.time() - began}
    jax.block_until_ready(svi.update(svi.init(key, *data), *data))
    return {"import_s": imported, "cpu_s": time.process_time(), "clock_s": time.time() - began}


def measured(name: str, rounds: int) -> dict[str, Any]:
    """One line of the table."""

    def fastest(*how: str) -> dict[str, float]:
        found = []
        for _ in range(rounds):
            process = [sys.executable, __file__, "--maker", WORKS[name], *how]
            done = subprocess.run(
                [*process, "--began", str(time.time())], check=True, capture_output=True, text=True
            )
            found.append(json.loads(done.stdout))
        return {key: round(min(each[key] for each in found), 1) for key in found[0]}

    return {"work": name} | fastest() | fastest("--by-run")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--maker", help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--by-run", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.maker:
        print(json.dumps(first_step(options.maker, options.began, by_run=options.by_run)))
        return
    import pandas as pd

    table = pd.DataFrame([measured(name, options.rounds) for name in WORKS])
    print(table.to_string(index=False))
    table.to_csv(RESULTS, index=False)


if __name__ == "__main__":
    main()
