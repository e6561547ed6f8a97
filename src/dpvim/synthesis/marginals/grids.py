"""Cells of columns: fine ones that the schema gives, and groups of them that releases suggest.

A column of levels has a cell for each level. Numbers have a cell for each value if these are few,
else intervals, with both bounds as cells of their own: values that were put on a bound, and zeros,
are lumps. A value that may be missing has a last cell for that.

>>> from dpvim.synthesis.schema import Integer
>>> grid = grid_of(Integer(name="age", lower=0, upper=120))
>>> grid.num_cells, grid.codes(np.array([0, 40, 120]), None).tolist()
(121, [0, 40, 120])
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from dpvim.synthesis.marginals.drawing import draw_given
from dpvim.synthesis.schema import AnyColumn, Categorical, Count, Levelled, Real

# Numbers with at most so many values have a cell for each; others are cut into intervals.
MOST_VALUES = 128
# Numbers of intervals. A range of many is one of those of few, cut further.
INTERVALS = (240, 120, 60, 40, 20)
# Of the intervals of counts, the share of those for one number each; then they grow in proportion.
_SINGLE_COUNTS = 1 / 4
# Differences of counts beyond so many standard deviations of the noise are no noise.
_CLEAR = 3.0
# A column is at least cut into so many parts.
_KEPT_BLOCKS = 8
# For a group a record counts at most so much more than one at the mean.
_MOST_LEVERAGE = 4.0
# A level without an order is a group if its records are so many standard deviations of the noise
# of pairs: another column may tell it nearly, and then they are in few cells. No more than so many
# are groups for that.
_CLEAR_LEVEL, _MOST_CLEAR_LEVELS = 8, 512


@dataclasses.dataclass(frozen=True, eq=False)
class Grid:
    """The fine cells of a column; public.

    Attributes:
        first: Of each cell, the first value: codes, whole numbers, or places from 0 to 1.
        last: The last one. Values of a cell are spread evenly between the two.
        whole: Whether values are whole numbers.
        steps: Of real numbers with few decimals, how many steps there are from bound to bound.
        ordered: Whether neighbouring cells are alike.
        nullable: Whether there is one more cell, for missing values.
    """

    first: np.ndarray
    last: np.ndarray
    whole: bool
    ordered: bool
    nullable: bool
    steps: int | None = None

    @property
    def num_values(self) -> int:
        """Number of cells for values that are not missing."""
        return len(self.first)

    @property
    def num_cells(self) -> int:
        return self.num_values + self.nullable

    def codes(self, values: np.ndarray, missing: np.ndarray | None) -> Int[np.ndarray, " rows"]:
        """The cell of each value; each depends on that value alone."""
        if self.steps is not None:
            values = np.rint(values.astype(np.float64) * self.steps)
        found = np.searchsorted(self.first, values, side="right") - 1
        codes = np.clip(found, 0, self.num_values - 1).astype(np.int32)
        if missing is not None and self.nullable:
            codes = np.where(missing, self.num_values, codes).astype(np.int32)
        return codes

    def values(
        self, codes: Int[np.ndarray, " rows"], rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Values in these cells, and where they are missing; missing ones are the smallest."""
        missing = codes >= self.num_values
        inside = np.where(missing, 0, codes)
        first, last = self.first[inside], self.last[inside]
        places = rng.random(len(codes))
        if self.whole or self.steps is not None:
            values = np.minimum(first + np.floor(places * (last - first + 1)), last)
        else:
            values = first + places * (last - first)
        if self.steps is not None:
            values = values / self.steps
        return values, missing if self.nullable else None


def grid_of(column: AnyColumn, intervals: int = INTERVALS[0]) -> Grid:
    """The fine cells of a column, by its entry in the schema.

    Args:
        column: The entry.
        intervals: Into how many parts the range of numbers with many values is cut.
    """
    if isinstance(column, Levelled):
        codes = np.arange(len(column.levels))
        ordered = not isinstance(column, Categorical)
        return Grid(codes, codes, True, ordered, column.nullable)
    if isinstance(column, Real):
        return _real_grid(column, intervals)
    lower, upper = (int(bound) for bound in column.bounds)
    first = _whole_starts(lower, upper, intervals, growing=isinstance(column, Count))
    last = np.append(first[1:] - 1, upper)
    return Grid(first, last, True, True, column.nullable)


