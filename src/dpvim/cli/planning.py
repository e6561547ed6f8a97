"""Plans of fits that are not run: for ``dpvim plan``, and for dry runs."""

from __future__ import annotations

from typing import Any, NoReturn

import typer

from dpvim import _validate
from dpvim.cli.common import print_json
from dpvim.ledger.book import Ledger
from dpvim.models.mixture import Mixture
from dpvim.privacy.plan import PrivacyPlan, default_sampling_prob
from dpvim.strategy import FitPlan, plan
from dpvim.synthesis.fitting import (
    CountSynthesizer,
    DpviSynthesizer,
    resolve_delta,
)
from dpvim.synthesis.marginals.release import design
from dpvim.synthesis.model import TableRegression
from dpvim.synthesis.schema import Schema
from dpvim.synthesis.twin import DPVI
from dpvim.types import Relation


def plan_of_dpvi(
    maker: DpviSynthesizer, rows: int, *, epsilon: float, delta: float | None
) -> PrivacyPlan:
    """The plan of a twin by DPVI for so many rows, calibrated."""
    mixture = maker.model
    assert isinstance(mixture, Mixture)
    options = maker.options
    prob = options.get("sampling_prob")
    return PrivacyPlan(
        num_examples=rows,
        sampling_prob=default_sampling_prob(num_examples=rows, dim=mixture.dim)
        if prob is None
        else prob,
        num_steps=options["num_steps"],
        clip_norm=options["clip_norm"],
        relation=options.get("relation", Relation.ZERO_OUT),
        max_rows_per_person=None if maker.group_by is None else 1,
    ).calibrate(epsilon=epsilon, delta=resolve_delta(delta, rows))


def facts_of_dpvi(maker: DpviSynthesizer, plan: PrivacyPlan) -> dict[str, Any]:
    """The work of a twin by DPVI, for people to read."""
    mixture = maker.model
    assert isinstance(mixture, Mixture)
    return {
        "unit": plan.unit.value,
        "engine": DPVI,
        "components": mixture.num_components,
        "parameters": mixture.dim,
        "sampling_prob": plan.sampling_prob,
        "expected_batch_size": round(plan.expected_batch_size, 1),
        "steps": plan.num_steps,
        "clip_norm": plan.clip_norm,
    }


def show_facts(facts: dict[str, Any]) -> None:
    """A line for each fact."""
    for name, value in facts.items():
        shown = f"{value:.4g}" if isinstance(value, float) else value
        typer.echo(f"{name.replace('_', ' '):<26} {shown}")


def end_dry_run(
    model: Any, data: tuple[Any, ...], *, as_json: bool = False, **options: Any
) -> NoReturn:
    """Check what is left to be checked, say what would be done, and end the command."""
    made = plan(model, *data, **options)
    if as_json:
        _end_with_json(made.to_dict())
    typer.echo(made)
    _end()


def end_dry_run_of_twin(
    maker: CountSynthesizer | DpviSynthesizer,
    source: Any,
    *,
    epsilon: float,
    delta: float | None,
    num_examples: int | None,
    ledger: Ledger | None = None,
    purpose: str | None = None,
    as_json: bool = False,
    **reading: Any,
) -> NoReturn:
    """Read the table, say what would be done with it, and end the command."""
    schema = maker.schema
    if isinstance(maker, DpviSynthesizer):
        table, num_records, by_person = maker.read(source, **reading)
        delta = resolve_delta(delta, num_records if num_examples is None else num_examples)
        budget = {
            "epsilon": epsilon,
            "delta": delta,
            "num_examples": num_examples,
            "ledger": ledger,
            "purpose": purpose,
        }
        options = {**budget, **by_person, **maker.options}
        end_dry_run(maker.model, (table.values, table.missing), as_json=as_json, **options)
    assert isinstance(maker, CountSynthesizer)
    tables, _ = maker.tables_of(source, **reading)
    rows = sum(table.num_rows for table in tables()) if callable(tables) else tables.num_rows
    of_twin = maker.plan(
        rows if num_examples is None else num_examples, epsilon=epsilon, delta=delta
    )
    of_twin.check_num_rows(rows)
    if not callable(tables):
        tables.counted(schema, design(schema, of_twin).grids)
    if ledger is not None:
        ledger.check_affordable(of_twin, delta=delta)
    facts = maker.facts(of_twin)
    if as_json:
        _end_with_json(facts)
    show_facts(facts)
    _end()


def by_person(person: str | None, max_rows: int | None, ids: Any) -> dict[str, Any]:
    """Options of a fit by persons, if one was asked for.

    Args:
        person, max_rows: As they were given; both or none.
        ids: Of persons, for each row.
    """
    if (person is None) != (max_rows is None):
        missing, given = (
            ("--max-rows", "--person") if max_rows is None else ("--person", "--max-rows")
        )
        raise ValueError(
            f"{missing}: expected with {given}, got none. --person names the column with the ids "
            "of persons, --max-rows the most rows of one that are used; it is public, and not to "
            "be read off the data."
        )
    return {} if person is None else {"group_by": ids, "max_rows_per_person": max_rows}


def _end_with_json(facts: dict[str, Any]) -> NoReturn:
    print_json({"dry_run": True, **facts})
    raise typer.Exit


def _end() -> NoReturn:
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
