"""Packages that only some users need, asked for by name where they are missing."""

from __future__ import annotations

import importlib
from typing import Any


class MissingExtraError(ImportError):
    """A package of one of dpvim's extras is not installed."""


def require(module: str, *, extra: str) -> Any:
    """Import a module that belongs to an extra, or say how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise MissingExtraError(
            f"{package} is needed here and is not installed: pip install 'dpvim[{extra}]'."
        ) from error
