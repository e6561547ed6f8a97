"""One process of several: its shard of the records, and which random numbers it has in common.

Records are numbered through all shards, in the order of the processes. Every process draws the same
batches, of all records, and takes the rows that lie in its shard: a record is in a batch exactly
when it would be in that of one process, and the cap holds for the whole batch. The noise is drawn
by process 0 and by nobody else.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Int

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

    @property
    def share(self) -> float:
        """The part of all records."""
        return self.num_rows / self.total

    def most_rows(self, max_batch_size: int) -> int:
        """Room for rows of a batch; an empty shard has one place, with nobody in it."""
        return max(1, min(max_batch_size, self.num_rows))

    def rows_of(self, rows: Int[np.ndarray, "steps batch"]) -> Int[np.ndarray, "steps own"]:
        """The rows of batches that lie in this shard, numbered within it.

        >>> Shard(first=2, num_rows=2, total=5, adds_noise=True).rows_of(np.array([[0, 3, 2, 4]]))
        array([[ 1,  0]], dtype=int32)
        """
        found = np.full((len(rows), self.most_rows(rows.shape[1])), EMPTY, np.int32)
        is_own = (rows >= self.first) & (rows < self.first + self.num_rows)
        found[np.arange(found.shape[1]) < is_own.sum(axis=1)[:, None]] = rows[is_own] - self.first
        return found


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
