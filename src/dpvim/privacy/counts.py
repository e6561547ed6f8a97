r"""Counts of declared cells: the door between a table and a release, beside that of the gradients.

A record stands in one cell of each marginal (a set of columns). Its share of a release is one
vector: an entry :math:`w_m` for its cell of every marginal m, so its norm is
:math:`\sqrt{\sum_m w_m^2}`, whatever the record holds. A release may be made in rounds, and later
rounds may ask for what earlier ones suggest. Each round has a public share of the squared norm; the
shares sum to at most one. So all rounds together are one Gaussian mechanism with a record's norm at
most the plan's clip norm (Gaussian mechanisms of the same noise compose exactly, also adaptively):
one plan with one step, one noise multiplier, one event for the accountant.

Instead of :math:`w_m n + \sigma z` what is released is :math:`n + round(\sigma z / w_m)`: the same
in other units, rounded to integers. Counts are integers, so :math:`n + round(z) = round(n + z)`,
and rounding is post-processing. Nothing here is in floating point but the noise.
"""

from __future__ import annotations

import dataclasses
import math
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from jaxtyping import Int

from dpvim.privacy.noise import rounded_gaussian
from dpvim.privacy.plan import PrivacyPlan
from dpvim.privacy.randomness import SecretStreams, move_to, position_of
from dpvim.types import BudgetExceededError

Codes: TypeAlias = Int[np.ndarray, "rows columns"]
"""A piece of a table: for each record and column a whole number."""
Pieces: TypeAlias = Callable[[], Iterable[Codes]]
"""Gives the table piece by piece, from the start at every call."""

# Shares that were computed may exceed one by rounding; the noise has a margin for it.
_ROUNDING = 1e-9
# Normals are made of 53 bits. Whole numbers are as fine a grid for noise up to this as that of the
# gradients is; far beyond, not all of them would be reached, and those that are would tell.
LARGEST_STDDEV = 2.0**25
# The variance of rounding to integers.
_ROUNDING_VARIANCE = 1 / 12


def counts_plan(
    *, num_examples: int, relation: Any, max_rows_per_person: int | None = None
) -> PrivacyPlan:
    """The plan of a release of counts, not yet calibrated: one step, a record's norm is one."""
    return PrivacyPlan(
        num_examples=num_examples,
        sampling_prob=1.0,
        num_steps=1,
        clip_norm=1.0,
        relation=relation,
        max_rows_per_person=max_rows_per_person,
    )


class Marginal(NamedTuple):
    """Columns that are counted together, and the weight of a record in it, up to a factor."""

    columns: tuple[int, ...]
    weight: float = 1.0


class NoisyMarginal(NamedTuple):
    """Released counts of a marginal's cells. Public.

    Attributes:
        columns: Those that are counted together.
        counts: The cells' counts with noise; an axis for each column.
        variance: Of the noise of each count, its rounding included.
    """

    columns: tuple[int, ...]
    counts: np.ndarray
    variance: float


