"""``dpvim report``: a twin in one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpvim._extras import require
from dpvim.cli.analyze_command import GlmFamily
from dpvim.cli.common import plain_errors, print_json
from dpvim.cli.options import AsJson, Delimiter, Encoding, OwnModel, TwinFolder
from dpvim.synthesis.model import load_model
from dpvim.synthesis.report.names import COMPARISON, REPORT
from dpvim.synthesis.tables import read_table
from dpvim.synthesis.twin import DATA, Twin


def report(
    twin: TwinFolder,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help=f"The file.  [default: {REPORT} in the folder; {COMPARISON} beside it]",
        ),
    ] = None,
    compare: Annotated[
        Path | None,
        typer.Option(help="The original table. The report is then NOT FOR RELEASE."),
    ] = None,
    formula: Annotated[
        str | None,
        typer.Option(help="With --compare: an analysis.  [default: the target on all others]"),
    ] = None,
    family: Annotated[GlmFamily | None, typer.Option(help="The formula's family.")] = None,
    delimiter: Delimiter = None,
    encoding: Encoding = None,
    model: OwnModel = None,
    as_json: AsJson = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
) -> None:
    """Describe a twin in one HTML page, with pictures and in plain words.

    With `--compare` the page shows the original beside the twin. It is for the holder of the data
    and is not written into the twin's folder.

    Examples:

    - `dpvim report twin`

    - `dpvim report twin --compare patients.csv --formula "infected ~ age" --family poisson`
    """
    with plain_errors("report", twin=twin, table=compare, output=output):
        page = require("dpvim.synthesis.report.page", extra="report")
        source = Twin.load(twin, model=None if model is None else load_model(model))
        target = output or _default_output(twin, compare is not None)
        tables = _tables(twin)
        original = None
        if compare is not None:
            original = read_table(
                compare, columns=source.schema.names, delimiter=delimiter, encoding=encoding
            )
        page.write_report(
            source,
            tables,
            target,
            compare=original,
            formula=formula,
            family=None if family is None else family.value,
            command=_command(twin),
            force=force,
        )
    if as_json:
        facts = {"report": str(target), "datasets": len(tables), "for_release": compare is None}
        print_json(facts)
        return
    stamp = "" if compare is None else " NOT FOR RELEASE: it shows the original data."
    typer.echo(f"{target}: a report on {len(tables)} synthetic tables.{stamp}")


def _default_output(twin: Path, compares: bool) -> Path:
    if not compares:
        return twin / REPORT
    return twin.with_name(COMPARISON) if twin.name else twin.resolve().with_name(COMPARISON)


def _tables(twin: Path) -> list[Path]:
    tables = sorted((twin / DATA).glob("synthetic-*"))
    if not tables:
        raise FileNotFoundError(
            f"{twin / DATA}: expected synthetic tables there, found none. Draw some: "
            f"dpvim sample {twin} -o {twin / DATA}"
        )
    return tables


def _command(twin: Path) -> str | None:
    """The command that made the twin, which synth leaves in its folder."""
    file = twin / "command.txt"
    return file.read_text(encoding="utf-8").strip() if file.is_file() else None
