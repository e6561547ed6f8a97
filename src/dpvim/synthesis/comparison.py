"""A twin beside its original, for the holder's eyes only: an analysis of both."""

from __future__ import annotations

import keyword
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import pandas as pd
from scipy import stats

from dpvim._extras import LazyModule
from dpvim.models.mixture import Mixture
from dpvim.synthesis.analysis.pooling import FailedFitsError, analyze
from dpvim.synthesis.encoding import decode, encode
from dpvim.synthesis.marginals.fit import MarginalFit
from dpvim.synthesis.model import target_model_of
from dpvim.synthesis.schema import AnyColumn, Count, Levelled, Real, Schema
from dpvim.synthesis.twin import Twin

if TYPE_CHECKING:
    from dpvim.synthesis.analysis import glm
else:
    glm = LazyModule("dpvim.synthesis.analysis.glm", extra="analysis")

_CONFIDENCE = 0.95
_GLM = {"logistic": "binomial", "poisson": "poisson", "linear": "gaussian"}
_MAX_COEFFICIENTS = 200
Dataset: TypeAlias = pd.DataFrame | str | Path


class NoAnalysisError(ValueError):
    """There is no analysis to compare; the message says why."""


@dataclass(frozen=True)
class Downstream:
    """One analysis of the original and of its synthetic tables.

    Attributes:
        formula: As in statsmodels.
        family: gaussian, binomial or poisson.
        original: ``estimate``, ``lower``, ``upper`` by coefficient.
        synthetic: The same, pooled by Rubin's rules.
        notes: What the pool warned of.
    """

    formula: str
    family: str
    original: pd.DataFrame
    synthetic: pd.DataFrame
    notes: tuple[str, ...]


def downstream(
    twin: Twin,
    datasets: Sequence[Dataset],
    original: pd.DataFrame,
    *,
    formula: str | None = None,
    family: str | None = None,
) -> Downstream:
    """Fit a generalised linear model to the original and, pooled, to its twins.

    Args:
        twin: Says how the tables are to be read, and which analysis is meant if none is given.
        datasets: Synthetic tables, frames or paths.
        original: The table that the twin was made from.
        formula: As in statsmodels; default the twin's target on all other columns.
        family: The outcome's distribution, as in `analyze`; it goes with a formula.

    Raises:
        NoAnalysisError: If there is none to make, or it has no answer.
    """
    if formula is None:
        formula, family = default_formula(twin)
    schema = twin.schema
    levels = {c.name: c.levels for c in schema.columns if isinstance(c, Levelled)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            pooled = analyze(
                datasets,
                formula,
                family=family or "gaussian",
                num_rows=twin.num_rows,
                levels=levels,
                dates=schema.dates,
                missing=schema.missing,
                level=_CONFIDENCE,
                progress=False,
            )
        except FailedFitsError as error:
            raise NoAnalysisError(str(error)) from error
    # What the model saw: values that are not declared are mapped in the same way.
    seen = decode(encode(original, schema), schema)
    layout = glm.Layout(levels=levels, dates=schema.dates, missing=list(schema.missing))
    found = glm.fit_table(seen, formula, pooled.family, layout)
    if found["failure"]:
        raise NoAnalysisError(f"the original could not be fitted: {found['failure']}")
    errors = np.sqrt(np.diag(found["covariance"]))
    half_width = stats.norm.ppf((1 + _CONFIDENCE) / 2) * errors
    table = pd.DataFrame(
        {
            "estimate": found["params"],
            "lower": found["params"] - half_width,
            "upper": found["params"] + half_width,
        },
        index=found["names"],
    )
    synthetic = pooled.combined.to_frame()[["estimate", "lower", "upper"]]
    if list(synthetic.index) != list(table.index):
        raise NoAnalysisError("original and synthetic tables have different coefficients")
    notes = tuple(str(warning.message) for warning in caught)
    return Downstream(formula, pooled.family, table, synthetic, notes)


def default_formula(twin: Twin) -> tuple[str, str]:
    """The regression of the twin's target on all other columns, and its family.

    Counts among the covariates are on the scale log(1 + x), and numbers declared as logarithmic on
    that scale, as the mixture of DPVI has them.
    """
    schema = twin.schema
    name, kind = _regression(twin)
    target = schema.column(name)
    if isinstance(target, Levelled) and not _is_name(target.name):
        raise NoAnalysisError(
            f"the target's name, {target.name!r}, cannot stand in a formula by itself; give one"
        )
    others = [column for column in schema.columns if column is not target]
    size = sum(len(c.levels) - 1 if isinstance(c, Levelled) else 1 for c in others)
    if size > _MAX_COEFFICIENTS:
        raise NoAnalysisError(
            f"the regression of {target.name!r} on all others has {size} coefficients; give a "
            "formula with fewer"
        )
    outcome = _quoted(target.name)
    if isinstance(target, Real) and target.scale == "log":
        outcome = f"np.log({outcome})"
    return f"{outcome} ~ {' + '.join(map(_term, others))}", _GLM[kind]


def target_of(twin: Twin) -> str | None:
    """The column that matters more than the others, if there is one.

    A mixture of DPVI regresses it on all others; of a fit to counts it has pairs with less noise.
    """
    if isinstance(twin.fit, MarginalFit):
        return twin.fit.target
    model = twin.model
    return model.response.name if isinstance(model, Mixture) and model.response else None


def _regression(twin: Twin) -> tuple[str, str]:
    """The target's name, and which regression suits it."""
    target = target_of(twin)
    if target is None:
        raise NoAnalysisError("the twin has no target, and no formula was given")
    if isinstance(twin.model, Mixture) and twin.model.response is not None:
        return target, twin.model.response.kind
    try:
        return target, target_model_of(twin.schema, target)
    except ValueError as error:
        # Its advice is for DPVI.
        raise NoAnalysisError(
            f"the target, {target!r}, has more than two levels, for which there is no regression "
            "here; give a formula with another outcome"
        ) from error


def readable_term(term: str, schema: Schema) -> str:
    """A coefficient's name without the quotes that formulas need."""
    for name in schema.names:
        term = term.replace(f"Q({name!r})", name)
    return term.replace("np.", "")


def _term(column: AnyColumn) -> str:
    name = _quoted(column.name)
    if isinstance(column, Count):
        return f"np.log1p({name})"
    return f"np.log({name})" if isinstance(column, Real) and column.scale == "log" else name


def _quoted(name: str) -> str:
    return name if _is_name(name) else f"Q({name!r})"


def _is_name(name: str) -> bool:
    """True if a formula takes it for a column, not for one of patsy's functions."""
    special = {"C", "I", "Q", "np", "Poly", "Sum", "Diff", "Helmert", "Treatment", "bs", "cr", "cc"}
    return name.isidentifier() and not keyword.iskeyword(name) and name not in special
