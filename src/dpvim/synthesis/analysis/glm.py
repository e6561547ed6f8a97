"""One generalised linear model on one table. Run as a script, it fits tables for another process.

It imports nothing of the package, so that a process that only fits tables starts in a moment.
"""

from __future__ import annotations

import os
import pickle
import re
import signal
import sys
import warnings
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import pandas as pd
import patsy
import statsmodels.api as sm

FAMILIES = {
    "gaussian": sm.families.Gaussian,
    "binomial": sm.families.Binomial,
    "poisson": sm.families.Poisson,
}
# Iterations double the correct digits; what has not converged after so many never will.
_MAX_ITERATIONS = 50
# What formulas of spreadsheets begin with; as in dpvim.synthesis.formulas.
_SIGNS = tuple("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")


class Layout(TypedDict):
    """Levels and missing values of tables; a plain dictionary, it travels between processes."""

    levels: Mapping[str, Sequence[Any]]
    """By column, the levels it can have."""
    dates: Mapping[str, tuple[str, str]]
    """By column of dates, how texts are written, as for strptime, and the date that counts as 0."""
    missing: Sequence[str] | None
    """Texts that stand for missing values in CSV files; None for those that pandas knows."""


class TableFit(TypedDict):
    """The fit of one table, or why there is none; a plain dictionary for the same reason."""

    failure: str
    """Why there is no fit; empty if there is one."""
    names: list[str]
    params: np.ndarray
    covariance: np.ndarray
    num_rows: int


class FitError(Exception):
    """The model has no estimate on this table; the message says why."""


def fit_table(table: pd.DataFrame | str, formula: str, family: str, layout: Layout) -> TableFit:
    """Fit a table, or the table in a file. Whatever goes wrong is a result, not an exception."""
    with warnings.catch_warnings():
        # What they say is found in the fit's attributes, which do not depend on filters.
        warnings.simplefilter("ignore")
        try:
            in_days = _with_days(_read_table(table, layout), layout["dates"])
            return _fit(in_days, formula, family, layout["levels"])
        except FitError as error:
            return failed_fit(str(error))
        except Exception as error:
            first_line = (str(error).strip().splitlines() or [""])[0]
            return failed_fit(f"{type(error).__name__}: {first_line}")


def failed_fit(reason: str) -> TableFit:
    """The result for a table that has no fit."""
    return TableFit(
        failure=reason, names=[], params=np.empty(0), covariance=np.empty((0, 0)), num_rows=0
    )


def _read_table(table: pd.DataFrame | str, layout: Layout) -> pd.DataFrame:
    if isinstance(table, pd.DataFrame):
        return table
    if Path(table).suffix == ".parquet":
        return pd.read_parquet(table)
    # Levels such as 01 or NA are texts, whatever they look like.
    texts = [
        n for n, allowed in layout["levels"].items() if all(isinstance(a, str) for a in allowed)
    ]
    written = [*texts, *layout["dates"]]
    missing = layout["missing"]
    frame = pd.read_csv(
        table,
        dtype=dict.fromkeys([*written, *_quoted(written)], "string"),
        na_values=None if missing is None else [*missing, *_quoted(missing)],
        keep_default_na=missing is None,
    )
    return _without_apostrophes(frame, {name: layout["levels"][name] for name in texts})


def _quoted(texts: Sequence[str]) -> dict[str, str]:
    """Texts that spreadsheets would run, by how tables hold them that were written to be safe."""
    return {f"'{text}": text for text in texts if text[:1] in _SIGNS}


def _without_apostrophes(frame: pd.DataFrame, levels: Mapping[str, Sequence[str]]) -> pd.DataFrame:
    """The table with names and levels as they are declared."""
    quoted = _quoted([name[1:] for name in frame.columns if name.startswith("'")])
    frame = frame.rename(columns=quoted)
    for name, allowed in levels.items():
        original = {text: level for text, level in _quoted(allowed).items() if text not in allowed}
        if original and name in frame.columns:
            frame[name] = frame[name].replace(original)
    return frame


def _with_days(table: pd.DataFrame, dates: Mapping[str, tuple[str, str]]) -> pd.DataFrame:
    """The table with dates as numbers of days; from 1970 on if nothing is declared of them."""
    columns = dict(table.items())
    for name, column in table.items():
        if name not in dates and not pd.api.types.is_datetime64_any_dtype(column.dtype):
            continue
        style, first = dates.get(str(name), ("%Y-%m-%d", "1970-01-01"))
        origin = datetime.strptime(first, style)
        if pd.api.types.is_datetime64_any_dtype(column.dtype):
            columns[name] = (column - pd.Timestamp(origin)) / pd.Timedelta(days=1)
        else:  # each distinct date once
            days = {each: _days(each, style, origin) for each in column.dropna().unique()}
            columns[name] = column.map(days).astype(float)
    return pd.DataFrame(columns)


def _days(value: Any, style: str, origin: datetime) -> float:
    if isinstance(value, str):
        moment = datetime.strptime(value, style)
    else:  # a day of a Parquet file
        moment = datetime(value.year, value.month, value.day)
    return (moment - origin) / timedelta(days=1)


