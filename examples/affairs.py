"""A private logistic regression on real data: Fair's survey on extramarital affairs (1978).

    python examples/affairs.py [--epsilon 1.0]

6366 women answered; the question here is who had an affair. The data come with statsmodels. The
columns are brought to the same scale by the ranges of the questionnaire, which are public; nothing
is read off the answers. Prints the private posterior next to the non-private means and saves the
fit with pictures of its trace and its posterior.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from statsmodels.datasets import fair

import dpvim

matplotlib.use("Agg")

# Column: smallest and largest answer on the questionnaire.
RANGES = {
    "rate_marriage": (1, 5),
    "age": (17.5, 42),
    "yrs_married": (0.5, 23),
    "children": (0, 5.5),
    "religious": (1, 4),
    "educ": (9, 20),
    "occupation": (1, 6),
}
NAMES = ["intercept", *RANGES]


def model(X: Any, y: Any = None) -> None:
    w = numpyro.sample("w", dist.Normal(0, 2).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("women", X.shape[0]):
        numpyro.sample("affair", dist.Bernoulli(logits=X @ w), obs=y)


def load() -> tuple[np.ndarray, np.ndarray]:
    table = fair.load_pandas().data
    columns = [np.ones(len(table))]
    for name, (low, high) in RANGES.items():
        columns.append(2 * (table[name].to_numpy() - low) / (high - low) - 1)
    return np.stack(columns, axis=1), (table["affairs"].to_numpy() > 0).astype(int)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--output", type=Path, default=Path("demo-output"))
    options = parser.parse_args()

    X, y = load()
    budget = {"epsilon": options.epsilon, "delta": 1e-5}
    print(dpvim.plan(model, X, y, **budget), "\n", flush=True)
    private = dpvim.fit(model, X, y, **budget)
    print("And without privacy, for comparison.\n", flush=True)
    baseline = dpvim.fit_nonprivate(model, X, y, learning_rate=1e-2)

    print(private.privacy, "\n")
    table = private.posterior.summary()
    table.index = pd.Index(NAMES, name="coefficient")
    table["non-private"] = baseline.posterior.loc
    table["its sd"] = baseline.posterior.scale
    print(table.round(3).to_string(), "\n")

    options.output.mkdir(parents=True, exist_ok=True)
    private.save(options.output / "fit.npz")
    pictures = {
        "trace": private.plot_trace(),
        "posterior": private.plot_posterior(nonprivate=baseline.posterior),
    }
    for name, figure in pictures.items():
        figure.savefig(options.output / f"{name}.png", dpi=130)
    print(f"Saved in {options.output}: fit.npz, trace.png, posterior.png")
    print("(posterior.png shows the non-private fit too: it is for comparison, not for release.)")


if __name__ == "__main__":
    main()
