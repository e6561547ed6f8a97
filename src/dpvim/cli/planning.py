"""Plans of fits that are not run: for ``dpvim plan``, and for dry runs."""

from __future__ import annotations

from typing import Any

import typer

from dpvim import _validate
from dpvim.privacy.plan import PrivacyPlan, default_sampling_prob
from dpvim.strategy import FitPlan, plan
from dpvim.synthesis.fitting import resolve_delta
from dpvim.synthesis.model import TableRegression
from dpvim.synthesis.schema import Schema
from dpvim.types import Relation


def make_plan(
    *,
    rows: int,
    dim: int,
    epsilon: float,
    delta: float | None,
    clip_norm: float,
    sampling_prob: float | None,
    steps: int,
    relation: Relation,
) -> PrivacyPlan:
    """The plan that `dpvim.fit` would make for so many rows and parameters, calibrated."""
    _validate.positive_int("rows", rows)
    if sampling_prob is None:
        sampling_prob = default_sampling_prob(num_examples=rows, dim=dim)
    return PrivacyPlan(
        num_examples=rows,
        sampling_prob=sampling_prob,
        num_steps=steps,
        clip_norm=clip_norm,
        relation=relation,
    ).calibrate(epsilon=epsilon, delta=resolve_delta(delta, rows))


def end_dry_run(model: Any, data: tuple[Any, ...], **options: Any) -> None:
    """Check what is left to be checked, say what would be done, and end the command."""
    typer.echo(plan(model, *data, **options))
    typer.echo("All is well. Nothing was spent or written.")
    raise typer.Exit


def plan_of_regression(
    schema: Schema, kind: str, target: str | None, *, rows: int, **options: Any
) -> FitPlan:
    """The plan of a regression of one column on all others, for so many rows."""
    _validate.positive_int("rows", rows)
    if target is None:
        raise ValueError(f"--target: expected the column that the {kind} regression explains.")
    regression = TableRegression(schema, kind=kind, target=target)
    return plan(regression.model, *regression.blank(rows), **options)
