"""When does it pay to choose? The best of several candidates, beside splitting the budget.

    python benchmarks/tuning.py noise      # no data: noise of a fit by the number of candidates
    python benchmarks/tuning.py run        # two data sets, resumable; about 20 minutes
    python benchmarks/tuning.py table

`noise`: the noise multiplier of a fit when one of k candidates is chosen, in units of that of a fit
without a choice: by a random number of trials (any candidate is tried with probability 0.8) and by
a split of the budget. Full batches, so that a fit is one Gaussian release.

`run`: randhie (visits to a doctor; normal, Poisson, negative binomial, each with two priors) and
fair (rating of a marriage as a count from the best; the same). 80 % of the records are there to
choose and fit with, the score is the log predictive density of the others, without noise: it is
the benchmark that looks, not a user. `first` is a fit of one candidate taken at random, with the
whole budget; `oracle` that of the best one. Appends to results/tuning.csv.
"""

from __future__ import annotations

import argparse
import csv
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import statsmodels.api as sm

import dpvim
from dpvim.bridge.data import prepare
from dpvim.checking.density import log_density
from dpvim.privacy.accounting import calibrate_noise
from dpvim.privacy.accounting.selection import Repeats
from dpvim.privacy.counts import counts_plan
from dpvim.tuning import REPEAT, SPLIT, _calibrated

PATH = Path(__file__).parent / "results" / "tuning.csv"
COLUMNS = ["data", "epsilon", "way", "seed", "chosen", "noise", "score"]
EPSILONS = (0.5, 2.0)
DELTA = 1e-6
PRIORS = (0.1, 1.0)


def model_of(kind: str, scale: float) -> Callable[..., None]:
    """A regression of a count on standardised columns."""

    def model(X: Any, y: Any) -> None:
        b = numpyro.sample("b", dist.Normal(0, scale).expand([X.shape[1]]).to_event(1))
        eta = numpyro.sample("a", dist.Normal(0, 2)) + X @ b
        if kind == "normal":
            outcome = dist.Normal(eta, numpyro.sample("s", dist.LogNormal(0, 1)))
        elif kind == "poisson":
            outcome = dist.Poisson(jnp.exp(eta))
        else:
            shape = numpyro.sample("shape", dist.LogNormal(0, 1))
            outcome = dist.NegativeBinomial2(jnp.exp(eta), shape)
        with numpyro.plate("records", X.shape[0]):
            numpyro.sample("y", outcome, obs=y)

    return model


CANDIDATES = {
    f"{kind}, prior {scale:g}": model_of(kind, scale)
    for kind in ("normal", "poisson", "negative binomial")
    for scale in PRIORS
}


def load(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Covariates, by public scales, and a count."""
    if name == "randhie":
        frame = sm.datasets.randhie.load_pandas().data
        y = frame.pop("mdvis").clip(0, 100)
        scales = {"lncoins": 5, "lpi": 8, "fmde": 9, "disea": 60}
    else:
        frame = sm.datasets.fair.load_pandas().data.drop(columns="affairs")
        y = 5 - frame.pop("rate_marriage")
        scales = {"age": 40, "yrs_married": 20, "children": 5, "religious": 4, "educ": 20}
        scales |= {"occupation": 6, "occupation_husb": 6}
    X = frame.assign(**{c: 2 * frame[c] / s - 1 for c, s in scales.items()})
    return X.to_numpy(np.float32), y.to_numpy(np.float32)


def noise_table() -> pd.DataFrame:
    """Noise of a fit with a choice among k, over that without one."""
    plan = counts_plan(num_examples=10_000, relation="zero_out")
    rows = []
    for epsilon in EPSILONS:
        score = plan.calibrate(epsilon=0.3 * epsilon, delta=DELTA)
        alone = calibrate_noise(
            epsilon=epsilon,
            delta=DELTA,
            relation=plan.relation,
            sampling_prob=1.0,
            num_steps=1,
            num_examples=10_000,
            max_batch_size=10_000,
        )
        for number in (2, 3, 4, 6, 8, 12, 20, 50):
            row: dict[str, float] = {"epsilon": epsilon, "candidates": number}
            for way in (REPEAT, SPLIT):
                repeats = Repeats.for_chance(0.8, 1 / number) if way == REPEAT else None
                plans, _ = _calibrated(plan, score, repeats, number, epsilon, DELTA)
                row[way] = (plans[0].noise_multiplier or math.nan) / alone
                if repeats is not None:
                    row["trials"] = repeats.mean
            rows.append(row)
    return pd.DataFrame(rows)


def score_of(fit: dpvim.Fit, X: np.ndarray, y: np.ndarray) -> float:
    """The mean log predictive density of records; without noise."""
    inputs = prepare((X, y), {})
    return float(np.mean(log_density(fit, inputs, 64, 0)(inputs.records)))


def one(name: str, epsilon: float, way: str, seed: int) -> dict[str, Any]:
    """A row of the results."""
    X, y = load(name)
    order = np.random.default_rng(seed).permutation(len(y))
    train, test = np.split(order, [int(0.8 * len(y))])
    budget: dict[str, Any] = {"epsilon": epsilon, "delta": DELTA}
    if way in (REPEAT, SPLIT):
        found = dpvim.tune(
            CANDIDATES, X[train], y[train], **budget, method=way, seed=seed, progress=False
        )
        chosen, fit = found.name, found.fit
        return {
            "chosen": chosen,
            "noise": found.plan.fit_plan.noise_multiplier,
            "score": score_of(fit, X[test], y[test]),
        }
    names = list(CANDIDATES)
    if way == "first":
        names = [names[np.random.default_rng([seed, 1]).integers(len(names))]]
    fits = {
        each: dpvim.fit(CANDIDATES[each], X[train], y[train], **budget, seed=seed, progress=False)
        for each in names
    }
    scores = {each: score_of(fit, X[test], y[test]) for each, fit in fits.items()}
    chosen = max(scores, key=lambda each: scores[each])
    noise = fits[chosen].privacy.noise_multiplier  # type: ignore[union-attr]
    return {"chosen": chosen, "noise": noise, "score": scores[chosen]}


def run(output: Path, seeds: int) -> None:
    done = set()
    if output.exists():
        with output.open(newline="") as file:
            done = {tuple(row[k] for k in COLUMNS[:4]) for row in csv.DictReader(file)}
    else:
        output.write_text(",".join(COLUMNS) + "\n")
    for seed in range(seeds):
        for name in ("fair", "randhie"):
            for epsilon in EPSILONS:
                for way in (REPEAT, SPLIT, "first", "oracle"):
                    key = (name, f"{epsilon:g}", way, str(seed))
                    if key in done:
                        continue
                    row = one(name, epsilon, way, seed)
                    with output.open("a", newline="") as file:
                        csv.writer(file).writerow([*key, *row.values()])
                    print(*key, *row.values(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["noise", "run", "table"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=PATH)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.what == "noise":
        print(noise_table().round(3).to_string(index=False))
    elif args.what == "run":
        run(args.output, args.seeds)
    else:
        table = pd.read_csv(args.output)
        best = table["chosen"] == table.groupby(["data", "epsilon", "seed"])["chosen"].transform(
            lambda each: each[table.loc[each.index, "way"] == "oracle"].iloc[0]
        )
        found = table.assign(best=best).groupby(["data", "epsilon", "way"])
        print(found[["score", "noise", "best"]].mean().round(4))


if __name__ == "__main__":
    main()
