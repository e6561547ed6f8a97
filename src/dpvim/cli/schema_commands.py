"""``dpvim schema draft`` and ``dpvim schema check``."""

from __future__ import annotations

import json
import shlex
import warnings
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer

from dpvim.cli.common import plain_errors, print_json
from dpvim.cli.options import AnyTable, AsJson, Delimiter, Encoding
from dpvim.synthesis.constrained import check_possible
from dpvim.synthesis.databases.addresses import without_password
from dpvim.synthesis.databases.connection import DatabaseTable
from dpvim.synthesis.databases.looking import draft_of, validation_counts_in
from dpvim.synthesis.draft import draft as draft_schema
from dpvim.synthesis.encoding import broken_counts, validation_counts
from dpvim.synthesis.fitting import opened_table
from dpvim.synthesis.formulas import formulas_of
from dpvim.synthesis.schema import Schema
from dpvim.synthesis.tables import read_table

schema_app = typer.Typer(help="What is publicly known about a table.", no_args_is_help=True)


@schema_app.command()
def draft(
    table: AnyTable,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the draft.")],
    delimiter: Delimiter = None,
    encoding: Encoding = None,
    as_json: AsJson = False,
) -> None:
    """Guess a schema from a table, to be reviewed.

    The draft is made by looking at the data, so it is as private as they are: replace what it
    says by public knowledge and set `reviewed = true`, column by column.

    Example: `dpvim schema draft patients.csv -o patients.toml`. As for synth, the table may be in
    a database.
    """
    with plain_errors("schema draft", table=table, output=output):
        if output.exists():
            raise FileExistsError(f"{output}: exists already. Choose another name.")
        reading = {"delimiter": delimiter, "encoding": encoding}
        with opened_table(table, **reading) as source:
            if isinstance(source, DatabaseTable):
                made = draft_of(source)
            else:
                made = draft_schema(read_table(table, **reading))
        with output.open("x", encoding="utf-8") as file:  # a file made meanwhile is not replaced
            file.write(made.to_toml())
        _warn_of_formulas(made.schema)
    if as_json:
        columns = [{"name": each.name, "kind": each.kind} for each in made.schema.columns]
        print_json({"schema": str(output), "columns": columns, "left_out": made.left_out})
        return
    typer.echo(f"{output}: a draft. Review every column before it is used. Then:")
    command = ["dpvim", "schema", "check", str(output), without_password(table)]
    typer.echo(f"  {shlex.join(command)}")


@schema_app.command()
def check(
    schema: Annotated[Path, typer.Argument(help="A schema (TOML).")],
    table: Annotated[str | None, typer.Argument(help="A table to try it on, as for synth.")] = None,
    delimiter: Delimiter = None,
    encoding: Encoding = None,
    as_json: AsJson = False,
) -> None:
    """Check a schema, and how a table goes with it: exact counts, for the holder's eyes only.

    Example: `dpvim schema check patients.toml patients.csv`
    """
    with plain_errors("schema check", schema=schema, table=table):
        known = Schema.load(schema)
        check_possible(known)
        _warn_of_formulas(known)
        counts = broken = None
        if table is not None:
            reading = {"delimiter": delimiter, "encoding": encoding}
            with opened_table(table, **reading) as source:
                if isinstance(source, DatabaseTable):
                    counts = validation_counts_in(source, known)
                else:
                    frame = read_table(table, columns=known.names, **reading)
                    counts = validation_counts(frame, known)
                    if known.constraints:
                        broken = broken_counts(frame, known)
    if as_json:
        facts = {"columns": known.names, "not_reviewed": known.unreviewed}
        print_json(facts if counts is None else {**facts, **_exact_counts(counts, broken)})
        return
    typer.echo(f"{schema}: {len(known.columns)} columns, {len(known.unreviewed)} not reviewed.")
    if counts is not None:
        typer.echo("NOT FOR RELEASE: exact counts of values")
        typer.echo(counts.to_string())
        if broken is not None:
            typer.echo("\nRows that break a constraint, which count as they are:")
            typer.echo(broken.to_string())
        elif known.constraints:
            typer.echo("\nRows that break a constraint are not counted in a database.")


def _exact_counts(counts: pd.DataFrame, broken: pd.Series | None) -> dict[str, Any]:
    return {
        "for_release": False,
        "counts": json.loads(counts.to_json(orient="index")),
        "broken_constraints": {} if broken is None else json.loads(broken.to_json()),
    }


def _warn_of_formulas(schema: Schema) -> None:
    if found := formulas_of(schema):
        warnings.warn(
            f"spreadsheets that open a CSV file would run as formulas: {'; '.join(found)}. Rename "
            "them, or see --formulas of synth.",
            UserWarning,
            stacklevel=2,
        )
