"""A generalised linear model on every synthetic data set, pooled into one table of results.

>>> rng = np.random.default_rng(0)
>>> tables = [pd.DataFrame({"x": np.arange(50.0)}) for _ in range(8)]
>>> for table in tables:
...     intercept, slope = rng.normal([1, 0.1], [0.5, 0.02])
...     table["y"] = intercept + slope * table["x"] + rng.normal(size=50)
>>> found = analyze(tables, "y ~ x", family="linear", workers=1)
>>> found.combined.names, found.num_failed
(('Intercept', 'x'), 0)
"""

from __future__ import annotations

import dataclasses
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from dpvim import _validate
from dpvim._extras import LazyModule
from dpvim._progress import ProgressBar, show_progress
from dpvim.synthesis.analysis.glm_workers import fit_tables
from dpvim.synthesis.analysis.rubin import Combined, combine
from dpvim.types import ConvergenceWarning

if TYPE_CHECKING:
    from dpvim.synthesis.analysis import glm
    from dpvim.synthesis.twin import Twin
else:
    glm = LazyModule("dpvim.synthesis.analysis.glm", extra="analysis")

_FAMILIES = {
    "gaussian": "gaussian",
    "linear": "gaussian",
    "binomial": "binomial",
    "logistic": "binomial",
    "poisson": "poisson",
}
_SUFFIXES = (".csv", ".csv.gz", ".parquet")
# Tables smaller than this together are fitted in the time that another process takes to start.
_WORTH_A_PROCESS = 50_000_000


class FailedFitsError(RuntimeError):
    """So many fits failed that there is nothing to pool."""


class FailedFitsWarning(UserWarning):
    """Some data sets could not be fitted; the results are those of the others."""


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Analysis:
    """Pooled results of a model that was fitted to every synthetic data set.

    Attributes:
        combined: Estimates, standard errors, intervals and p-values.
        formula: The model's formula.
        family: The outcome's distribution: gaussian, binomial or poisson.
        num_datasets: How many data sets there were.
        failures: For each data set that is not in the results, its index and the reason.
        doubts: Reasons not to trust the intervals, if the twin was given.
    """

    combined: Combined
    formula: str
    family: str
    num_datasets: int
    failures: tuple[tuple[int, str], ...]
    doubts: tuple[str, ...] = ()

    @property
    def num_failed(self) -> int:
        """Number of data sets that are not in the results."""
        return len(self.failures)

    def __str__(self) -> str:
        lines = [f"{self.formula}  ({self.family})", str(self.combined)]
        if self.failures:
            lines.append(
                f"{self.num_failed} of {self.num_datasets} data sets could not be fitted and are "
                f"left out:\n{_reasons(self.failures)}"
            )
        if self.doubts:
            lines += ["DOUBTFUL:", *(f"  {doubt}" for doubt in self.doubts)]
        return "\n".join(lines)

    def __repr__(self) -> str:
        done = self.num_datasets - self.num_failed
        return f"<Analysis {self.formula!r}: {done} of {self.num_datasets} data sets fitted>"


def analyze(
    datasets: Iterable[pd.DataFrame | str | Path],
    formula: str,
    *,
    family: str = "gaussian",
    num_rows: int | None = None,
    levels: Mapping[str, Sequence[Any]] | None = None,
    dates: Mapping[str, tuple[str, str]] | None = None,
    missing: Sequence[str] | None = None,
    level: float = 0.95,
    progress: bool | None = None,
    workers: int | None = None,
    twin: Twin | None = None,
) -> Analysis:
    """Fit a generalised linear model to every synthetic data set and pool the results.

    A data set is left out if its fit has no finite answer: a singular design, separation, no
    convergence, or columns of the design that other data sets have and it does not have. How many
    and why is a warning, part of the result, and printed with it.

    Args:
        datasets: Frames, or paths of CSV and Parquet files, which are read when their turn comes.
        formula: As in statsmodels (patsy): ``y ~ age + C(region)``. A yes-or-no outcome may be
            written as a condition, ``I(income == 'high') ~ age``. Rows with missing values are
            left out.
        family: ``gaussian`` (or ``linear``), ``binomial`` (or ``logistic``), ``poisson``; each
            with its canonical link.
        num_rows: Rows of the original data, used where a variance comes out negative.
        levels: By column, the levels it can have. Without them a column of text has those that
            a data set happens to hold, and the first one in order is the reference. An outcome
            with two levels counts as 0 and 1.
        dates: By column of dates, how they are written in CSV files and which of them counts as 0,
            as ``schema.dates`` has it. In a formula a date is a number of days.
        missing: Texts that stand for missing values in CSV files; default those pandas knows.
        level: Level of the intervals.
        progress: Whether to show a bar; unless told, if standard error is a terminal.
        workers: Number of processes. Unless told, one for each core if the data sets are large
            enough for that to pay, else this process alone.
        twin: The twin that the data sets are of: then columns of the formula that do not go
            together as its released counts say are named in `Analysis.doubts`, and in a warning.
    """
    canonical = _FAMILIES[_validate.one_of("family", family, _FAMILIES)]
    if not isinstance(formula, str) or "~" not in formula:
        raise ValueError(
            "formula: expected an outcome and covariates, as in 'y ~ age', got "
            f"{_validate.shown(formula)}."
        )
    _validate.open_unit("level", level)
    if num_rows is not None:
        _validate.positive_int("num_rows", num_rows)
    if workers is not None:
        _validate.positive_int("workers", workers)
    if dates is not None:
        _validate.an_instance("dates", dates, Mapping, "a dict by column, as schema.dates")
    if missing is not None:
        _check_texts("missing", missing)
    tables = _read_datasets(datasets)
    layout = glm.Layout(
        levels=_read_levels(levels),
        dates=dict(dates or {}),
        missing=None if missing is None else list(missing),
    )
    bar = ProgressBar(
        len(tables), show=show_progress(progress), label="analyzing", unit="data sets"
    )
    with bar:
        fits = fit_tables(
            tables,
            formula,
            canonical,
            layout,
            workers=workers or _default_workers(tables),
            done=lambda: bar.advance(1),
        )
    fits = _with_equal_designs(fits)
    failures = tuple((i, fit["failure"]) for i, fit in enumerate(fits) if fit["failure"])
    fitted = [fit for fit in fits if not fit["failure"]]
    if len(fitted) < 2:
        raise FailedFitsError(
            f"expected fits of at least 2 data sets, got {len(fitted)} of {len(fits)}; the "
            f"others failed:\n{_reasons(failures)}"
        )
    if failures:
        warnings.warn(
            f"{len(failures)} of {len(fits)} data sets could not be fitted and are left out:\n"
            f"{_reasons(failures)}",
            FailedFitsWarning,
            stacklevel=2,
        )
    # The harmonic mean: a variance goes with one over the number of rows.
    rows = len(fitted) / sum(1 / fit["num_rows"] for fit in fitted)
    combined = combine(
        np.stack([fit["params"] for fit in fitted]),
        np.stack([fit["covariance"] for fit in fitted]),
        num_rows=num_rows,
        num_synthetic_rows=None if num_rows is None else rows,
        names=fitted[0]["names"],
        level=level,
    )
    doubts = () if twin is None else _doubts(twin, tables, formula)
    return Analysis(combined, formula, canonical, len(fits), failures, doubts)


