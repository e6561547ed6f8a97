"""Functions that take their options by keyword are shown with these, as `help` shows them."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import griffe

PATHS = ("dpvim.fitting.fit", "dpvim.fitting.fit_nonprivate")


class OptionsOfFit(griffe.Extension):
    """Takes the signatures of some functions from the functions, not from the source."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Replace the parameters of a function that is named above."""
        if func.path not in PATHS:
            return
        module, _, name = func.path.rpartition(".")
        signature = inspect.signature(getattr(importlib.import_module(module), name))
        func.parameters = griffe.Parameters(
            *(
                griffe.Parameter(
                    parameter.name,
                    annotation=_text(parameter.annotation),
                    kind=griffe.ParameterKind[parameter.kind.name.lower()],
                    default=None
                    if parameter.default is inspect.Parameter.empty
                    else repr(getattr(parameter.default, "value", parameter.default)),
                )
                for parameter in signature.parameters.values()
            )
        )


def _text(annotation: Any) -> str | None:
    if annotation is inspect.Parameter.empty:
        return None
    return annotation if isinstance(annotation, str) else annotation.__name__
