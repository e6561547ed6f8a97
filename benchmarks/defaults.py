"""Defaults alone: models as users write them, epsilon, delta and nothing else, against NUTS.

    python benchmarks/defaults.py run        # fits and NUTS, resumable; defaults.csv
    python benchmarks/defaults.py others     # the same of other_models.py; defaults_others.csv
    python benchmarks/defaults.py grid       # the best of a grid chosen with the truth in hand
    python benchmarks/defaults.py table      # what docs/defaults.md shows

Seeds below 20 were used while the rules were made; the committed table has the seeds from 20 on.
Means, intervals and standard deviations are those of the unconstrained parameters, where all of
them exist. "hold" is the share of 90 % intervals that contain the mean of NUTS, "off" the largest
error in the interval's own standard deviations, "width" the median of the ratio of standard
deviations to those of NUTS. NUTS is kept in the user's cache.
"""

from __future__ import annotations

import argparse
import csv
import time
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd
import platformdirs
from default_models import CASES
from numpyro.infer import MCMC, NUTS, init_to_median
from other_models import OTHER_CASES

import dpvim
from dpvim.bridge.data import prepare
from dpvim.bridge.model import bridge

RESULTS = Path(__file__).parent / "results"
EPSILONS = (0.5, 1.0, 8.0)
SEEDS = tuple(range(20, 25))
DELTA = 1e-5
CLIP_NORMS = (0.5, 2.0, 8.0, 32.0)
LEARNING_RATES = (3e-3, 3e-2)
GRID_STEPS = 4096
ALL_CASES = CASES | OTHER_CASES
COLUMNS = ["model", "seed", "epsilon", "setting", "parameters", "hold", "off", "width", "clipped"]
COLUMNS += ["flagged", "seconds", "doubts"]


def data_of(name: str, seed: int) -> tuple[Any, ...]:
    return ALL_CASES[name].make(np.random.default_rng([seed, list(ALL_CASES).index(name)]))


def nuts(name: str, seed: int) -> np.ndarray:
    """Draws of the unconstrained parameters, from the cache if they are there."""
    data_set = f"{name}-{list(ALL_CASES).index(name)}-{seed}"
    path = platformdirs.user_cache_path("dpvim-benchmarks") / f"nuts-{data_set}.npy"
    if path.exists():
        return np.load(path)
    args = data_of(name, seed)
    draws = ALL_CASES[name].draws
    if draws is not None:
        return draws(*args)
    space = bridge(ALL_CASES[name].model, prepare(args, {})).space
    kernel = NUTS(ALL_CASES[name].model, init_strategy=init_to_median(num_samples=50))
    chain = MCMC(kernel, num_warmup=500, num_samples=600, progress_bar=False)
    single = [np.asarray(a, np.float32) if np.asarray(a).dtype == float else a for a in args]
    chain.run(jax.random.key(seed), *single)
    drawn = chain.get_samples()
    sites = {site.name: drawn[site.name] for site in space.sites}
    found = np.asarray(jax.vmap(space.unconstrain)(sites), float)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, found)
    return found


def measure(name: str, seed: int, epsilon: float, **options: Any) -> dict[str, Any]:
    """One fit against NUTS."""
    reference = nuts(name, seed)
    began = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # doubts are counted, and seeds are for experiments
        fit = dpvim.fit(
            ALL_CASES[name].model,
            *data_of(name, seed),
            epsilon=epsilon,
            delta=DELTA,
            seed=seed,
            **options,
        )
        posterior = fit.posterior
        ends = posterior.latent_dist.quantiles(np.array([0.05, 0.95]))
    mean, sd = reference.mean(axis=0), reference.std(axis=0)
    return {
        "model": name,
        "seed": seed,
        "epsilon": epsilon,
        "parameters": len(mean),
        "hold": np.mean((ends[:, 0] < mean) & (mean < ends[:, 1])),
        "off": np.max(np.abs(posterior.loc - mean) / posterior.scale),
        "width": np.median(posterior.scale / sd),
        "clipped": posterior.clipped,
        "flagged": bool(posterior.not_converged),
        "seconds": time.process_time() - began,
        "doubts": " | ".join(doubt.split(":")[0] for doubt in posterior.doubts),
    }


