"""Do the intervals of models that fall into blocks hold, and those of a diagonal curvature?

    python benchmarks/blocks.py [--seeds 100 101 102] [--only groups]

Parameters are drawn from the prior and records from the model, at epsilon 1 (delta 1e-5); the
target's regression has the simulated population of the paper's health study, whose truth is fixed.

two       Two logistic regressions with 80 coefficients each, features of many scales: 2 blocks.
groups    40 groups with a logistic regression of 5 coefficients each, by lookup: 40 blocks.
target    The mixture of `synthesize(engine="dpvi", target=...)` with its regression: 2 blocks. The
          coefficients of the regression are counted.
wide      One logistic regression with 300 coefficients, independent features: one block, too large.
          The releases have a diagonal curvature, on request.
correlated  The same, with a correlation of 0.6 between any two features.
sites     A logistic regression with 3 sites of 60 coefficients and the same correlation; sites
          are taken for blocks although they are not: curvature within sites alone.

Writes benchmarks/results/blocks.csv: the share of 90 % intervals that hold the truth, and the
median ratio of standard deviations to those of the non-private posterior, by data set and method.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from scipy import special

import dpvim
from dpvim.experiments import population
from dpvim.inference.blocks import Blocks

RESULTS = Path(__file__).parent / "results" / "blocks.csv"
EPSILON, DELTA = 1.0, 1e-5
NUM_ROWS, NUM_STEPS, SAMPLING_PROB, LEARNING_RATE = 20_000, 4000, 0.05, 1e-2
PRIOR_SCALE = 0.3
CONFIDENCE = 0.9


class Outcome(NamedTuple):
    """A fit, and the truth and the non-private standard deviations of some of its coordinates."""

    fit: dpvim.Fit
    chosen: np.ndarray
    truth: np.ndarray
    nonprivate_sd: np.ndarray


def features(rng: np.random.Generator, dim: int, correlation: float = 0.0) -> np.ndarray:
    """Scales from 1 down to 0.2."""
    X = np.sqrt(1 - correlation) * rng.normal(size=(NUM_ROWS, dim))
    X += np.sqrt(correlation) * rng.normal(size=(NUM_ROWS, 1))
    return X * np.geomspace(1.0, 0.2, dim) / np.sqrt(dim / 20)


def outcomes(rng: np.random.Generator, predictor: np.ndarray) -> np.ndarray:
    return (rng.random(len(predictor)) < special.expit(predictor)).astype(np.float32)


def laplace_sd(X: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Of a logistic regression, from the information at the truth."""
    slope = special.expit(X @ truth) * special.expit(-(X @ truth))
    precision = (X * slope[:, None]).T @ X + np.eye(len(truth)) / PRIOR_SCALE**2
    return np.sqrt(np.diagonal(np.linalg.inv(precision)))


def coefficients(name: str, *shape: int) -> Any:
    return numpyro.sample(name, dist.Normal(0, PRIOR_SCALE).expand(shape).to_event(len(shape)))


def two_model(X: Any, Z: Any, y: Any = None, z: Any = None) -> None:
    a, b = coefficients("a", X.shape[1]), coefficients("b", Z.shape[1])
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ a), obs=y)
        numpyro.sample("z", dist.Bernoulli(logits=Z @ b), obs=z)


NUM_GROUPS, OF_GROUP = 40, 5


def groups_model(X: Any, group: Any, y: Any = None) -> None:
    w = coefficients("w", NUM_GROUPS, OF_GROUP)
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=(w[group] * X).sum(-1)), obs=y)


def wide_model(X: Any, y: Any = None) -> None:
    w = coefficients("w", X.shape[1])
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def run(model: Callable[..., None], *data: np.ndarray, clip_norm: float, seed: int) -> dpvim.Fit:
    return dpvim.fit(
        model,
        *data,
        epsilon=EPSILON,
        delta=DELTA,
        clip_norm=clip_norm,
        num_steps=NUM_STEPS,
        sampling_prob=SAMPLING_PROB,
        learning_rate=LEARNING_RATE,
        seed=seed,
        progress=False,
    )


def two(seed: int) -> Outcome:
    rng = np.random.default_rng(seed)
    X, Z = features(rng, 80), features(rng, 80)
    truth = PRIOR_SCALE * rng.normal(size=(2, 80))
    y, z = outcomes(rng, X @ truth[0]), outcomes(rng, Z @ truth[1])
    fit = run(two_model, X, Z, y, z, clip_norm=4.0, seed=seed)
    sd = np.append(laplace_sd(X, truth[0]), laplace_sd(Z, truth[1]))
    return Outcome(fit, np.arange(160), truth.ravel(), sd)


def groups(seed: int) -> Outcome:
    rng = np.random.default_rng(seed)
    X, group = features(rng, OF_GROUP), rng.integers(0, NUM_GROUPS, NUM_ROWS)
    X = X / X.std(axis=0)
    truth = PRIOR_SCALE * rng.normal(size=(NUM_GROUPS, OF_GROUP))
    y = outcomes(rng, (truth[group] * X).sum(axis=1))
    fit = run(groups_model, X, group, y, clip_norm=2.5, seed=seed)
    sds = [laplace_sd(X[group == g], truth[g]) for g in range(NUM_GROUPS)]
    return Outcome(fit, np.arange(truth.size), truth.ravel(), np.concatenate(sds))


