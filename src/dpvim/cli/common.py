"""Parts that all commands share: errors without tracebacks, json, the version."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import typer

from dpvim._extras import MissingExtraError
from dpvim.cli.next_command import next_command
from dpvim.synthesis.analysis.pooling import FailedFitsError
from dpvim.synthesis.databases.addresses import without_password
from dpvim.types import BudgetExceededError, LostProcessError

# Exit codes: 0 done, 1 something was found or went wrong, 2 the command was misused.
FOUND, MISUSED = 1, 2
# What users can do something about.
_PLAIN = (
    *(ValueError, TypeError, OSError),
    *(BudgetExceededError, FailedFitsError, LostProcessError, MissingExtraError),
)


@contextmanager
def plain_errors(command: str, **files: Path | str | None) -> Iterator[None]:
    """Errors in what was asked for end the command with a sentence, not a traceback.

    Warnings are sentences, too.

    Args:
        command: Its name, as it is typed.
        files: Names that it was given, by what they are; see `next_command`.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default", UserWarning)
            warnings.showwarning = _print_warning
            yield
    except _PLAIN as error:
        typer.echo(f"Error: {without_password(str(error))}", err=True)
        if advice := next_command(error, command, files):
            typer.echo(f"Next: {without_password(advice)}", err=True)
        raise typer.Exit(MISUSED) from error


def _print_warning(message: Warning | str, *where: Any, **more: Any) -> None:
    typer.echo(f"Warning: {without_password(str(message))}", err=True)


def print_json(content: dict[str, Any]) -> None:
    """For scripts: one json document on standard output.

    Numbers that are not finite, which json does not have, are null.
    """
    typer.echo(json.dumps(_finite(content), indent=2, allow_nan=False))


def _finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [*map(_finite, content)]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def print_version(wanted: bool) -> None:
    """Print the version and stop."""
    if wanted:
        typer.echo(f"dpvim {metadata.version('dpvim')}")
        raise typer.Exit
