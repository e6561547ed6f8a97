"""The counts that a twin asks for, round by round, and what they become.

All that is decided here is decided by the schema, the plan, and what was released before.

1. Columns of many cells are counted by themselves (`_SINGLES_SHARE` of the release), and their
   cells put into groups of about equal size, in which a record far from the mean counts for more.
2. All pairs of columns are counted, in groups. (To count all pairs with a part of the release, and
   those that a first fit cannot explain with the rest, was worse: docs/synthesis.md.)
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from dpvim.privacy.counts import (
    Cells,
    CountMechanism,
    Marginal,
    NoisyMarginal,
    record_weights,
)
from dpvim.privacy.plan import PrivacyPlan
from dpvim.synthesis.encoding import EncodedTable
from dpvim.synthesis.marginals.grids import (
    INTERVALS,
    Grid,
    Groups,
    grid_of,
    group_cells,
    redraw_probs,
    single_groups,
)
from dpvim.synthesis.marginals.kept import KeptRounds
from dpvim.synthesis.marginals.pair_counts import PairCounts, gather
from dpvim.synthesis.marginals.tilting import Scores, scores_of
from dpvim.synthesis.schema import Schema

# Columns with more cells than this are grouped.
MOST_SINGLE_CELLS = 48
# Into how many groups: as many as leave so many standard deviations of the noise to a pair of them,
# were the records spread evenly, but neither fewer nor more than these.
_PAIR_NOISES, _FEWEST_GROUPS, _MOST_GROUPS = 3, 24, 48
_SINGLES_SHARE = 0.1
# What an interval should hold, in standard deviations of the noise of its count.
_LEAST_NOISES = 8
# What a record counts for in a pair with the target, if others are 1.
_TARGET_WEIGHT = 2.0


@dataclasses.dataclass(frozen=True, eq=False)
class Releases:
    """All that was released of a table, and the groups of cells that it is counted in.

    Attributes:
        grids: The fine cells of each column.
        groups: The groups of each column's cells.
        noisy: The released counts, in the order of their release.
        num_rows: Number of records: public, or an estimate from the counts.
    """

    grids: tuple[Grid, ...]
    groups: tuple[Groups, ...]
    noisy: tuple[NoisyMarginal, ...]
    num_rows: float

    @property
    def counts(self) -> PairCounts:
        """The counts of groups and pairs of them."""
        return gather(self.noisy, [each.of_cell for each in self.groups], self.num_rows)

    def redraw_groups(self, rng: np.random.Generator) -> tuple[Groups, ...]:
        """The groups, with the probabilities of cells within them drawn anew."""
        alone = {each.columns[0]: each for each in self.noisy if len(each.columns) == 1}
        return tuple(
            redraw_probs(
                grid,
                groups,
                alone[column].counts,
                alone[column].variance,
                num_rows=self.num_rows,
                rng=rng,
            )
            if column in alone
            else groups
            for column, (grid, groups) in enumerate(zip(self.grids, self.groups, strict=True))
        )

    @property
    def scores(self) -> tuple[tuple[Scores, ...], ...]:
        """For each column the scores of its groups."""
        counts = self.counts
        sizes = np.split(counts.of_cells()[0], counts.offsets[1:-1])
        return tuple(map(scores_of, self.grids, self.groups, sizes))

    @property
    def in_order(self) -> list[int]:
        """For each column, how many of its first groups are in an order; missing is in none."""
        return [
            each.size - grid.nullable if grid.ordered else 0
            for grid, each in zip(self.grids, self.groups, strict=True)
        ]


@dataclasses.dataclass(frozen=True)
class Design:
    """The counts to be made of a table with a schema; public.

    Attributes:
        grids: The fine cells of each column.
        grouped: Columns that are counted by themselves first.
        pairs: Pairs of columns, with their weights.
        shares: Of the release: that of columns by themselves, and that of pairs.
        intervals: Into how many parts the range of numbers with many values is cut.
    """

    grids: tuple[Grid, ...]
    grouped: tuple[int, ...]
    pairs: tuple[Marginal, ...]
    shares: tuple[float, float]
    intervals: int


def design(schema: Schema, plan: PrivacyPlan, *, target: str | None = None) -> Design:
    """Decide what will be counted; reads no data."""
    columns = range(len(schema.columns))
    finest = [grid_of(column) for column in schema.columns]
    grouped = tuple(i for i in columns if finest[i].num_cells > MOST_SINGLE_CELLS)
    pairs = tuple(
        Marginal(pair, _TARGET_WEIGHT if target in [schema.names[c] for c in pair] else 1.0)
        for pair in itertools.combinations(columns, 2)
    )
    singles = _SINGLES_SHARE if grouped else 0.0
    if not pairs:
        grouped, singles = tuple(columns), 1.0
    intervals = _num_intervals(plan, len(grouped))
    grids = tuple(grid_of(column, intervals) for column in schema.columns)
    return Design(grids, grouped, pairs, (singles, 1 - singles), intervals)


def noise_of_pairs(plan: PrivacyPlan, wanted: Design) -> list[float]:
    """Standard deviations of the noise of the counts of each pair of columns."""
    if not wanted.pairs:
        return []
    weights = record_weights(wanted.pairs, share=wanted.shares[1], norm=plan.clip_norm)
    return [plan.noise_stddev / weight for weight in weights]


def _num_intervals(plan: PrivacyPlan, num_grouped: int) -> int:
    """As many as have counts that stand out from the noise, were the records spread evenly."""
    noise = plan.noise_stddev / plan.clip_norm * math.sqrt(max(num_grouped, 1) / _SINGLES_SHARE)
    most = plan.num_examples / (_LEAST_NOISES * noise)
    return next((each for each in INTERVALS if each <= most), INTERVALS[-1])


def _num_groups(plan: PrivacyPlan, noise: float) -> int:
    """Of a column's cells; more of them tell more of its values, and less of pairs with others."""
    number = math.sqrt(plan.num_examples / (_PAIR_NOISES * noise)) if noise else math.inf
    return int(min(max(number, _FEWEST_GROUPS), _MOST_GROUPS))


