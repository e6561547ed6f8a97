"""The paper's model of its health study: data, model, optimum, and the running of cells.

A mixture of 16 product distributions for six columns, and a Poisson regression of the outcome on
them. UK Biobank is closed; the simulated population stands in for it, or a table of the user's.
Both parts share no likelihood term, so the best mean-field Gaussian of the regression does not
depend on the mixture, and is computed exactly.

The published runs drew batches without replacement and accounted for Poisson sampling. Here they
are Poisson samples, with the same noise: the mechanism is the one that is accounted for, and the
amount of noise is the paper's. Runs have seeds, which whoever knows them can repeat: what comes out
has no guarantee, and is not for release.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pandas as pd
from jaxtyping import Float

from dpvim.experiments import population, ukb_downstream, ukb_gradients
from dpvim.experiments.experiment import RECOMMENDED, Cell, CellResult
from dpvim.experiments.optimum import MeanField, mean_field_optimum
from dpvim.experiments.running import fits
from dpvim.experiments.ukb_downstream import Regression, regression_cells
from dpvim.models.columns import CategoricalColumn, CountColumn, Response
from dpvim.models.mixture import Mixture
from dpvim.posterior.convergence import drift_score
from dpvim.posterior.metrics import mpae
from dpvim.result import Fit
from dpvim.synthesis.encoding import encode
from dpvim.synthesis.model import build_mixture
from dpvim.synthesis.schema import Schema
from dpvim.synthesis.tables import read_table
from dpvim.types import Relation

POPULATION = "population"
NUM_COMPONENTS = 16
# Windows in parts of the trace, and rules that choose one for each parameter.
WINDOWS: dict[str, float | str] = {
    "last 10 %": 0.1,
    "last 25 %": 0.25,
    "last 50 %": 0.5,
    "slope": "slope",
    "rhat": "rhat",
    "auto": "auto",
}
_CURVE_POINTS = 50
# A window whose old end differs from its new half by so many standard errors has not converged.
_DRIFTING = 2.0


class Study(NamedTuple):
    """A table with its model, and what a fit without privacy would find.

    Attributes:
        schema: The table's columns.
        model: The paper's mixture and regression.
        values, missing: The table, encoded.
        num_rows: N.
        optimum: The best mean-field Gaussian of the coefficients.
        original: The coefficients' maximum likelihood estimates on the table itself.
    """

    schema: Schema
    model: Mixture
    values: dict[str, np.ndarray]
    missing: dict[str, np.ndarray]
    num_rows: int
    optimum: MeanField
    original: Regression


# Files of tables that cells were made of, by what is in the files.
_FILES: dict[str, tuple[Path, Path]] = {}


@cache
def table_settings(table: Path | None, schema: Path | None) -> Mapping[str, Any]:
    """Settings of a cell that say which table it is: by its content, wherever the file is.

    `load` finds the files that were named here, in this process.

    Args:
        table, schema: Files; None for the simulated population.
    """
    if table is None:
        return {"table": POPULATION}
    if schema is None:
        raise ValueError(f"schema: expected the schema of the table {str(table)!r}, got none.")
    content = hashlib.sha256()
    for path in (table, schema):
        content.update(hashlib.sha256(path.read_bytes()).digest())
    digits = content.hexdigest()[:12]
    _FILES[digits] = table, schema
    return {"table": table.name, "content": digits}


@cache
def load(content: str | None = None) -> Study:
    """The simulated population, or the table with this content."""
    if content is None:
        return study_of(population.simulate(seed=0), population.SCHEMA)
    table, schema = _FILES[content]
    known = Schema.load(schema)
    return study_of(read_table(table, columns=known.names), known)


def study_of(frame: pd.DataFrame, schema: Schema) -> Study:
    """The paper's model of a table, and the optimum of its regression."""
    model = paper_model(schema)
    encoded = encode(frame, schema)
    cells = regression_cells(model, encoded.values, encoded.missing)
    optimum = mean_field_optimum(
        cells.X, cells.totals, "poisson", prior_scale=1.0, offset=cells.offset
    )
    original = ukb_downstream.poisson_regression(cells, start=optimum.loc)
    if original is None:
        raise ValueError(
            "table: expected outcomes at every level of every column, got a level without any: "
            "its coefficient is infinite. Join it with another one in the schema."
        )
    values, missing = dict(encoded.values), dict(encoded.missing)
    return Study(schema, model, values, missing, len(frame), optimum, original)


