"""Released counts of cells and of pairs of cells, side by side in two arrays."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from dpvim.privacy.counts import NoisyMarginal


class PairCounts(NamedTuple):
    """Released counts, the cells of all columns side by side. Public.

    Attributes:
        sizes: Number of cells of each column.
        singles: Counts of cells.
        singles_variance: Of their noise; infinite where nothing was released.
        pairs: Counts of pairs of cells of different columns, the first column's first.
        pairs_variance: Of their noise; infinite elsewhere.
        num_rows: Number of records, or an estimate of it.
    """

    sizes: tuple[int, ...]
    singles: Float[np.ndarray, " l"]
    singles_variance: Float[np.ndarray, " l"]
    pairs: Float[np.ndarray, "l l"]
    pairs_variance: Float[np.ndarray, "l l"]
    num_rows: float

    @property
    def offsets(self) -> list[int]:
        return [0, *itertools.accumulate(self.sizes)]

    def block(self, first: int, second: int) -> tuple[slice, slice]:
        """The place of the counts of a pair of columns."""
        starts = self.offsets
        return (
            slice(starts[first], starts[first + 1]),
            slice(starts[second], starts[second + 1]),
        )

    @property
    def measured_pairs(self) -> list[tuple[int, int]]:
        columns = range(len(self.sizes))
        return [
            pair
            for pair in itertools.combinations(columns, 2)
            if np.isfinite(self.pairs_variance[self.block(*pair)]).all()
        ]

    def of_cells(self) -> tuple[Float[np.ndarray, " l"], Float[np.ndarray, " l"]]:
        """For each cell the best estimate of its count, and the variance of its noise.

        A cell is counted by itself, or in every pair with another column, or both.
        """
        with np.errstate(divide="ignore"):
            precision = 1 / self.singles_variance
        weighted = self.singles * precision
        for first, second in self.measured_pairs:
            at = self.block(first, second)
            for axis, cells in ((1, at[0]), (0, at[1])):
                of_sum = 1 / self.pairs_variance[at].sum(axis=axis)
                weighted[cells] += self.pairs[at].sum(axis=axis) * of_sum
                precision[cells] += of_sum
        return weighted / precision, 1 / precision


def gather(
    released: Iterable[NoisyMarginal],
    groups: Sequence[Int[np.ndarray, " cells"]],
    num_rows: float,
) -> PairCounts:
    """All counts of one and two columns that were released, the best of them for each cell.

    Args:
        released: Counts of fine cells (of one column), or of groups.
        groups: For each column the group of each fine cell.
        num_rows: Number of records, or an estimate of it.
    """
    sizes = tuple(int(of_cell.max()) + 1 for of_cell in groups)
    size, starts = sum(sizes), [0, *itertools.accumulate(sizes)]
    # Sums of counts by their precision, and of precisions.
    singles, pairs = np.zeros((2, size)), np.zeros((2, size, size))
    for each in released:
        counts = np.asarray(each.counts, float)
        if len(each.columns) == 1:
            (column,) = each.columns
            of_cell = groups[column] if len(counts) != sizes[column] else np.arange(sizes[column])
            cells = np.bincount(of_cell)
            at = slice(starts[column], starts[column + 1])
            precision = 1 / (each.variance * cells)
            singles[:, at] += np.bincount(of_cell, counts) * precision, precision
        else:
            first, second = each.columns
            block = (
                slice(starts[first], starts[first + 1]),
                slice(starts[second], starts[second + 1]),
            )
            pairs[(slice(None), *block)] += np.stack([counts, np.ones_like(counts)]) / each.variance
    return PairCounts(sizes, *_best(singles), *_best(pairs), num_rows)


def _best(sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    weighted, precision = sums
    with np.errstate(divide="ignore"):
        return weighted / np.where(precision > 0, precision, 1.0), 1 / precision


def noise_of(
    variance: Float[np.ndarray, "*cells"], rng: np.random.Generator
) -> Float[np.ndarray, "*cells"]:
    """Noise as the released counts have it; none where nothing was released."""
    return np.sqrt(np.where(np.isfinite(variance), variance, 0)) * rng.normal(size=variance.shape)


def split_noise(
    counts: PairCounts, rng: np.random.Generator, *, ratio: float
) -> list[tuple[PairCounts, PairCounts]]:
    r"""Two sets of counts whose noise is independent, each with more of it than these have; twice.

    For counts y with normal noise of variance v and fresh noise e of the same variance,
    :math:`y + r e` and :math:`y - e / r` have noise of variance :math:`(1 + r^2) v` and
    :math:`(1 + r^{-2}) v`, and it is uncorrelated. (Their sampling errors are the same.)
    The second time it is -e: in the sum of two errors of prediction, one each, most of what is due
    to e is gone.

    Args:
        counts: Released.
        rng: Of the fresh noise.
        ratio: r; the smaller, the more is left in the first.
    """
    of_singles = noise_of(counts.singles_variance, rng)
    of_pairs = noise_of(counts.pairs_variance, rng)

    def moved(by: float) -> PairCounts:
        return counts._replace(
            singles=counts.singles + by * of_singles,
            singles_variance=(1 + by**2) * counts.singles_variance,
            pairs=counts.pairs + by * of_pairs,
            pairs_variance=(1 + by**2) * counts.pairs_variance,
        )

    return [(moved(sign * ratio), moved(-sign / ratio)) for sign in (1, -1)]


def misfit(counts: PairCounts, singles: np.ndarray, pairs: np.ndarray) -> float:
    """Squared differences from expected counts, in units of noise and sampling errors."""
    of_singles = _squares(counts.singles, counts.singles_variance, singles)
    return float(of_singles.sum() + _squares(counts.pairs, counts.pairs_variance, pairs).sum())


def _squares(released: np.ndarray, variance: np.ndarray, expected: np.ndarray) -> np.ndarray:
    return (released - expected) ** 2 / (variance + np.maximum(expected, 1.0))


def clear_misfits(
    counts: PairCounts, pairs: Float[np.ndarray, "l l"], *, errors: float
) -> dict[tuple[int, int], float]:
    """The misfit of each pair of columns, less that of a fit that is right.

    Args:
        counts: Released.
        pairs: Expected counts of pairs of cells.
        errors: Pairs are left out whose misfit is not beyond so many standard errors.
    """
    squares = _squares(counts.pairs, counts.pairs_variance, pairs)
    found = {}
    for pair in counts.measured_pairs:
        own = squares[counts.block(*pair)]
        beyond = float(own.sum() - own.size)
        if beyond > errors * math.sqrt(2 * own.size):
            found[pair] = beyond
    return found


def unexplained_shares(
    counts: PairCounts, expected: Float[np.ndarray, "l l"]
) -> dict[tuple[int, ...], float]:
    """For each pair of columns, what share of the records a fit puts into the wrong cells.

    An estimate: half of the absolute differences between released and expected counts, less what
    noise and sampling alone would make of them; zero where these explain all.
    """
    found: dict[tuple[int, ...], float] = {}
    for pair in counts.measured_pairs:
        at = counts.block(*pair)
        variance = counts.pairs_variance[at] + np.maximum(expected[at], 1.0)
        differences = np.abs(counts.pairs[at] - expected[at]).sum()
        by_chance = np.sqrt(2 / math.pi * variance).sum()
        found[pair] = float(max(differences - by_chance, 0.0) / 2 / counts.num_rows)
    return found
