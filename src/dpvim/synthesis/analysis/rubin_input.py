"""Read what `combine` is given: estimates, covariances, names and numbers of rows.

Every function returns arrays of the shapes that the rules in `rubin` expect, or raises a
``ValueError`` that says what was expected.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from jaxtyping import Float

from dpvim import _validate

Matrix: TypeAlias = Float[np.ndarray, "k k"]


def read_estimates(estimates: Any) -> tuple[Float[np.ndarray, "m k"], tuple[str, ...] | None]:
    """One row for each data set, and the names that a frame or series bring with them."""
    if not isinstance(estimates, np.ndarray | pd.DataFrame | pd.Series):
        _validate.an_instance("estimates", estimates, Iterable, "numbers, one for each data set")
        estimates = list(estimates)
        if estimates and all(isinstance(entry, pd.Series) for entry in estimates):
            # Aligned by label: a label that some series lack becomes NaN and is refused below.
            estimates = pd.DataFrame([entry.to_dict() for entry in estimates])
    names = None
    if isinstance(estimates, pd.DataFrame):
        names = tuple(map(str, estimates.columns))
    values = _numbers("estimates", estimates)
    if values.ndim not in (1, 2) or values.size == 0:
        raise ValueError(
            f"estimates: expected shape [m] or [m, k] for m data sets and k estimates, got "
            f"{values.shape}."
        )
    if len(values) < 2:
        raise ValueError(
            "estimates: expected those of at least 2 data sets, got 1. One synthetic data set "
            "does not show how estimates vary between data sets, which is what the variance is "
            "made of. Generate more."
        )
    values = values.reshape(len(values), -1)
    bad = np.argwhere(~np.isfinite(values))
    if len(bad):
        data_set, column = bad[0]
        what = f" of {names[column]!r}" if names else f" {column}"
        raise ValueError(
            f"estimates: expected finite numbers, got {values[data_set, column]} for estimate"
            f"{what} in data set {data_set}. Leave data sets out whose analysis failed, and say so."
        )
    return values, names


def read_names(
    given: Sequence[str] | None, found: tuple[str, ...] | None, k: int
) -> tuple[str, ...]:
    """The given names, else those that were found, else q1, q2, ..."""
    if given is None:
        return found or tuple(f"q{i + 1}" for i in range(k))
    _validate.many("names", given, "a list of names")
    names = (given,) if isinstance(given, str) else tuple(map(str, given))
    for name in names:
        _validate.text("names", name)
    if len(names) != k or len(set(names)) != k:
        raise ValueError(
            f"names: expected {k} different names, one for each estimate, got "
            f"{_validate.shown(given)}."
        )
    return names


def read_within(covariances: Any, m: int, k: int, labels: tuple[str, ...] | None) -> Matrix:
    """Mean covariance matrix; NaN off the diagonal if variances are all there is."""
    if not isinstance(covariances, np.ndarray | pd.DataFrame | pd.Series):
        expected = "numbers, as many as there are data sets"
        _validate.an_instance("covariances", covariances, Iterable, expected)
        covariances = list(covariances)
        for i, entry in enumerate(covariances):
            if labels and isinstance(entry, pd.DataFrame) and tuple(map(str, entry)) != labels:
                raise ValueError(
                    f"covariances: expected the columns of the estimates, {list(labels)}, got "
                    f"{list(entry.columns)} in data set {i}. Put them in the same order."
                )
    values = _numbers("covariances", covariances)
    if values.shape == (m,) and k == 1:
        values = values[:, None]
    if values.shape not in ((m, k), (m, k, k)):
        raise ValueError(
            f"covariances: expected shape [{m}, {k}] (variances) or [{m}, {k}, {k}] (covariance "
            f"matrices) for estimates of shape [{m}, {k}], got {list(values.shape)}."
        )
    if not np.isfinite(values).all():
        where = np.argwhere(~np.isfinite(values))[0][0]
        raise ValueError(
            f"covariances: expected finite numbers, got NaN or infinity in data set {where}. Leave "
            "data sets out whose analysis failed, and say so."
        )
    variances = values if values.ndim == 2 else np.einsum("lii->li", values)
    if (variances < 0).any():
        where, i = np.argwhere(variances < 0)[0]
        raise ValueError(
            f"covariances: expected variances of at least 0, got {variances[where, i]:g} for "
            f"estimate {i} in data set {where}. Give variances, not standard errors or logarithms."
        )
    if values.ndim == 2:
        # Covariances that were not given are not zero: they are unknown.
        within = np.full((k, k), np.nan)
        np.fill_diagonal(within, variances.mean(axis=0))
        return within
    scale = np.sqrt(variances[:, :, None] * variances[:, None, :])
    uneven = np.abs(values - values.swapaxes(1, 2)) > 1e-6 * scale
    if uneven.any():
        where, i, j = np.argwhere(uneven)[0]
        raise ValueError(
            f"covariances: expected symmetric matrices, got {values[where, i, j]:g} and "
            f"{values[where, j, i]:g} at [{i}, {j}] and [{j}, {i}] of data set {where}."
        )
    mean = values.mean(axis=0)
    return (mean + mean.T) / 2


def read_rows_ratio(num_rows: float | None, num_synthetic_rows: float | None) -> float | None:
    """Rows of a synthetic data set by rows of the original, if known."""
    if num_rows is None and num_synthetic_rows is None:
        return None
    if num_rows is None or num_synthetic_rows is None:
        given = "num_rows" if num_synthetic_rows is None else "num_synthetic_rows"
        raise ValueError(
            f"num_rows, num_synthetic_rows: expected both or neither, got {given} only. Only their "
            "ratio is used; give both."
        )
    synthetic = _validate.positive("num_synthetic_rows", num_synthetic_rows)
    return synthetic / _validate.positive("num_rows", num_rows)


def check_within(within: Matrix, labels: tuple[str, ...]) -> None:
    """Refuse a mean covariance that is not positive definite."""
    variances = np.diag(within)
    if (variances == 0).any():
        raise ValueError(
            f"covariances: expected a positive variance of {labels[int(variances.argmin())]!r} in "
            "at least one data set, got 0 in all of them. Leave the estimate out: by its own "
            "account it is known exactly."
        )
    if np.isnan(within).any():
        return
    scale = np.sqrt(variances)
    lowest = np.linalg.eigvalsh(within / np.outer(scale, scale))[0]
    if lowest <= len(within) * np.finfo(float).eps:
        raise ValueError(
            "covariances: expected a mean covariance matrix that is positive definite, got one "
            f"with smallest eigenvalue {lowest:.2g} (of its correlations). Leave out estimates "
            "that follow from the others, or give variances of shape [m, k] only."
        )


def _numbers(name: str, value: Any) -> np.ndarray:
    try:
        return np.array(value, dtype=float)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name}: expected numbers in arrays of equal shape, one for each data set ({error})."
        ) from error
