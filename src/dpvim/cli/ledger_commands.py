"""``dpvim ledger``: a data set's budget, and what was spent of it on what."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from dpvim import _validate
from dpvim._extras import require
from dpvim.cli.common import FOUND, plain_errors, print_json
from dpvim.cli.options import AsJson, RelationOption
from dpvim.ledger import cost, storage
from dpvim.ledger.book import RECORD, Ledger
from dpvim.ledger.entries import to_fields
from dpvim.ledger.fingerprint import key_path
from dpvim.ledger.state import Release, problems_of
from dpvim.ledger.storage import head_path
from dpvim.privacy.plan import PrivacyPlan
from dpvim.synthesis.databases.addresses import without_password
from dpvim.synthesis.fitting import opened_table
from dpvim.types import Relation

ledger_app = typer.Typer(help="A data set's budget, and its use.", no_args_is_help=True)

LedgerFile = Annotated[Path, typer.Argument(help="A file that init made.")]
# Releases of equal size that the rest of a budget is divided into.
_DIVISIONS = (1, 2, 4, 12, 52)


@ledger_app.command()
def init(
    ledger: Annotated[Path, typer.Argument(help="A new file.")],
    name: Annotated[str, typer.Option(help="Of the data set; public.")],
    epsilon: Annotated[float, typer.Option(help="What all releases together may cost.")],
    delta: Annotated[float, typer.Option(help="At this delta; well below 1 / records.")],
    relation: RelationOption = Relation.ZERO_OUT,
    unit: Annotated[str, typer.Option(help="Unit of privacy: record or person.")] = RECORD,
    table: Annotated[
        str | None,
        typer.Option(help="The table, to bind the ledger to.  [default: the first that is used]"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Declare the budget of a data set.

    Every release from it is then booked: `--ledger` of synth, fit and reproduce, `ledger=` in
    Python. The budget cannot be changed afterwards.

    Example: `dpvim ledger init patients.ledger --name "patients 2026" --epsilon 3 --delta 1e-6
    --table patients.csv`
    """
    with plain_errors("ledger init", ledger=ledger), opened_table(table) as data:
        made = Ledger.create(
            ledger,
            name=name,
            epsilon=epsilon,
            delta=delta,
            relation=relation,
            unit=unit,
            data=data,
        )
    if as_json:
        files = {"ledger": ledger, "head": head_path(ledger), "secret_key": key_path(ledger)}
        print_json(
            {
                "name": made.name,
                "budget": _facts_of_budget(made),
                "files": {name: str(path) for name, path in files.items()},
            }
        )
        return
    typer.echo(f"{ledger}: the ledger of {made.name!r}, {_budget(made)}.")
    typer.echo(
        f"Keep {ledger.name} and {head_path(ledger).name} together. {key_path(ledger).name} is "
        "secret: with it guesses about the data can be tried on the ledger."
    )


