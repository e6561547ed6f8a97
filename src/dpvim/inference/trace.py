"""The variational parameters as a run went on. Every snapshot is a DP output."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
from jaxtyping import Float, Int

from dpvim.inference.families import Params


@dataclasses.dataclass(frozen=True)
class Trace:
    """Snapshots of the parameters; the first one is the initial value.

    A fit has one: ``fit.trace``. `dpvim.fit` has an example.

    Attributes:
        steps: After how many steps each snapshot was taken, starting with 0.
        params: The family's parameters, every array with a leading axis of snapshots.
    """

    steps: Int[np.ndarray, " snapshots"]
    params: Params

    @property
    def loc(self) -> Float[np.ndarray, "snapshots d"]:
        """Means of the latent."""
        return self.params.loc

    @property
    def raw_scale(self) -> Float[np.ndarray, "snapshots d"]:
        """T^-1 of the standard deviations (mean-field)."""
        return self._parameter("raw_scale")

    @property
    def raw_tril(self) -> Float[np.ndarray, "snapshots d d"]:
        """The Cholesky factor with T^-1 of its diagonal (full-rank)."""
        return self._parameter("raw_tril")

    def _parameter(self, name: str) -> np.ndarray:
        if name not in self.params._fields:
            raise AttributeError(f"there is no {name} in this family; it has {self.params._fields}")
        return np.asarray(getattr(self.params, name))

    @property
    def every(self) -> int:
        """Steps between snapshots."""
        return int(self.steps[1] - self.steps[0]) if len(self) > 1 else 1

    @property
    def last(self) -> Params:
        """The newest snapshot."""
        return self[-1]

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, index: int) -> Params:
        return jax.tree.map(lambda leaf: leaf[index], self.params)

    @classmethod
    def stack(cls, steps: list[int], snapshots: list[Params]) -> Trace:
        """From pieces, each with a leading axis of snapshots."""
        stacked = jax.tree.map(lambda *leaves: np.concatenate(leaves), *snapshots)
        return cls(np.asarray(steps), stacked)

    def concat(self, later: Trace) -> Trace:
        """This trace continued by another one that starts where it ends."""
        if later.steps[0] != self.steps[-1]:
            raise ValueError(f"a trace from step {later.steps[0]} does not follow {self.steps[-1]}")
        tail = jax.tree.map(lambda leaf: leaf[1:], later.params)
        return Trace.stack([*self.steps.tolist(), *later.steps[1:].tolist()], [self.params, tail])


def default_trace_every(*, num_steps: int, num_params: int) -> int:
    """About 2000 snapshots, fewer where they would take more than 256 MB.

    >>> default_trace_every(num_steps=20_000, num_params=200)
    10
    """
    snapshots = max(2, min(2000, 256 * 2**20 // (4 * num_params)))
    return max(1, -(-num_steps // snapshots))