def paper_model(schema: Schema) -> Mixture:
    """16 components, and standard normal priors of all coefficients, the intercept's among them."""
    columns = build_mixture(schema, components=NUM_COMPONENTS).columns
    response = Response(_outcome_of(columns), "poisson")
    return Mixture(columns, NUM_COMPONENTS, response, prior_scale=1.0, intercept_scale=1.0)


def _outcome_of(columns: Sequence[Any]) -> str:
    able = [
        column.name
        for column in columns
        if isinstance(column, CountColumn)
        or (isinstance(column, CategoricalColumn) and column.num_levels == 2)
    ]
    if not able:
        raise ValueError(
            "schema: expected a count or a column of two levels, the outcome of the Poisson "
            "regression; got none."
        )
    return population.OUTCOME if population.OUTCOME in able else able[-1]


def coefficients_of(fit: Fit) -> slice:
    """Positions of the regression's coefficients in the flat latent."""
    end = 0
    for site in fit.space.sites:
        begin, end = end, end + site.raw_size
        if site.name.endswith(".coefficients"):
            return slice(begin, end)
    raise ValueError("fit: expected a site with the coefficients of the response, got none.")


# -- running ------------------------------------------------------------------------------------


def together(cell: Cell) -> tuple[tuple[str, Any], ...]:
    """Cells that differ in their seed alone are one call."""
    return tuple(sorted((name, value) for name, value in cell.items() if name != "seed"))


def run(cells: Sequence[Cell]) -> list[CellResult]:
    """Fit the cells, which are equal but for their seeds, and measure each."""
    first = cells[0]
    study = load(first.get("content"))
    options = _options(first, study)
    each = [{"seed": cell["seed"]} for cell in cells]
    found = fits(study.model, study.values, study.missing, each=each, **options)
    return [measure(study, cell, fit) for cell, fit in zip(cells, found, strict=True)]


def _options(cell: Cell, study: Study) -> dict[str, Any]:
    options: dict[str, Any] = {
        "epsilon": cell["epsilon"],
        "delta": 1 / study.num_rows,
        "relation": Relation.ZERO_OUT.value,
        "clip_norm": cell["clip_norm"],
        "num_steps": cell["num_steps"],
        "learning_rate": cell["learning_rate"],
        "probe_width": 1.0,
    }
    if cell["way"] == RECOMMENDED:
        return options
    return options | {name: cell[name] for name in ("variant", "init_scale", "sampling_prob")}


def measure(study: Study, cell: Cell, fit: Fit) -> CellResult:
    """Errors of the regression's means and standard deviations, by estimate, and as curves."""
    if cell["way"] == RECOMMENDED:
        return _measure_defaults(study, cell, fit)
    part = coefficients_of(fit)
    loc, scale = fit.trace.loc[:, part], _scales(fit)[:, part]
    errors = Errors(study.optimum, loc[0], scale[0])
    rows = [errors.of("last", loc[-1], scale[-1]) | _norms(study, fit)]
    arrays: dict[str, Any] = errors.curves(fit, loc, scale)
    if cell.get("datasets"):
        rows, errors_of = _measure_averages(study, cell, fit, errors)
        arrays |= errors_of
    return CellResult(rows, arrays)


class Errors(NamedTuple):
    """Distances from the optimum, in parts of the distance at the start."""

    optimum: MeanField
    initial_loc: np.ndarray
    initial_scale: np.ndarray

    def of(self, estimate: str, loc: np.ndarray, scale: np.ndarray) -> dict[str, Any]:
        """Equation (eq:MPAE) of the paper, and errors that are steadier.

        A parameter that happens to start next to its optimum makes its proportion enormous, and
        the mean of MPAE over random starts does not exist. The pooled errors are sums over
        parameters, divided once; the last two have no start in them.
        """
        return {
            "estimate": estimate,
            "means": float(mpae(loc, self.initial_loc, self.optimum.loc)),
            "stds": float(mpae(scale, self.initial_scale, self.optimum.scale)),
            "means_pooled": float(self.pooled_means(loc)),
            "stds_pooled": float(self.pooled_stds(scale)),
            "means_rmse": float(np.sqrt(np.mean((loc - self.optimum.loc) ** 2))),
            "stds_log": float(np.abs(np.log(scale / self.optimum.scale)).mean()),
        }

    def pooled_means(self, loc: np.ndarray) -> Any:
        return _pooled(loc, self.initial_loc, self.optimum.loc)

    def pooled_stds(self, scale: np.ndarray) -> Any:
        return _pooled(scale, self.initial_scale, self.optimum.scale)

    def curves(self, fit: Fit, loc: np.ndarray, scale: np.ndarray) -> dict[str, np.ndarray]:
        """Both errors, MPAE and pooled, as the run went on, at about fifty points."""
        at = np.unique(np.linspace(0, len(loc) - 1, _CURVE_POINTS + 1).astype(int))
        return {
            "curve_steps": fit.trace.steps[at],
            "curve_means": mpae(loc[at], self.initial_loc, self.optimum.loc),
            "curve_stds": mpae(scale[at], self.initial_scale, self.optimum.scale),
            "curve_means_pooled": self.pooled_means(loc[at]),
            "curve_stds_pooled": self.pooled_stds(scale[at]),
        }


