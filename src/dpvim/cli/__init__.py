"""The command line: ``dpvim`` and ``python -m dpvim``."""

from __future__ import annotations

from typing import Annotated

import typer
from typer.core import TyperGroup

from dpvim.cli.analyze_command import analyze
from dpvim.cli.audit_command import audit
from dpvim.cli.common import print_version
from dpvim.cli.doctor_command import doctor
from dpvim.cli.fit_command import fit
from dpvim.cli.ledger_commands import ledger_app
from dpvim.cli.report_command import report
from dpvim.cli.reproduce_command import reproduce
from dpvim.cli.schema_commands import schema_app
from dpvim.cli.serve_command import serve
from dpvim.cli.twin_commands import plan, sample, synth

# The page of help is the first thing that people see: it has to fit a screen.
_STORY = """Private synthetic twins and posteriors of sensitive tables.

Begin with these three, and read what each of them says:

    dpvim schema draft patients.csv -o patients.toml
    dpvim plan --schema patients.toml --rows 58261 --epsilon 1
    dpvim synth patients.csv --schema patients.toml --epsilon 1 -o twin

Every command has --help with examples, and --json for scripts.
"""
_TWIN, _POSTERIOR, _TRUST = "A synthetic twin of a table", "A model of a table", "Budget and trust"


class _InOrder(TyperGroup):
    """Commands in the order in which they are used; groups would come last otherwise."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        known = super().list_commands(ctx)
        return sorted(known, key=lambda name: (name not in _FIRST, known.index(name)))


_FIRST = ("schema", "ledger")
app = typer.Typer(
    cls=_InOrder,
    help=_STORY,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,  # locals may hold records
    rich_markup_mode="markdown",
)
app.add_typer(
    schema_app, name="schema", rich_help_panel=_TWIN, short_help="What is known publicly: draft it."
)
app.add_typer(
    ledger_app, name="ledger", rich_help_panel=_TRUST, short_help="What was spent on what."
)
for panel, command, words in (
    (_TWIN, plan, "What it would do and cost; reads no data."),
    (_TWIN, synth, "Learn a private model, draw tables from it."),
    (_TWIN, sample, "More tables from a twin, at no cost."),
    (_TWIN, analyze, "A regression, pooled over the tables."),
    (_TWIN, report, "The twin in one page of HTML."),
    (_TWIN, serve, "All of this on a page of your own machine."),
    (_POSTERIOR, fit, "The private posterior of a regression or model."),
    (_TRUST, audit, "Attack the installed library."),
    (_TRUST, doctor, "Versions, memory, data, extras; what is amiss."),
    (_TRUST, reproduce, "The experiments of the paper."),
):
    app.command(rich_help_panel=panel, short_help=words)(command)


@app.callback(cls=_InOrder, help=_STORY)
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, help="Show the version.")
    ] = False,
) -> None:
    """Synthetic twins and posteriors of sensitive tables."""
