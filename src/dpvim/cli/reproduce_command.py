"""``dpvim reproduce``: the paper's experiments."""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from dpvim._extras import require
from dpvim.cells import RAY, THREADS
from dpvim.cli.common import plain_errors, print_json
from dpvim.cli.options import AsJson
from dpvim.experiments.experiment import AS_PUBLISHED, RECOMMENDED, WAYS, Scope
from dpvim.experiments.registry import NAMES, RUNTIME, find
from dpvim.ledger.book import Ledger

ExperimentName = StrEnum("ExperimentName", {name: name for name in NAMES})  # type: ignore[misc]


class Place(StrEnum):
    """A place for cells to be run."""

    threads = THREADS
    ray = RAY


def reproduce(
    names: Annotated[
        list[ExperimentName], typer.Argument(help="One or several.", show_default=False)
    ],
    quick: Annotated[
        bool,
        typer.Option("--quick/--full", help="About a minute each, or the paper's grid: hours."),
    ] = True,
    as_published: Annotated[
        bool, typer.Option("--as-published", help="Only with the paper's settings.")
    ] = False,
    recommended: Annotated[
        bool, typer.Option("--recommended", help="Only with dpvim's defaults.")
    ] = False,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, help="Repeats of each setting.  [default: the paper's; few if quick]"),
    ] = None,
    epsilons: Annotated[
        str | None, typer.Option(help="Such as 1,4.  [default: the paper's; fewer if quick]")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the results.")] = Path(
        "reproduction"
    ),
    table: Annotated[
        Path | None, typer.Option(help="A table in the place of the simulated population (ukb-*).")
    ] = None,
    schema: Annotated[Path | None, typer.Option(help="Its schema (TOML).")] = None,
    ledger: Annotated[
        Path | None,
        typer.Option(help="Its ledger: pays for every batch of fits, marked as seeded."),
    ] = None,
    draw_only: Annotated[
        bool, typer.Option("--draw-only", help="Run nothing; draw what has been run.")
    ] = False,
    on: Annotated[
        Place, typer.Option(help="threads of this process, or workers of a Ray cluster.")
    ] = Place.threads,
    as_json: AsJson = False,
) -> None:
    """Rerun the paper's experiments: a table, a figure and a verdict on each claim.

    What was run is kept in the folder: a command that was interrupted goes on where it stopped, and
    more seeds add to those that are there. Results of these runs are not for release: seeds are
    fixed, and constants are read off the data, as in the paper.

    Examples:

    - `dpvim reproduce adult`

    - `dpvim reproduce adult adult-noise --full --seeds 5 -o results`

    - `dpvim reproduce ukb-init --full --table people.csv --schema people.toml`
    """
    with plain_errors("reproduce", table=table, schema=schema, ledger=ledger):
        scope = Scope(
            quick=quick,
            ways=_ways(as_published, recommended),
            repeats=seeds,
            epsilons=_numbers(epsilons),
            table=table,
            schema=schema,
        )
        if (table is None) != (schema is None):
            raise ValueError("--table and --schema: expected both or none, got one of them.")
        if ledger is not None and table is None:
            raise ValueError("--ledger: expected with --table alone; simulated people need none.")
        # Seeds are fixed here, so that there is no guarantee. Whoever runs these on people's
        # records has it in their ledger all the same, marked, at the price without the seeds.
        booked_in = None if ledger is None else Ledger(ledger, data=table, allow_seeds=True)
        found = {
            name.value: _one(name.value, scope, output, draw_only, as_json, booked_in, on.value)
            for name in names
        }
    if as_json:
        print_json(found)


def _one(
    name: str,
    scope: Scope,
    output: Path,
    draw_only: bool,
    as_json: bool,
    ledger: Ledger | None = None,
    on: str = THREADS,
) -> dict[str, object]:
    running = require("dpvim.experiments.running", extra="reproduce")
    if name == RUNTIME:
        runtime = require("dpvim.experiments.runtime", extra="reproduce")
        summary: pd.DataFrame = runtime.write(output)
        folder, verdicts = output / name, []
    else:
        try:
            outcome = running.reproduce(
                find(name), scope, output, run=not draw_only, ledger=ledger, on=on
            )
        except KeyboardInterrupt:
            typer.echo(
                f"{name}: interrupted. What is done is kept in {output}; the same command goes on "
                "from there.",
                err=True,
            )
            raise typer.Exit(130) from None
        folder, summary, verdicts = outcome.folder, outcome.summary, outcome.verdicts
    if not as_json:
        typer.echo(f"\n{name}")
        for verdict in verdicts:
            typer.echo(f"\n- {verdict.claim}\n  {verdict.judgement}: {verdict.measured}")
        if not verdicts:
            typer.echo(summary.to_string(index=False))
        typer.echo(f"\nFigure and tables: {folder}")
    return {
        "folder": str(folder),
        "summary": summary.to_dict(orient="records"),
        "verdicts": [verdict._asdict() for verdict in verdicts],
    }


def _ways(as_published: bool, recommended: bool) -> tuple[str, ...]:
    if as_published and recommended:
        return WAYS
    if as_published:
        return (AS_PUBLISHED,)
    return (RECOMMENDED,) if recommended else WAYS


def _numbers(text: str | None) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--epsilons: expected numbers such as 1,4, got {text!r}.") from None
    if not all(0 < number < math.inf for number in numbers):
        raise ValueError(f"--epsilons: expected positive numbers, got {text!r}.")
    return tuple(dict.fromkeys(numbers))
