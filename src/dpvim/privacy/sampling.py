r"""Poisson sampling by geometric gaps: the cost grows with the batch, not with the data.

All (step, row) pairs of a run are laid in one line, step by step. Independent coins with
probability q on every place of that line are the same as independent Geometric(q) gaps between
the places taken, so one stream of gaps gives the batches of all steps, however many are asked for
at a time.

>>> from dpvim.privacy.randomness import SecretStreams
>>> sampler = PoissonSampler(SecretStreams(seed=1), num_rows=1000, sampling_prob=0.01,
...                          max_batch_size=30)
>>> sampler.draw(4).shape
(4, 30)
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dpvim.privacy.randomness import SecretStreams, move_to, position_of

_BLOCK = 4096
# Steps are drawn a few at a time, so many places or one step: what is worked out on the way stays
# in the caches, and in memory that is not asked of the system anew.
_PLACES_AT_A_TIME = 2**16
# A block of gaps must not overflow 64 bits. Longer gaps end where no run comes: at the smallest
# probability that plans allow, one gap in e^10^6 is as long.
_LONGEST_GAP = 2**50


EMPTY = -1
"""In the place of a row's number: nobody is there."""


class PoissonSampler:
    """Draws which rows are in which batch.

    Guarantees:
        Every row is in every step's batch independently with probability `sampling_prob`. A batch
        above `max_batch_size` is cut to a uniformly random subset of that size. The stream does
        not depend on how many steps are drawn at a time. An empty batch is an ordinary one.
        With `shuffled` the rows of a batch stand in uniformly random places, so that where one
        stands says nothing about who else is there: without a record, all others have the places
        that they have with it.
    """

    def __init__(
        self,
        streams: SecretStreams,
        *,
        num_rows: int,
        sampling_prob: float,
        max_batch_size: int,
        shuffled: bool = False,
    ) -> None:
        self._shuffle = streams.generator("places") if shuffled else None
        self._gaps = streams.generator("membership")
        self._truncation = streams.generator("truncation")
        self._num_rows = num_rows
        self._sampling_prob = sampling_prob
        self._max_batch_size = max_batch_size
        # Places taken that have not been handed out, relative to the next step's first row;
        # the last one is where the next gap starts.
        self._places = np.array([], dtype=np.int64)
        self._last_place = -1

    def draw(self, num_steps: int) -> np.ndarray:
        """Row numbers of the next batches, shape [num_steps, max_batch_size]; `EMPTY` places."""
        rows = np.full((num_steps, self._max_batch_size), EMPTY, dtype=np.int32)
        at_a_time = max(1, _PLACES_AT_A_TIME // self._max_batch_size)
        for first in range(0, num_steps, at_a_time):
            self._draw_into(rows[first : first + at_a_time])
        return rows

    def _draw_into(self, rows: np.ndarray) -> None:
        """The next batches, one for each of these rows of empty places."""
        firsts = self._num_rows * np.arange(len(rows) + 1)
        self._extend_to(int(firsts[-1]))
        ends = np.searchsorted(self._places, firsts[1:])
        drawn = np.diff(ends, prepend=0)
        taken = self._places[: ends[-1]] - np.repeat(firsts[:-1], drawn)
        self._places = self._places[ends[-1] :] - firsts[-1]
        self._last_place -= int(firsts[-1])

        overfull = np.flatnonzero(drawn > self._max_batch_size)
        if len(overfull):
            kept = np.ones(len(taken), bool)
            for step in overfull:
                order = self._truncation.permutation(drawn[step])
                kept[ends[step] - drawn[step] : ends[step]] = order < self._max_batch_size
            taken = taken[kept]
        rows[np.arange(self._max_batch_size) < drawn[:, None]] = taken
        if self._shuffle is not None:
            self._shuffle.permuted(rows, axis=1, out=rows)

    def position(self) -> dict[str, np.ndarray]:
        """Position in the streams, to go on from with the same keys; secret."""
        found = {name: position_of(stream) for name, stream in self._streams().items()}
        return found | {"places": self._places.copy(), "last_place": np.array(self._last_place)}

    def move_to(self, position: Mapping[str, np.ndarray]) -> None:
        """Go on from a position."""
        for name, stream in self._streams().items():
            move_to(stream, position[name])
        self._places = position["places"].astype(np.int64)
        self._last_place = int(position["last_place"])

    def _streams(self) -> dict[str, np.random.Generator]:
        streams = {"gaps": self._gaps, "truncation": self._truncation}
        return streams if self._shuffle is None else streams | {"shuffle": self._shuffle}

    def _extend_to(self, end: int) -> None:
        new = [self._places]
        while self._last_place < end:
            gaps = _geometric(self._gaps, self._sampling_prob, _BLOCK)
            places = self._last_place + np.cumsum(gaps)
            self._last_place = int(places[-1])
            new.append(places)
        self._places = np.concatenate(new)


def _geometric(generator: np.random.Generator, prob: float, count: int) -> np.ndarray:
    """Geometric(prob) numbers, 1 and more, by inversion: the whole part of an exponential variable.

    For probabilities below a third `generator.geometric` draws the same numbers, with a logarithm
    for each. Gaps beyond 2^50 are cut to that.
    """
    with np.errstate(divide="ignore"):  # prob 1 has an infinite rate: all gaps are 1
        rate = -np.log1p(-prob)
    gaps = generator.standard_exponential(count) / rate
    return 1 + np.minimum(gaps, _LONGEST_GAP).astype(np.int64)
