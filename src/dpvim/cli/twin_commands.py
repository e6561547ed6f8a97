"""``dpvim plan``, ``synth`` and ``sample``: a synthetic twin of a table."""

from __future__ import annotations

import contextlib
from typing import Annotated, Any

import numpy as np
import typer

from dpvim import _validate
from dpvim.checkpoints import forget
from dpvim.cli.common import plain_errors, print_json
from dpvim.cli.options import (
    AnyTable,
    AsJson,
    Checkpoint,
    ChosenClipNorm,
    ChosenSteps,
    ClipNorm,
    Components,
    Datasets,
    Delimiter,
    Delta,
    DryRun,
    Encoding,
    EngineOption,
    Epsilon,
    Format,
    Formulas,
    FormulasRule,
    LearningRate,
    LedgerOption,
    MaxRows,
    NewFolder,
    Numbers,
    NumExamples,
    OwnModel,
    Person,
    PrivateSeed,
    Purpose,
    RegressionKind,
    RelationOption,
    RowsOut,
    SamplingProb,
    SchemaFile,
    Steps,
    TableFormat,
    Target,
    TargetModel,
    TwinFolder,
    command_line,
)
from dpvim.cli.planning import (
    by_person,
    end_dry_run_of_twin,
    facts_of_dpvi,
    plan_of_dpvi,
    plan_of_regression,
    show_facts,
)
from dpvim.files import new_folder
from dpvim.ledger.book import Ledger
from dpvim.synthesis.fitting import CountSynthesizer, make_synthesizer, opened_table, resolve_delta
from dpvim.synthesis.model import load_model
from dpvim.synthesis.schema import Schema
from dpvim.synthesis.twin import CLOSEST, DATA, Twin, check_format
from dpvim.types import Relation


