"""Measure what a checkpoint costs: processor time of a fit with one, over that of the same without.

    python benchmarks/checkpoint_overhead.py [--steps 60000] [--repeats 3]

Both take the same steps with the same noise, in turns, in one process that compiled them before;
the smallest time of each counts. The fixed part (the program's fingerprint, the first and the last
file) is a run of few steps with a checkpoint, less one without. Prints one line of json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpyro
import numpyro.distributions as dist

import dpvim
from dpvim import checkpoints


def model(X: Any, y: Any) -> None:
    w = numpyro.sample("w", dist.Normal(0, 1).expand([10]).to_event(1))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, 1.0), obs=y)


def processor_time(X: Any, y: Any, steps: int, folder: Path | None) -> tuple[float, float]:
    """Processor and wall time of a fit, in seconds."""
    began = time.process_time(), time.perf_counter()
    dpvim.fit(model, X, y, epsilon=1.0, delta=1e-6, num_steps=steps, seed=0, checkpoint=folder)
    return time.process_time() - began[0], time.perf_counter() - began[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60_000)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    rng = np.random.default_rng(0)
    X = rng.normal(size=(5000, 10))
    y = X @ rng.normal(size=10) + rng.normal(size=5000)
    saves = 0
    save = checkpoints.Checkpoint.save

    def counting(checkpoint: checkpoints.Checkpoint, arrays: Any) -> None:
        nonlocal saves
        saves += 1
        save(checkpoint, arrays)

    patched: Any = checkpoints.Checkpoint
    patched.save = counting
    found: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as place:
        for repeat in range(args.repeats):
            for steps, kind in ((2560, "short"), (args.steps, "long")):
                for with_one in (False, True):
                    folder = Path(place) / f"{kind}{repeat}" if with_one else None
                    name = f"{kind}_{'with' if with_one else 'without'}"
                    found.setdefault(name, []).append(processor_time(X, y, steps, folder))
    least = {name: min(cpu for cpu, _ in times) for name, times in found.items()}
    fixed = least["short_with"] - least["short_without"]
    total = least["long_with"] - least["long_without"]
    print(
        json.dumps(
            {
                **{f"cpu_seconds_{name}": round(value, 2) for name, value in least.items()},
                "wall_seconds_long": round(min(wall for _, wall in found["long_with"]), 1),
                "saves_a_fit": saves / args.repeats,
                "fixed_seconds": round(fixed, 2),
                "overhead": round(total / least["long_without"], 4),
            }
        )
    )


if __name__ == "__main__":
    main()
