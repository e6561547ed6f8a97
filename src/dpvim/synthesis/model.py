"""From a schema to the model of its table."""

from __future__ import annotations

from typing import Any

from dpvim import _validate
from dpvim.models.columns import (
    CategoricalColumn,
    Column,
    CountColumn,
    NormalColumn,
    Response,
)
from dpvim.models.mixture import Mixture
from dpvim.models.regression import OUTCOMES
from dpvim.synthesis.schema import Binary, Count, Integer, Levelled, Real, Schema


def model_of(
    schema: Schema,
    *,
    components: int,
    target: str | None = None,
    target_model: str | None = None,
) -> Mixture:
    """The mixture that a twin is drawn from.

    Args:
        schema: The table's columns.
        components: Number of mixture components.
        target: A column that is regressed on all others, if any.
        target_model: ``logistic``, ``poisson`` or ``linear``; by default the one that suits the
            target's kind.
    """
    if target is None:
        if target_model is not None:
            raise ValueError(
                f"target_model: expected together with a target, got {target_model!r} alone. Name "
                "the column to be regressed on the others, or leave it out."
            )
        return Mixture([_column(each) for each in schema.columns], components)
    _validate.one_of("target", target, schema.names)
    if target_model is None:
        target_model = _usual_model(schema.column(target))
    _validate.one_of("target_model", target_model, OUTCOMES)
    columns = [_column(each) for each in schema.columns]
    return Mixture(columns, components, Response(target, target_model))


def _column(column: Any) -> Column:
    if isinstance(column, Levelled):
        return CategoricalColumn(column.name, len(column.levels), column.nullable)
    if isinstance(column, Count):
        return CountColumn(column.name, int(column.upper), column.nullable, overdispersed=True)
    if isinstance(column, Integer):
        lower, upper = column.bounds
        return NormalColumn(column.name, column.nullable, lower, upper, integral=True)
    assert isinstance(column, Real)
    return NormalColumn(column.name, column.nullable)  # encoded between 0 and 1


def _usual_model(column: Any) -> str:
    if isinstance(column, Binary) or (isinstance(column, Levelled) and len(column.levels) == 2):
        return "logistic"
    if isinstance(column, Levelled):
        raise ValueError(
            f"target: expected a binary, count, integer or real column, got {column.name!r} with "
            f"{len(column.levels)} levels. Leave the target out: the mixture models such columns."
        )
    return "poisson" if isinstance(column, Count) else "linear"
