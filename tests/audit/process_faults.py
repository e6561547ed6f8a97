"""Faults of steps over several processes: noise, shards and batches that do not fit together."""

from __future__ import annotations

from typing import Any

import numpy as np
from planting import Fault, patch

from dpvim.inference import sharing
from dpvim.inference.engine import Engine
from dpvim.inference.sharing import Sharing
from dpvim.privacy.sampling import EMPTY
from dpvim.privacy.shards import Shard
from dpvim.privacy.source import BatchNoiseSource


def _noise_in_every_process() -> Any:
    """Each adds noise of its own to its share, and all are summed."""

    def make(old: Any) -> Any:
        def faulty(self: Sharing, point: Any, share: Any) -> Any:
            shares = np.asarray(share).view(np.float64)[:, 0]
            noisy = shares + np.random.default_rng(self.shard.first).normal(size=shares.shape)
            return old(self, point, noisy.view(np.uint32).reshape(-1, 2))

        return faulty

    return patch(Sharing, "_meet", make)


def _noise_of_its_own() -> Any:
    """Each takes the noise that it drew: nobody but process 0 drew any."""

    def make(old: Any) -> Any:
        return lambda self, program: program

    return patch(Sharing, "chunk", make)


def _record_in_two_shards() -> Any:
    """Shards overlap by a record."""

    def make(old: Any) -> Any:
        def faulty(self: Shard, rows: np.ndarray, size: int) -> np.ndarray:
            longer = old(self._replace(num_rows=self.num_rows + 1), rows, size)
            return np.where(longer == EMPTY, EMPTY, np.minimum(longer, self.num_rows - 1))

        return faulty

    return patch(Shard, "rows_of", make)


def _shard_summed_twice() -> Any:
    return patch(sharing, "_sum_of", lambda old: lambda shares: old([*shares, shares[-1]]))


def _shard_left_out() -> Any:
    return patch(sharing, "_sum_of", lambda old: lambda shares: old(shares[:1]))


def _same_batches_in_both() -> Any:
    """Each draws from its own rows, with the key that all have in common."""

    def make(old: Any) -> Any:
        def faulty(self: Engine, num_rows: int, streams: Any) -> Any:
            if self.sharing is None:
                return old(self, num_rows, streams)
            released = self.variant.num_released
            return BatchNoiseSource(self.plan, streams, num_rows=num_rows, num_released=released)

        return faulty

    return patch(Engine, "source", make)


PROCESS_FAULTS = [
    Fault("noise in every process", _noise_in_every_process, "processes"),
    Fault("a process takes its own noise", _noise_of_its_own, "processes"),
    Fault("record in two shards", _record_in_two_shards, "processes"),
    Fault("shard summed twice", _shard_summed_twice, "processes"),
    Fault("shard left out", _shard_left_out, "processes"),
    Fault("the same batches in both processes", _same_batches_in_both, "processes"),
]
