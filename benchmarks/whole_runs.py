"""Whole runs of two or more checkouts of dpvim, in turn: CPU time and time on the clock of a step.

    python benchmarks/whole_runs.py ../before . [--works 0 1 4 7] [--steps 16384] [--rounds 9]

The first checkout is what the others are compared with. Every checkout has a process of its own,
with XLA's default threads, and they run one after the other, round after round, so that what
others do on the machine meets all of them: `cpu_times` and `clock_times` are medians of ratios
within a round. On a machine with more work than cores the clock says little: a process with more
threads that want to run gets more of it. `same` tells whether parameters after the run are those of
the first checkout to the last bit. Works are those of `benchmarks/speed.py`, by number.
`-o FILE` writes the table to another file than `benchmarks/results/whole_runs.csv`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results" / "whole_runs.csv"


def serve(number: int, steps: int) -> None:
    """In a checkout's process: a run for every line of input, its times and the end of it."""
    import jax
    import optax
    import speed

    from dpvim.svi import DPSVI

    warnings.simplefilter("ignore")
    work = speed.WORKS[number]
    model, data = work.make()
    plan = speed.plan_for(len(jax.tree.leaves(data)[0]))
    optimizer = optax.adam(1e-3)
    svi = DPSVI(model, work.family, optimizer, plan, variant=work.variant, seed=0)
    first = True
    for _ in sys.stdin:
        began = time.perf_counter(), time.process_time()
        params = svi.run(jax.random.key(0), steps, *data, progress_bar=False).params
        took = time.perf_counter() - began[0], time.process_time() - began[1]
        answer: dict[str, Any] = {"us": [1e6 * seconds / steps for seconds in took]}
        if first:  # each run has a place of its own in the streams
            leaves = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params)]
            answer["end"] = hashlib.sha256(b"".join(leaves)).hexdigest()
        first = False
        print(json.dumps(answer), flush=True)


class Checkout:
    """A process that runs the code of a checkout."""

    def __init__(self, folder: Path, number: int, steps: int) -> None:
        command = [sys.executable, __file__, "--serve", str(number), "--steps", str(steps)]
        path = os.pathsep.join(map(str, (folder.resolve() / "src", Path(__file__).parent)))
        self._process = subprocess.Popen(
            command,
            env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self) -> dict[str, Any]:
        """One run."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("run\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def end(self) -> None:
        """No more runs."""
        self._process.communicate()


def compare(number: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    import speed

    checkouts = [Checkout(folder, number, options.steps) for folder in options.checkouts]
    ends = [checkout.run()["end"] for checkout in checkouts]  # compiled
    rounds = [[checkout.run()["us"] for checkout in checkouts] for _ in range(options.rounds)]
    for checkout in checkouts:
        checkout.end()
    times = np.array(rounds)  # rounds x checkouts x (clock, CPU)
    ratios = np.median(times[:, :1] / times, axis=0)
    work = speed.WORKS[number]
    return [
        {
            "work": work.name,
            "variant": work.variant,
            "checkout": place,
            "cpu_us": round(float(np.median(times[:, place, 1])), 1),
            "clock_us": round(float(np.median(times[:, place, 0])), 1),
            "cpu_times": round(float(ratios[place, 1]), 2),
            "clock_times": round(float(ratios[place, 0]), 2),
            "same": end == ends[0],
        }
        for place, end in enumerate(ends)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", type=Path, nargs="*")
    parser.add_argument("--works", type=int, nargs="*", default=[0, 1, 4, 7])
    parser.add_argument("--steps", type=int, default=16_384)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.serve, options.steps)
        return
    import pandas as pd

    rows = []
    for number in options.works:
        rows += compare(number, options)
        print(pd.DataFrame(rows[-len(options.checkouts) :]).to_string(index=False), flush=True)
        pd.DataFrame(rows).to_csv(options.output, index=False)


if __name__ == "__main__":
    main()
