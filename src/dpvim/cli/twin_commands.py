"""``dpvim plan``, ``synth`` and ``sample``: a synthetic twin of a table."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from dpvim import _validate
from dpvim.cli.common import plain_errors, print_json
from dpvim.cli.options import (
    AsJson,
    ChosenClipNorm,
    ChosenSteps,
    ClipNorm,
    Components,
    Datasets,
    Delimiter,
    Delta,
    DryRun,
    Encoding,
    Epsilon,
    Format,
    Formulas,
    FormulasRule,
    LearningRate,
    NewFolder,
    Numbers,
    NumbersModel,
    NumExamples,
    OwnModel,
    PrivateSeed,
    RegressionKind,
    RelationOption,
    RowsOut,
    SamplingProb,
    SchemaFile,
    Steps,
    Table,
    TableFormat,
    Target,
    TargetModel,
    TwinFolder,
    command_line,
)
from dpvim.cli.planning import end_dry_run, make_plan, plan_of_regression
from dpvim.files import new_folder
from dpvim.synthesis.encoding import encode
from dpvim.synthesis.fitting import (
    DEFAULT_CLIP_NORM,
    DEFAULT_COMPONENTS,
    DEFAULT_LEARNING_RATE,
    DEFAULT_STEPS,
    fit_twin,
    resolve_delta,
)
from dpvim.synthesis.model import build_mixture, build_model, load_model
from dpvim.synthesis.schema import Schema
from dpvim.synthesis.tables import read_table
from dpvim.synthesis.twin import DATA, Twin, check_format
from dpvim.types import Relation


def plan(
    schema: SchemaFile,
    rows: Annotated[int, typer.Option(help="Public number of rows.")],
    epsilon: Epsilon,
    delta: Delta = None,
    model: Annotated[
        RegressionKind | None,
        typer.Option(help="A regression that `dpvim fit` would make, instead of a synthesis."),
    ] = None,
    target: Target = None,
    target_model: TargetModel = None,
    components: Components = DEFAULT_COMPONENTS,
    numbers: Numbers = NumbersModel.histogram,
    clip_norm: ChosenClipNorm = None,
    sampling_prob: SamplingProb = None,
    steps: ChosenSteps = None,
    relation: RelationOption = Relation.ZERO_OUT,
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
    settings: dict[str, Any] = {"epsilon": epsilon, "sampling_prob": sampling_prob}
    settings |= {"relation": relation}
    with plain_errors():
        known = Schema.load(schema)
        delta = resolve_delta(delta, _validate.positive_int("rows", rows))
        if model is not None:
            made = plan_of_regression(
                known,
                model.value,
                target,
                rows=rows,
                delta=delta,
                clip_norm=clip_norm,
                num_steps=steps,
                **settings,
            )
            print_json(made.to_dict()) if as_json else typer.echo(made)
            return
        mixture = build_mixture(
            known,
            components=components,
            target=target,
            target_model=target_model,
            numbers=numbers.value,
        )
        of_twin = make_plan(
            rows=rows,
            dim=mixture.dim,
            delta=delta,
            clip_norm=DEFAULT_CLIP_NORM if clip_norm is None else clip_norm,
            steps=DEFAULT_STEPS if steps is None else steps,
            **settings,
        )
    facts: dict[str, Any] = {
        "columns": len(mixture.columns),
        "not_reviewed": len(known.unreviewed),
        "components": components,
        "parameters": mixture.dim,
        "rows": rows,
        "sampling_prob": of_twin.sampling_prob,
        "expected_batch_size": round(of_twin.expected_batch_size, 1),
        "steps": of_twin.num_steps,
        "clip_norm": of_twin.clip_norm,
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
    for name, value in facts.items():
        shown = f"{value:.4g}" if isinstance(value, float) else value
        typer.echo(f"{name.replace('_', ' '):<20} {shown}")


def synth(
    table: Table,
    schema: SchemaFile,
    epsilon: Epsilon,
    output: NewFolder,
    delta: Delta = None,
    target: Target = None,
    target_model: TargetModel = None,
    components: Components = DEFAULT_COMPONENTS,
    numbers: Numbers = NumbersModel.histogram,
    model: OwnModel = None,
    datasets: Datasets = 100,
    rows: RowsOut = None,
    table_format: TableFormat = Format.csv,
    formulas: Formulas = FormulasRule.refuse,
    clip_norm: ClipNorm = DEFAULT_CLIP_NORM,
    learning_rate: LearningRate = DEFAULT_LEARNING_RATE,
    sampling_prob: SamplingProb = None,
    steps: Steps = DEFAULT_STEPS,
    relation: RelationOption = Relation.ZERO_OUT,
    num_examples: NumExamples = None,
    delimiter: Delimiter = None,
    encoding: Encoding = None,
    seed: PrivateSeed = None,
    dry_run: DryRun = False,
) -> None:
    """Learn a private model of a table and draw synthetic twins of it.

    The folder holds the synthetic tables, the posterior, the schema, the privacy statement and the
    command; nothing in it is private.

    Examples:

    - `dpvim synth patients.csv --schema patients.toml --epsilon 1 -o twin`

    - `dpvim synth patients.csv --schema patients.toml --epsilon 1 --target infected
      --target-model poisson --datasets 20 --format parquet -o twin`
    """
    with plain_errors():
        _validate.positive_int("datasets", datasets)
        if rows is not None:
            _validate.positive_int("rows", rows)
        known = Schema.load(schema)
        known.check_reviewed()
        check_format(known, table_format.value, formulas.value)
        chosen = build_model(
            known,
            None if model is None else load_model(model),
            components=components,
            target=target,
            target_model=target_model,
            numbers=numbers.value,
        )
        with new_folder(output) as folder:
            frame = read_table(table, columns=known.names, delimiter=delimiter, encoding=encoding)
            if dry_run:
                table_as_arrays = encode(frame, known)
                public_rows = len(frame) if num_examples is None else num_examples
                end_dry_run(
                    chosen,
                    (table_as_arrays.values, table_as_arrays.missing),
                    num_examples=num_examples,
                    epsilon=epsilon,
                    delta=resolve_delta(delta, public_rows),
                    clip_norm=clip_norm,
                    sampling_prob=sampling_prob,
                    num_steps=steps,
                    relation=relation,
                )
            twin = fit_twin(
                frame,
                known,
                chosen,
                epsilon=epsilon,
                delta=delta,
                clip_norm=clip_norm,
                learning_rate=learning_rate,
                sampling_prob=sampling_prob,
                num_steps=steps,
                num_examples=num_examples,
                relation=relation,
                seed=seed,
            )
            twin.write_into(folder, not_for_release=seed is not None)
            (folder / "command.txt").write_text(command_line() + "\n", encoding="utf-8")
        # From here on the budget is spent and its result is safe.
        typer.echo(str(twin.privacy))
        typer.echo(
            f"\n{output}: the fit is saved. If drawing the tables is interrupted, go on with: "
            f"dpvim sample {output} -o {output / DATA}"
        )
        twin.write_datasets(
            output / DATA, datasets, rows, suffix=table_format.value, formulas=formulas.value
        )
    typer.echo(f"\n{output}: {datasets} synthetic tables and the posterior they were drawn from.")


def sample(
    twin: TwinFolder,
    output: NewFolder,
    datasets: Datasets = 100,
    rows: RowsOut = None,
    table_format: TableFormat = Format.csv,
    formulas: Formulas = FormulasRule.refuse,
    model: OwnModel = None,
    seed: Annotated[int | None, typer.Option(help="Repeat a draw.")] = None,
) -> None:
    """Draw more synthetic tables from a twin. Needs no data and costs no privacy.

    Example: `dpvim sample twin --datasets 20 --rows 1000 -o more`
    """
    with plain_errors():
        source = Twin.load(twin, model=None if model is None else load_model(model))
        source.write_datasets(
            output,
            datasets,
            rows,
            suffix=table_format.value,
            formulas=formulas.value,
            seed=seed,
        )
    typer.echo(f"{output}: {datasets} synthetic tables.")
