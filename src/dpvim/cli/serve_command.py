"""``dpvim serve``: a twin of a table, by a page in the browser."""

from __future__ import annotations

import html
import os
import tempfile
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from dpvim._extras import require
from dpvim.cli.common import plain_errors, print_json
from dpvim.cli.options import AsJson, Delimiter, Encoding, Table


def serve(
    table: Table,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="A new folder for the twin.  [default: TABLE-twin beside it]"
        ),
    ] = None,
    schema: Annotated[
        Path | None,
        typer.Option(help="Read if it is there, and written.  [default: TABLE.toml beside it]"),
    ] = None,
    ledger: Annotated[
        Path | None,
        typer.Option(help="Used if it is there, else made.  [default: TABLE.ledger beside it]"),
    ] = None,
    datasets: Annotated[int, typer.Option(help="Number of synthetic tables.")] = 20,
    delimiter: Delimiter = None,
    encoding: Encoding = None,
    port: Annotated[int, typer.Option(help="Of the page.  [default: a free one]")] = 0,
    browser: Annotated[bool, typer.Option(help="Open a browser.")] = True,
    as_json: AsJson = False,
) -> None:
    """Open a page on this machine that leads from a table to its twin, without typing commands.

    Schema, budget, plan, fit, report. The page cannot be reached from other machines, and its
    address has a secret in it: do not pass it on. Ctrl-C, or a button at the end, closes it.

    Example: `dpvim serve patients.csv`
    """
    stem = table.name.removesuffix(".gz").rpartition(".")[0] or table.name
    output = output or table.with_name(f"{stem}-twin")
    schema = schema or table.with_name(f"{stem}.toml")
    ledger = ledger or table.with_name(f"{stem}.ledger")
    with plain_errors("serve", table=table, output=output, schema=schema, ledger=ledger):
        server_module = require("dpvim.serve.server", extra="serve")
        session_module = require("dpvim.serve.session", extra="serve")
        session = session_module.Session(
            table,
            schema_path=schema,
            ledger_path=ledger,
            output=output,
            datasets=datasets,
            delimiter=delimiter,
            encoding=encoding,
        )
        server = server_module.PageServer(session, port=port)
    if as_json:
        print_json({"url": server.url, "output": str(output)})
    else:
        typer.echo(f"The page: {server.url}\nIts address is a secret. Ctrl-C closes it.")
    with server, tempfile.TemporaryDirectory(prefix="dpvim-") as private:
        if browser:
            webbrowser.open(_way_in(Path(private), server.url).as_uri())
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            typer.echo("Closed.", err=True)


def _way_in(folder: Path, url: str) -> Path:
    """A file that leads to the page.

    A browser is given its name, and not the address: other users can see arguments of processes.
    """
    path = folder / "open.html"
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(
            '<!doctype html><meta charset="utf-8">'
            f'<meta http-equiv="refresh" content="0;url={html.escape(url)}">'
        )
    return path
