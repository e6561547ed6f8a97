"""Do pooled intervals from synthetic data hold? `python benchmarks/rubin_coverage.py`

Linear regression with three correlated covariates and 500 rows. In every replication there are new
data, their exact posterior (flat prior), and m synthetic tables, each from its own draw of the
posterior. The intervals are for the true coefficients. Tables are drawn as what a regression reads
off them (cross products, estimates, residual variance), which is exact and quick.

`posterior` is "exact", or "noisy": what a private fit that knows about its noise would release. Its
centre is moved by noise with three times the sampling variance, and it is wider to match.

Rules: `combine` (this package); `missing data` (T = (1 + 1/m) b + u with its degrees of freedom);
`b over m` (population variance, and the missing-data T where the right one is negative); `one
table` (the first table as if it were real).

Columns: how often intervals of a level hold; how often T was `negative`, and how often the 95 %
intervals `then` hold; `width`, the median of the 95 % intervals' width by that of the interval from
the original data, and `wide`, its 90 % quantile; `joint`, how often the test of all three
coefficients at once rejects the truth at 5 %.

A minute on two cores; writes results/rubin_coverage.csv.
"""

from __future__ import annotations

import argparse
import os
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

from dpvim.synthesis.analysis.rubin import NegativeVarianceWarning, Total, combine, total_variance

RESULTS = Path(__file__).parent / "results"
NUM_ROWS = 500
ROW_RATIOS = (0.25, 1.0, 4.0)
NUM_DATASETS = (5, 20, 100)
POSTERIORS = {"exact": 1.0, "noisy": 4.0}
LEVELS = (0.5, 0.8, 0.9, 0.95)
COVARIATES = np.array([[1.0, 0.5, 0.2], [0.5, 1.0, 0.0], [0.2, 0.0, 1.0]])
DIM = len(COVARIATES)
# Replications that are drawn at a time, so that a hundred tables each stay small.
BLOCK = 1000
JOINT_TESTS = 2000


class Cell(NamedTuple):
    posterior: str
    rows_ratio: float
    m: int
    replications: int


class Tables(NamedTuple):
    """For each replication: what the original says, and the tables' estimates and covariances."""

    miss: np.ndarray  # [R, k], original estimate less truth
    variance: np.ndarray  # [R, k], by the original data
    estimates: np.ndarray  # [R, m, k], less truth
    covariances: np.ndarray  # [R, m, k, k]


def inverse_roots(rng: np.random.Generator, num_rows: int, shape: tuple[int, ...]) -> np.ndarray:
    """Factors F with F F' = (X'X)^-1 for designs with so many normal rows (Bartlett)."""
    lower = np.tril(rng.normal(size=(*shape, DIM, DIM)), -1)
    for i in range(DIM):
        lower[..., i, i] = np.sqrt(rng.chisquare(num_rows - i, size=shape))
    return np.linalg.inv(np.linalg.cholesky(COVARIATES) @ lower).swapaxes(-1, -2)


