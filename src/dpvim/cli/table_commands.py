"""``dpvim schema``, ``plan``, ``synth``, ``sample``, ``analyze``: a twin of a table."""

from __future__ import annotations

import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from dpvim.cli.common import plain_errors, print_json
from dpvim.plan import PrivacyPlan, default_sampling_prob, resolve_num_steps
from dpvim.progress import ProgressBar, wanted
from dpvim.synthesis.analysis import analyze as pooled_analysis
from dpvim.synthesis.draft import draft as draft_schema
from dpvim.synthesis.encoding import audit as suitability
from dpvim.synthesis.model import model_of
from dpvim.synthesis.schema import Levelled, Schema
from dpvim.synthesis.tables import read_table, write_table
from dpvim.synthesis.twin import (
    DEFAULT_CLIP_NORM,
    DEFAULT_COMPONENTS,
    Twin,
    default_delta,
    new_folder,
    synthesize,
)
from dpvim.types import Relation

schema_app = typer.Typer(help="What is publicly known about a table.", no_args_is_help=True)


class TargetModel(StrEnum):
    """Regressions of a target on the other columns."""

    logistic = "logistic"
    poisson = "poisson"
    linear = "linear"


class GlmFamily(StrEnum):
    """Distributions of an outcome, with their canonical links."""

    gaussian = "gaussian"
    linear = "linear"
    binomial = "binomial"
    logistic = "logistic"
    poisson = "poisson"


class Format(StrEnum):
    """File formats of synthetic tables."""

    csv = "csv"
    parquet = "parquet"


Delimiter = Annotated[str | None, typer.Option(help="What separates fields of a CSV file.")]
Encoding = Annotated[str | None, typer.Option(help="Of a CSV file.  [default: utf-8]")]
SchemaFile = Annotated[Path, typer.Option("--schema", help="The table's schema (TOML).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print json, for scripts.")]
Epsilon = Annotated[float, typer.Option(help="The privacy budget.")]
Delta = Annotated[float | None, typer.Option(help="[default: a tenth of 1 / rows]")]
Target = Annotated[str | None, typer.Option(help="A column to be regressed on all others.")]
TargetKind = Annotated[
    TargetModel | None, typer.Option(help="Its regression.  [default: by its kind]")
]
Components = Annotated[int, typer.Option(help="Number of mixture components.")]
ClipNorm = Annotated[float, typer.Option(help="Largest norm of one record's gradient.")]
SamplingProb = Annotated[
    float | None, typer.Option(help="Probability that a record is in a batch.  [default: by size]")
]
Steps = Annotated[int | None, typer.Option(help="Number of steps.  [default: 10000]")]
Datasets = Annotated[int, typer.Option(help="Number of synthetic tables.")]
RowsOut = Annotated[
    int | None, typer.Option("--rows", help="Rows of each.  [default: as the original]")
]
RelationOption = Annotated[Relation, typer.Option(help="Which data sets are neighbours.")]


@schema_app.command("draft")
def schema_draft(
    table: Annotated[Path, typer.Argument(help="CSV, TSV (also gzipped) or Parquet.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the draft.")],
    delimiter: Delimiter = None,
    encoding: Encoding = None,
) -> None:
    """Guess a schema from a table, to be reviewed.

    The draft was made by looking at the data, so it is as private as they are: replace what it
    says by public knowledge and set `reviewed = true`, column by column.

    Example: `dpvim schema draft patients.csv -o patients.toml`
    """
    with plain_errors():
        if output.exists():
            raise FileExistsError(f"{output}: exists already. Choose another name.")
        text = draft_schema(read_table(table, delimiter=delimiter, encoding=encoding)).to_toml()
        output.write_text(text)
    typer.echo(f"{output}: a draft. Review every column before it is used.")


