"""Do the intervals of a private posterior hold what they promise?

    python benchmarks/coverage.py [--fits 200]

Two questions, for conjugate linear regression and logistic regression with ten parameters, some of
them weakly informed by the data, at epsilon 0.5, 1 and 4:

(a) the DP part: over repeated fits of one data set, how often does estimate +- z x (added standard
    deviation alone) hold the non-private posterior mean?
(b) the whole: over data sets drawn from the model with parameters from the prior, how often do the
    posterior's intervals hold the true parameter, and how wide are they?

Writes benchmarks/results/coverage.csv and coverage.png.
"""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")

import jax
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pandas as pd
from scipy import special, stats

import dpvim
from dpvim.inference.families import mean_field
from dpvim.posterior.from_trace import posterior_from_trace

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent / "results"
# Spread of each feature; the last one is the intercept. The smaller, the less the data say.
SCALES = np.array([1.0, 1.0, 0.7, 0.5, 0.35, 0.25, 0.15, 0.1, 0.05, 1.0])
NUM_ROWS = 4000
NUM_STEPS = 6000
# Large enough that hardly a record is clipped: the bias of a tight clip is a question of its own.
CLIP = {"linear": 6.0, "logistic": 3.0}
LEARNING_RATE = 1e-2
LEVELS = (0.5, 0.8, 0.9, 0.95)
EPSILONS = (0.5, 1.0, 4.0)
METHODS: dict[str, dict[str, Any]] = {
    "last": {"estimate": "last", "noise_aware": None, "window": "slope"},
    "last, noise-aware": {"estimate": "last", "noise_aware": "iterate", "window": "slope"},
    "average, noise-aware": {"estimate": "average", "noise_aware": "average", "window": "slope"},
    "auto": {"estimate": "average", "noise_aware": "average", "window": "auto"},
}


def linear(X: Any, y: Any = None) -> None:
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, 1), obs=y)


def logistic(X: Any, y: Any = None) -> None:
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


MODELS = {"linear": linear, "logistic": logistic}


class Data(NamedTuple):
    X: np.ndarray
    y: np.ndarray
    truth: np.ndarray
    nonprivate_mean: np.ndarray
    nonprivate_sd: np.ndarray


class Cell(NamedTuple):
    model: str
    epsilon: float
    question: str
    fits: int


def draw_data(model: str, seed: int) -> Data:
    """Parameters from the prior, records from the model, and what they say without privacy."""
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=len(SCALES))
    X = rng.normal(size=(NUM_ROWS, len(SCALES))) * SCALES
    X[:, -1] = 1.0
    signal = X @ truth
    if model == "linear":
        y = signal + rng.normal(size=NUM_ROWS)
        precision = X.T @ X + np.eye(len(SCALES))
        mean = np.linalg.solve(precision, X.T @ y)
    else:
        y = (rng.random(NUM_ROWS) < special.expit(signal)).astype(float)
        mean = np.zeros(len(SCALES))
        for _ in range(30):
            prob = special.expit(X @ mean)
            precision = (X * (prob * (1 - prob))[:, None]).T @ X + np.eye(len(SCALES))
            mean = mean + np.linalg.solve(precision, X.T @ (y - prob) - mean)
    sd = np.sqrt(np.diag(np.linalg.inv(precision)))
    return Data(X.astype(np.float32), y.astype(np.float32), truth, mean, sd)


def run_cell(cell: Cell) -> pd.DataFrame:
    """One row for each fit, method and parameter."""
    one_data_set = cell.question == "dp part"
    sets = [draw_data(cell.model, 1000 + i) for i in range(1 if one_data_set else cell.fits)]
    plan = dpvim.PrivacyPlan(
        num_examples=NUM_ROWS,
        sampling_prob=0.1,
        num_steps=NUM_STEPS,
        clip_norm=CLIP[cell.model],
    ).calibrate(epsilon=cell.epsilon, delta=1e-5)
    svi = dpvim.DPSVI(MODELS[cell.model], "mean_field", optax.adam(LEARNING_RATE), plan, seed=0)
    X, y = (np.stack([getattr(s, name) for s in sets]) for name in ("X", "y"))
    runs = svi.run_many(
        jax.random.key(1),
        cell.fits,
        NUM_STEPS,
        *((X[0], y[0]) if one_data_set else (X, y)),
        stacked=not one_data_set,
        progress_bar=False,
        trace_every=3,
    )
    family = mean_field(len(SCALES))
    frames = []
    for i, done in enumerate(runs):
        data = sets[0 if one_data_set else i]
        for name, options in METHODS.items():
            found = posterior_from_trace(done.trace, family, **options)
            frames.append(
                pd.DataFrame(
                    {
                        **cell._asdict(),
                        "fit": i,
                        "method": name,
                        "parameter": np.arange(len(SCALES)),
                        "loc": found.loc,
                        "scale": found.scale,
                        "dp_scale": found.dp_scale,
                        "converged": found.windows.converged,
                        "truth": data.truth,
                        "nonprivate_mean": data.nonprivate_mean,
                        "nonprivate_sd": data.nonprivate_sd,
                    }
                )
            )
    return pd.concat(frames, ignore_index=True)


