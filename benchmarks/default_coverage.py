"""Coverage of the truth with defaults alone, on the data sets of docs/honest-posterior.md.

    python benchmarks/default_coverage.py [--fits 20]     resumable; default_coverage.csv
    python benchmarks/default_coverage.py --table

Parameters are drawn from the prior and records from the model, so that 90 % intervals of an exact
posterior hold the truth 90 % of the time. Clip norm, learning rate and steps are the library's.
"Width" is the median of the standard deviation over the non-private one.
"""

from __future__ import annotations

import argparse
import csv
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
from honest_posterior import CASES, EPSILONS, draw_data, model_of

import dpvim

PATH = Path(__file__).parent / "results" / "default_coverage.csv"
FIRST_SEED = 7000  # other data sets than those of the other table
COLUMNS = ["case", "epsilon", "seed", "held", "parameters", "width", "off", "flagged"]


def measure(name: str, epsilon: float, seed: int) -> dict[str, object]:
    case = CASES[name]
    data = draw_data(case, seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # doubts are counted, and seeds are for experiments
        fit = dpvim.fit(model_of(case), data.X, data.y, epsilon=epsilon, delta=1e-5, seed=seed)
        posterior = fit.posterior
    low, high = posterior.latent_dist.quantiles(np.array([0.05, 0.95])).T
    return {
        "case": name,
        "epsilon": epsilon,
        "seed": seed,
        "held": int(((low < data.truth) & (data.truth < high)).sum()),
        "parameters": len(data.truth),
        "width": f"{np.median(posterior.scale / data.nonprivate_sd):.4g}",
        "off": f"{np.max(np.abs(posterior.loc - data.truth) / posterior.scale):.4g}",
        "flagged": bool(posterior.not_converged),
    }


def show() -> None:
    table = pd.read_csv(PATH)
    for (name, epsilon), part in table.groupby(["case", "epsilon"]):
        share = part.held.sum() / part.parameters.sum()
        flagged = f"{part.flagged.sum()} of {len(part)}"
        print(
            f"| {name} | {epsilon:g} | {100 * share:.0f} ({part.width.median():.2f}) | "
            f"{part.off.max():.1f} | {flagged} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fits", type=int, default=20)
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    if args.table:
        return show()
    done: set[tuple[str, float, int]] = set()
    if PATH.exists():
        table = pd.read_csv(PATH)
        done = set(zip(table.case, table.epsilon, table.seed, strict=True))
    else:
        PATH.write_text(",".join(COLUMNS) + "\n")
    for number in range(args.fits):
        for name in CASES:
            for epsilon in EPSILONS:
                if (name, epsilon, FIRST_SEED + number) in done:
                    continue
                row = measure(name, epsilon, FIRST_SEED + number)
                with PATH.open("a", newline="") as file:
                    csv.DictWriter(file, COLUMNS).writerow(row)
        print(number + 1, "data sets", flush=True)


if __name__ == "__main__":
    main()
