"""The host's randomness of a run: which records are in a batch, and the noise of a release."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from dpvim.privacy.noise import RoundedGaussianNoise
from dpvim.privacy.plan import Plan
from dpvim.privacy.randomness import SecretStreams
from dpvim.privacy.sampling import PoissonSampler
from dpvim.privacy.shards import Shard


class BatchNoiseSource:
    """The host's side of a run: batches and noise for the next steps, in order.

    Guarantees:
        No noise is handed out twice: a source cannot be copied, stored, or used by a process
        other than the one that made it. Its `position` goes into checkpoints alone, from which
        one run goes on, on the same data (`dpvim.checkpoints`). With a `shard` batches are those
        of all records, of which it hands out the rows of the shard, as microbatches of so many
        rows need them; where the noise is another process's to add, none is drawn.
    """

    def __init__(
        self,
        plan: Plan,
        streams: SecretStreams,
        *,
        num_rows: int,
        num_released: int,
        shard: Shard | None = None,
        microbatch: int = 0,
    ) -> None:
        self._takes_all = plan.sampling_prob == 1 and not plan.num_rows_is_private
        self.batch_size = num_rows if self._takes_all else plan.max_batch_size
        self._shard, self._microbatch = shard, microbatch
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._sampler = PoissonSampler(
            streams,
            num_rows=num_rows,
            sampling_prob=plan.sampling_prob,
            max_batch_size=plan.max_batch_size,
            shuffled=plan.num_rows_is_private,
        )
        self._noise = RoundedGaussianNoise(
            streams,
            stddev=plan.noise_stddev if shard is None or shard.adds_noise else 0.0,
            grid=plan.noise_grid,
            size=num_released,
        )

    def draw(self, num_steps: int, capacity: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows and noise of `num_steps` steps, padded with zeros to `capacity` steps."""
        if os.getpid() != self._process:
            raise RuntimeError(
                "a run was forked: its noise would be used twice. Start it in the new process."
            )
        with self._lock:
            drawn = (self._rows(num_steps), self._noise.draw(num_steps))
        return _padded(drawn[0], capacity), _padded(drawn[1], capacity)

    def _rows(self, num_steps: int) -> np.ndarray:
        if self._takes_all:  # every row, every step: no row numbers are needed
            return np.zeros((num_steps, 0), np.int32)
        rows = self._sampler.draw(num_steps)
        return rows if self._shard is None else self._shard.rows_of(rows, self._microbatch)

    def position(self) -> dict[str, np.ndarray]:
        """Position in the streams after what was drawn so far; secret."""
        with self._lock:
            return self._sampler.position() | self._noise.position()

    def move_to(self, position: Mapping[str, np.ndarray]) -> None:
        """Go on from the position of a source with the same streams."""
        with self._lock:
            self._sampler.move_to(position)
            self._noise.move_to(position)

    def __reduce__(self) -> Any:
        raise TypeError("a source of noise is not copied or stored: noise would be used twice.")


def _padded(drawn: np.ndarray, capacity: int) -> np.ndarray:
    """With zeros after the last step. Memory that nobody has written to takes no time."""
    if len(drawn) == capacity:  # as most chunks are; nothing is copied
        return drawn
    padded = np.zeros((capacity, *drawn.shape[1:]), drawn.dtype)
    padded[: len(drawn)] = drawn
    return padded
