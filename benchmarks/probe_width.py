"""What does probing wider do to the fit itself, on the mixture of a twin and on Adult?

    DPVIM_DATA=... python benchmarks/probe_width.py [--seeds 3]

A gradient that is taken kappa times further out has kappa times less noise in the scales; where
the log-likelihood is no quadratic it is another gradient. Each of these fits probes at kappa in
the first three quarters of its run and as usual in the last (`probe_width`).

The twin's mixture (six columns of the simulated population and a Poisson target, sixteen
components) is judged by the log-likelihood of 10 000 people who were not in the data, averaged
over 100 draws of the posterior. Adult is judged by the distances of means and standard deviations
from those of the best approximation without privacy, by Laplace's method.

Writes benchmarks/results/probe_width.csv.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd
from scipy import special

import dpvim
from dpvim.experiments import adult, population
from dpvim.models.mixture import Mixture
from dpvim.synthesis.encoding import encode

RESULTS = Path(__file__).parent / "results"
WIDTHS = (1.0, 2.0, 4.0)
EPSILONS = (1.0, 4.0)
NUM_NEW_ROWS, NUM_DRAWS = 10_000, 100


def of_the_mixture(epsilon: float, width: float, seed: int) -> Iterator[dict[str, Any]]:
    """Held-out log-likelihood a record, of the last iterate and of the trace's average."""
    twin = dpvim.synthesize(
        population.simulate(population.NUM_ROWS, seed=seed),
        population.SCHEMA,
        epsilon=epsilon,
        target=population.OUTCOME,
        engine="dpvi",
        probe_width=width,
        seed=seed,
        progress=False,
    )
    others = encode(population.simulate(NUM_NEW_ROWS, seed=seed + 1000), population.SCHEMA)
    assert isinstance(twin.model, Mixture)
    rows = twin.model.batch_of(others.values, others.missing)
    for name in ("last", "average"):
        draws = twin.by_dpvi.posterior_at(name).sample(NUM_DRAWS, seed=0)
        each = [
            np.asarray(twin.model.log_prob(jax.tree.map(lambda site, i=i: site[i], draws), rows))
            for i in range(NUM_DRAWS)
        ]
        held_out = special.logsumexp(each, axis=0, b=1 / NUM_DRAWS).mean()
        yield {"measure": f"held-out log-likelihood, {name}", "value": held_out}


def of_adult(epsilon: float, width: float, seed: int) -> Iterator[dict[str, Any]]:
    """Distances of the last iterate from what there is without privacy."""
    data = adult.load()
    mean, precision = adult.laplace(data)
    # The best Gaussian without correlations has the inverse of the precision's diagonal.
    scale = 1 / np.sqrt(np.diag(precision))
    fit = dpvim.fit(
        adult.model,
        data.X,
        data.y,
        epsilon=epsilon,
        delta=1e-5,
        clip_norm=2.0,
        sampling_prob=0.1,
        num_steps=20_000,
        learning_rate=3e-3,
        engine="dpvi",
        probe_width=width,
        seed=seed,
        progress=False,
    )
    last = fit.posterior_from("last", noise_aware=None)
    far = {"means": last.loc - mean, "standard deviations": last.scale - scale}
    for name, gap in far.items():
        yield {"measure": f"distance of {name}", "value": float(np.linalg.norm(gap))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    # Seeds make the table repeatable; nothing here is for release.
    warnings.simplefilter("ignore", dpvim.NotForReleaseWarning)
    rows = []
    for work, measure in (("twin's mixture", of_the_mixture), ("Adult", of_adult)):
        for epsilon in EPSILONS:
            for seed in range(options.seeds):
                for width in WIDTHS:
                    cell = {"work": work, "epsilon": epsilon, "probe_width": width, "seed": seed}
                    rows += [cell | found for found in measure(epsilon, width, seed)]
            raw = pd.DataFrame(rows)
            by_cell = raw.groupby(["work", "epsilon", "measure", "probe_width"])["value"]
            table = by_cell.agg(["mean", "std", "size"]).reset_index()
            table.round(4).to_csv(RESULTS / "probe_width.csv", index=False)
            print(table.to_string(index=False), flush=True)


if __name__ == "__main__":
    main()