@schema_app.command("check")
def schema_check(
    schema: Annotated[Path, typer.Argument(help="A schema (TOML).")],
    table: Annotated[Path | None, typer.Argument(help="A table to try it on.")] = None,
    delimiter: Delimiter = None,
    encoding: Encoding = None,
) -> None:
    """Check a schema, and how a table goes with it. Counts are exact: for the holder only."""
    with plain_errors():
        known = Schema.load(schema)
        typer.echo(f"{schema}: {len(known.columns)} columns, {len(known.unreviewed)} not reviewed.")
        if table is not None:
            frame = read_table(table, columns=known.names, delimiter=delimiter, encoding=encoding)
            typer.echo("NOT FOR RELEASE: exact counts of values")
            typer.echo(suitability(frame, known).to_string())


def plan(
    schema: SchemaFile,
    rows: Annotated[int, typer.Option(help="Public number of rows.")],
    epsilon: Epsilon,
    delta: Delta = None,
    target: Target = None,
    target_model: TargetKind = None,
    components: Components = DEFAULT_COMPONENTS,
    clip_norm: ClipNorm = DEFAULT_CLIP_NORM,
    sampling_prob: SamplingProb = None,
    steps: Steps = None,
    relation: RelationOption = Relation.ZERO_OUT,
    as_json: AsJson = False,
) -> None:
    """What a synthesis would do and cost. Reads no data.

    Example: `dpvim plan --schema patients.toml --rows 58261 --epsilon 1`
    """
    with plain_errors():
        model = model_of(
            Schema.load(schema), components=components, target=target, target_model=target_model
        )
        prob = sampling_prob or default_sampling_prob(num_examples=rows, dim=model.dim)
        made = PrivacyPlan(
            num_examples=rows,
            sampling_prob=prob,
            num_steps=resolve_num_steps(num_steps=steps, num_epochs=None, sampling_prob=prob),
            clip_norm=clip_norm,
            relation=relation,
        ).calibrate(epsilon=epsilon, delta=default_delta(rows) if delta is None else delta)
    facts = {
        "columns": len(model.columns),
        "components": components,
        "parameters": model.dim,
        "rows": rows,
        "expected_batch_size": round(made.expected_batch_size, 1),
        "sampling_prob": made.sampling_prob,
        "steps": made.num_steps,
        "clip_norm": made.clip_norm,
        "noise_multiplier": made.noise_multiplier,
        "epsilon": epsilon,
        "delta": default_delta(rows) if delta is None else delta,
        "relation": relation.value,
    }
    if as_json:
        print_json(facts)
        return
    for name, value in facts.items():
        shown = f"{value:.4g}" if isinstance(value, float) else value
        typer.echo(f"{name.replace('_', ' '):<20} {shown}")


def synth(
    table: Annotated[Path, typer.Argument(help="CSV, TSV (also gzipped) or Parquet.")],
    schema: SchemaFile,
    epsilon: Epsilon,
    output: Annotated[Path, typer.Option("--output", "-o", help="A new folder.")],
    delta: Delta = None,
    target: Target = None,
    target_model: TargetKind = None,
    components: Components = DEFAULT_COMPONENTS,
    datasets: Datasets = 100,
    rows: RowsOut = None,
    file_format: Annotated[Format, typer.Option("--format", help="Of the tables.")] = Format.csv,
    clip_norm: ClipNorm = DEFAULT_CLIP_NORM,
    sampling_prob: SamplingProb = None,
    steps: Steps = None,
    relation: RelationOption = Relation.ZERO_OUT,
    num_examples: Annotated[
        int | None, typer.Option(help="Public bound on the rows; with add_or_remove.")
    ] = None,
    delimiter: Delimiter = None,
    encoding: Encoding = None,
    seed: Annotated[
        int | None, typer.Option(help="For tests only: the result is not private.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, read the table, spend nothing.")
    ] = False,
) -> None:
    """Learn a private model of a table and draw synthetic twins of it.

    The folder holds the synthetic tables, the posterior, the schema, the privacy statement and the
    command; nothing in it is private. It appears when all of it has been written.

    Example: `dpvim synth patients.csv --schema patients.toml --epsilon 1 -o twin`
    """
    with plain_errors():
        known = Schema.load(schema)
        known.check_reviewed()
        kind = None if target_model is None else target_model.value
        model_of(known, components=components, target=target, target_model=kind)
        with new_folder(output) as folder:
            frame = read_table(table, columns=known.names, delimiter=delimiter, encoding=encoding)
            if dry_run:
                typer.echo(f"{table}: can be read by {schema}. Nothing was spent or written.")
                raise DryRun
            twin = synthesize(
                frame,
                known,
                epsilon=epsilon,
                delta=delta,
                target=target,
                target_model=kind,
                components=components,
                clip_norm=clip_norm,
                sampling_prob=sampling_prob,
                num_steps=steps,
                num_examples=num_examples,
                relation=relation,
                seed=seed,
            )
            twin.write_into(folder, not_for_release=seed is not None)
            _write_tables(twin, folder, datasets, rows, file_format, None)
            (folder / "command.txt").write_text(_command() + "\n")
    typer.echo(str(twin.privacy))
    typer.echo(f"\n{output}: {datasets} synthetic tables and the posterior they were drawn from.")


