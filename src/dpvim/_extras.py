"""Packages that only some commands need, and that ``pip install dpvim`` leaves out.

`pyproject.toml` has them as extras, which `EXTRAS` lists. They are imported when they are first
used; one that is not installed is an error that says how to install it.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any, NamedTuple


class Extra(NamedTuple):
    """Modules that an extra brings, and their purpose."""

    modules: tuple[str, ...]
    purpose: str


EXTRAS = {
    "tables": Extra(("pyarrow",), "tables and twins: dpvim schema, synth, fit"),
    "databases": Extra(
        ("ibis", "duckdb", "psycopg"), "tables in PostgreSQL and DuckDB: dpvim.open_table"
    ),
    "spark": Extra(("pyspark",), "tables in Spark: dpvim.open_table; Java 17 or 21 beside it"),
    "analysis": Extra(("statsmodels", "patsy"), "pooled regressions: dpvim analyze"),
    "report": Extra(("jinja2", "PIL"), "a page on a twin: dpvim report"),
    "serve": Extra(("jinja2",), "twins without typing: dpvim serve"),
    "plots": Extra(("matplotlib",), "pictures: fit.plot_posterior()"),
    "arviz": Extra(("arviz",), "posterior.to_arviz()"),
    "audit": Extra(("jax_privacy",), "attacks on the library: dpvim audit"),
    "reproduce": Extra(("pooch",), "the paper's experiments: dpvim reproduce"),
    "ray": Extra(("ray",), 'sweeps on a cluster: on="ray" of fit_many, tune, dpvim reproduce'),
    "flows": Extra(("flowjax",), 'normalising flows: family="flow"'),
}
"""By name of the extra, the modules that it adds to what every installation has."""


class MissingExtraError(ImportError):
    """A package that belongs to an extra is not installed."""


def require(module: str, *, extra: str) -> ModuleType:
    """Import a module that needs the packages of an extra.

    >>> require("json", extra="tables").loads("[1]")
    [1]
    >>> require("no_such_package", extra="report")
    Traceback (most recent call last):
    ...
    dpvim._extras.MissingExtraError: no_such_package is not installed: pip install 'dpvim[report]'
    """
    try:
        return importlib.import_module(module)
    except (ModuleNotFoundError, MissingExtraError) as error:
        package = (error.name or module).partition(".")[0]
        if package == "dpvim":
            raise
        raise MissingExtraError(
            f"{package} is not installed: pip install 'dpvim[{extra}]'", name=package
        ) from error


class LazyModule:
    """A module that is imported, by `require`, when one of its attributes is first used.

    >>> LazyModule("json", extra="tables").loads("[1]")
    [1]
    """

    def __init__(self, module: str, *, extra: str) -> None:
        self._module, self._extra = module, extra

    def __getattr__(self, name: str) -> Any:
        return getattr(require(self._module, extra=self._extra), name)
