"""Blocks: their numbers, and which products of a latent are kept."""

from __future__ import annotations

import numpy as np
import pytest
from release_cases import plan_of

from dpvim.inference.blocks import Blocks
from dpvim.inference.release_sums import LARGEST_FULL_DIM, Collector, ReleaseSums

RNG = np.random.default_rng(0)


def blocks_of_sizes(sizes, outside=0):
    """Blocks whose coordinates stand in a random order."""
    labels = np.repeat([*range(len(sizes)), -1], [*sizes, outside])
    return Blocks.from_labels(RNG.permutation(labels))


def test_numbers_follow_the_first_coordinates():
    assert Blocks.from_labels([4, 4, 1, 4, -1, 0]).labels == (0, 0, 1, 0, -1, 2)
    assert Blocks.one(3) == Blocks.from_labels([9, 9, 9])
    assert Blocks.from_labels([-1, -1]).largest == 0


@pytest.mark.parametrize(
    "blocks",
    [
        blocks_of_sizes([3, 2, 2, 1], outside=2),  # a small latent: all products are kept
        blocks_of_sizes([80, 50, 50, 1, 1], outside=3),
        blocks_of_sizes([LARGEST_FULL_DIM + 1, 5]),
        blocks_of_sizes([1] * (LARGEST_FULL_DIM + 2)),
        Blocks.one(LARGEST_FULL_DIM + 1),
    ],
    ids=["small", "several", "too large", "singles", "one"],
)
def test_a_block_has_the_products_of_its_own_coordinates(blocks):
    dim, plan = len(blocks.labels), plan_of(num_steps=32)
    x, g = RNG.normal(size=(2, 32, dim))
    collector = Collector(dim, plan, blocks)
    collector.add(0, 32, x, g * plan.sampling_prob)
    sums = collector.total()
    assert all(
        a.shape == b.shape for a, b in zip(sums, ReleaseSums.zeros(dim, blocks), strict=True)
    )
    for number, members in enumerate(blocks.members):
        found = sums.of_block(number, blocks)
        own_x, own_g = x[:, members], g[:, members]
        wanted = own_x.T @ own_x, own_x.T @ own_g
        if len(members) > LARGEST_FULL_DIM:
            wanted = tuple(map(np.diagonal, wanted))
        np.testing.assert_allclose(found.point_point.sum(axis=0), wanted[0])
        np.testing.assert_allclose(found.point_gradient.sum(axis=0), wanted[1])
        np.testing.assert_allclose(found.point.sum(axis=0), own_x.sum(axis=0))
        np.testing.assert_allclose(found.gradient_squared.sum(axis=0), (own_g**2).sum(axis=0))


def test_memory_grows_with_the_blocks():
    """3000 coordinates in blocks of 30: a hundredth of all products."""
    sums = ReleaseSums.zeros(3000, blocks_of_sizes([30] * 100))
    assert sums.point_point.shape[1] == 3000 * 30