def codes_of(table: EncodedTable, schema: Schema, grids: Sequence[Grid]) -> np.ndarray:
    """The fine cell of each record and column; each depends on that record alone."""
    columns = [
        grid.codes(table.values[column.name], table.missing.get(column.name))
        for column, grid in zip(schema.columns, grids, strict=True)
    ]
    return np.stack(columns, axis=1)


def release(mechanism: CountMechanism | KeptRounds, wanted: Design) -> Releases:
    """Ask for the counts of a design, round by round."""
    singles, pairs = wanted.shares
    noisy: list[NoisyMarginal] = []
    groups = [single_groups(grid) for grid in wanted.grids]
    if singles:
        fine = Cells(tuple(each.of_cell for each in groups))
        noisy += mechanism.release(fine, [Marginal((c,)) for c in wanted.grouped], share=singles)
        rows = _num_rows(mechanism, noisy)
        noises = noise_of_pairs(mechanism.plan, wanted)
        noise = float(np.median(noises)) if noises else 0.0
        num_groups = _num_groups(mechanism.plan, noise)
        for column, each in zip(wanted.grouped, noisy, strict=True):
            groups[column] = group_cells(
                wanted.grids[column],
                each.counts,
                each.variance,
                num_rows=rows,
                num_groups=num_groups,
                noise=noise,
            )
    if pairs:
        cells = Cells(tuple(each.of_cell for each in groups))
        noisy += mechanism.release(cells, wanted.pairs, share=pairs)
    return Releases(wanted.grids, tuple(groups), tuple(noisy), _num_rows(mechanism, noisy))


def _num_rows(mechanism: CountMechanism | KeptRounds, noisy: Sequence[NoisyMarginal]) -> float:
    """The number of records if it is public, else what the counts say it is."""
    plan = mechanism.plan
    if not plan.num_rows_is_private:
        return float(plan.num_examples)
    totals = np.array([each.counts.sum() for each in noisy], float)
    precisions = np.array([1 / (each.variance * each.counts.size) for each in noisy])
    estimate = float(totals @ precisions / precisions.sum())
    return float(np.clip(estimate, 1.0, plan.num_examples))