def _doubts(twin: Twin, tables: list[pd.DataFrame | str], formula: str) -> tuple[str, ...]:
    """Doubts of the twin about the columns that a formula names, with a warning."""
    named = [
        name for name in twin.schema.names if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", formula)
    ]
    if len(named) < 2:
        return ()
    doubts = tuple(twin.doubts(tables, named))
    if doubts:
        warnings.warn("; ".join(doubts) + ".", ConvergenceWarning, stacklevel=3)
    return doubts


def _with_equal_designs(fits: list[glm.TableFit]) -> list[glm.TableFit]:
    """Fits without a column that others have are failures: they answer another question."""
    names = list(dict.fromkeys(name for fit in fits for name in fit["names"]))

    def checked(fit: glm.TableFit) -> glm.TableFit:
        if fit["failure"]:
            return fit
        missing = [name for name in names if name not in fit["names"]]
        if missing:
            reason = f"columns missing in its design: {', '.join(missing)} (see levels)"
            return glm.failed_fit(reason)
        order = [fit["names"].index(name) for name in names]
        return glm.TableFit(
            failure="",
            names=names,
            params=fit["params"][order],
            covariance=fit["covariance"][np.ix_(order, order)],
            num_rows=fit["num_rows"],
        )

    return [checked(fit) for fit in fits]


def _read_datasets(datasets: Iterable[pd.DataFrame | str | Path]) -> list[pd.DataFrame | str]:
    if isinstance(datasets, pd.DataFrame | str | Path):
        raise TypeError(
            "datasets: expected several frames or paths, got a single "
            f"{type(datasets).__name__}. Give a list of at least 2."
        )
    _validate.many("datasets", datasets, "several frames or paths")
    tables: list[pd.DataFrame | str] = []
    for index, dataset in enumerate(datasets):
        if isinstance(dataset, pd.DataFrame):
            tables.append(dataset)
        elif not isinstance(dataset, str | Path):
            raise TypeError(
                f"datasets: expected frames or paths, got {type(dataset).__name__} at {index}."
            )
        elif not str(dataset).endswith(_SUFFIXES):
            raise ValueError(
                f"datasets: expected files that end in {', '.join(_SUFFIXES)}, got "
                f"{str(dataset)!r}."
            )
        elif not Path(dataset).is_file():
            raise FileNotFoundError(f"datasets: there is no file {str(dataset)!r}.")
        else:
            tables.append(str(dataset))
    if len(tables) < 2:
        raise ValueError(
            f"datasets: expected at least 2, got {len(tables)}. One synthetic data set does not "
            "show how estimates vary between data sets. Generate more."
        )
    return tables


def _read_levels(levels: Mapping[str, Sequence[Any]] | None) -> dict[str, list[Any]]:
    read = {}
    if levels is not None:
        _validate.an_instance("levels", levels, Mapping, "a dict of lists by column")
    for column, values in ({} if levels is None else levels).items():
        listed = isinstance(values, Sequence | np.ndarray) and not isinstance(values, str)
        if not listed or len(values) == 0 or len({*map(repr, values)}) != len(values):
            raise ValueError(
                f"levels: expected a list of different values for {column!r}, got "
                f"{_validate.shown(values)}."
            )
        read[column] = list(values)
    return read


def _check_texts(name: str, given: Any) -> None:
    listed = isinstance(given, list | tuple)
    if not listed or not all(isinstance(text, str) for text in given):
        raise TypeError(f"{name}: expected a list of texts, got {_validate.shown(given)}.")


def _default_workers(tables: Sequence[pd.DataFrame | str]) -> int:
    size = sum(
        os.stat(table).st_size if isinstance(table, str) else table.memory_usage(index=False).sum()
        for table in tables
    )
    return min(os.cpu_count() or 1, len(tables)) if size > _WORTH_A_PROCESS else 1


def _reasons(failures: Sequence[tuple[int, str]]) -> str:
    counts = Counter(reason for _, reason in failures)
    return "\n".join(f"  {count} x {reason}" for reason, count in counts.most_common())
