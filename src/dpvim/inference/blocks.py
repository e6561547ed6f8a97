"""Blocks of the latent: coordinates of different blocks are in no term of the likelihood together.

Their mixed second derivatives are zero whatever the data, so the curvature is block-diagonal, and
given a prior that does the same so is the posterior. `dpvim.bridge.find_blocks` finds them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

# The label of coordinates that the likelihood does not depend on.
NO_BLOCK = -1


class EqualBlocks(NamedTuple):
    """Blocks of one size.

    Attributes:
        members: The coordinates of each.
        full: True if products of different coordinates are kept.
        first: Place of their first product among all products that are kept.
    """

    members: Int[np.ndarray, "blocks size"]
    full: bool
    first: int

    @property
    def num_products(self) -> int:
        """Number of products that are kept."""
        return self.members.size * (self.members.shape[1] if self.full else 1)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The blocks of a latent; equal and hashable by value.

    Attributes:
        labels: The number of each coordinate's block, in the order of their first coordinates;
            -1 for coordinates that the likelihood does not depend on.

    >>> blocks = Blocks.from_labels([7, 7, -1, 3, 7])
    >>> blocks.labels, [list(map(int, block)) for block in blocks.members]
    ((0, 0, -1, 1, 0), [[0, 1, 4], [3]])
    """

    labels: tuple[int, ...]

    @classmethod
    def one(cls, dim: int) -> Blocks:
        """All coordinates in one block: always right, whatever the model."""
        return cls((0,) * dim)

    @classmethod
    def from_labels(cls, labels: Iterable[int]) -> Blocks:
        """Blocks of coordinates with equal labels."""
        numbers: dict[int, int] = {NO_BLOCK: NO_BLOCK}
        return cls(tuple(numbers.setdefault(int(label), len(numbers) - 1) for label in labels))

    @functools.cached_property
    def members(self) -> list[Int[np.ndarray, " size"]]:
        """The coordinates of each block."""
        labels = np.array(self.labels, int)
        return [np.flatnonzero(labels == number) for number in range(max(self.labels) + 1)]

    @property
    def outside(self) -> Int[np.ndarray, " n"]:
        """Coordinates of no block."""
        return np.flatnonzero(np.array(self.labels) == NO_BLOCK)

    @property
    def largest(self) -> int:
        """Size of the largest block."""
        return max((len(block) for block in self.members), default=0)

    def by_size(self, largest_full: int) -> list[EqualBlocks]:
        """Blocks of equal sizes together, with the products that are kept of each.

        Of blocks with more than `largest_full` coordinates, and of coordinates of no block, squares
        alone are kept.
        """
        singles: Sequence[np.ndarray] = [self.outside[i : i + 1] for i in range(len(self.outside))]
        every = [*self.members, *singles]
        groups, first = [], 0
        for size in sorted({len(block) for block in every}):
            members = np.stack([block for block in every if len(block) == size])
            groups.append(EqualBlocks(members, size <= largest_full, first))
            first += groups[-1].num_products
        return groups