def collect(path: Path, work: list[dict[str, Any]]) -> None:
    """Measure what is not in the table yet, a line at a time."""
    done = set()
    if path.exists():
        table = pd.read_csv(path)
        done = set(zip(table.model, table.seed, table.epsilon, table.setting, strict=True))
    else:
        path.write_text(",".join(COLUMNS) + "\n")
    for one in work:
        setting = ", ".join(
            f"{k} {v:g}" for k, v in one.items() if k in ("clip_norm", "learning_rate")
        )
        setting = setting or "defaults"
        if (one["name"], one["seed"], one["epsilon"], setting) in done:
            continue
        row = measure(**one) | {"setting": setting}
        with path.open("a", newline="") as file:
            csv.DictWriter(file, COLUMNS).writerow(
                {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()}
            )
        print(
            row["model"],
            row["seed"],
            row["epsilon"],
            setting,
            f"hold {row['hold']:.2f}",
            flush=True,
        )


def show(table: pd.DataFrame) -> None:
    """Print a table of docs/defaults.md."""
    table["held"] = table.hold.astype(float) * table.parameters
    print(
        "| model | d | "
        + " | ".join(f"epsilon {e:g}: hold, off, width" for e in EPSILONS)
        + " | flagged |"
    )
    print("|---|---|" + "---|" * (len(EPSILONS) + 1))
    for name in table.model.unique():
        part = table[table.model == name]
        cells = []
        for epsilon in EPSILONS:
            cell = part[part.epsilon == epsilon]
            cells.append(f"{cell.hold.mean():.2f}, {cell.off.max():.1f}, {cell.width.median():.2f}")
        flagged = " / ".join(f"{part[part.epsilon == e].flagged.sum()}" for e in EPSILONS)
        print(
            f"| {name} | {part.parameters.iloc[0]} | "
            + " | ".join(cells)
            + f" | {flagged} of {part.seed.nunique()} |"
        )
    for title, part in (("all", table), ("not flagged", table[~table.flagged])):
        shares = part.groupby("epsilon")[["held", "parameters"]].sum()
        print(
            title, (shares.held / shares.parameters).round(3).to_dict(), "worst off", part.off.max()
        )


def show_grid(table: pd.DataFrame) -> None:
    """Print how wide the defaults' intervals are beside the best of the grid."""
    grid = pd.read_csv(RESULTS / "defaults_grid.csv", keep_default_na=False)
    print("\nmedian width: defaults, best of the grid that holds 90 %, ratio")
    for (name, epsilon, seed), part in grid.groupby(["model", "epsilon", "seed"]):
        ours = table[(table.model == name) & (table.epsilon == epsilon) & (table.seed == seed)]
        good = part[part.hold >= 0.9]
        best, width = good.width.min() if len(good) else np.nan, ours.width.iloc[0]
        print(f"{name:18s} {epsilon:g} {width:.2f} {best:.2f} {width / best:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["run", "others", "grid", "table"])
    parser.add_argument("--models", nargs="*")
    parser.add_argument("--seeds", nargs="*", type=int, default=SEEDS)
    parser.add_argument("--epsilons", nargs="*", type=float, default=EPSILONS)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.what == "table":
        table, others = (
            pd.read_csv(RESULTS / f"{name}.csv", keep_default_na=False)
            for name in ("defaults", "defaults_others")
        )
        show(table)
        show_grid(table)
        return show(others)
    work = [
        {"name": name, "seed": seed, "epsilon": epsilon}
        for seed in args.seeds
        for name in args.models or (OTHER_CASES if args.what == "others" else CASES)
        for epsilon in args.epsilons
    ]
    if args.what != "grid":
        name = "defaults.csv" if args.what == "run" else "defaults_others.csv"
        return collect(args.output or RESULTS / name, work)
    grid = [
        one | {"clip_norm": clip, "learning_rate": rate, "num_steps": GRID_STEPS}
        for one in work
        for clip in CLIP_NORMS
        for rate in LEARNING_RATES
    ]
    collect(args.output or RESULTS / "defaults_grid.csv", grid)


if __name__ == "__main__":
    main()
