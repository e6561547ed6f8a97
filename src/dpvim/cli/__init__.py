"""The command line: ``dpvim`` and ``python -m dpvim``."""

from __future__ import annotations

from typing import Annotated

import typer

from dpvim.cli.analyze_command import analyze
from dpvim.cli.audit_command import audit
from dpvim.cli.common import print_version
from dpvim.cli.fit_command import fit
from dpvim.cli.ledger_commands import ledger_app
from dpvim.cli.report_command import report
from dpvim.cli.reproduce_command import reproduce
from dpvim.cli.schema_commands import schema_app
from dpvim.cli.twin_commands import plan, sample, synth

app = typer.Typer(
    help="Differentially private variational inference.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,  # locals may hold records
    rich_markup_mode="markdown",
)
app.add_typer(schema_app, name="schema")
app.add_typer(ledger_app, name="ledger")
for command in (plan, synth, sample, analyze, report, fit, audit, reproduce):
    app.command()(command)


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, help="Show the version.")
    ] = False,
) -> None:
    """Differentially private variational inference."""
