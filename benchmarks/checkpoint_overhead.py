"""Measure what a checkpoint costs: processor time in its own code, over that of the whole fit.

    python benchmarks/checkpoint_overhead.py [--steps 20000]

The difference of two fits, with and without one, is smaller than what two fits differ by on a busy
machine; so the time in the checkpoint's functions is added up (of the thread that is in them).
`fixed` is spent once a fit: the fingerprints of program and data, the first and the last file.
`overhead` is the share of what is spent again and again: files with progress, and positions in the
streams of noise. Prints one line of json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import numpyro
import numpyro.distributions as dist

import dpvim
from dpvim import checkpoints, resumable
from dpvim.privacy.source import BatchNoiseSource

_PARTS = {
    "program": (resumable, "program_digest"),
    "data": (resumable, "data_digest"),
    "begin": (checkpoints, "_write_begin"),
    "end": (checkpoints.Checkpoint, "finish"),
    "save": (checkpoints.Checkpoint, "save"),
    "position": (BatchNoiseSource, "position"),
}


def model(X: Any, y: Any) -> None:
    w = numpyro.sample("w", dist.Normal(0, 1).expand([10]).to_event(1))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, 1.0), obs=y)


def timed(function: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        began = time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            spent.append(time.thread_time() - began)

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    rng = np.random.default_rng(0)
    X = rng.normal(size=(5000, 10))
    y = X @ rng.normal(size=10) + rng.normal(size=5000)
    spent: dict[str, list[float]] = {name: [] for name in _PARTS}
    for name, (place, attribute) in _PARTS.items():
        setattr(place, attribute, timed(getattr(place, attribute), spent[name]))
    with tempfile.TemporaryDirectory() as folder:
        began = time.process_time(), time.perf_counter()
        dpvim.fit(
            model, X, y, epsilon=1.0, delta=1e-6, num_steps=args.steps, checkpoint=f"{folder}/run"
        )
        total, wall = time.process_time() - began[0], time.perf_counter() - began[1]
    seconds = {name: sum(times) for name, times in spent.items()}
    repeated = seconds["save"] + seconds["position"]
    fixed = sum(seconds.values()) - repeated
    facts = {
        "cpu_seconds": round(total, 2),
        "wall_seconds": round(wall, 1),
        "saves": len(spent["save"]),
        **{f"seconds_{name}": round(value, 4) for name, value in seconds.items()},
        "fixed_seconds": round(fixed, 3),
        "overhead": round(repeated / (total - repeated - fixed), 5),
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