class DryRun(typer.Exit):
    """Ends a dry run: nothing is kept."""


def sample(
    twin: Annotated[Path, typer.Argument(help="A folder that synth made.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="A new folder for the tables.")],
    datasets: Datasets = 100,
    rows: RowsOut = None,
    file_format: Annotated[Format, typer.Option("--format", help="Of the tables.")] = Format.csv,
    seed: Annotated[int | None, typer.Option(help="Repeat a draw.")] = None,
) -> None:
    """Draw more synthetic tables from a twin. Needs no data and costs no privacy.

    Example: `dpvim sample twin --datasets 20 --rows 1000 -o more`
    """
    with plain_errors(), new_folder(output) as folder:
        _write_tables(Twin.load(twin), folder, datasets, rows, file_format, seed)
    typer.echo(f"{output}: {datasets} synthetic tables.")


def analyze(
    twin: Annotated[Path, typer.Argument(help="A folder that synth made.")],
    formula: Annotated[str, typer.Argument(help="As in statsmodels: 'y ~ age + sex'.")],
    family: Annotated[GlmFamily, typer.Option(help="The outcome's distribution.")] = (
        GlmFamily.gaussian
    ),
    level: Annotated[float, typer.Option(help="Level of the intervals.")] = 0.95,
    as_json: AsJson = False,
) -> None:
    """Fit a generalised linear model to every synthetic table and pool by Rubin's rules.

    Example: `dpvim analyze twin "infected ~ age_group + sex" --family poisson`
    """
    with plain_errors():
        source = Twin.load(twin)
        tables = sorted((twin / "data").glob("synthetic-*"))
        if len(tables) < 2:
            raise ValueError(
                f"{twin}: expected at least two synthetic tables in its folder data, found "
                f"{len(tables)}. Make more: dpvim synth --datasets 100."
            )
        result = pooled_analysis(
            tables,
            formula,
            family=family.value,
            num_rows=source.num_rows,
            levels={c.name: c.levels for c in source.schema.columns if isinstance(c, Levelled)},
            level=level,
        )
    if as_json:
        rows: Any = result.combined.to_frame().reset_index(names="term").to_dict("records")
        print_json({"formula": formula, "num_failed": result.num_failed, "terms": rows})
    else:
        typer.echo(str(result))


def _write_tables(
    twin: Twin, folder: Path, count: int, rows: int | None, kind: Format, seed: int | None
) -> None:
    """synthetic-001.csv, ... in the folder `data`."""
    (folder / "data").mkdir()
    width = max(3, len(str(count)))
    with ProgressBar(count, show=wanted(None), label="sampling", unit="tables") as bar:
        for number, table in enumerate(twin.datasets(count, rows, seed=seed), start=1):
            name = f"synthetic-{number:0{width}}.{kind.value}"
            write_table(table, folder / "data" / name, missing=twin.schema.missing[0])
            bar.advance(1)


def _command() -> str:
    return shlex.join(["dpvim", *sys.argv[1:]])
