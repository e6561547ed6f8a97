"""Regressions on columns that go closely together: defaults against the posterior without privacy.

    python benchmarks/close_columns.py run [--epsilons 1 4] [--seeds 20 ... 24]   # resumable
    python benchmarks/close_columns.py table           # what docs/defaults.md shows

Logistic regressions of 4000 records, with coefficients 0.7 times as wide as their priors. "hold" is
the share of 90 % intervals that contain the mean without privacy (a Gaussian around its mode: with
so many records that is the posterior), "off" the largest error in the interval's own standard
deviations, "along" the same of the combinations of coefficients that are eigenvectors of the
information: the hard ones are among these. "width" is the median of the standard deviations over
those without privacy, "weakest" that of the combination which the data tell least about. Seeds
below 20 were used while the rules were made.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from scipy import special

import dpvim

PATH = Path(__file__).parent / "results" / "close_columns.csv"
EPSILONS, SEEDS = (1.0, 4.0), (20, 21, 22, 23, 24)
RECORDS, DELTA, INTERCEPT_SCALE = 4000, 1e-5, 5.0
COLUMNS = ["case", "epsilon", "seed", "parameters", "hold", "off", "along", "width", "weakest"]
COLUMNS += ["doubts"]


def model(X: Any, y: Any = None) -> None:
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    b = numpyro.sample("b", dist.Normal(0, INTERCEPT_SCALE))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w + b), obs=y)


def indicators(levels: np.ndarray, count: int) -> np.ndarray:
    """Of all levels but the first, centred."""
    return np.eye(count)[levels][:, 1:] - 1 / count


def levels(rng: np.random.Generator) -> np.ndarray:
    """Four columns of levels; two agree 93 % of the time."""
    first = rng.integers(0, 7, RECORDS)
    second = np.where(rng.random(RECORDS) < 0.93, first, rng.integers(0, 7, RECORDS))
    others = [indicators(rng.integers(0, n, RECORDS), n) for n in (5, 4)]
    return np.hstack([indicators(first, 7), indicators(second, 7), *others])


def pair(rng: np.random.Generator) -> np.ndarray:
    """Twelve numbers; two have a correlation of 0.9976."""
    X = rng.normal(size=(RECORDS, 12))
    X[:, 1] = X[:, 0] + 0.07 * rng.normal(size=RECORDS)
    return X


def common(rng: np.random.Generator) -> np.ndarray:
    """Twenty numbers; any two have a correlation of 0.95."""
    shared = rng.normal(size=(RECORDS, 1))
    return np.sqrt(0.95) * shared + np.sqrt(0.05) * rng.normal(size=(RECORDS, 20))


def series(rng: np.random.Generator) -> np.ndarray:
    """Fifteen numbers, each with a correlation of 0.97 to the one before."""
    X = rng.normal(size=(RECORDS, 15))
    for j in range(1, 15):
        X[:, j] = 0.97 * X[:, j - 1] + np.sqrt(1 - 0.97**2) * X[:, j]
    return X


def rare(rng: np.random.Generator) -> np.ndarray:
    """Twelve levels, seven of which have 1.4 % of the records each, and four numbers."""
    shares = np.array([0.3, 0.25, 0.2, 0.1, 0.05, *[0.1 / 7] * 7])
    found = rng.choice(12, RECORDS, p=shares)
    return np.hstack([indicators(found, 12), rng.normal(size=(RECORDS, 4))])


def independent(rng: np.random.Generator) -> np.ndarray:
    """Twenty numbers that do not go together, for comparison."""
    return rng.normal(size=(RECORDS, 20))


CASES = {each.__name__: each for each in (levels, pair, common, series, rare, independent)}


def data_of(case: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([seed, 77])
    X = CASES[case](rng)
    coefficients = 0.7 * rng.normal(size=X.shape[1])
    y = rng.random(RECORDS) < special.expit(X @ coefficients - 0.5)
    return X.astype(np.float32), y.astype(int)


def without_privacy(X: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mode, information of the likelihood and covariance, with the intercept last."""
    X = np.column_stack([X.astype(float), np.ones(len(X))])
    prior = np.append(np.ones(X.shape[1] - 1), INTERCEPT_SCALE**-2)
    mode = np.zeros(X.shape[1])
    for _ in range(60):
        means = special.expit(X @ mode)
        information = X.T @ ((means * (1 - means))[:, None] * X)
        ascent = X.T @ (y - means) - prior * mode
        mode += np.linalg.solve(information + np.diag(prior), ascent)
    return mode, information, np.linalg.inv(information + np.diag(prior))


