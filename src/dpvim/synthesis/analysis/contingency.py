"""Contingency tables: bins of columns, and joint counts of one or two of them.

Bins come from the schema alone, so that they are the same for an original and for its twins.

>>> from dpvim.synthesis.schema import Binary, Count
>>> schema = Schema((Binary(name="ill", levels=("no", "yes")), Count(name="visits", upper=3)))
>>> frame = pd.DataFrame({"ill": ["no", "no", "yes", "yes"], "visits": [0, 0, 1, 3]})
>>> table = bin_table(frame, schema)
>>> table.counts("visits"), table.bins["visits"].labels
(array([2, 1, 0, 1]), ('0', '1', '2', '3'))
>>> table.pair_counts("ill", "visits")
array([[2, 0, 0, 0],
       [0, 1, 0, 1]])
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from dpvim import _validate
from dpvim.synthesis.encoding import EncodedTable, encode
from dpvim.synthesis.schema import AnyColumn, Count, Date, Levelled, Real, Schema

NUM_BINS = 20
MISSING_LABEL = "missing"


@dataclass(frozen=True, eq=False)
class Bins:
    """The values of a column, in a few groups.

    Attributes:
        labels: What the groups are called; the last one is for missing values if there are any.
        edges: Of numbers, where groups start and the last one ends; None for levels.
        nullable: Whether the last group is for missing values.
        log_scale: Whether the numbers are declared to be on a logarithmic scale.
        starts: Of dates, the text of the date that each group starts with; None for others.
    """

    labels: tuple[str, ...]
    edges: Float[np.ndarray, " groups_and_one"] | None
    nullable: bool
    log_scale: bool = False
    starts: tuple[str, ...] | None = None

    @property
    def size(self) -> int:
        return len(self.labels)

    @property
    def num_present(self) -> int:
        """Number of groups for values that are not missing."""
        return self.size - self.nullable


@dataclass(frozen=True, eq=False)
class BinnedTable:
    """For each column the group of each record.

    Attributes:
        bins: The groups, by column.
        codes: Their indices, by column.
    """

    bins: Mapping[str, Bins]
    codes: Mapping[str, Int[np.ndarray, " rows"]]

    @property
    def names(self) -> list[str]:
        return list(self.codes)

    @property
    def num_rows(self) -> int:
        return len(next(iter(self.codes.values())))

    def counts(self, name: str) -> Int[np.ndarray, " groups"]:
        return np.bincount(self.codes[name], minlength=self.bins[name].size)

    def pair_counts(self, first: str, second: str) -> Int[np.ndarray, "groups others"]:
        shape = self.bins[first].size, self.bins[second].size
        joint = self.codes[first].astype(np.int64) * shape[1] + self.codes[second]
        return np.bincount(joint, minlength=shape[0] * shape[1]).reshape(shape)

    def rows(self, chosen: slice | np.ndarray) -> BinnedTable:
        """Some of the records."""
        # Copies: a view would keep the whole table in memory.
        return BinnedTable(self.bins, {n: codes[chosen].copy() for n, codes in self.codes.items()})


def bin_table(
    table: pd.DataFrame | EncodedTable, schema: Schema, *, num_bins: int = NUM_BINS
) -> BinnedTable:
    """Count a table by its schema.

    Args:
        table: A table, or what `encode` made of it.
        schema: Its columns.
        num_bins: Into how many groups the declared range of a column of numbers is cut.
    """
    _validate.positive_int("num_bins", num_bins)
    encoded = table if isinstance(table, EncodedTable) else encode(table, schema)
    bins, codes = {}, {}
    for column in schema.columns:
        groups = bins_of(column, num_bins)
        found = _codes(column, groups, np.asarray(encoded.values[column.name]))
        if column.nullable:
            found = np.where(encoded.missing[column.name], groups.size - 1, found)
        bins[column.name], codes[column.name] = groups, found.astype(np.int32)
    return BinnedTable(bins, codes)


def concat(tables: Sequence[BinnedTable]) -> BinnedTable:
    """The records of several tables together."""
    names = tables[0].names
    return BinnedTable(
        tables[0].bins, {name: np.concatenate([t.codes[name] for t in tables]) for name in names}
    )


def bins_of(column: AnyColumn, num_bins: int = NUM_BINS) -> Bins:
    """The groups of a column, from what is declared about it.

    Levels are groups of their own. Reals are cut into parts of equal width, on the declared scale;
    integers too, or each is a group of its own if there are few. Groups of counts get wider, since
    most counts are far below their bound.
    """
    missing = (MISSING_LABEL,) if column.nullable else ()
    if isinstance(column, Levelled):
        return Bins((*map(str, column.levels), *missing), None, column.nullable)
    lower, upper = column.bounds
    if isinstance(column, Real):
        is_log = column.scale == "log"
        edges = (np.geomspace if is_log else np.linspace)(lower, upper, num_bins + 1)
        labels = [f"{format_short(a)} to {format_short(b)}" for a, b in itertools.pairwise(edges)]
        return Bins((*labels, *missing), edges, column.nullable, is_log)
    edges = _whole_edges(int(lower), int(upper), num_bins, growing=isinstance(column, Count))
    # Large numbers are rounded in labels, which have little room.
    text: Callable[[float], str] = format_short if upper >= 1e6 else "{:.0f}".format
    if isinstance(column, Date):
        text = column.text
    labels = [
        text(a) if b - a == 1 else f"{text(a)} to {text(b - 1)}"
        for a, b in itertools.pairwise(edges)
    ]
    starts = tuple(map(text, edges[:-1])) if isinstance(column, Date) else None
    return Bins((*labels, *missing), edges, column.nullable, starts=starts)


def cramers_v(counts: Int[np.ndarray, "groups others"]) -> float:
    r"""Cramer's V of two columns from their joint counts, corrected for bias.

    With chi-square over n written as :math:`\varphi^2`, r rows and c columns that occur:
    :math:`\sqrt{\tilde\varphi^2 / (\min(\tilde r, \tilde c) - 1)}`, where
    :math:`\tilde\varphi^2 = \max(0, \varphi^2 - (r-1)(c-1)/(n-1))` and
    :math:`\tilde r = r - (r-1)^2/(n-1)` (Bergsma 2013). 0 for independent columns, 1 if one
    determines the other; 0 if one of them is constant.

    >>> cramers_v(np.array([[50, 0], [0, 50]])), cramers_v(np.array([[25, 25], [25, 25]]))
    (1.0, 0.0)
    """
    counts = counts[counts.any(axis=1)][:, counts.any(axis=0)]
    total, (rows, columns) = counts.sum(), counts.shape
    if total < 2 or rows < 2 or columns < 2:
        return 0.0
    joint = counts / total
    expected = joint.sum(axis=1, keepdims=True) * joint.sum(axis=0, keepdims=True)
    phi2 = ((joint - expected) ** 2 / expected).sum()
    phi2 = max(0.0, phi2 - (rows - 1) * (columns - 1) / (total - 1))
    smaller = min(side - (side - 1) ** 2 / (total - 1) for side in (rows, columns))
    return 0.0 if smaller <= 1 else float(min(1.0, np.sqrt(phi2 / (smaller - 1))))


def format_short(number: float) -> str:
    """A number in three digits, without an exponent if it needs none.

    >>> format_short(3162.3), format_short(0.1), format_short(2e9), format_short(5.0)
    ('3160', '0.1', '2e+09', '5')
    """
    rounded = float(f"{number:.3g}")
    return f"{rounded:.0f}" if 1000 <= abs(rounded) < 1e6 else f"{rounded:.3g}"


def _codes(column: AnyColumn, groups: Bins, values: np.ndarray) -> np.ndarray:
    if groups.edges is None:
        return values
    if isinstance(column, Real):  # encoded as places between the bounds
        place = np.floor(values.astype(float) * groups.num_present)
    else:
        place = np.searchsorted(groups.edges, values, side="right") - 1
    return np.clip(place, 0, groups.num_present - 1)


def _whole_edges(lower: int, upper: int, num_bins: int, *, growing: bool) -> np.ndarray:
    end = upper + 1
    if end - lower <= num_bins:
        return np.arange(lower, end + 1, dtype=float)
    if growing:
        return np.unique(np.rint(np.geomspace(1, end - lower + 1, num_bins + 1) - 1)) + lower
    width = -(-(end - lower) // num_bins)
    return np.append(np.arange(lower, end, width, dtype=float), end)
