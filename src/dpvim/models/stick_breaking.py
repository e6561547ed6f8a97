r"""Stick-breaking and the derivatives of its log-probabilities, for many simplices side by side.

With z the fractions that stick-breaking takes off (`biject_to(simplex)`: z = sigmoid(u - log(levels
left))),

.. math:: \log p[c] = \log z_c + \sum_{i<c} \log(1 - z_i), \qquad
          \frac{d \log p[c]}{du_i} = [i = c] (1 - z_i) - [i < c] z_i.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.nn import log_sigmoid, sigmoid
from jaxtyping import Array, Float

from dpvim.bridge.structured import matmul


class Fractions(NamedTuple):
    """The sticks' logits, and the fractions that they take (z) and leave (1 - z)."""

    sticks: Float[Array, "sticks k"]
    taken: Float[Array, "sticks k"]
    left: Float[Array, "sticks k"]


class StickBreaking:
    """Stick-breaking for groups of levels, side by side.

    Level c takes a part of what the levels before it have left, and the last one takes the rest.
    """

    def __init__(self, sizes: list[int]) -> None:
        self.num_levels = sum(sizes)
        self.first = np.cumsum([0, *sizes])[:-1]
        self._takes = np.zeros((self.num_levels - len(sizes), self.num_levels), np.float32)
        self._leaves = np.zeros_like(self._takes)
        row = 0
        for first, size in zip(self.first, sizes, strict=True):
            for level in range(first, first + size - 1):
                self._takes[row, level] = 1
                self._leaves[row, level + 1 : first + size] = 1
                row += 1
        remaining = [np.arange(size - 1, 0, -1) for size in sizes]
        self._log_remaining = np.log(np.concatenate([np.zeros(0), *remaining])).astype(np.float32)

    def fractions(self, raw: Float[Array, "sticks k"]) -> Fractions:
        sticks = raw - self._log_remaining[:, None]
        return Fractions(sticks, _no_nan(sigmoid(sticks)), _no_nan(sigmoid(-sticks)))

    def log_probs(self, fractions: Fractions) -> Float[Array, "levels k"]:
        return self._accumulate(log_sigmoid(fractions.sticks), log_sigmoid(-fractions.sticks))

    def squared_norms(
        self, fractions: Fractions, scale: Float[Array, "sticks k"]
    ) -> Float[Array, "levels k"]:
        """Squared norms of the derivatives of the levels' log-probabilities, times scale."""
        return self._accumulate((scale * fractions.left) ** 2, (scale * fractions.taken) ** 2)

    def jacobian(self, fractions: Fractions) -> Float[Array, "sticks levels"]:
        """Derivatives of the levels' log-probabilities, for fractions with k = 1."""
        return fractions.left * self._takes - fractions.taken * self._leaves

    def pull_back(
        self, fractions: Fractions, gradient: Float[Array, "levels n"]
    ) -> Float[Array, "sticks n"]:
        """A gradient by the levels' log-probabilities, carried to the raw values."""
        own = matmul(self._takes.astype(gradient.dtype), gradient)
        later = matmul(self._leaves.astype(gradient.dtype), gradient)
        return own * fractions.left - later * fractions.taken

    def _accumulate(self, taking: Array, leaving: Array) -> Float[Array, "levels k"]:
        matrix = np.concatenate([self._takes, self._leaves]).T
        return matmul(matrix, jnp.concatenate([taking, leaving]))


def _no_nan(numbers: Array) -> Array:
    """Replace NaN by zero: with such a latent no record counts, and the sum is to be zero."""
    return jnp.where(jnp.isnan(numbers), 0.0, numbers)
