"""Progress of a run as arrays: all that it needs to go on as if it had never stopped.

State, trace and sums are releases and what was made of them. The position in the streams of
batches and noise is secret; a run that is over has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from dpvim.inference.engine import State
from dpvim.inference.trace import Trace

_STATE, _TRACE, _OBSERVED, _POSITION = "state", "trace", "observed", "position"


class Progress(NamedTuple):
    """A run after some of its steps.

    Attributes:
        state: Where it is.
        trace: Snapshots so far.
        observed: What was made of the releases so far.
        position: Position in the secret streams after these steps; empty at the end of a run.
    """

    state: State
    trace: Trace
    observed: Mapping[str, np.ndarray]
    position: Mapping[str, np.ndarray]

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Arrays by name, exact to the last bit."""
        leaves = [_plain(leaf) for leaf in jax.tree.leaves(self.state)]
        return {
            **{f"{_STATE}.{i}": leaf for i, leaf in enumerate(leaves)},
            f"{_TRACE}.steps": self.trace.steps,
            **_named(_TRACE, self.trace.params._asdict()),
            **_named(_OBSERVED, self.observed),
            **_named(_POSITION, self.position),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray], like: State) -> Progress:
        """The progress of a run whose state has the form of another one.

        Raises:
            ValueError, KeyError: If the arrays are not those of such a run.
        """
        leaves, structure = jax.tree.flatten(like)
        found = [_as_leaf(arrays[f"{_STATE}.{i}"], leaf) for i, leaf in enumerate(leaves)]
        snapshots = _group(_TRACE, arrays)
        steps = snapshots.pop("steps")
        trace = Trace(steps, type(like.params)(**snapshots))
        state = jax.tree.unflatten(structure, found)
        return cls(state, trace, _group(_OBSERVED, arrays), _group(_POSITION, arrays))


class Keeper(Protocol):
    """Somebody who keeps the progress of a run, so that a crash does not cost it."""

    def load(self, like: State) -> Progress | None:
        """Kept progress to go on from; None at the beginning."""

    def is_due(self) -> bool:
        """True if progress should be kept now."""

    def keep(self, progress: Progress) -> None:
        """Keep the progress in place of what was kept before."""


class _NoKeeper:
    def load(self, like: State) -> None:
        return None

    def is_due(self) -> bool:
        return False

    def keep(self, progress: Progress) -> None:
        pass


NOBODY: Keeper = _NoKeeper()
"""Keeps nothing."""


def _named(group: str, arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {f"{group}.{name}": np.asarray(array) for name, array in arrays.items()}


def _group(group: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    prefix = f"{group}."
    return {
        name.removeprefix(prefix): array
        for name, array in arrays.items()
        if name.startswith(prefix)
    }


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _plain(leaf: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)


def _as_leaf(array: np.ndarray, like: Any) -> Any:
    wanted = _plain(like)
    if (array.shape, array.dtype) != (wanted.shape, wanted.dtype):
        raise ValueError("the state of another run")
    return jax.random.wrap_key_data(jnp.asarray(array)) if _is_key(like) else jnp.asarray(array)
