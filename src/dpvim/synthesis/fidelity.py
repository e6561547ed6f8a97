"""Total variation distance between a synthetic table and the original, by column and by pair.

The distances are exact functions of private data, for the holder's eyes only.

>>> total_variation(np.array([3, 1]), np.array([1, 1]))
0.25
"""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd

from dpvim.synthesis.analysis.contingency import BinnedTable


def total_variation(first: np.ndarray, second: np.ndarray) -> float:
    r""":math:`\frac12 \sum_i |p_i - q_i|` of two arrays of counts, each divided by its sum.

    0 if the shares are the same, 1 if nothing occurs in both.
    """
    if first.shape != second.shape:
        raise ValueError(f"counts: expected equal shapes, got {first.shape} and {second.shape}.")
    totals = first.sum(), second.sum()
    if min(totals) <= 0:
        raise ValueError("counts: expected at least one record on both sides, got none.")
    return float(np.abs(first / totals[0] - second / totals[1]).sum() / 2)


def marginal_tv(first: BinnedTable, second: BinnedTable) -> pd.Series:
    """The total variation distance of each column, by name."""
    _check_same(first, second)
    distances = {n: total_variation(first.counts(n), second.counts(n)) for n in first.names}
    return pd.Series(distances, name="tv", dtype=float)


def pairwise_tv(first: BinnedTable, second: BinnedTable) -> pd.DataFrame:
    """The total variation distance of each pair of columns: ``first``, ``second``, ``tv``."""
    _check_same(first, second)
    rows = [
        (a, b, total_variation(first.pair_counts(a, b), second.pair_counts(a, b)))
        for a, b in itertools.combinations(first.names, 2)
    ]
    return pd.DataFrame(rows, columns=["first", "second", "tv"]).astype({"tv": float})


def _check_same(first: BinnedTable, second: BinnedTable) -> None:
    sides = [{n: table.bins[n].labels for n in table.names} for table in (first, second)]
    if sides[0] != sides[1]:
        raise ValueError(
            "expected two tables with the same columns and bins, got others. Bin both with the "
            "same schema."
        )
