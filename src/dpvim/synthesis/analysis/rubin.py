r"""Rubin's rules for fully synthetic data: one answer from the analyses of m synthetic tables.

Table l has the estimate :math:`q_l` with covariance :math:`u_l`, both as if the table were real.
With :math:`\bar q` and :math:`\bar u` their means and

.. math:: b = \sum_l (q_l - \bar q)^2 / (m - 1), \qquad T = (1 + 1/m)\, b - \bar u,

the interval is :math:`\bar q \pm t_\nu \sqrt T` with
:math:`\nu = (m - 1) (1 - \bar u / ((1 + 1/m)\, b))^2`. The within part is *subtracted*: a synthetic
table is drawn from a draw of the posterior, so b holds the posterior's variance and the sampling
variance of a table, and only the first one is wanted. (When missing values are filled in, most of
a table is the same in all m, and the within part is added. That rule is wrong here.)

A difference of estimates may be negative. Then T is replaced by :math:`(n_{syn} / n)\, \bar u`, the
sampling variance of a table of the original's size, with m - 1 degrees of freedom. That knows
nothing of the noise of a private fit, so it is worth a warning. docs/analysis.md derives all this
and says how often the intervals hold.

>>> print(combine([0.9, 1.4, 0.6, 1.1], [0.02, 0.03, 0.02, 0.03], names=["slope"]))
4 synthetic data sets, 95 % intervals
      estimate std. error    2.5 % 97.5 %   df p-value
slope        1     0.3416  -0.4459  2.446  2.0   0.098

References: Raghunathan, Reiter and Rubin (2003), J. Official Statistics 19; Reiter (2002), J.
Official Statistics 18; Reiter (2005), J. Statistical Planning and Inference 131, for `test`.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float
from scipy import stats

from dpvim import _validate
from dpvim.synthesis.analysis.rubin_input import (
    Matrix,
    check_within,
    read_estimates,
    read_names,
    read_rows_ratio,
    read_within,
)

Vector: TypeAlias = Float[np.ndarray, " k"]

# With so few degrees of freedom the quantiles of t leave the range of floating-point numbers.
_MIN_DF = 0.01
# Below this an interval is so wide that the reader should be told why.
_FEW_DF = 2.0


class NegativeVarianceWarning(UserWarning):
    """The between part is smaller than the within part; a substitute variance is used."""


class Total(NamedTuple):
    """The rule for scalars: variance, degrees of freedom, and where T was not positive."""

    variance: np.ndarray
    df: np.ndarray
    negative: np.ndarray


class WaldTest(NamedTuple):
    """A test of several components at once: an F statistic and how it compares."""

    statistic: float
    df_numerator: float
    df_denominator: float
    p_value: float
    negative: bool
    """Whether the between part was too small, and the substitute variance was used."""


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Combined:
    """Pooled estimates from m synthetic tables. Arrays have one entry for each of k estimates.

    Attributes:
        names: What the estimates are called.
        num_datasets: The number m of tables.
        level: Level of the intervals.
        rows_ratio: Rows of a synthetic table by rows of the original; 1 if these were not given.
        estimate: Mean over the tables.
        standard_error: Square root of the total variance.
        df: Degrees of freedom of the t distribution.
        lower: Lower end of the interval.
        upper: Upper end of the interval.
        p_value: Two-sided, for the hypothesis that the estimand is zero.
        negative: Where the total variance was not positive and was replaced.
        covariance: T, with `standard_error` squared on its diagonal; positive definite. NaN off the
            diagonal if only variances were given.
        adjusted: Whether `covariance` had to be made positive definite.
        between: Covariance b of the estimates between tables.
        within: Mean covariance within tables.
    """

    names: tuple[str, ...]
    num_datasets: int
    level: float
    rows_ratio: float
    estimate: Vector
    standard_error: Vector
    df: Vector
    lower: Vector
    upper: Vector
    p_value: Vector
    negative: Bool[np.ndarray, " k"]
    covariance: Matrix
    adjusted: bool
    between: Matrix
    within: Matrix

    def to_frame(self) -> pd.DataFrame:
        """A row for each estimate."""
        columns = {
            "estimate": self.estimate,
            "std_error": self.standard_error,
            "lower": self.lower,
            "upper": self.upper,
            "df": self.df,
            "p_value": self.p_value,
            "negative": self.negative,
        }
        return pd.DataFrame(columns, index=list(self.names))

    def test(self, contrast: Any = None, value: Any = 0.0) -> WaldTest:
        r"""The test of Reiter (2005) of a hypothesis on one or several components.

        With c independent contrasts, :math:`r = (1 + 1/m)\, tr(b \bar u^{-1}) / c` and
        :math:`t = c (m - 1)`, the statistic
        :math:`\bar q' \bar u^{-1} \bar q / (c\, (r - 1))` has c and
        :math:`4 + (t - 4) (1 - (1 - 2/t) / r)^2` degrees of freedom. It takes b for a multiple of
        :math:`\bar u`, since a few tables cannot say more about b. For one contrast this is
        the table's own p-value. If r is not above 1, the covariance is (n_syn / n) times the within
        part, with c and t degrees of freedom.

        Args:
            contrast: Names of the estimates that are `value` under the hypothesis, or a matrix
                [c, k] (a vector for one contrast). All of them unless told.
            value: What the contrasts are under the hypothesis: a number or c of them.
        """
        rows = self._contrast(contrast)
        c, m = len(rows), self.num_datasets
        distance = rows @ self.estimate - np.broadcast_to(np.asarray(value, float), c)
        # A contrast of one estimate must not be spoilt by covariances that were not given.
        used = np.flatnonzero(rows.any(axis=0))
        rows = rows[:, used]
        within = rows @ self.within[np.ix_(used, used)] @ rows.T
        between = rows @ self.between[np.ix_(used, used)] @ rows.T
        if np.isnan(within).any():
            raise ValueError(
                "contrast: expected covariances between the estimates it involves, but combine was "
                "given variances only. Give combine covariance matrices of shape [m, k, k]."
            )
        per_contrast = float(distance @ np.linalg.solve(within, distance)) / c
        ratio = (1 + 1 / m) * float(np.trace(np.linalg.solve(within, between))) / c
        negative = ratio <= 1
        df = float(c * (m - 1)) if negative else _test_df(c, m, ratio)
        statistic = per_contrast / (self.rows_ratio if negative else ratio - 1)
        return WaldTest(statistic, float(c), df, float(stats.f.sf(statistic, c, df)), negative)

    def __str__(self) -> str:
        tail = 50 * (1 - self.level)
        table = pd.DataFrame(
            {
                "estimate": [f"{x:.4g}" for x in self.estimate],
                "std. error": [f"{x:.4g}" for x in self.standard_error],
                f"{tail:g} %": [f"{x:.4g}" for x in self.lower],
                f"{100 - tail:g} %": [f"{x:.4g}" for x in self.upper],
                "df": [f"{x:.1f}" for x in self.df],
                "p-value": ["<0.001" if p < 0.001 else f"{p:.3f}" for p in self.p_value],
            },
            index=[
                name + (" *" if flag else "")
                for name, flag in zip(self.names, self.negative, strict=True)
            ],
        )
        lines = [
            f"{self.num_datasets} synthetic data sets, {100 * self.level:g} % intervals",
            table.to_string(),
        ]
        if self.negative.any():
            lines.append(
                "* (1 + 1/m) b - u is negative; the variance is n_syn / n = "
                f"{self.rows_ratio:g} times u, too little after a private fit. More or larger "
                "synthetic data sets avoid this."
            )
        if (self.df[~self.negative] < _FEW_DF).any():
            lines.append(
                f"Below {_FEW_DF:g} degrees of freedom an interval is wide because the data sets "
                "are too few or too small to tell b from u, not because the data say little."
            )
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<Combined: {len(self.names)} estimates from {self.num_datasets} data sets>"

    def _contrast(self, contrast: Any) -> Float[np.ndarray, "c k"]:
        k = len(self.names)
        if contrast is None:
            return np.eye(k)
        entries = [contrast] if isinstance(contrast, str) else contrast
        if len(entries) and all(isinstance(entry, str) for entry in entries):
            chosen = [_validate.one_of("contrast", entry, self.names) for entry in entries]
            rows = np.eye(k)[[self.names.index(name) for name in chosen]]
        else:
            rows = np.atleast_2d(np.asarray(contrast, dtype=float))
        if rows.ndim != 2 or rows.shape[1] != k or not np.isfinite(rows).all():
            raise ValueError(
                f"contrast: expected names of estimates or finite numbers of shape [c, {k}], got "
                f"shape {rows.shape}. Give each contrast a weight for every estimate."
            )
        if np.linalg.matrix_rank(rows) < len(rows):
            raise ValueError(
                f"contrast: expected independent contrasts, got {len(rows)} of rank "
                f"{np.linalg.matrix_rank(rows)}. Leave out those that follow from the others."
            )
        return rows


def combine(
    estimates: Any,
    covariances: Any,
    *,
    num_rows: float | None = None,
    num_synthetic_rows: float | None = None,
    names: Sequence[str] | None = None,
    level: float = 0.95,
) -> Combined:
    """Pool the estimates from m synthetic data sets by the rules for fully synthetic data.

    The number of axes of `estimates` and `covariances` says what they are:

    ============= =============== =================================
    ``estimates`` ``covariances``
    ============= =============== =================================
    [m]           [m]             one estimate, its variances
    [m, k]        [m, k]          k estimates, their variances
    [m, k]        [m, k, k]       k estimates, their covariances
    ============= =============== =================================

    Args:
        estimates: From each data set, the estimates: arrays, lists, a frame with a row for each
            data set, or a list of series (as `params` of statsmodels).
        covariances: From each data set, the estimates' variances or covariance matrix, as the
            analysis of this data set alone gives them.
        num_rows: Rows of the original data. It is used only where the total variance is negative;
            there it is taken to be `num_synthetic_rows` if neither is given, with a warning.
        num_synthetic_rows: Rows of one synthetic data set.
        names: What to call the estimates; frames and series bring their own.
        level: Level of the intervals.
    """
    level = _validate.open_unit("level", level)
    values, found_names = read_estimates(estimates)
    m, k = values.shape
    labels = read_names(names, found_names, k)
    within = read_within(covariances, m, k, found_names)
    rows_ratio = read_rows_ratio(num_rows, num_synthetic_rows)

    estimate = values.mean(axis=0)
    deviations = values - estimate
    between = deviations.T @ deviations / (m - 1)
    check_within(within, labels)

    total = total_variance(np.diag(between), np.diag(within), m, rows_ratio or 1.0)
    covariance, adjusted = _covariance(between, within, m, rows_ratio or 1.0, total.variance)
    standard_error = np.sqrt(total.variance)
    half_width = standard_error * _quantile(0.5 + level / 2, total.df)
    if total.negative.any():
        _warn_negative([labels[i] for i in np.flatnonzero(total.negative)], rows_ratio)
    return Combined(
        names=labels,
        num_datasets=m,
        level=level,
        rows_ratio=rows_ratio or 1.0,
        estimate=estimate,
        standard_error=standard_error,
        df=total.df,
        lower=estimate - half_width,
        upper=estimate + half_width,
        p_value=2 * stats.t.sf(np.abs(estimate) / standard_error, total.df),
        negative=total.negative,
        covariance=covariance,
        adjusted=adjusted,
        between=between,
        within=within,
    )


def total_variance(
    between: np.ndarray, within: np.ndarray, num_datasets: int, rows_ratio: float = 1.0
) -> Total:
    """The rule for scalars, entry by entry of arrays of any shape."""
    inflated = (1 + 1 / num_datasets) * np.asarray(between, float)
    difference = inflated - within
    # At exactly zero there would be no degrees of freedom.
    negative = difference <= 0
    share = np.divide(within, inflated, out=np.zeros_like(inflated), where=~negative)
    variance = np.where(negative, rows_ratio * np.asarray(within), difference)
    df = (num_datasets - 1) * np.where(negative, 1.0, np.square(1 - share))
    return Total(variance, df, negative)


def _test_df(c: int, m: int, ratio: float) -> float:
    """Degrees of freedom of the denominator: those of t for one contrast."""
    t = c * (m - 1)
    if c > 1 and t > 4:
        return 4 + (t - 4) * (1 - (1 - 2 / t) / ratio) ** 2
    # The moments behind the formula above do not exist; this is Rubin's (1987) older formula.
    return (c + 1) / 2 * (m - 1) * (1 - 1 / ratio) ** 2


def _quantile(probability: float, df: Vector) -> Vector:
    return np.where(df < _MIN_DF, np.inf, stats.t.ppf(probability, np.maximum(df, _MIN_DF)))


def _covariance(
    between: Matrix, within: Matrix, m: int, rows_ratio: float, variance: Vector
) -> tuple[Matrix, bool]:
    """T, or the nearest thing to it that is a covariance matrix with these variances.

    In the coordinates in which the within part is the identity, directions in which T is not
    positive get the variance that the scalar rule would give them; zero would claim certainty.
    Then the scalar rule's variances are put back on the diagonal.
    """
    if np.isnan(within).any():
        unknown = np.full_like(within, np.nan)
        np.fill_diagonal(unknown, variance)
        return unknown, False
    total = (1 + 1 / m) * between - within
    factor = np.linalg.cholesky(within)
    half = np.linalg.solve(factor, total)
    values, vectors = np.linalg.eigh(np.linalg.solve(factor, half.T))
    if (values > 0).all():
        return total, False
    directions = factor @ vectors
    repaired = (directions * np.where(values > 0, values, rows_ratio)) @ directions.T
    scale = np.sqrt(variance / np.diag(repaired))
    return repaired * np.outer(scale, scale), True


def _warn_negative(names: list[str], rows_ratio: float | None) -> None:
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    known = rows_ratio is not None
    ratio = f"n_syn / n = {rows_ratio:g}" if known else "n_syn / n, taken to be 1,"
    advice = "" if known else " Give num_rows and num_synthetic_rows."
    warnings.warn(
        f"The total variance of {shown} is negative: estimates vary less between the synthetic "
        f"data sets than within them. {ratio} times the within variance is used instead."
        f"{advice} That is too little if the posterior is wider than the data alone make it, as "
        "after a private fit. More or larger synthetic data sets avoid this.",
        NegativeVarianceWarning,
        stacklevel=3,
    )