def wide(seed: int, correlation: float = 0.0) -> Outcome:
    rng = np.random.default_rng(seed)
    X, truth = features(rng, 300, correlation), PRIOR_SCALE * rng.normal(size=300)
    fit = run(wide_model, X, outcomes(rng, X @ truth), clip_norm=4.0, seed=seed)
    return Outcome(fit, np.arange(300), truth, laplace_sd(X, truth))


def sites_model(X: Any, y: Any = None) -> None:
    w = [coefficients(name, OF_SITE) for name in "abc"]
    predictor = sum(X[:, OF_SITE * i : OF_SITE * (i + 1)] @ part for i, part in enumerate(w))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=predictor), obs=y)


OF_SITE = 60


def sites(seed: int) -> Outcome:
    rng = np.random.default_rng(seed)
    dim = 3 * OF_SITE
    X, truth = features(rng, dim, correlation=0.6), PRIOR_SCALE * rng.normal(size=dim)
    X = X[:, rng.permutation(dim)]
    by_site = Blocks.from_labels(np.repeat(np.arange(3), OF_SITE))
    with mock.patch("dpvim.bridge.model.find_blocks", return_value=by_site):
        fit = run(sites_model, X, outcomes(rng, X @ truth), clip_norm=4.0, seed=seed)
    return Outcome(fit, np.arange(dim), truth, laplace_sd(X, truth))


def target(seed: int) -> Outcome:
    frame = population.simulate(seed=seed)
    twin = dpvim.synthesize(
        frame,
        population.SCHEMA,
        epsilon=EPSILON,
        delta=DELTA,
        target=population.OUTCOME,
        engine="dpvi",
        seed=seed,
        progress=False,
    )
    fit: Any = twin.fit
    model: Any = twin.model
    labels = fit.space.raw_labels()
    chosen = np.array([i for i, name in enumerate(labels) if name.startswith(population.OUTCOME)])
    truth = population.truth().coefficients().to_numpy().copy()
    truth[0] -= model.log_mean_offset
    # The information of a Poisson regression, in the model's features.
    indicators = [frame[column.name] == level for column in COLUMNS for level in column.levels[1:]]
    design = np.column_stack([np.ones(len(frame)), *indicators])
    rate = np.exp(model.log_mean_offset + design @ truth)
    scales = np.append(model.intercept_scale, np.full(len(truth) - 1, model.prior_scale))
    precision = (design * rate[:, None]).T @ design + np.diag(1 / scales**2)
    return Outcome(fit, chosen, truth, np.sqrt(np.diagonal(np.linalg.inv(precision))))


COLUMNS: Any = population.SCHEMA.columns[:-1]
CASES: dict[str, Callable[[int], Outcome]] = {
    "two": two,
    "groups": groups,
    "target": target,
    "wide": wide,
    "correlated": lambda seed: wide(seed, correlation=0.6),
    "sites": sites,
}


def measured(case: str, seed: int) -> Iterator[dict[str, Any]]:
    """A row for each method."""
    started = time.perf_counter()
    found = CASES[case](seed)
    ran = time.perf_counter() - started
    on_request = case in ("wide", "correlated")
    methods = {
        "trace": lambda: found.fit.averaged,
        "releases": lambda: (
            found.fit.posterior_from("releases") if on_request else found.fit.posterior
        ),
    }
    for method, make in methods.items():
        started = time.perf_counter()
        posterior = make()
        took = time.perf_counter() - started
        tails = np.array([0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2])
        low, high = posterior.latent_dist.quantiles(tails)[found.chosen].T
        sd = posterior.scale[found.chosen]
        yield {
            "case": case,
            "seed": seed,
            "method": method,
            "source": posterior.method,
            "blocks": len(found.fit.blocks.members) if found.fit.blocks else 1,
            "parameters": len(found.truth),
            "hold": np.mean((low <= found.truth) & (found.truth <= high)),
            "width": np.median(sd / found.nonprivate_sd),
            "off": np.abs((posterior.loc[found.chosen] - found.truth) / sd).max(),
            "not_converged": len(posterior.not_converged),
            "seconds_of_run": ran,
            "seconds_of_posterior": took,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[100, 101, 102])
    parser.add_argument("--only", choices=list(CASES), nargs="+", default=list(CASES))
    options = parser.parse_args()
    warnings.simplefilter("ignore", dpvim.ConvergenceWarning)
    rows = pd.read_csv(RESULTS).to_dict("records") if RESULTS.exists() else []
    for case in options.only:
        for seed in options.seeds:
            rows = [row for row in rows if (row["case"], row["seed"]) != (case, seed)]
            new = list(measured(case, seed))
            print(pd.DataFrame(new).to_string(index=False), flush=True)
            rows += new
            pd.DataFrame(rows).to_csv(RESULTS, index=False, float_format="%.4g")
    print(pd.DataFrame(rows).groupby(["case", "method"])[["hold", "width", "off"]].mean())


if __name__ == "__main__":
    main()
