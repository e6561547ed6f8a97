"""Which variational family serves a posterior with correlations, under noise?

    python benchmarks/families.py [--datasets 3]

Linear regression with 100 coefficients in five sites of 20, features with correlation 0.8 between
neighbours, 20 000 records, epsilon 1 and 4: every family, aligned and (where it exists) vanilla.

Learning rate and clip norm are chosen for each of them on one data set (by held-out predictive
density, as nobody could in private: every family is shown at its best) and used on others. For each
of these the exact posterior is known:

* loss: held-out log predictive density below that of the exact posterior, in nats for 1000 records;
* covariance error: Frobenius norm of the difference to the exact covariance, relative to it. `own`
  is that of the approximation alone, `total` includes what the noise of the run added.

The posterior is the average of the trace, whose shape is the family's; the last row is the
posterior from the releases, which is a model of its own and the default where it exists.

Writes benchmarks/results/families_tuning.csv and families.csv; goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")

import warnings

import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from scipy import stats

import dpvim

RESULTS = Path(__file__).parent / "results"
NUM_ROWS, HELD_OUT, NUM_SITES, SITE_SIZE, CORRELATION = 20_000, 5000, 5, 20, 0.8
DIM = NUM_SITES * SITE_SIZE
RUN: dict[str, Any] = {"delta": 1e-5, "sampling_prob": 0.05, "num_steps": 4000, "init_scale": 0.05}
EPSILONS = (1.0, 4.0)
RATES = (3e-4, 1e-3, 3e-3, 1e-2)
# The norm of a gradient is about 10; a vanilla one is longer, by the slopes of the parameters.
CLIPS = {"aligned": (10.0,), "vanilla": (10.0, 40.0)}
FAMILIES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "mean-field": ("mean_field", ("aligned", "vanilla")),
    "low-rank 5": (dpvim.family("low_rank", rank=5), ("aligned", "vanilla")),
    "block-diagonal": ("block_diagonal", ("aligned", "vanilla")),
    "full-rank": ("full_rank", ("aligned", "vanilla")),
    "flow": ("flow", ("aligned",)),
}
TUNING_SEED = 1000


def model(X: Any, y: Any = None) -> None:
    parts = [
        numpyro.sample(f"w{i}", dist.Normal(0, 1).expand([SITE_SIZE]).to_event(1))
        for i in range(NUM_SITES)
    ]
    mean = sum(X[:, SITE_SIZE * i : SITE_SIZE * (i + 1)] @ part for i, part in enumerate(parts))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Normal(mean, 1), obs=y)


class Data(NamedTuple):
    X: np.ndarray
    y: np.ndarray
    X_new: np.ndarray
    y_new: np.ndarray
    mean: np.ndarray
    covariance: np.ndarray


def make_data(seed: int) -> Data:
    rng = np.random.default_rng(seed)
    innovations = rng.normal(size=(NUM_ROWS + HELD_OUT, DIM))
    X = np.empty_like(innovations)
    X[:, 0] = innovations[:, 0]
    for j in range(1, DIM):
        X[:, j] = CORRELATION * X[:, j - 1] + np.sqrt(1 - CORRELATION**2) * innovations[:, j]
    y = X @ rng.normal(scale=0.3, size=DIM) + rng.normal(size=len(X))
    X_train, y_train = X[:NUM_ROWS], y[:NUM_ROWS]
    covariance = np.linalg.inv(X_train.T @ X_train + np.eye(DIM))
    mean = covariance @ (X_train.T @ y_train)
    return Data(X_train, y_train, X[NUM_ROWS:], y[NUM_ROWS:], mean, covariance)


def log_predictive(data: Data, draws: np.ndarray) -> float:
    """Mean over held-out records of the log of the mean density over draws."""
    logs = stats.norm.logpdf(data.y_new[:, None], data.X_new @ draws.T)
    return float(np.mean(np.logaddexp.reduce(logs, axis=1) - np.log(len(draws))))


def draws_of(posterior: Any) -> np.ndarray:
    sites = posterior.sample(500, seed=0)
    return np.concatenate([sites[f"w{i}"] for i in range(NUM_SITES)], axis=1)


class Cell(NamedTuple):
    family: str
    variant: str
    epsilon: float
    clip_norm: float
    learning_rate: float
    dataset: int


def run(cell: Cell, data: Data) -> Iterator[dict[str, Any]]:
    began = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit = dpvim.fit(
            model,
            data.X,
            data.y,
            family=FAMILIES[cell.family][0],
            variant=cell.variant,
            epsilon=cell.epsilon,
            clip_norm=cell.clip_norm,
            learning_rate=cell.learning_rate,
            seed=cell.dataset,
            progress=False,
            **RUN,
        )
        cpu = time.process_time() - began
        own = fit.posterior_from("trace", noise_aware=None)
        found = {"trace": fit.posterior_from("trace")}
        if cell.family == "mean-field" and cell.variant == "aligned":
            found["releases"] = fit.posterior_from("releases")
    exact = np.random.default_rng(0).multivariate_normal(data.mean, data.covariance, 500)
    best = log_predictive(data, exact)
    for method, posterior in found.items():
        yield {
            **cell._asdict(),
            "method": method,
            "loss": 1000 * (best - log_predictive(data, draws_of(posterior))),
            "own_covariance_error": relative_error(own.covariance, data.covariance),
            "total_covariance_error": relative_error(posterior.covariance, data.covariance),
            "cpu_seconds": cpu,
        }


def relative_error(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def run_all(cells: list[Cell], path: Path) -> pd.DataFrame:
    """All cells that the file does not have yet, each written when it is done."""
    done = pd.read_csv(path) if path.exists() else pd.DataFrame(columns=[*Cell._fields])
    known = set(done[list(Cell._fields)].itertuples(index=False, name=None))
    data: dict[int, Data] = {}
    for number, cell in enumerate(cells):
        if tuple(cell) in known:
            continue
        if cell.dataset not in data:
            data = {cell.dataset: make_data(cell.dataset)}
        rows = pd.DataFrame(run(cell, data[cell.dataset]))
        rows.round(5).to_csv(path, mode="a", header=not path.exists(), index=False)
        print(f"{number + 1}/{len(cells)}", rows.round(3).to_dict("records")[0], flush=True)
    return pd.read_csv(path)


def tuning_cells() -> list[Cell]:
    return [
        Cell(family, variant, epsilon, clip, rate, TUNING_SEED)
        for family, (_, variants) in FAMILIES.items()
        for variant in variants
        for epsilon in EPSILONS
        for clip in CLIPS[variant]
        for rate in RATES
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--datasets", type=int, default=3)
    number = parser.parse_args().datasets
    tuned = run_all(tuning_cells(), RESULTS / "families_tuning.csv")
    tuned = tuned[tuned.method == "trace"]
    best = tuned.loc[tuned.groupby(["family", "variant", "epsilon"]).loss.idxmin()]
    cells = [
        Cell(row.family, row.variant, row.epsilon, row.clip_norm, row.learning_rate, dataset)
        for dataset in range(number)
        for row in best.itertuples()
    ]
    found = run_all(cells, RESULTS / "families.csv")
    keys = ["epsilon", "method", "family", "variant"]
    numbers = ["loss", "own_covariance_error", "total_covariance_error", "cpu_seconds"]
    print(found.groupby(keys)[numbers].mean().round(2).to_string())


if __name__ == "__main__":
    main()
