r"""Running sums of what a run released, and where: noisy gradients at known points.

An aligned release, divided by the sampling probability, is

.. math:: G_t = \nabla \log p(D \mid \theta_t) + e_t,

with a known point :math:`\theta_t` and noise of a known size. Where the log-likelihood is
quadratic that is a linear regression of G on theta, for which the sums below are sufficient. They
are kept for consecutive windows of the run, so that whoever reads them can tell the way there from
the place. All of it is post-processing of DP outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dpvim.compiling import jit_quickly
from dpvim.plan import Plan

Collect: TypeAlias = Callable[[int, int, Any, Any], None]
"""``(first step, number of steps, points, releases)``: takes the steps of a chunk. The arrays have
a row for each step and may have more."""

NUM_WINDOWS = 16
# Beyond this many coordinates products of different coordinates are not kept: 16 windows of two
# matrices would be 8 MB and more, in memory and in every saved fit.
LARGEST_FULL_DIM = 128


class ReleaseSums(NamedTuple):
    """Sums over the steps of each window, in double precision.

    Attributes:
        steps: Number of steps.
        point: Sum of theta.
        gradient: Sum of G, a noisy gradient of the whole data's log-likelihood.
        point_point: Sum of theta theta', or of its diagonal for a large latent.
        point_gradient: Sum of theta G', or of its diagonal.
        gradient_squared: Sum of the squares of G.
    """

    steps: Float[np.ndarray, " windows"]
    point: Float[np.ndarray, "windows d"]
    gradient: Float[np.ndarray, "windows d"]
    point_point: Float[np.ndarray, "windows d d"] | Float[np.ndarray, "windows d"]
    point_gradient: Float[np.ndarray, "windows d d"] | Float[np.ndarray, "windows d"]
    gradient_squared: Float[np.ndarray, "windows d"]

    @classmethod
    def zeros(cls, dim: int) -> ReleaseSums:
        """Sums of nothing, with products of all coordinates if the latent is small enough."""
        vector = (NUM_WINDOWS, dim)
        product = (*vector, dim) if dim <= LARGEST_FULL_DIM else vector
        shapes = (vector[:1], vector, vector, product, product, vector)
        return cls(*(np.zeros(shape) for shape in shapes))

    @property
    def dim(self) -> int:
        """d."""
        return self.point.shape[1]

    @property
    def is_full(self) -> bool:
        """Whether products of different coordinates were kept."""
        return self.point_point.ndim == 3

    @property
    def are_enough(self) -> bool:
        """Whether there are more steps than lines through them could use up."""
        counted = self.steps[self.steps > 1]
        return bool(counted.sum() >= 2 * (self.dim + len(counted)) + 8)

    def then(self, later: ReleaseSums) -> ReleaseSums:
        """With the sums of other steps of the same run."""
        return ReleaseSums(*(a + b for a, b in zip(self, later, strict=True)))

    def add(self, window: int, others: ReleaseSums) -> None:
        """Add sums of one window, which have no axis of windows, in place."""
        for total, part in zip(self, others, strict=True):
            total[window] += np.asarray(part)


def collector(sums: ReleaseSums, plan: Plan) -> Collect:
    """A function that adds the steps of a chunk to `sums`."""

    def collect(first: int, length: int, points: Any, releases: Any) -> None:
        most = min(len(points), plan.num_steps // NUM_WINDOWS + 1)  # steps of a window
        windows = np.arange(first, first + length) * NUM_WINDOWS // plan.num_steps
        for window in np.unique(windows):
            start, end = np.searchsorted(windows, [window, window + 1])
            with jax.enable_x64(True):
                part = _sums_of_rows(
                    points, releases, plan.sampling_prob, start, end, most=most, full=sums.is_full
                )
            sums.add(int(window), part)

    return collect


@partial(jit_quickly, static_argnames=("most", "full"))
def _sums_of_rows(
    points: Float[Array, "steps d"],
    releases: Float[Array, "steps d"],
    sampling_prob: float,
    start: int,
    end: int,
    *,
    most: int,
    full: bool,
) -> Any:
    """The sums of rows `start` to `end`, at most `most`. Which rows they are is a value, so that
    one compilation serves all chunks: `most` rows are read, and the others among them are zeros."""
    begin = jnp.minimum(start, points.shape[0] - most)
    rows = begin + jnp.arange(most)
    counts = ((start <= rows) & (rows < end)).astype(jnp.float64)

    def chosen(values: Array) -> Float[Array, "most d"]:
        some = jax.lax.dynamic_slice_in_dim(values, begin, most).astype(jnp.float64)
        return jnp.where(counts[:, None] > 0, some, 0.0)

    x, g = chosen(points), chosen(releases) / sampling_prob
    products = (x.T @ x, x.T @ g) if full else ((x * x).sum(axis=0), (x * g).sum(axis=0))
    sums: Any = (counts.sum(), x.sum(axis=0), g.sum(axis=0), *products, (g * g).sum(axis=0))
    return ReleaseSums(*sums)