def plan(
    schema: SchemaFile,
    rows: Annotated[int, typer.Option(help="Public number of rows; of persons with --person.")],
    epsilon: Epsilon,
    delta: Delta = None,
    model: Annotated[
        RegressionKind | None,
        typer.Option(help="A regression that `dpvim fit` would make, instead of a synthesis."),
    ] = None,
    target: Target = None,
    engine: EngineOption = None,
    components: Components = None,
    target_model: TargetModel = None,
    numbers: Numbers = None,
    clip_norm: ChosenClipNorm = None,
    sampling_prob: SamplingProb = None,
    steps: ChosenSteps = None,
    relation: RelationOption = Relation.ZERO_OUT,
    person: Person = None,
    max_rows: MaxRows = None,
    check: Annotated[
        bool, typer.Option("--check", help="Ask dp-accounting's accountant as well.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show what a synthesis, or with --model a fit, would do and cost. Reads no data.

    Examples:

    - `dpvim plan --schema patients.toml --rows 58261 --epsilon 1`

    - `dpvim plan --schema patients.toml --rows 58261 --epsilon 1 --model poisson --target infected`
    """
    of_steps: dict[str, Any] = {
        "clip_norm": clip_norm,
        "sampling_prob": sampling_prob,
        "num_steps": steps,
    }
    with plain_errors("plan", schema=schema):
        known = Schema.load(schema)
        delta = resolve_delta(delta, _validate.positive_int("rows", rows))
        if model is not None:
            made = plan_of_regression(
                known,
                model.value,
                target,
                rows=rows,
                epsilon=epsilon,
                delta=delta,
                relation=relation,
                **by_person(person, max_rows, np.arange(rows)),
                **of_steps,
            )
            print_json(made.to_dict()) if as_json else typer.echo(made)
            return
        if max_rows is not None:
            raise ValueError("--max-rows: expected with --model; a twin has one row a person.")
        maker = make_synthesizer(
            known,
            engine=engine,
            target=target,
            components=components,
            target_model=target_model,
            numbers=numbers,
            relation=relation,
            group_by=person,
            **of_steps,
        )
        facts: dict[str, Any] = {
            "columns": len(known.columns),
            "not_reviewed": len(known.unreviewed),
            "rows" if person is None else "persons": rows,
        }
        if isinstance(maker, CountSynthesizer):
            of_twin = maker.plan(rows, epsilon=epsilon, delta=delta)
            facts |= maker.facts(of_twin)
        else:
            of_twin = plan_of_dpvi(maker, rows, epsilon=epsilon, delta=delta)
            facts |= facts_of_dpvi(maker, of_twin)
    facts |= {
        "noise_multiplier": of_twin.noise_multiplier,
        "epsilon": epsilon,
        "delta": delta,
        "relation": relation.value,
    }
    if check:
        facts |= {
            f"epsilon_by_{name}": of_twin.epsilon(delta, accountant=name)
            for name in ("dpvim", "dp_accounting")
        }
    if as_json:
        print_json(facts)
        return
    show_facts(facts)


def synth(
    table: AnyTable,
    schema: SchemaFile,
    epsilon: Epsilon,
    output: NewFolder,
    delta: Delta = None,
    target: Target = None,
    engine: EngineOption = None,
    components: Components = None,
    datasets: Datasets = 100,
    rows: RowsOut = None,
    table_format: TableFormat = Format.csv,
    formulas: Formulas = FormulasRule.refuse,
    relation: RelationOption = Relation.ZERO_OUT,
    num_examples: NumExamples = None,
    person: Person = None,
    delimiter: Delimiter = None,
    encoding: Encoding = None,
    model: OwnModel = None,
    target_model: TargetModel = None,
    numbers: Numbers = None,
    clip_norm: ClipNorm = None,
    learning_rate: LearningRate = None,
    sampling_prob: SamplingProb = None,
    steps: Steps = None,
    ledger: LedgerOption = None,
    purpose: Purpose = None,
    seed: PrivateSeed = None,
    checkpoint: Checkpoint = None,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Learn a private model of a table and draw synthetic twins of it.

    The folder holds the synthetic tables, what was released, the schema, the privacy statement and
    the command; nothing in it is private.

    Examples:

    - `dpvim synth patients.csv --schema patients.toml --epsilon 1 -o twin`

    - `dpvim synth patients.parquet --schema patients.toml --epsilon 1 --target infected
      --datasets 20 --format parquet -o twin`

    - `dpvim synth visits.csv --schema visits.toml --epsilon 1 --person patient -o twin` uses one
      row of each patient, chosen at random

    - `dpvim synth postgresql://reader@db.example/clinic#patients --schema patients.toml
      --epsilon 1 -o twin` counts in the database: only counts leave it
    """
    with (
        plain_errors("synth", table=table, schema=schema, ledger=ledger, output=output),
        contextlib.ExitStack() as opened,
    ):
        _validate.positive_int("datasets", datasets)
        if rows is not None:
            _validate.positive_int("rows", rows)
        known = Schema.load(schema)
        known.check_reviewed()
        check_format(known, table_format.value, formulas.value)
        maker = make_synthesizer(
            known,
            engine=engine,
            target=target,
            components=components,
            model=None if model is None else load_model(model),
            target_model=target_model,
            numbers=numbers,
            clip_norm=clip_norm,
            learning_rate=learning_rate,
            sampling_prob=sampling_prob,
            num_steps=steps,
            relation=relation,
            seed=seed,
            group_by=person,
            checkpoint=checkpoint,
        )
        reading: dict[str, Any] = {"delimiter": delimiter, "encoding": encoding}
        source: Any = table
        if isinstance(maker, CountSynthesizer):
            source = opened.enter_context(opened_table(table, **reading))
        budget: dict[str, Any] = {
            "epsilon": epsilon,
            "delta": delta,
            "num_examples": num_examples,
            "ledger": None if ledger is None else Ledger(ledger, data=source),
            "purpose": purpose,
        }
        with new_folder(output) as folder:
            if dry_run:
                end_dry_run_of_twin(maker, source, as_json=as_json, **budget, **reading)
            twin = maker.fit(source, **budget, **reading)
            opened.close()
            twin.write_into(folder, not_for_release=seed is not None)
            (folder / "command.txt").write_text(command_line() + "\n", encoding="utf-8")
        # From here on the budget is spent and its result is safe.
        if checkpoint is not None:
            forget(checkpoint)
        # With json this goes where warnings go: it is for somebody who waits.
        typer.echo(str(twin.privacy), err=as_json)
        typer.echo(
            f"\n{output}: the fit is saved. If drawing the tables is interrupted, go on with: "
            f"dpvim sample {output} -o {output / DATA}",
            err=as_json,
        )
        written: dict[str, Any] = {"suffix": table_format.value, "formulas": formulas.value}
        twin.write_datasets(output / DATA, datasets, rows, **written)
        if isinstance(maker, CountSynthesizer):
            twin.write_closest(output, rows, **written)
    counted = isinstance(maker, CountSynthesizer)
    closest = f"{output / CLOSEST}.{table_format.value}" if counted else None
    if as_json:
        print_json(
            {
                "folder": str(output),
                "privacy": twin.privacy.to_dict(),
                "data": str(output / DATA),
                "datasets": datasets,
                "rows": twin.num_rows if rows is None else rows,
                "closest": closest,
            }
        )
        return
    typer.echo(f"\n{output}: {datasets} synthetic tables and what they were drawn from.")
    if closest is not None:
        typer.echo(
            f"{closest}: the one table that is closest to the "
            "original, for looking and training. For intervals pool the others: dpvim analyze."
        )


def sample(
    twin: TwinFolder,
    output: NewFolder,
    datasets: Datasets = 100,
    rows: RowsOut = None,
    table_format: TableFormat = Format.csv,
    formulas: Formulas = FormulasRule.refuse,
    closest: Annotated[
        bool, typer.Option("--closest", help="One table, the closest to the original.")
    ] = False,
    model: OwnModel = None,
    seed: Annotated[int | None, typer.Option(help="Repeat a draw.")] = None,
    as_json: AsJson = False,
) -> None:
    """Draw more synthetic tables from a twin. Needs no data and costs no privacy.

    Example: `dpvim sample twin --datasets 20 --rows 1000 -o more`
    """
    written: dict[str, Any] = {"suffix": table_format.value, "formulas": formulas.value}
    with plain_errors("sample", twin=twin, output=output):
        source = Twin.load(twin, model=None if model is None else load_model(model))
        if closest:
            with new_folder(output) as folder:
                source.write_closest(folder, rows, seed=seed, **written)
        else:
            source.write_datasets(output, datasets, rows, seed=seed, **written)
    if as_json:
        print_json(
            {
                "folder": str(output),
                "datasets": 1 if closest else datasets,
                "rows": source.num_rows if rows is None else rows,
                "closest": closest,
            }
        )
        return
    made = "the closest table" if closest else f"{datasets} synthetic tables"
    typer.echo(f"{output}: {made}.")
