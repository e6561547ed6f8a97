"""A private logistic regression on real data: Fair's survey on extramarital affairs (1978).

    python examples/affairs.py [--epsilon 1.0]

6366 women answered; the question here is who had an affair. The data come with statsmodels. The
columns are brought to the same scale by the ranges of the questionnaire, which are public; nothing
is read off the answers. Prints the private posterior next to the non-private one and saves a
picture of both.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
from statsmodels.datasets import fair

import dpvim

matplotlib.use("Agg")
import matplotlib.pyplot as plt

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
    settings: dict[str, Any] = {"learning_rate": 3e-3}
    print(f"Fitting {len(X):,} records privately, epsilon = {options.epsilon:g} ...", flush=True)
    private = dpvim.fit(model, X, y, epsilon=options.epsilon, delta=1e-5, clip_norm=2.0, **settings)
    print("... and without privacy, for comparison.\n", flush=True)
    baseline = dpvim.fit_nonprivate(model, X, y, **settings)

    print(private.privacy, "\n")
    print(f"{'coefficient':<15}{'private':>18}{'non-private':>18}")
    for i, name in enumerate(NAMES):
        cells = [
            f"{fit.posterior.loc[i]:>9.2f} +- {fit.posterior.scale[i]:.2f}"
            for fit in (private, baseline)
        ]
        print(f"{name:<15}{cells[0]:>18}{cells[1]:>18}")
    path = picture(private, baseline, options.epsilon, options.output)
    print(f"\nPicture: {path}")


def picture(private: dpvim.Fit, baseline: dpvim.Fit, epsilon: float, folder: Path) -> Path:
    """Both posteriors, coefficient by coefficient: mean and 95 % interval."""
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    rows = np.arange(len(NAMES))
    fits = [
        (baseline, "non-private", "tab:gray", -0.14),
        (private, f"private, epsilon = {epsilon:g}", "tab:blue", 0.14),
    ]
    for fit, label, colour, offset in fits:
        axes.errorbar(
            fit.posterior.loc,
            rows + offset,
            xerr=1.96 * fit.posterior.scale,
            fmt="o",
            color=colour,
            label=label,
            capsize=3,
        )
    axes.axvline(0, color="black", linewidth=0.6)
    axes.set_yticks(rows, NAMES)
    axes.invert_yaxis()
    axes.set_xlabel("coefficient on the log-odds of an affair (95 % interval)")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "affairs.png"
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


if __name__ == "__main__":
    main()
