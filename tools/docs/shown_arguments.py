"""What the reference shows of functions, beyond what their source says.

Functions that take their options by keyword are shown with these, as `help` shows them. Arguments
that share a description (``epsilon, delta: The budget.``) are shown one by one, with their types.
Examples are shown as code wherever they stand; Markdown would take ``>>>`` for a quotation.
"""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import griffe

PATHS = ("dpvim.fitting.fit", "dpvim.fitting.fit_nonprivate")
SECTION = re.compile(r"^(Args|Attributes):\n((?:    .*\n|\n)+)", re.MULTILINE)
SHARED = re.compile(r"^    (\w+(?:, \w+)+): (.*(?:\n(?:        .*|(?=\n)))*)", re.MULTILINE)
EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)
# Descriptions up to this length are repeated for each argument.
SHORT = 120


class ShownArguments(griffe.Extension):
    """Signatures from the functions, and a line for each argument."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Give every argument of a docstring a line of its own, and examples a fence."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(one_by_one(obj.docstring.value))

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Replace the parameters of a function that is named above."""
        if func.path not in PATHS:
            return
        module, _, name = func.path.rpartition(".")
        signature = inspect.signature(getattr(importlib.import_module(module), name))
        func.parameters = griffe.Parameters(*map(_parameter, signature.parameters.values()))


def one_by_one(docstring: str) -> str:
    """Split ``a, b: text`` in the lists of arguments and attributes."""

    def split(match: re.Match[str]) -> str:
        names, text = match[1].split(", "), match[2]
        again = text if len(text) <= SHORT else f"See `{names[0]}`."
        return "\n".join(f"    {n}: {text if n == names[0] else again}" for n in names)

    return SECTION.sub(lambda section: SHARED.sub(split, section[0]), f"{docstring}\n").rstrip()


def fenced(docstring: str) -> str:
    """Put examples of a docstring, up to an empty line, into fences."""
    return EXAMPLE.sub(lambda example: f"```pycon\n{example[0]}\n```", docstring)


def _parameter(parameter: inspect.Parameter) -> griffe.Parameter:
    default = parameter.default
    return griffe.Parameter(
        parameter.name,
        annotation=_text(parameter.annotation),
        kind=griffe.ParameterKind[parameter.kind.name.lower()],
        default=None
        if default is inspect.Parameter.empty
        else repr(getattr(default, "value", default)),
    )


def _text(annotation: Any) -> str | None:
    if annotation is inspect.Parameter.empty:
        return None
    return annotation if isinstance(annotation, str) else annotation.__name__