@ledger_app.command()
def show(
    ledger: LedgerFile,
    picture: Annotated[
        Path | None, typer.Option(help="Draw it, too: a new file (.png, .svg or .pdf).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what was released, what it cost, and what is left.

    Example: `dpvim ledger show patients.ledger --picture patients.svg`
    """
    with plain_errors("ledger show", ledger=ledger):
        book = Ledger(ledger)
        releases, spent, left = book.releases, book.spent(), book.left()
        if picture is not None:
            drawing = require("dpvim.ledger.picture", extra="plots")
            drawing.draw(book).savefig(picture, dpi=150)
    if as_json:
        print_json(
            {
                "name": book.name,
                "budget": _facts_of_budget(book),
                "spent": spent,
                "left": left,
                "releases": [_facts(release) for release in releases],
                "entries": [to_fields(entry) for entry in book.entries],
            }
        )
        return
    _print_table(book, releases)
    typer.echo(f"spent  {cost.spelled(spent, book.delta)} of {_budget(book)}")
    typer.echo(f"left   one release of ({_down(left)}, {book.delta:g}) on all records")
    if any(release.settled is None for release in releases):
        typer.echo("open   under way, or their process was killed: they count at their full price.")
    if any(release.booked.seeded for release in releases):
        typer.echo("seeded runs have no guarantee: nothing of them may be published.")


@ledger_app.command()
def check(ledger: LedgerFile, as_json: AsJson = False) -> None:
    """Look for lines that were cut short, edited, removed or moved. Ends with 1 if there are any.

    Example: `dpvim ledger check patients.ledger`
    """
    with plain_errors("ledger check", ledger=ledger), storage.opened(ledger) as file:
        found = file.contents
    problems = problems_of(found)
    if as_json:
        print_json(
            {
                "entries": len(found.entries),
                "problems": [{"line": each.line, "text": each.text} for each in problems],
                "last_line_cut_short": bool(found.chain.torn),
            }
        )
        raise typer.Exit(FOUND if problems else 0)
    for problem in problems:
        typer.echo(f"{ledger}, {problem}")
    if problems:
        raise typer.Exit(FOUND)
    typer.echo(f"{ledger}: {len(found.entries)} entries, all as they were written.")
    if found.chain.torn:
        typer.echo(
            "The last line was cut short by a crash while it was written. Nothing was released "
            "under it; the next booking makes a note of it."
        )


@ledger_app.command()
def plan(
    ledger: LedgerFile,
    epsilon: Annotated[float | None, typer.Option(help="Of a release that is thought of.")] = None,
    delta: Annotated[float | None, typer.Option(help="Of it.  [default: the ledger's]")] = None,
    rows: Annotated[
        int | None, typer.Option(help="Public number of records; with --sampling-prob.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps of the release.")] = 1,
    sampling_prob: Annotated[
        float, typer.Option(help="Probability that a record is in a batch.")
    ] = 1.0,
    as_json: AsJson = False,
) -> None:
    """Say what could still be afforded. Books nothing.

    Without --epsilon: the epsilon of one more release, of two equal ones, and so on. With it: the
    total after such a release, and how many of them there could be.

    Examples:

    - `dpvim ledger plan patients.ledger`

    - `dpvim ledger plan patients.ledger --epsilon 0.5 --steps 4000 --sampling-prob 0.1
      --rows 58261`
    """
    with plain_errors("ledger plan", ledger=ledger):
        book = Ledger(ledger)
        spent, budget = book.prices, book.budget
        if epsilon is None:
            parts = {count: cost.epsilon_left(budget, spent, count) for count in _DIVISIONS}
            facts: dict[str, Any] = {"left": parts}
        else:
            wanted = _plan(book, epsilon, delta, rows, steps, sampling_prob)
            total = budget.total([*spent, wanted])
            facts = {
                "epsilon": epsilon,
                "total": total,
                "affordable": total <= book.epsilon,
                "releases_left": cost.releases_left(budget, spent, wanted),
            }
        facts = {"spent": budget.total(spent), "budget": _facts_of_budget(book), **facts}
    if as_json:
        print_json(facts)
        return
    typer.echo(f"spent  {cost.spelled(facts['spent'], book.delta)} of {_budget(book)}")
    if epsilon is None:
        for count, each in parts.items():
            some = "one release" if count == 1 else f"{count} equal releases, each"
            typer.echo(f"left   {some} of ({_down(each)}, {book.delta:g}) on all records")
        return
    verdict = "could be afforded" if facts["affordable"] else "is more than is left"
    typer.echo(f"total  {cost.spelled(total, book.delta)} with this release, which {verdict}")
    typer.echo(f"left   {facts['releases_left']:,} such releases")
    if not facts["affordable"]:
        own_delta = book.delta if delta is None else delta
        typer.echo(f"       {cost.offers(budget, spent, wanted, own_delta)}")


@ledger_app.command()
def bind(
    ledger: LedgerFile,
    table: Annotated[
        str, typer.Argument(help="A file or table with the same records, or some of them.")
    ],
    note: Annotated[str, typer.Option(help="The reason, noted in the ledger; public.")],
    as_json: AsJson = False,
) -> None:
    """Say that another file holds the ledger's data set, too.

    Example: `dpvim ledger bind patients.ledger patients.parquet --note "as Parquet"`
    """
    with plain_errors("ledger bind", ledger=ledger), opened_table(table) as data:
        Ledger(ledger).bind(data, note)
    shown = without_password(table)
    if as_json:
        print_json({"ledger": str(ledger), "table": shown, "note": note})
        return
    typer.echo(f"{ledger}: {shown} counts as its data set from now on.")


def _plan(
    book: Ledger,
    epsilon: float,
    delta: float | None,
    rows: int | None,
    steps: int,
    sampling_prob: float,
) -> PrivacyPlan:
    if sampling_prob < 1 and rows is None:
        raise ValueError("--rows: expected with --sampling-prob, got none.")
    wanted = PrivacyPlan(
        num_examples=1 if rows is None else rows,
        sampling_prob=sampling_prob,
        num_steps=_validate.positive_int("steps", steps),
        clip_norm=1.0,
        relation=book.relation,
    )
    return wanted.calibrate(epsilon=epsilon, delta=book.delta if delta is None else delta)


def _print_table(book: Ledger, releases: tuple[Release, ...]) -> None:
    from rich.console import Console
    from rich.table import Table

    some = "1 release" if len(releases) == 1 else f"{len(releases)} releases"
    table = Table(title=f"{book.name}: {some}", title_justify="left")
    for name in ("line", "time", "purpose", "mechanism"):
        table.add_column(name)
    for name in ("steps", "epsilon", "delta", "total"):
        table.add_column(name, justify="right")
    table.add_column("state")
    for release in releases:
        booked, end = release.booked, release.settled or release.booked
        of_steps = f"{release.steps:,}"
        if release.steps != booked.steps:
            of_steps += f" of {booked.steps:,}"
        table.add_row(
            str(release.line),
            booked.time.removesuffix("+00:00"),
            # A purpose is text, not markup.
            booked.purpose.replace("[", r"\["),
            booked.mechanism,
            of_steps,
            f"{release.epsilon:.4g}",
            f"{booked.delta:g}",
            f"{end.total:.4g}",
            release.state + (" (seeded)" if booked.seeded else ""),
        )
    # Of a terminal its width; a file or a pipe has none.
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 140
    Console(width=width).print(table)


def _facts(release: Release) -> dict[str, Any]:
    booked = release.booked
    return {
        "id": booked.id,
        "time": booked.time,
        "purpose": booked.purpose,
        "mechanism": booked.mechanism,
        "steps": release.steps,
        "steps_booked": booked.steps,
        "epsilon": release.epsilon,
        "delta": booked.delta,
        "state": release.state,
        "seeded": booked.seeded,
    }


def _facts_of_budget(book: Ledger) -> dict[str, Any]:
    return {
        "epsilon": book.epsilon,
        "delta": book.delta,
        "relation": book.relation.value,
        "unit": book.unit,
    }


def _budget(book: Ledger) -> str:
    return (
        f"a budget of ({book.epsilon:g}, {book.delta:g}) for each {book.unit}, "
        f"{book.relation.value}"
    )


def _down(epsilon: float) -> str:
    """Rounded down: asked for, it must be granted."""
    return f"{int(epsilon * 1e4) / 1e4:.4g}"