def summarise(raw: pd.DataFrame) -> pd.DataFrame:
    """Coverage by cell and method: for all parameters, and for those called converged."""
    raw = raw.copy()
    dp_part = raw["question"] == "dp part"
    miss = raw["loc"] - np.where(dp_part, raw["nonprivate_mean"], raw["truth"])
    spread = np.where(dp_part, raw["dp_scale"], raw["scale"])
    with np.errstate(divide="ignore", invalid="ignore"):
        z = np.abs(miss) / spread
    for level in LEVELS:
        raw[f"{level:.0%}"] = z <= stats.norm.ppf(0.5 + level / 2)
    raw["width"] = raw["scale"] / raw["nonprivate_sd"]
    columns = [f"{level:.0%}" for level in LEVELS]
    keys = ["question", "model", "epsilon", "method"]
    rows = []
    # Well informed: the data reduce the prior's standard deviation to a fifth or less.
    well = raw.groupby(["model", "parameter"])["nonprivate_sd"].transform("mean") < 0.2
    parts = {
        "all": np.ones(len(raw), bool),
        "well informed": well,
        "weakly informed": ~well,
        "converged": raw["converged"],
    }
    for part, chosen in parts.items():
        table = raw[chosen].groupby(keys)[columns].mean().round(3)
        table["median width"] = raw[chosen].groupby(keys)["width"].median().round(2)
        table["share"] = (raw[chosen].groupby(keys).size() / raw.groupby(keys).size()).round(3)
        rows.append(table.reset_index().assign(parameters=part))
    return pd.concat(rows, ignore_index=True)


def draw_picture(table: pd.DataFrame, path: Path) -> None:
    """Coverage against promise: one panel for each question, model and group of parameters."""
    groups = ["converged", "well informed", "weakly informed"]
    panels = [(q, m) for q in ("dp part", "whole") for m in MODELS]
    figure, axes = plt.subplots(
        len(groups), len(panels), figsize=(13, 9), sharex=True, sharey=True, layout="constrained"
    )
    colours = dict(zip(METHODS, ("tab:gray", "tab:orange", "tab:green", "tab:blue"), strict=True))
    for row, group in enumerate(groups):
        for column, (question, model) in enumerate(panels):
            ax = axes[row, column]
            ax.plot([0.45, 1], [0.45, 1], color="black", linewidth=0.7)
            chosen = table[
                (table.parameters == group) & (table.question == question) & (table.model == model)
            ]
            for method, colour in colours.items():
                for epsilon, marker in zip(EPSILONS, "o^s", strict=True):
                    line = chosen[(chosen.method == method) & (chosen.epsilon == epsilon)]
                    # A handful of parameters that pass a rule by chance are no rate.
                    if len(line) and line["share"].iloc[0] > 0.01:
                        found = line[[f"{level:.0%}" for level in LEVELS]].to_numpy()[0]
                        label = (
                            f"{method}, epsilon {epsilon:g}" if (row, column) == (0, 0) else None
                        )
                        ax.plot(
                            LEVELS, found, marker=marker, color=colour, linewidth=0.8, label=label
                        )
            title = "called converged" if group == "converged" else group
            ax.set_title(f"{question}: {model}\n{title}", fontsize=10)
    for ax in axes[-1]:
        ax.set_xlabel("promised")
    for ax in axes[:, 0]:
        ax.set_ylabel("held")
    figure.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fits", type=int, default=200)
    parser.add_argument("--raw", type=Path, default=None, help="also keep every estimate here")
    parser.add_argument("--only", choices=MODELS, default=None)
    parser.add_argument("--picture", action="store_true", help="draw the committed table again")
    options = parser.parse_args()
    if options.picture:
        draw_picture(pd.read_csv(RESULTS / "coverage.csv"), RESULTS / "coverage.png")
        return
    models = [options.only] if options.only else list(MODELS)
    cells = [
        Cell(model, epsilon, question, options.fits)
        for epsilon in EPSILONS
        for model in models
        for question in ("dp part", "whole")
    ]
    frames = []
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for frame in pool.map(run_cell, cells):
            frames.append(frame)
            raw = pd.concat(frames, ignore_index=True)
            if options.raw:
                raw.to_parquet(options.raw)
            table = summarise(raw)
            table.to_csv(RESULTS / "coverage.csv", index=False)
            print(f"{len(frames)} of {len(cells)} cells done", flush=True)
    draw_picture(table, RESULTS / "coverage.png")
    print(table[table.parameters == "all"].to_string(index=False))


if __name__ == "__main__":
    main()
