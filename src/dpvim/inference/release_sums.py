r"""Running sums of what a run released, and where: noisy gradients at known points.

An aligned release, divided by the sampling probability, is

.. math:: G_t = \nabla \log p(D \mid \theta_t) + e_t,

with a known point :math:`\theta_t` and noise of a known size. Where the log-likelihood is
quadratic that is a linear regression of G on theta, for which the sums below are sufficient. They
are kept for consecutive windows of the run, so that whoever reads them can tell the way there from
the place. All of it is post-processing of DP outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dpvim._compile import jit_quickly
from dpvim.inference.blocks import Blocks
from dpvim.privacy.plan import Plan
from dpvim.types import Scalar

NUM_WINDOWS = 16
# Of larger blocks products of different coordinates are not kept: 16 windows of two matrices would
# be 8 MB and more, in memory and in every saved fit.
LARGEST_FULL_DIM = 128
# Steps that are summed at a time.
_BLOCK_STEPS = 256


class ReleaseSums(NamedTuple):
    """Sums over the steps of each window, in double precision.

    Attributes:
        steps: Number of steps.
        point: Sum of theta.
        gradient: Sum of G, a noisy gradient of the whole data's log-likelihood.
        point_point: Sum of theta theta'; for a large latent of its entries within blocks, or of
            its diagonal (`dpvim.inference.blocks`).
        point_gradient: The same of theta G'.
        gradient_squared: Sum of the squares of G.
    """

    steps: Float[np.ndarray, " windows"]
    point: Float[np.ndarray, "windows d"]
    gradient: Float[np.ndarray, "windows d"]
    point_point: Float[np.ndarray, "windows d d"] | Float[np.ndarray, "windows products"]
    point_gradient: Float[np.ndarray, "windows d d"] | Float[np.ndarray, "windows products"]
    gradient_squared: Float[np.ndarray, "windows d"]

    @classmethod
    def zeros(cls, dim: int, blocks: Blocks | None = None) -> ReleaseSums:
        """Sums of nothing: with products of all coordinates if the latent is small enough, else
        with those of coordinates of one block."""
        vector = (NUM_WINDOWS, dim)
        product: tuple[int, ...] = (*vector, dim)
        if dim > LARGEST_FULL_DIM:
            groups = (blocks or Blocks.one(dim)).by_size(LARGEST_FULL_DIM)
            product = (NUM_WINDOWS, sum(group.num_products for group in groups))
        shapes = (vector[:1], vector, vector, product, product, vector)
        return cls(*(np.zeros(shape) for shape in shapes))

    @property
    def dim(self) -> int:
        """d."""
        return self.point.shape[1]

    @property
    def is_full(self) -> bool:
        """True if products of different coordinates were kept."""
        return self.point_point.ndim == 3

    @property
    def are_enough(self) -> bool:
        """True if there are more steps than a regression on them has coefficients."""
        counted = self.steps[self.steps > 1]
        return bool(counted.sum() >= 2 * (self.dim + len(counted)) + 8)

    def of_block(self, block: int, blocks: Blocks) -> ReleaseSums:
        """The sums of one block: all of its products, or squares alone if it is too large."""
        members = blocks.members[block]
        products = [self._products_of(part, members, blocks) for part in self[3:5]]
        vectors = (part[:, members] for part in (self.point, self.gradient, self.gradient_squared))
        point, gradient, squares = vectors
        return ReleaseSums(self.steps, point, gradient, products[0], products[1], squares)

    def _products_of(self, part: np.ndarray, members: np.ndarray, blocks: Blocks) -> np.ndarray:
        if self.is_full:
            return part[:, members[:, None], members]
        size = len(members)
        group = next(g for g in blocks.by_size(LARGEST_FULL_DIM) if g.members.shape[1] == size)
        shape = (len(part), len(group.members), *(size,) * (1 + group.full))
        found = part[:, group.first : group.first + group.num_products].reshape(shape)
        return found[:, np.flatnonzero((group.members == members).all(axis=1))[0]]

    def concat(self, later: ReleaseSums) -> ReleaseSums:
        """With the sums of other steps of the same run."""
        return ReleaseSums(*(a + b for a, b in zip(self, later, strict=True)))

    def add(self, window: int, others: ReleaseSums) -> None:
        """Add sums of one window, which have no axis of windows, in place."""
        for total, part in zip(self, others, strict=True):
            total[window] += np.asarray(part)


class Collector:
    """Adds up the points and releases of a run, as they come.

    Guarantees:
        The sums are a function of what was released. Steps come in chunks whose lengths follow the
        clock, so rows wait until their block is complete: blocks begin at multiples of a fixed
        number of steps, and each is summed by the same program, in order.
    """

    def __init__(self, dim: int, plan: Plan, blocks: Blocks | None = None) -> None:
        self._blocks = blocks or Blocks.one(dim)
        self._sums = ReleaseSums.zeros(dim, self._blocks)
        self._plan = plan
        self._points, self._releases = np.zeros((2, _BLOCK_STEPS, dim))
        self._first = self._end = 0  # the steps that wait

    def add(self, first: int, length: int, points: Any, releases: Any) -> None:
        """Take the steps from `first` on. The arrays may have more rows than that."""
        points, releases = np.asarray(points), np.asarray(releases)
        done = 0
        while done < length:
            step = first + done
            if self._first == self._end:
                self._first = self._end = step
            count = min(length - done, self._end_of_block(step) - step)
            to, taken = self._end - self._first, slice(done, done + count)
            self._points[to : to + count] = points[taken]
            self._releases[to : to + count] = releases[taken]
            self._end, done = step + count, done + count
            if self._end == self._end_of_block(step):
                self._sum_up()

    def total(self) -> ReleaseSums:
        """The sums of all steps so far, at the end of a run."""
        self._sum_up()
        return self._sums

    def progress(self) -> dict[str, np.ndarray]:
        """Everything that changes as a run goes on; `go_on` takes it."""
        waiting = self._end - self._first
        sums = {f"sums.{name}": array for name, array in self._sums._asdict().items()}
        return {
            **sums,
            "span": np.array([self._first, self._end]),
            "points": self._points[:waiting],
            "releases": self._releases[:waiting],
        }

    def go_on(self, progress: Mapping[str, np.ndarray]) -> None:
        """Go on from the `progress` of a collector that was made alike."""
        self._sums = ReleaseSums(*(progress[f"sums.{name}"] for name in self._sums._fields))
        self._first, self._end = map(int, progress["span"])
        waiting = self._end - self._first
        self._points[:waiting] = progress["points"]
        self._releases[:waiting] = progress["releases"]

    def _end_of_block(self, step: int) -> int:
        """Blocks end at multiples of their length, and where a window ends."""
        window_end = -(-(self._window(step) + 1) * self._plan.num_steps // NUM_WINDOWS)
        return min((step // _BLOCK_STEPS + 1) * _BLOCK_STEPS, window_end)

    def _window(self, step: int) -> int:
        return step * NUM_WINDOWS // self._plan.num_steps

    def _sum_up(self) -> None:
        count = self._end - self._first
        if count == 0:
            return
        with jax.enable_x64(True):
            part = _sums_of_rows(
                self._points,
                self._releases,
                self._plan.sampling_prob,
                count,
                None if self._sums.is_full else self._blocks,
            )
        self._sums.add(self._window(self._first), part)
        self._first = self._end


@partial(jit_quickly, static_argnames="blocks")
def _sums_of_rows(
    points: Float[Array, "block d"],
    releases: Float[Array, "block d"],
    sampling_prob: Scalar | float,
    count: Int[Array, ""] | int,
    blocks: Blocks | None,
) -> Any:
    """The sums of the first `count` rows; with all products if there are no blocks."""
    counts = (jnp.arange(points.shape[0]) < count).astype(jnp.float64)

    x, g = (jnp.where(counts[:, None] > 0, values, 0.0) for values in (points, releases))
    g = g / sampling_prob
    products = [x.T @ other if blocks is None else _by_block(x, other, blocks) for other in (x, g)]
    sums: Any = (counts.sum(), x.sum(axis=0), g.sum(axis=0), *products, (g * g).sum(axis=0))
    return ReleaseSums(*sums)


def _by_block(
    x: Float[Array, "steps d"], other: Float[Array, "steps d"], blocks: Blocks
) -> Float[Array, " products"]:
    """Sums of products within blocks, in the order of `Blocks.by_size`."""
    parts = []
    for group in blocks.by_size(LARGEST_FULL_DIM):
        a, b = x[:, group.members], other[:, group.members]
        parts.append(jnp.einsum("nki,nkj->kij" if group.full else "nki,nki->ki", a, b).ravel())
    return jnp.concatenate(parts)