def apply(roots: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    return (roots @ vectors[..., None])[..., 0]


def draw_tables(rng: np.random.Generator, cell: Cell, count: int) -> Tables:
    n, n_syn, factor = NUM_ROWS, int(NUM_ROWS * cell.rows_ratio), POSTERIORS[cell.posterior]
    shape = (count, cell.m)
    roots = inverse_roots(rng, n, (count,))
    residual = rng.chisquare(n - DIM, size=count) / (n - DIM)
    miss = apply(roots, rng.normal(size=(count, DIM)))
    centre = miss + np.sqrt(factor - 1) * apply(roots, rng.normal(size=(count, DIM)))

    sigma2 = residual[:, None] * (n - DIM) / rng.chisquare(n - DIM, size=shape)
    spread = np.sqrt(factor * sigma2)[..., None]
    draws = centre[:, None] + spread * apply(roots[:, None], rng.normal(size=(*shape, DIM)))

    synthetic_roots = inverse_roots(rng, n_syn, shape)
    noise = apply(synthetic_roots, rng.normal(size=(*shape, DIM)))
    estimates = draws + np.sqrt(sigma2)[..., None] * noise
    synthetic_residual = sigma2 * rng.chisquare(n_syn - DIM, size=shape) / (n_syn - DIM)
    scaled = np.sqrt(synthetic_residual)[..., None, None] * synthetic_roots
    variance = residual[:, None] * np.square(roots).sum(axis=-1)
    return Tables(miss, variance, estimates, scaled @ scaled.swapaxes(-1, -2))


def by_rule(tables: Tables, cell: Cell) -> dict[str, tuple[np.ndarray, Total]]:
    """Estimate, variance and degrees of freedom of every coefficient, by each rule."""
    m = cell.m
    estimate = tables.estimates.mean(axis=1)
    between = tables.estimates.var(axis=1, ddof=1)
    variances = np.einsum("rlii->rli", tables.covariances)
    within = variances.mean(axis=1)
    inflated = (1 + 1 / m) * between
    missing = Total(
        inflated + within, (m - 1) * (1 + within / inflated) ** 2, np.zeros(within.shape, bool)
    )
    shrunk = total_variance(between * (m - 1) / m, within, m)
    population = shrunk._replace(
        variance=np.where(shrunk.negative, inflated * (m - 1) / m + within, shrunk.variance)
    )
    single = missing._replace(variance=variances[:, 0], df=np.full(within.shape, np.inf))
    return {
        "combine": (estimate, total_variance(between, within, m, cell.rows_ratio)),
        "missing data": (estimate, missing),
        "b over m": (estimate, population),
        "one table": (tables.estimates[:, 0], single),
    }


def joint_rejections(tables: Tables, cell: Cell, count: int) -> list[bool]:
    def p_value(i: int) -> float:
        pooled = combine(
            tables.estimates[i],
            tables.covariances[i],
            num_rows=NUM_ROWS,
            num_synthetic_rows=NUM_ROWS * cell.rows_ratio,
        )
        return pooled.test().p_value

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NegativeVarianceWarning)
        return [p_value(i) < 0.05 for i in range(count)]


def run_cell(cell: Cell) -> pd.DataFrame:
    """One row for each rule."""
    seed = [int(100 * cell.rows_ratio), cell.m, list(POSTERIORS).index(cell.posterior)]
    rng = np.random.default_rng(seed)
    parts: dict[str, list[np.ndarray]] = {}
    joint: list[bool] = []
    for start in range(0, cell.replications, BLOCK):
        tables = draw_tables(rng, cell, min(BLOCK, cell.replications - start))
        wanted = min(len(tables.miss), JOINT_TESTS - len(joint))
        joint += joint_rejections(tables, cell, max(0, wanted))
        original = stats.t.ppf(0.975, NUM_ROWS - DIM) * np.sqrt(tables.variance)
        for rule, (estimate, total) in by_rule(tables, cell).items():
            error = np.sqrt(total.variance)
            p_value = 2 * stats.t.sf(np.abs(estimate) / error, total.df)
            with np.errstate(over="ignore"):
                width = error * stats.t.ppf(0.975, np.maximum(total.df, 0.01)) / original
            held = [p_value > 1 - level for level in LEVELS]
            parts.setdefault(rule, []).append(np.stack([*held, total.negative, width]))
    rows = []
    for rule, blocks in parts.items():
        values = np.concatenate(blocks, axis=1).reshape(len(LEVELS) + 2, -1)
        negative = values[-2].astype(bool)
        rows.append(
            {
                "posterior": cell.posterior,
                "n_syn / n": cell.rows_ratio,
                "m": cell.m,
                "rule": rule,
                **{f"{level:.0%}": values[i].mean() for i, level in enumerate(LEVELS)},
                "negative": values[-2].mean(),
                "then": values[len(LEVELS) - 1][negative].mean() if negative.any() else np.nan,
                "width": f"{np.median(values[-1]):.3g}",
                "wide": f"{np.quantile(values[-1], 0.9):.3g}",
                "joint": np.mean(joint) if rule == "combine" else np.nan,
            }
        )
    return pd.DataFrame(rows).round(3)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replications", type=int, default=10_000)
    options = parser.parse_args()
    cells = [
        Cell(posterior, ratio, m, options.replications)
        for posterior in POSTERIORS
        for ratio in ROW_RATIOS
        for m in NUM_DATASETS
    ]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        table = pd.concat(pool.map(run_cell, cells), ignore_index=True)
    table.to_csv(RESULTS / "rubin_coverage.csv", index=False)
    print(table.to_string(index=False))


if __name__ == "__main__":
    main()
