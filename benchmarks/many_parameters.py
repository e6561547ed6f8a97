"""Defaults and the number of parameters: where does the information give out?

    python benchmarks/many_parameters.py run [--epsilons 1 4 16] [--seeds 20 21]   # resumable
    python benchmarks/many_parameters.py table                # what docs/defaults.md shows

Logistic regressions of 50 000 records with 30, 60, 100 and 128 coefficients, a Normal(0, 0.3)
prior, and independent features whose scales go from 1 down to 0.2 (over the root of their number).
Truths come from the prior, nothing but epsilon and delta is given. "hold" is the share of 90 %
intervals that contain the truth, "off" the largest error in the interval's own standard deviations,
"width" the median of the standard deviations over those without privacy (Laplace's approximation),
"prior" that over the prior's: 1 is to know nothing.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from blocks import CONFIDENCE, PRIOR_SCALE, outcomes
from blocks import laplace_sd as sd_without_privacy
from blocks import wide_model as wide

import dpvim

PATH = Path(__file__).parent / "results" / "many_parameters.csv"
RECORDS, DELTA = 50_000, 1e-5
COLUMNS = ["parameters", "epsilon", "seed", "hold", "off", "width", "prior"]
COLUMNS += ["cpu_seconds", "doubts"]


def features(rng: np.random.Generator, dim: int) -> np.ndarray:
    scales = np.geomspace(1.0, 0.2, dim) / np.sqrt(dim / 20)
    return (rng.normal(size=(RECORDS, dim)) * scales).astype(np.float32)


def measure(dim: int, epsilon: float, seed: int) -> dict[str, Any]:
    """One row of the table."""
    rng = np.random.default_rng(seed)
    X, truth = features(rng, dim), PRIOR_SCALE * rng.normal(size=dim)
    y = outcomes(rng, X @ truth)
    began = time.process_time()
    fit = dpvim.fit(wide, X, y, epsilon=epsilon, delta=DELTA, seed=seed, progress=False)
    posterior = fit.posterior
    draws = posterior.sample(2000, seed=seed)["w"]
    seconds = time.process_time() - began
    tail = 50 * (1 - CONFIDENCE)
    lower, upper = np.percentile(draws, [tail, 100 - tail], axis=0)
    sd = draws.std(axis=0)
    return {
        "parameters": dim,
        "epsilon": epsilon,
        "seed": seed,
        "hold": float(np.mean((lower <= truth) & (truth <= upper))),
        "off": float(np.max(np.abs(draws.mean(axis=0) - truth) / sd)),
        "width": float(np.median(sd / sd_without_privacy(X, truth))),
        "prior": float(np.median(sd / PRIOR_SCALE)),
        "cpu_seconds": round(seconds),
        "doubts": len(posterior.doubts),
    }


def collect(runs: list[tuple[int, float, int]], path: Path) -> None:
    done = set()
    if path.exists():
        done = set(
            pd.read_csv(path)[["parameters", "epsilon", "seed"]].itertuples(index=False, name=None)
        )
    else:
        with path.open("w", newline="") as file:
            csv.writer(file).writerow(COLUMNS)
    for run in runs:
        if run not in done:
            row = measure(*run)
            print(row, flush=True)
            with path.open("a", newline="") as file:
                values = [f"{v:.4g}" if isinstance(v, float) else v for v in row.values()]
                csv.writer(file, lineterminator="\n").writerow(values)


def show(path: Path) -> None:
    found = pd.read_csv(path)
    rows = found.groupby(["parameters", "epsilon"], sort=False).agg(
        seeds=("seed", "count"),
        hold=("hold", "mean"),
        off=("off", "max"),
        width=("width", "mean"),
        prior=("prior", "mean"),
        doubted=("doubts", lambda each: (each > 0).sum()),
        cpu_seconds=("cpu_seconds", "mean"),
    )
    print(rows.round(3).to_string())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["run", "table"])
    parser.add_argument("--parameters", nargs="+", type=int, default=[30, 60, 100, 128])
    parser.add_argument("--epsilons", nargs="+", type=float, default=[1.0, 4.0, 16.0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[20, 21])
    parser.add_argument("--output", type=Path, default=PATH)
    args = parser.parse_args()
    if args.what == "table":
        return show(args.output)
    warnings.simplefilter("ignore")
    return collect(list(itertools.product(args.parameters, args.epsilons, args.seeds)), args.output)


if __name__ == "__main__":
    main()
