"""A posterior that is known by its draws, with the interface of a mixture of Gaussians."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float
from scipy import special

from dpvim.posterior.convergence import Windows


class DrawnPosterior(NamedTuple):
    """Draws of the latent, used like a `GaussianMixture`.

    Attributes:
        latents: The draws, of equal weight.
        dp_scale: Standard deviation that the noise of the run adds to each coordinate.
        windows: Snapshots spanned by the steps that were used; coordinates count as converged if
            there are no doubts.
        p_values: Ones: coordinates are not tested one by one.
        doubts: What speaks against all of it, a sentence each.
        clipped: Share of the records that were clipped; None if they were not counted.
    """

    latents: Float[np.ndarray, "n d"]
    dp_scale: Float[np.ndarray, " d"]
    windows: Windows
    p_values: Float[np.ndarray, " d"]
    doubts: tuple[str, ...] = ()
    clipped: float | None = None

    @property
    def loc(self) -> Float[np.ndarray, " d"]:
        """Mean."""
        return self.latents.mean(axis=0)

    @property
    def scale(self) -> Float[np.ndarray, " d"]:
        """Standard deviations."""
        return self.latents.std(axis=0)

    @property
    def covariance(self) -> Float[np.ndarray, "d d"]:
        """Covariance."""
        return np.cov(self.latents, rowvar=False, bias=True).reshape(self.loc.size, -1)

    def draw(self, key: Array, n: int) -> Float[np.ndarray, "n d"]:
        """`n` of the draws in random order; none comes again before all others have come."""
        order = np.asarray(jax.random.permutation(key, len(self.latents)))
        return self.latents[np.resize(order, n)]

    def log_density(self, latents: Float[np.ndarray, "*n d"]) -> np.ndarray:
        """Log-density at one latent or at several: an estimate by Gaussian kernels.

        The draws are pulled towards their mean by as much as the kernels widen them, so that mean
        and covariance are those of the draws, and many dimensions give a Gaussian.
        """
        n, dim = self.latents.shape
        width = (4 / (n * (dim + 2))) ** (1 / (dim + 4))  # Silverman's rule
        root = np.linalg.cholesky(self.covariance)
        centres = np.sqrt(1 - width**2) * np.linalg.solve(root, (self.latents - self.loc).T).T
        places = np.linalg.solve(root, (np.atleast_2d(latents) - self.loc).T).T
        log_norm = dim * np.log(width * np.sqrt(2 * np.pi)) + np.log(np.diagonal(root)).sum()
        squares = (np.square((place - centres) / width).sum(axis=1) for place in places)
        logs = np.array([special.logsumexp(-0.5 * each) for each in squares]) - np.log(n) - log_norm
        return logs if np.ndim(latents) > 1 else logs[0]

    def quantiles(self, tails: Float[np.ndarray, " q"]) -> Float[np.ndarray, "d q"]:
        """Quantiles of each coordinate."""
        return np.quantile(self.latents, tails, axis=0).T