def measure(case: str, epsilon: float, seed: int) -> dict[str, Any]:
    X, y = data_of(case, seed)
    mode, information, covariance = without_privacy(X, y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # doubts are counted, and seeds are for experiments
        posterior = dpvim.fit(model, X, y, epsilon=epsilon, delta=DELTA, seed=seed).posterior
    latent = np.argsort([1, *[0] * X.shape[1]], kind="stable")  # b stands before w
    own = np.asarray(posterior.covariance)
    order = latent if next(iter(posterior.mean)) == "b" else np.arange(len(mode))
    own = own[np.ix_(order, order)]
    error = np.append(posterior.mean["w"], posterior.mean["b"]) - mode
    scale, exact = np.sqrt(np.diag(own)), np.sqrt(np.diag(covariance))
    _, axes = np.linalg.eigh(information)
    along = np.sqrt(np.einsum("ij,ik,kj->j", axes, own, axes))
    weakest = np.sqrt(axes[:, 0] @ covariance @ axes[:, 0])
    return {
        "case": case,
        "epsilon": epsilon,
        "seed": seed,
        "parameters": len(mode),
        "hold": np.mean(np.abs(error / scale) < 1.645),
        "off": np.max(np.abs(error / scale)),
        "along": np.max(np.abs(axes.T @ error / along)),
        "width": np.median(scale / exact),
        "weakest": along[0] / weakest,
        "doubts": len(posterior.doubts),
    }


def show(path: Path) -> None:
    table = pd.read_csv(path)
    table["doubted"] = table.doubts > 0
    print("| case | epsilon | hold | off | along | width | weakest | doubted |")
    print("|---|---|---|---|---|---|---|---|")
    for (case, epsilon), part in table.groupby(["case", "epsilon"], sort=False):
        cells = [f"{part.hold.mean():.2f}", f"{part.off.max():.1f}", f"{part.along.max():.1f}"]
        cells += [f"{part.width.median():.2f}", f"{part.weakest.median():.2f}"]
        print(f"| {case} | {epsilon:g} |", " | ".join(cells), end=" ")
        print(f"| {part.doubted.sum()} of {len(part)} |")
    sure = table[~table.doubted]
    print(f"all: {table.hold.mean():.3f}; not doubted: {sure.hold.mean():.3f}, off", end=" ")
    print(f"{sure.off.max():.1f}, along {sure.along.max():.1f}, {len(sure)} of {len(table)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["run", "table"])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--epsilons", nargs="+", type=float, default=EPSILONS)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--output", type=Path, default=PATH)
    args = parser.parse_args()
    if args.what == "table":
        return show(args.output)
    if not args.output.exists():
        args.output.write_text(",".join(COLUMNS) + "\n")
    found = pd.read_csv(args.output)
    done = set(zip(found.case, found.epsilon, found.seed, strict=True))
    for key in itertools.product(args.cases, args.epsilons, args.seeds):
        if key in done:
            continue
        row = measure(*key)
        with args.output.open("a", newline="") as file:
            csv.DictWriter(file, COLUMNS).writerow(
                {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()}
            )
        print(*key, f"hold {row['hold']:.2f}, off {row['off']:.1f}", flush=True)


if __name__ == "__main__":
    main()
