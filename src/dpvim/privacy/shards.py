"""One process of several: its shard of the records, and which random numbers it has in common.

Records are numbered through all shards, in the order of the processes. Every process draws the same
batches, of all records, and takes the rows that lie in its shard: a record is in a batch exactly
when it would be in that of one process, and the cap holds for the whole batch. The noise is drawn
by process 0 and by nobody else.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from dpvim.privacy.randomness import SecretStreams
from dpvim.privacy.sampling import EMPTY

# What all processes draw alike. Anything else, above all the noise, is a process's own.
_IN_COMMON = ("membership", "truncation")


class Shard(NamedTuple):
    """The records of one process.

    Attributes:
        first: Number of the first one among all records.
        num_rows: How many there are; none is a number, too.
        total: Number of all records.
        adds_noise: True for one process of all.
    """

    first: int
    num_rows: int
    total: int
    adds_noise: bool

    def rows_of(
        self, rows: Int[np.ndarray, "steps batch"], size: int
    ) -> Int[np.ndarray, "steps batch"]:
        """The rows of batches that lie in this shard, numbered within it.

        They stay in their places where a batch is one microbatch of `size`, and move to the front
        where it is several: those behind them need not be worked on.

        >>> shard = Shard(first=2, num_rows=2, total=5, adds_noise=True)
        >>> rows = np.array([[0, 3, 2, 4]], np.int32)
        >>> shard.rows_of(rows, size=16), shard.rows_of(rows, size=3)
        (array([[-1,  1,  0, -1]], dtype=int32), array([[ 1,  0, -1, -1]], dtype=int32))
        """
        is_own = (rows >= self.first) & (rows < self.first + self.num_rows)
        own = np.where(is_own, rows - self.first, EMPTY).astype(np.int32)
        if rows.shape[1] <= size:
            return own
        found = np.full_like(own, EMPTY)
        found[np.arange(rows.shape[1]) < is_own.sum(axis=1)[:, None]] = own[is_own]
        return found

    def padding(self, size: int) -> tuple[int, int]:
        """Places with nobody in them, before the records and behind them, where all are taken.

        If all shards together fit into a microbatch of `size` each has its place in it; else there
        is a whole microbatch at least.
        """
        if self.total <= size:
            return self.first, self.total - self.first - self.num_rows
        return 0, max(0, size - self.num_rows)

    def is_absent(self, size: int) -> Bool[np.ndarray, " rows"]:
        """True for the places of `padding`."""
        before, after = self.padding(size)
        return np.repeat([True, False, True], [before, self.num_rows, after])


class ShardStreams(SecretStreams):
    """Streams of one process: batches from what all have in common, all else from its own.

    Args:
        common: The same in all processes, and known to nobody else.
        own: Of this process alone.
    """

    def __init__(self, common: SecretStreams, own: SecretStreams) -> None:
        self._common, self._own = common, own

    def generator(self, purpose: str) -> np.random.Generator:
        return (self._common if purpose in _IN_COMMON else self._own).generator(purpose)

    def __repr__(self) -> str:
        return f"ShardStreams({self._common!r}, {self._own!r})"
