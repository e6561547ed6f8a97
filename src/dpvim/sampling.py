r"""Poisson sampling by geometric gaps: the cost grows with the batch, not with the data.

All (step, row) pairs of a run are laid in one line, step by step. Independent coins with
probability q on every place of that line are the same as independent Geometric(q) gaps between
the places taken, so one stream of gaps gives the batches of all steps, however many are asked for
at a time.

>>> from dpvim.randomness import SecretStreams
>>> sampler = PoissonSampler(SecretStreams(seed=1), num_rows=1000, sampling_prob=0.01,
...                          max_batch_size=30)
>>> batches = sampler.draw(4)
>>> batches.rows.shape, batches.sizes.shape
((4, 30), (4,))
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dpvim.randomness import SecretStreams

_BLOCK = 4096


class Batches(NamedTuple):
    """Rows of each step's batch; what lies at or beyond a step's size is padding (row 0)."""

    rows: np.ndarray
    sizes: np.ndarray


class PoissonSampler:
    """Draws which rows are in which batch.

    Guarantees:
        Every row is in every step's batch independently with probability `sampling_prob`. A batch
        above `max_batch_size` is cut to a uniformly random subset of that size. The stream does
        not depend on how many steps are drawn at a time. An empty batch is an ordinary one.
    """

    def __init__(
        self,
        streams: SecretStreams,
        *,
        num_rows: int,
        sampling_prob: float,
        max_batch_size: int,
    ) -> None:
        self._gaps = streams.generator("membership")
        self._truncation = streams.generator("truncation")
        self._num_rows = num_rows
        self._sampling_prob = sampling_prob
        self._max_batch_size = max_batch_size
        # Places taken that have not been handed out, relative to the next step's first row;
        # the last one is where the next gap starts.
        self._places = np.array([], dtype=np.int64)
        self._last_place = -1

    def draw(self, num_steps: int) -> Batches:
        """The next `num_steps` batches."""
        end = num_steps * self._num_rows
        self._extend_to(end)
        count = int(np.searchsorted(self._places, end))
        taken, self._places = self._places[:count], self._places[count:] - end
        self._last_place -= end

        step, row = np.divmod(taken, self._num_rows)
        drawn = np.bincount(step, minlength=num_steps)
        starts = np.concatenate([[0], np.cumsum(drawn)[:-1]])
        column = np.arange(count) - starts[step]
        for overfull in np.flatnonzero(drawn > self._max_batch_size):
            column[step == overfull] = self._truncation.permutation(drawn[overfull])
        kept = column < self._max_batch_size
        rows = np.zeros((num_steps, self._max_batch_size), dtype=np.int32)
        rows[step[kept], column[kept]] = row[kept]
        sizes = np.minimum(drawn, self._max_batch_size).astype(np.int32)
        return Batches(rows, sizes)

    def _extend_to(self, end: int) -> None:
        new = [self._places]
        while self._last_place < end:
            gaps = self._gaps.geometric(self._sampling_prob, size=_BLOCK)
            places = self._last_place + np.cumsum(gaps)
            self._last_place = int(places[-1])
            new.append(places)
        self._places = np.concatenate(new)