def _whole_starts(
    lower: int, upper: int, intervals: int, *, growing: bool
) -> Int[np.ndarray, " cells"]:
    """First values of the cells of whole numbers."""
    # Counts are mostly small, and far ones rare: there no cell of one number stands out.
    if upper - lower < (min(MOST_VALUES, intervals) if growing else MOST_VALUES):
        return np.arange(lower, upper + 1)
    if growing:
        singles = int(_SINGLE_COUNTS * intervals)
        ratio = (upper / singles) ** (1 / (intervals - singles))
        grown = singles * ratio ** np.arange(intervals - singles)
        starts = np.concatenate([np.arange(singles), np.floor(grown).astype(np.int64)])
    else:
        inner = np.linspace(lower, upper, intervals, endpoint=False)[1:]
        starts = np.concatenate([[lower, lower + 1], np.ceil(inner).astype(np.int64)])
    return np.unique(np.append(starts, upper))


def _real_grid(column: Real, intervals: int) -> Grid:
    steps = _few_steps(column)
    if steps is not None:
        places = np.arange(steps + 1)
        return Grid(places, places, False, True, column.nullable, steps)
    inner = np.arange(1, intervals) / intervals
    # What is above 0 is not on the bound, however little.
    first = np.concatenate([[0.0, np.nextafter(np.float32(0), np.float32(1))], inner, [1.0]])
    last = np.concatenate([[0.0], inner, [1.0], [1.0]])
    return Grid(first, last, False, True, column.nullable)


def _few_steps(column: Real) -> int | None:
    """Steps from bound to bound where a column has so few decimals that each value has a cell."""
    if column.decimals is None or column.scale != "linear":
        return None
    steps = round((column.upper - column.lower) * 10**column.decimals)
    return steps if 0 < steps < MOST_VALUES else None


class Groups(NamedTuple):
    """Cells of a column that are counted together with other columns.

    Attributes:
        of_cell: The group of each fine cell.
        probs: Within its group, the probability of each fine cell.
    """

    of_cell: Int[np.ndarray, " cells"]
    probs: Float[np.ndarray, " cells"]

    @property
    def size(self) -> int:
        return int(self.of_cell.max()) + 1

    def draw(
        self, groups: Int[np.ndarray, " rows"], rng: np.random.Generator, *, evenly: bool
    ) -> Int[np.ndarray, " rows"]:
        """A fine cell in each of these groups."""
        probs = np.zeros((self.size, len(self.of_cell)))
        probs[self.of_cell, np.arange(len(self.of_cell))] = self.probs
        return draw_given(probs, groups, rng, evenly=evenly)


def single_groups(grid: Grid) -> Groups:
    """Every cell by itself."""
    return Groups(np.arange(grid.num_cells), np.ones(grid.num_cells))


def group_cells(
    grid: Grid,
    counts: np.ndarray,
    variance: float,
    *,
    num_rows: float,
    num_groups: int,
    noise: float,
) -> Groups:
    """Groups of about equal size from released counts of the fine cells.

    In ordered columns a record counts for more the farther it is from the mean: in groups of equal
    numbers nearly all of the variance of a column with a long tail would be within the last one,
    where values do not follow other columns.

    Neighbouring cells are put together until they hold a share of the records; a cell that holds
    one by itself stays alone, so lumps are kept. Levels without an order that are rare are put
    together whatever their place: those that neither hold a quarter of a share nor stand out from
    the noise.

    Args:
        grid: The fine cells.
        counts: Of these.
        variance: Of their noise.
        num_rows: Number of records, or an estimate of it.
        num_groups: About so many groups.
        noise: Standard deviation of the noise of counts of pairs.
    """
    sizes = _sizes_of_cells(grid, counts, variance, num_rows)
    values = sizes[: grid.num_values]
    if grid.ordered:
        values = values * _leverages(grid, values)
    share = values.sum() / num_groups
    if grid.ordered:
        of_cell = _neighbours(values, share)
    else:
        clear = max(_CLEAR_LEVEL * noise, values.sum() / _MOST_CLEAR_LEVELS)
        of_cell = _rare_ones(values, min(share / 4, clear))
    if grid.nullable:
        of_cell = np.append(of_cell, of_cell.max() + 1)
    return Groups(of_cell, sizes)


