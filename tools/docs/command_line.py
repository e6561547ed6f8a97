"""The command line as a page: every command with its options, from the commands themselves."""

from __future__ import annotations

import inspect
from typing import Any

import typer

from dpvim.cli import app


def describe() -> str:
    """Markdown on all commands."""
    return "\n\n".join(_describe(typer.main.get_command(app), "dpvim"))


def _describe(command: Any, name: str) -> list[str]:
    if hasattr(command, "commands"):
        return [
            part
            for word, each in sorted(command.commands.items())
            for part in _describe(each, f"{name} {word}")
        ]
    context = type(command).context_class(command, info_name=name)
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    text = inspect.cleandoc(command.help or "").replace("\f", "")
    options = [_row(each) for each in command.params if each.name != "help"]
    table = "\n".join(["| | | default |", "|---|---|---|", *options]) if options else ""
    return [f"## {name}", f"```text\n{usage}\n```", text, table]


def _row(parameter: Any) -> str:
    is_option = parameter.param_type_name == "option"
    words = [*parameter.opts, *parameter.secondary_opts] if is_option else [parameter.name.upper()]
    names = ", ".join(f"`{word}`" for word in words)
    default = parameter.default
    if getattr(parameter, "required", False):
        shown = "needed"
    elif default in (None, False, (), []) or callable(default):
        shown = ""
    else:
        shown = f"`{getattr(default, 'value', default)}`"
    text = (getattr(parameter, "help", None) or "").replace("|", "\\|").replace("\n", " ")
    return f"| {names} | {text} | {shown} |"