def _fit(
    table: pd.DataFrame, formula: str, family: str, levels: Mapping[str, Sequence[Any]]
) -> TableFit:
    y, X = patsy.dmatrices(
        formula,
        _with_levels(table, levels, outcome=_column_name(formula.split("~")[0])),
        # Names in a formula mean the same in every process: columns, patsy's functions and numpy.
        eval_env=patsy.EvalEnvironment([{"np": np}]),
        return_type="dataframe",
    )
    outcome = _outcome(y, family)
    _check_estimable(X)
    model = sm.GLM(outcome, X, family=FAMILIES[family]())
    # Judged by the deviance, a coefficient on its way to infinity would count as converged.
    fit = model.fit(tol_criterion="params", rtol=1e-8, maxiter=_MAX_ITERATIONS)
    params, covariance = np.asarray(fit.params), np.asarray(fit.cov_params())
    if not fit.converged:
        raise FitError(_why_not_converged(fit.fit_history["params"], list(X.columns), family))
    if not (np.isfinite(params).all() and np.isfinite(covariance).all()):
        raise FitError("the estimates are not finite")
    return TableFit(
        failure="",
        names=list(X.columns),
        params=params,
        covariance=(covariance + covariance.T) / 2,
        num_rows=len(table),
    )


def _column_name(term: str) -> str:
    """The column that a term names, by itself or as in Q("age group")."""
    quoted = re.fullmatch(r"""\s*Q\(\s*(["'])(.*)\1\s*\)\s*""", term)
    return quoted[2] if quoted else term.strip()


def _with_levels(
    table: pd.DataFrame, levels: Mapping[str, Sequence[Any]], *, outcome: str
) -> pd.DataFrame:
    """The table with text as categories: the given levels, else those it holds, sorted.

    An outcome with two levels is 0 for the first and 1 for the second.
    """
    columns = dict(table.items())
    for name, allowed in levels.items():
        if name not in columns:
            raise FitError(f"the column {name!r}, for which levels are given, is missing")
        unknown = set(columns[name].dropna().unique()) - set(allowed)
        if unknown:
            shown = ", ".join(sorted(map(repr, unknown))[:3])
            raise FitError(f"the column {name!r} holds {shown}, not among its levels")
        column = pd.Series(
            pd.Categorical(columns[name], categories=list(allowed)), index=table.index
        )
        if name == outcome and len(allowed) == 2:
            column = column.cat.codes.astype(float).where(column.notna())
        columns[name] = column
    for name, column in columns.items():
        # patsy takes text row by row, categories at once.
        if name not in levels and pd.api.types.is_string_dtype(column.dtype):
            columns[name] = column.astype("category")
    return pd.DataFrame(columns)


def _outcome(y: pd.DataFrame, family: str) -> np.ndarray:
    names = list(y.columns)
    if len(names) == 2 and names[0].endswith("[False]") and names[1].endswith("[True]"):
        y = y.iloc[:, 1:]
    elif any(name.endswith("]") for name in names):
        raise FitError(
            "the outcome is categorical; model a yes or no, as in I(income == 'high') ~ age"
        )
    elif len(names) > 1 and not (family == "binomial" and len(names) == 2):
        raise FitError(f"the outcome has {len(names)} columns instead of one")
    values = y.to_numpy(float)
    if len(values) == 0:
        raise FitError("no row is without missing values")
    if not np.isfinite(values).all():
        raise FitError("the outcome holds infinite values")
    if family != "gaussian" and (values < 0).any():
        raise FitError(f"the outcome holds negative values, which {family} does not have")
    if family == "binomial" and values.shape[1] == 1 and (values > 1).any():
        raise FitError("the outcome holds values above 1; binomial takes 0 and 1")
    return values if values.shape[1] == 2 else values[:, 0]


def _check_estimable(X: pd.DataFrame) -> None:
    values = X.to_numpy(float)
    if not np.isfinite(values).all():
        raise FitError("a covariate holds infinite values")
    norms = np.linalg.norm(values, axis=0)
    empty = [name for name, norm in zip(X.columns, norms, strict=True) if norm == 0]
    if empty:
        raise FitError(f"not estimable: no row has {', '.join(empty)}")
    rank = np.linalg.matrix_rank(values / norms)
    if rank < len(norms):
        raise FitError(f"singular design: {len(norms)} columns have rank {rank}")


def _why_not_converged(history: list[np.ndarray], names: list[str], family: str) -> str:
    """A coefficient without a finite estimate grows by about one with every iteration."""
    moved = np.abs(history[-1] - history[len(history) // 2])
    growing = [name for name, distance in zip(names, moved, strict=True) if not distance < 1]
    if growing and family != "gaussian":
        return f"separation: the estimate of {', '.join(growing)} is infinite"
    return "the fit did not converge"


def serve() -> None:
    """Fit the tables that come in on standard input until it closes; answer on standard output."""
    # Ctrl-C is for the process that asks; it ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing that a library prints may get between the answers
    requests = sys.stdin.buffer
    formula, family, layout = pickle.load(requests)
    while True:
        try:
            table = pickle.load(requests)
        except EOFError:
            return
        pickle.dump(fit_table(table, formula, family, layout), answers)
        answers.flush()


if __name__ == "__main__":
    serve()
