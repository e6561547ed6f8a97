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
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from dpvim.plan import Plan

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

    def then(self, later: ReleaseSums) -> ReleaseSums:
        """With the sums of other steps of the same run."""
        return ReleaseSums(*(a + b for a, b in zip(self, later, strict=True)))

    def add(
        self,
        windows: Int[np.ndarray, " steps"],
        points: Float[np.ndarray, "steps d"],
        gradients: Float[np.ndarray, "steps d"],
    ) -> None:
        """Add steps, in place; `windows` says to which window each belongs, and is sorted."""
        for window in np.unique(windows):
            chosen = slice(*np.searchsorted(windows, [window, window + 1]))
            x, g = points[chosen].astype(np.float64), gradients[chosen].astype(np.float64)
            product = np.matmul if self.is_full else _sum_of_products
            self.steps[window] += len(x)
            self.point[window] += x.sum(axis=0)
            self.gradient[window] += g.sum(axis=0)
            self.point_point[window] += product(x.T, x)
            self.point_gradient[window] += product(x.T, g)
            self.gradient_squared[window] += np.square(g).sum(axis=0)


def collector(sums: ReleaseSums, plan: Plan) -> Callable[[int, np.ndarray, np.ndarray], None]:
    """A function ``(first step, points, releases)`` that adds the steps of a chunk to `sums`."""

    def collect(first: int, points: np.ndarray, releases: np.ndarray) -> None:
        steps = np.arange(first, first + len(points))
        windows = steps * NUM_WINDOWS // plan.num_steps
        sums.add(windows, points, releases / np.float64(plan.sampling_prob))

    return collect


def _sum_of_products(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.einsum("it,ti->i", a, b)