class Cells(NamedTuple):
    """The cells of the columns: for each column, the cell of each code. Public."""

    of_code: tuple[Int[np.ndarray, " codes"], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(int(cells.max()) + 1 for cells in self.of_code)


class SourceOfCounts(Protocol):
    """A table that can be counted, wherever it is: in memory, in a file, in a database."""

    def count(self, cells: Cells, marginals: Sequence[Marginal]) -> list[np.ndarray]:
        """Exact counts, an array with an axis for each column of each marginal; private.

        Every record is in one cell of each marginal, whatever it holds.
        """
        ...


@dataclasses.dataclass(frozen=True)
class InPieces:
    """A table that is counted piece by piece in this process."""

    pieces: Pieces

    def count(self, cells: Cells, marginals: Sequence[Marginal]) -> list[np.ndarray]:
        """Exact counts; private."""
        return count_cells(self.pieces(), cells, marginals)


class CountMechanism:
    """Releases noisy counts of one table, in rounds, within one plan.

    Args:
        plan: One step on all records; its clip norm is the norm of a record's share.
        streams: Randomness of the noise.
        table: With one row for each record; if records are persons, for each person. In pieces, or
            something else that counts.

    Guarantees:
        The rounds together are the Gaussian mechanism of the plan. Noise is used once: a mechanism
        cannot be copied, stored, or used by another process than the one that made it.
    """

    def __init__(
        self, plan: PrivacyPlan, streams: SecretStreams, table: Pieces | SourceOfCounts
    ) -> None:
        if plan.num_steps != 1 or plan.sampling_prob != 1:
            raise ValueError(
                f"plan: expected one step on all records, got {plan.num_steps} steps at sampling "
                f"probability {plan.sampling_prob:g}."
            )
        self.plan = plan
        self._spent = Fraction()
        self._lock = threading.Lock()
        self._source: SourceOfCounts = InPieces(table) if callable(table) else table
        self._generator = streams.generator("counts")
        self._process = os.getpid()

    def release(
        self, cells: Cells, marginals: Sequence[Marginal], *, share: float
    ) -> list[NoisyMarginal]:
        """Count the table in these cells, and release the counts with noise.

        Args:
            cells: Of each column; a function of what is public or was released.
            marginals: What is counted; every column of a marginal once.
            share: Of the squared norm of a record's share; with those of earlier rounds at most 1.
        """
        if os.getpid() != self._process:
            raise RuntimeError("a release was forked: its noise would be used twice.")
        weights = record_weights(marginals, share=share, norm=self.plan.clip_norm)
        _check_scales(self.plan.noise_stddev, weights)
        # Spent before the data are looked at: whatever goes wrong below, it is gone.
        self._spend(share)
        counts = self._source.count(cells, marginals)
        self.plan.check_num_rows(_num_records(counts, cells, marginals))
        return [self._noisy(*each) for each in zip(marginals, counts, weights, strict=True)]

    def position(self) -> np.ndarray:
        """Position in the stream of noise, for checkpoints alone; secret."""
        return position_of(self._generator)

    def skip(self, share: float, position: np.ndarray | None) -> None:
        """Count a round as spent that this run released before it crashed, and was kept.

        Args:
            share: Of the round.
            position: In the stream of noise after it; None if no round will follow.
        """
        self._spend(share)
        if position is not None:
            move_to(self._generator, position)

    @property
    def share_spent(self) -> float:
        """By all rounds so far."""
        return float(self._spent)

    def _spend(self, share: float) -> None:
        """Exact, so that no share is too small to count, and for one thread after the other."""
        with self._lock:
            if self._spent + Fraction(share) > 1 + _ROUNDING:
                raise BudgetExceededError(
                    f"share: expected at most {1 - self.share_spent:.3g}, which is what earlier "
                    f"rounds left, got {share:g}."
                )
            self._spent += Fraction(share)

    def _noisy(self, marginal: Marginal, counts: np.ndarray, weight: float) -> NoisyMarginal:
        stddev = self.plan.noise_stddev / weight
        noise = rounded_gaussian(self._generator, stddev, counts.shape)
        released = counts + noise.astype(np.int64)
        return NoisyMarginal(marginal.columns, released, stddev**2 + _ROUNDING_VARIANCE)

    def __reduce__(self) -> Any:
        raise TypeError("a source of noise is not copied or stored: noise would be used twice.")


def record_weights(marginals: Sequence[Marginal], *, share: float, norm: float) -> list[float]:
    """Weights of a record in each marginal: their squares sum to ``share * norm**2``."""
    if not marginals:
        raise ValueError("marginals: expected at least one, got none.")
    if not 0 < share <= 1 + _ROUNDING:
        raise ValueError(f"share: expected more than 0 and at most 1, got {share:g}.")
    for marginal in marginals:
        if not (marginal.weight > 0 and math.isfinite(marginal.weight)):
            raise ValueError(f"weight: expected a positive number, got {marginal.weight!r}.")
        if not marginal.columns or len(set(marginal.columns)) < len(marginal.columns):
            raise ValueError(f"columns: expected each once, got {marginal.columns}.")
    length = math.hypot(*(marginal.weight for marginal in marginals))
    # A little less than the whole, so that no rounding makes a record longer than it may be.
    factor = (1 - _ROUNDING) * norm * math.sqrt(share) / length
    return [factor * marginal.weight for marginal in marginals]


def _check_scales(noise_stddev: float, weights: Sequence[float]) -> None:
    """Refuse noise that whole numbers in double precision cannot hold."""
    if min(weights) * LARGEST_STDDEV < noise_stddev:
        raise ValueError(
            f"weight: expected noise of at most {LARGEST_STDDEV:.2g} records on a count, got more. "
            "Ask for fewer marginals, with weights that are less far apart, or for a larger "
            "epsilon."
        )


def _num_records(counts: Sequence[np.ndarray], cells: Cells, marginals: Sequence[Marginal]) -> int:
    """Number of records that were counted: in each marginal the same, each in one cell."""
    shapes = [tuple(cells.sizes[column] for column in each.columns) for each in marginals]
    totals = {int(each.sum()) for each in counts}
    if (
        [each.shape for each in counts] != shapes
        or any(each.dtype.kind not in "iu" or (each < 0).any() for each in counts)
        or len(totals) != 1
    ):
        raise ValueError(
            "table: expected every record in one cell of each marginal, got counts that cannot be: "
            "the source of counts is wrong. Nothing was released."
        )
    return totals.pop()


def count_cells(
    pieces: Iterable[Codes], cells: Cells, marginals: Sequence[Marginal]
) -> list[np.ndarray]:
    """Exact counts; private. Every record is in one cell of each marginal, whatever it holds."""
    sizes = cells.sizes
    shapes = [tuple(sizes[column] for column in m.columns) for m in marginals]
    totals = [np.zeros(math.prod(shape), np.int64) for shape in shapes]
    for piece in pieces:
        placed = [
            # Codes that no cell was declared for are the last one's: no record is an error.
            np.take(of_code, piece[:, column], mode="clip").astype(np.int64)
            for column, of_code in enumerate(cells.of_code)
        ]
        for total, shape, marginal in zip(totals, shapes, marginals, strict=True):
            at = placed[marginal.columns[0]]
            for column, size in zip(marginal.columns[1:], shape[1:], strict=True):
                at = at * size + placed[column]
            total += np.bincount(at, minlength=len(total))
    return [total.reshape(shape) for total, shape in zip(totals, shapes, strict=True)]
