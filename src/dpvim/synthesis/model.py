"""Models of a table by its schema: a mixture, a regression, or the user's own."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from dpvim import _validate
from dpvim.models.columns import (
    CategoricalColumn,
    Column,
    CountColumn,
    NormalColumn,
    Response,
    check_regression,
    feature_names,
    table_features,
    table_standardised,
)
from dpvim.models.mixture import Mixture
from dpvim.models.regression import Regression
from dpvim.synthesis.encoding import EncodedTable
from dpvim.synthesis.schema import AnyColumn, Count, Level, Levelled, Real, Schema
from dpvim.types import ModelError

NUMBERS = ("histogram", "normal")
DEFAULT_NUMBERS = "histogram"
_NUM_BINS = 20
# Standard deviation of an intercept's prior: rates of rare outcomes are e^-5 and less.
_INTERCEPT_SCALE = 5.0


def build_model(
    schema: Schema,
    own: Callable[..., Any] | None = None,
    *,
    components: int,
    target: str | None = None,
    target_model: str | None = None,
    numbers: str = DEFAULT_NUMBERS,
) -> Callable[..., Any]:
    """The user's own model, or else the mixture with these settings (see `build_mixture`)."""
    if own is None:
        return build_mixture(
            schema,
            components=components,
            target=target,
            target_model=target_model,
            numbers=numbers,
        )
    if target is not None or target_model is not None:
        raise ValueError("target: expected none with a model of your own, which has its own.")
    return own


def build_mixture(
    schema: Schema,
    *,
    components: int,
    target: str | None = None,
    target_model: str | None = None,
    numbers: str = DEFAULT_NUMBERS,
) -> Mixture:
    """The mixture that a twin is drawn from.

    Args:
        schema: The table's columns.
        components: Number of mixture components.
        target: A column that is regressed on all others, if any.
        target_model: ``logistic``, ``poisson`` or ``linear``; by default the one that suits the
            target's kind.
        numbers: What integer and real columns are in a component: ``histogram`` or ``normal``.
    """
    _validate.one_of("numbers", numbers, NUMBERS)
    bins = _NUM_BINS if numbers == "histogram" else 0
    response = None
    if target is not None:
        response = Response(target, target_model_of(schema, target, target_model))
    elif target_model is not None:
        raise ValueError(
            f"target_model: expected together with a target, got {target_model!r} alone. Name the "
            "column to be regressed on the others, or leave it out."
        )
    columns = [_column(each, 0 if each.name == target else bins) for each in schema.columns]
    return Mixture(columns, components, response)


def mixture_settings(model: Callable[..., Any] | None, schema: Schema) -> dict[str, Any] | None:
    """The settings that `build_mixture` makes this model from; None for the user's own."""
    if not isinstance(model, Mixture):
        return None
    name, kind = model.response or (None, None)
    for numbers in NUMBERS:
        settings: dict[str, Any] = {"components": model.num_components, "numbers": numbers}
        settings |= {"target": name, "target_model": kind}
        if build_mixture(schema, **settings) == model:
            return settings
    return None


def coefficient_names(model: Mixture, schema: Schema) -> list[str]:
    """Names of the response's coefficients, with the levels as the schema has them."""
    return ["intercept", *feature_names(model.predictors, _levels(schema))]


class TableRegression:
    """A regression of one column of a table on all others.

    Attributes:
        model: Takes what `data` returns.
        names: Of the covariates, with the levels as the schema has them.
    """

    def __init__(self, schema: Schema, *, kind: str, target: str) -> None:
        _validate.one_of("target", target, schema.names)
        columns = {each.name: _column(each) for each in schema.columns}
        self._target = columns.pop(target)
        self._covariates = list(columns.values())
        check_regression(self._target, kind)
        if self._target.nullable:
            raise ValueError(
                f"target: expected a column without missing values, got {target!r}, which is "
                "nullable. Declare it without, or use synth, which models them."
            )
        if not columns:
            raise ValueError(f"schema: expected columns besides the target {target!r}, got none.")
        self.model = Regression(kind, intercept_scale=_INTERCEPT_SCALE)
        self.names = feature_names(self._covariates, _levels(schema))

    def blank(self, num_rows: int) -> tuple[Float[np.ndarray, "n m"], Float[np.ndarray, " n"]]:
        """Covariates and outcome of the right shapes, all zero: enough for a plan."""
        return np.zeros((num_rows, len(self.names)), np.float32), np.zeros(num_rows, np.float32)

    def data(self, table: EncodedTable) -> tuple[Float[np.ndarray, "n m"], Float[np.ndarray, " n"]]:
        """Covariates and outcome."""
        covariates = table_features(self._covariates, table.values, table.missing)
        outcome = table.values[self._target.name]
        if isinstance(self._target, NormalColumn):
            outcome = table_standardised(self._target, outcome)
        return covariates, outcome.astype(np.float32)


def load_model(path: str | Path) -> Callable[..., Any]:
    """Run a Python file and return its function `model`."""
    source = Path(path)
    if not source.is_file():
        raise FileNotFoundError(f"{source}: expected a Python file with a model, there is none.")
    model = runpy.run_path(str(source)).get("model")
    if not callable(model):
        raise ModelError(
            f"{source}: expected a function named model, model(values, missing, num_rows=None), "
            "found none."
        )
    return model


def _levels(schema: Schema) -> dict[str, tuple[Level, ...]]:
    return {column.name: column.levels for column in schema.columns if isinstance(column, Levelled)}


def _column(column: AnyColumn, num_bins: int = 0) -> Column:
    if isinstance(column, Levelled):
        return CategoricalColumn(column.name, len(column.levels), column.nullable)
    if isinstance(column, Count):
        return CountColumn(column.name, int(column.upper), column.nullable, overdispersed=True)
    if isinstance(column, Real):  # encoded tables have them as places between the bounds
        return NormalColumn(column.name, column.nullable, num_bins=num_bins)
    if column.integral:
        lower, upper = column.bounds
        bins = min(num_bins, int(upper - lower) + 1)
        return NormalColumn(column.name, column.nullable, lower, upper, True, bins)
    raise TypeError(f"column {column.name!r}: no model for the kind {column.kind!r}.")


def target_model_of(schema: Schema, target: str, kind: str | None = None) -> str:
    """The regression of a target: the one that is asked for, or the one that suits its kind."""
    _validate.one_of("target", target, schema.names)
    if kind is not None:
        return kind
    column = schema.column(target)
    if isinstance(column, Levelled):
        if len(column.levels) == 2:
            return "logistic"
        raise ValueError(
            f"target: expected a binary, count, integer or real column, got {target!r} with "
            f"{len(column.levels)} levels. Leave the target out: the mixture models such columns."
        )
    return "poisson" if isinstance(column, Count) else "linear"