def _pooled(params: np.ndarray, initial: np.ndarray, optimum: np.ndarray) -> Any:
    return np.abs(params - optimum).sum(axis=-1) / np.abs(initial - optimum).sum()


def _scales(fit: Fit) -> Float[np.ndarray, "snapshots d"]:
    """T(s) of all snapshots."""
    factor = fit.family.factor
    assert factor is not None
    return np.asarray(jax.vmap(factor)(fit.trace.params), float)


def _norms(study: Study, fit: Fit) -> dict[str, float]:
    """Median norm of what a record would add to a release, over C: at the start, at the end."""
    clip_norm = fit.plan.clip_norm
    found = {}
    for name, index in {"norm_start": 0, "norm_end": -1}.items():
        norms = ukb_gradients.released_norms(study, fit, fit.trace[index])
        found[name] = float(np.median(norms)) / clip_norm
        found[f"clipped{name[4:]}"] = float(np.mean(norms > clip_norm))
    return found


def _measure_averages(
    study: Study, cell: Cell, fit: Fit, errors: Errors
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The last iterate and averages over windows: errors, downstream analysis, and the windows."""
    rows, errors_of = [], {}
    part, trace = coefficients_of(fit), fit.trace.loc
    last_error = np.abs(trace[-1, part] - study.optimum.loc)
    one_snapshot = 1 / len(trace)
    for name, window in {"last": one_snapshot, **WINDOWS}.items():
        rule = window if isinstance(window, str) else max(1, round(window * len(trace)))
        found = fit.posterior_from("trace", noise_aware=None, window=rule)
        loc, windows = found.loc[part], found.latent_dist.windows
        lengths, passed = windows.lengths[part], windows.converged[part]
        drifting = _drifts(trace[:, part], lengths)
        rows.append(
            errors.of(name, loc, found.scale[part])
            | ukb_downstream.pooled_errors(study, found, cell["datasets"], cell["seed"])
            | {
                "window": float(np.median(lengths)) / len(trace),
                "passed": float(np.mean(passed)) if isinstance(rule, str) else np.nan,
                "passed_drifting": float(np.mean(passed & drifting)),
                "worse_than_last": float(np.mean(np.abs(loc - study.optimum.loc) > last_error)),
            }
        )
        errors_of[f"error {name}"] = loc - study.optimum.loc
    return rows, errors_of


def _drifts(trace: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Mark parameters that are still on their way in their window."""
    found = np.zeros(len(lengths), bool)
    for length in np.unique(lengths[lengths > 1]):
        columns = lengths == length
        found[columns] = drift_score(trace[-length:, columns]) > _DRIFTING
    return found


def _measure_defaults(study: Study, cell: Cell, fit: Fit) -> CellResult:
    """Errors of the average of the trace, with and without the noise's variance.

    In parts of the distance at the start of a published run with standard deviations of one.
    """
    part = coefficients_of(fit)
    errors = Errors(study.optimum, fit.trace.loc[0, part], np.ones(len(study.optimum.loc)))
    rows = []
    for name, aware in {"average": None, "noise-aware": "average"}.items():
        found = fit.posterior_from("trace", noise_aware=aware)  # type: ignore[arg-type]
        row = errors.of(name, found.loc[part], found.scale[part])
        row |= {"doubts": len(found.doubts), "not_converged": len(found.not_converged)}
        if cell.get("datasets"):
            row |= ukb_downstream.pooled_errors(study, found, cell["datasets"], cell["seed"])
        rows.append(row)
    return CellResult(rows, {})