def _leverages(grid: Grid, sizes: Float[np.ndarray, " cells"]) -> Float[np.ndarray, " cells"]:
    """One and the squared distance from the mean, in variances, up to a bound."""
    places = (grid.first + grid.last) / 2
    squares = (places - np.average(places, weights=sizes)) ** 2
    variance = np.average(squares, weights=sizes)
    return 1 + np.minimum(squares / variance, _MOST_LEVERAGE) if variance > 0 else squares + 1


def redraw_probs(
    grid: Grid,
    groups: Groups,
    counts: np.ndarray,
    variance: float,
    *,
    num_rows: float,
    rng: np.random.Generator,
) -> Groups:
    """The same groups, their cells' probabilities from counts with noise and sampling once more."""
    sampling = np.sqrt(np.maximum(groups.probs, 0.0)) * rng.normal(size=counts.shape)
    again = counts + math.sqrt(variance) * rng.normal(size=counts.shape) + sampling
    return Groups(groups.of_cell, _sizes_of_cells(grid, again, variance, num_rows))


def _sizes_of_cells(
    grid: Grid, counts: np.ndarray, variance: float, num_rows: float
) -> Float[np.ndarray, " cells"]:
    """Number of records in each fine cell, by released counts; all of them have some."""
    smooth = _without_noise(counts[: grid.num_values], variance) if grid.ordered else counts
    sizes = on_simplex(np.append(smooth, counts[len(smooth) :]), num_rows)
    # Where nothing was seen in a group, its cells are alike.
    return sizes + 1e-6 * max(num_rows, 1.0) / len(sizes)


def _without_noise(counts: np.ndarray, variance: float) -> Float[np.ndarray, " cells"]:
    """Counts of neighbouring cells, evened out where their differences may be noise.

    Haar wavelets: the two halves of a range are told apart if their counts differ by more than
    `_CLEAR` standard deviations of the noise, and so on within the halves. Lumps stay.
    """
    length = 2 ** (len(counts) - 1).bit_length()
    means = np.pad(counts.astype(float), (0, length - len(counts)))
    halves = []
    while len(means) > _KEPT_BLOCKS:
        pairs = means.reshape(-1, 2)
        apart = (pairs[:, 0] - pairs[:, 1]) / math.sqrt(2)
        halves.append(np.where(np.abs(apart) > _CLEAR * math.sqrt(variance), apart, 0.0))
        means = pairs.sum(axis=1) / math.sqrt(2)
    for apart in reversed(halves):
        means = (np.stack([means + apart, means - apart], axis=1) / math.sqrt(2)).ravel()
    return means[: len(counts)]


def _neighbours(sizes: Float[np.ndarray, " cells"], share: float) -> Int[np.ndarray, " cells"]:
    of_cell, group, held = np.zeros(len(sizes), int), 0, 0.0
    for cell, size in enumerate(sizes):
        is_lump = size >= share / 2
        if cell and (held >= share or (is_lump and held > 0)):
            group, held = group + 1, 0.0
        of_cell[cell] = group
        held += share if is_lump else size
    return of_cell


def _rare_ones(sizes: Float[np.ndarray, " cells"], least: float) -> Int[np.ndarray, " cells"]:
    frequent = sizes >= least
    of_cell = np.cumsum(frequent) - 1
    return np.where(frequent, of_cell, frequent.sum()) if not frequent.all() else of_cell


def on_simplex(counts: np.ndarray, total: float) -> np.ndarray:
    """The nearest counts that are not negative and sum to `total`.

    >>> on_simplex(np.array([5.0, 2.0, -3.0]), 6.0)
    array([4.5, 1.5, 0. ])
    """
    flat = np.sort(np.asarray(counts, float).ravel())[::-1]
    excess = (np.cumsum(flat) - total) / np.arange(1, flat.size + 1)
    kept = np.flatnonzero(flat > excess)[-1]
    return np.maximum(np.asarray(counts, float) - excess[kept], 0.0)
