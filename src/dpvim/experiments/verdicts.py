"""Verdicts by rules: numbers over repeats, differences between runs of the same seed.

A difference is clear if it is beyond the 97.5 % quantile of Student's t, in its standard errors;
with one repeat none is. A claim about several settings holds if it does in all of them, and in part
if in some.

>>> print(Number.of([1.0, 1.2, 1.1]))
1.1 ± 0.058
>>> print(Number.of([1.0]))
1
>>> [Number.of(values).is_positive for values in ([0.10, 0.11, 0.12], [0.1, 0.5, 0.9], [0.1])]
[True, False, False]
>>> judged([True, False]), judged([True, True]), judged([False])
('holds in part', 'holds', 'does not hold')
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from scipy import stats

from dpvim.experiments.experiment import Judgement

if TYPE_CHECKING:
    import pandas as pd


class Number(NamedTuple):
    """A mean over repeats, its standard error, and the spread of the repeats."""

    mean: float
    error: float
    spread: float
    repeats: int

    @classmethod
    def of(cls, values: Sequence[float] | np.ndarray) -> Number:
        known = np.asarray(values, float)
        spread = float(known.std(ddof=1)) if len(known) > 1 else np.nan
        return cls(float(known.mean()), spread / np.sqrt(len(known)), spread, len(known))

    def __str__(self) -> str:
        error = f" ± {self.error:.2g}" if np.isfinite(self.error) else ""
        return f"{self.mean:.3g}{error}"

    @property
    def limit(self) -> float:
        """By how much the mean may be off by chance; infinite for one repeat."""
        if self.repeats < 2:
            return np.inf
        return float(stats.t.ppf(0.975, self.repeats - 1)) * self.error

    @property
    def is_positive(self) -> bool:
        """True if it is, by more than chance."""
        return bool(self.mean > self.limit)


class Comparison(NamedTuple):
    """An error of two kinds of runs, and by how much the second one is larger, seed by seed."""

    smaller: Number
    larger: Number
    difference: Number

    @classmethod
    def of(cls, smaller: pd.DataFrame, larger: pd.DataFrame, column: str) -> Comparison:
        """Of a column, in two tables with one row a seed."""
        a, b = (frame.set_index("seed")[column] for frame in (smaller, larger))
        return cls(Number.of(a), Number.of(b), Number.of((b - a).dropna()))

    def __str__(self) -> str:
        return f"{self.smaller} against {self.larger}"

    @property
    def is_clear(self) -> bool:
        """True if the second is larger by more than chance."""
        return self.difference.is_positive


def spreads_differ(smaller: Number, larger: Number) -> bool:
    """True if the first spread over repeats is below the second by more than chance (F-test)."""
    if min(smaller.repeats, larger.repeats) < 2 or not larger.spread > 0:
        return False
    ratio = (smaller.spread / larger.spread) ** 2
    return bool(stats.f.cdf(ratio, smaller.repeats - 1, larger.repeats - 1) < 0.05)


def judged(passed: Sequence[bool]) -> Judgement:
    """Judge a claim that was tried in several settings."""
    if passed and all(passed):
        return "holds"
    return "holds in part" if any(passed) else "does not hold"
