"""Plans of fits that are not run: for ``dpvim plan``, and for dry runs."""

from __future__ import annotations

from typing import Any

import typer

from dpvim import _validate
from dpvim.bridge.data import prepare
from dpvim.bridge.model import bridge
from dpvim.privacy.plan import PrivacyPlan, default_sampling_prob
from dpvim.synthesis.fitting import resolve_delta
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


def end_dry_run(
    model: Any, data: tuple[Any, ...], *, num_examples: int | None, **settings: Any
) -> None:
    """Check what is left to be checked, say what would be done, and end the command."""
    inputs = prepare(data, {})
    if num_examples is None and settings["relation"] is Relation.ADD_OR_REMOVE:
        raise ValueError(
            "--num-examples: expected with add_or_remove, where the number of records is private. "
            "Declare a public bound on it."
        )
    rows = inputs.num_rows if num_examples is None else num_examples
    plan = make_plan(rows=rows, dim=bridge(model, inputs).problem.dim, **settings)
    plan.check_num_rows(inputs.num_rows)
    typer.echo(
        f"All is well: {plan.num_steps:,} steps, batches of about "
        f"{plan.expected_batch_size:,.0f} records, noise multiplier {plan.noise_multiplier:.4g}. "
        "Nothing was spent or written."
    )
    raise typer.Exit
