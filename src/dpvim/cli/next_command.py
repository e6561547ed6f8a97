"""The command to type after an error, where there is one that helps."""

from __future__ import annotations

import itertools
import os
import shlex
from collections.abc import Mapping
from pathlib import Path

from dpvim.ledger.entries import LedgerError
from dpvim.synthesis.schema import NotReviewedError, SchemaError
from dpvim.synthesis.tables import TableError
from dpvim.types import BudgetExceededError

# Messages with these say it themselves.
_SAYS_IT = ("dpvim ", "pip install")


def next_command(
    error: BaseException, command: str, files: Mapping[str, Path | str | None]
) -> str | None:
    """The command to type next, or None.

    >>> files = {"table": Path("t.csv"), "ledger": Path("my ledger")}
    >>> next_command(BudgetExceededError("too much"), "synth", files)
    "dpvim ledger plan 'my ledger'"

    Args:
        error: The error that ended a command.
        command: The command's name, such as ``ledger init``.
        files: Names that it was given: ``table``, ``schema``, ``ledger``, ``twin``, ``output``.
    """
    if any(text in str(error) for text in _SAYS_IT):
        return None
    given = {name: path for name, path in files.items() if path is not None}
    if isinstance(error, FileExistsError):
        return _with_another_name(given.get("output"))
    if isinstance(error, OSError):
        return _to_make_what_is_missing(error, command, given)
    if isinstance(error, BudgetExceededError):
        return _typed("ledger plan", given.get("ledger")) if "ledger" in given else None
    if isinstance(error, LedgerError) and "ledger" in given and command != "ledger check":
        return _typed("ledger check", given["ledger"])
    is_about_schema = isinstance(error, SchemaError | TableError)
    if is_about_schema and "schema" in given and command != "schema check":
        # Of a draft nothing else is wrong: how the table goes with it is what a reviewer asks.
        table = given.get("table") if isinstance(error, NotReviewedError | TableError) else None
        return _typed("schema check", given["schema"], table)
    return _typed(command) + " --help"


def _to_make_what_is_missing(
    error: OSError, command: str, given: Mapping[str, Path | str]
) -> str | None:
    if not isinstance(error, FileNotFoundError):
        return None
    # A name may be that of a file, or of a folder that lacks something.
    missing = {name for name, path in given.items() if not os.path.lexists(path)}
    if "table" in missing:
        return None  # nobody can make people's data
    if "schema" in missing and "table" in given:
        return _typed("schema draft", given["table"], "-o", given["schema"])
    if "schema" in missing:
        return f"dpvim schema draft TABLE -o {shlex.quote(str(given['schema']))}"
    if "twin" in given and "twin" in missing:
        return f"dpvim synth TABLE --schema SCHEMA --epsilon 1 -o {shlex.quote(str(given['twin']))}"
    return None


def _with_another_name(taken: Path | str | None) -> str | None:
    if taken is None:
        return None
    taken = Path(taken)
    free = next(
        name
        for number in itertools.count(2)
        if not os.path.lexists(name := taken.with_name(f"{taken.stem}-{number}{taken.suffix}"))
    )
    return f"the same command with -o {shlex.quote(str(free))}"


def _typed(command: str, *arguments: Path | str | None) -> str:
    given = [str(argument) for argument in arguments if argument is not None]
    return shlex.join(["dpvim", *command.split(), *given])
