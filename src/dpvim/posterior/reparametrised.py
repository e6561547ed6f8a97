"""The posterior of a family that is not Gaussian: its own draws, moved by the noise of the run."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy import special

from dpvim._compile import single_precision
from dpvim.inference.families import Family, Params
from dpvim.posterior.convergence import Windows

# Moments and quantiles are those of so many draws with a fixed key, the same each time.
_DRAWS = 20_000
# The density of the draws moved by noise is an average over so many values of the noise.
_NOISE_DRAWS = 256


# Draws for the mean of the latent at a snapshot, and as many with the opposite sign.
_DRAWS_OF_MEAN = 64


@single_precision
def means_of_draws(family: Family, snapshots: Params) -> Float[np.ndarray, "snapshots d"]:
    """Means of the latent at every snapshot of the parameters, over the same base draws."""
    etas = jax.random.normal(jax.random.key(2), (_DRAWS_OF_MEAN, family.base_size))
    etas = jnp.concatenate([etas, -etas])

    def mean(params: Params) -> Float[Array, " d"]:
        return jax.vmap(family.reparametrise, (None, 0))(params, etas).mean(axis=0)

    return np.asarray(jax.jit(lambda p: jax.lax.map(mean, p))(jax.tree.map(jnp.asarray, snapshots)))


@dataclasses.dataclass(frozen=True, eq=False)
class ReparametrisedPosterior:
    """A family's distribution plus Gaussian noise of its location, used like a Gaussian.

    Attributes:
        family: The family.
        params: Its parameters.
        dp_factor: Cholesky factor of the covariance that the noise of the run adds.
        windows: Number of snapshots used for each mean, and if they pass the convergence test.
    """

    family: Family
    params: Params
    dp_factor: Float[np.ndarray, "d d"]
    windows: Windows

    @property
    def dp_scale(self) -> Float[np.ndarray, " d"]:
        """Standard deviation that the noise of the run adds to each coordinate."""
        return np.linalg.norm(self.dp_factor, axis=1)

    @property
    def loc(self) -> Float[np.ndarray, " d"]:
        """Mean."""
        return self._draws.mean(axis=0)

    @property
    def scale(self) -> Float[np.ndarray, " d"]:
        """Standard deviations."""
        return self._draws.std(axis=0)

    @property
    def covariance(self) -> Float[np.ndarray, "d d"]:
        """Covariance."""
        return np.cov(self._draws, rowvar=False, bias=True).reshape(self.family.dim, -1)

    @single_precision
    def draw(self, key: Array, n: int) -> Float[np.ndarray, "n d"]:
        """`n` independent draws."""
        key_eta, key_noise = jax.random.split(key)
        etas = jax.random.normal(key_eta, (n, self.family.base_size))
        params = jax.tree.map(jnp.asarray, self.params)
        latents = jax.jit(jax.vmap(self.family.reparametrise, (None, 0)))(params, etas)
        return np.asarray(latents, np.float64) + self._noise(key_noise, n)

    @single_precision
    def log_density(self, latents: Float[np.ndarray, "*n d"]) -> np.ndarray:
        """Log-density at one latent or at several; with noise, an average over 256 values of it."""
        if not self.dp_factor.any():
            return self._family_log_density(latents)
        noise = self._noise(jax.random.key(1), _NOISE_DRAWS)
        moved = np.expand_dims(latents, -2) - noise
        return special.logsumexp(self._family_log_density(moved), axis=-1) - np.log(len(noise))

    def quantiles(self, tails: Float[np.ndarray, " q"]) -> Float[np.ndarray, "d q"]:
        """Quantiles of each coordinate."""
        return np.quantile(self._draws, tails, axis=0).T

    def _family_log_density(self, latents: np.ndarray) -> np.ndarray:
        log_density, params = self.family.log_density, jax.tree.map(jnp.asarray, self.params)
        assert log_density is not None  # a family has this or a factor
        flat = jnp.asarray(latents, jnp.float32).reshape(-1, self.family.dim)
        values = jax.jit(jax.vmap(log_density, (None, 0)))(params, flat)
        return np.asarray(values, np.float64).reshape(np.shape(latents)[:-1])

    def _noise(self, key: Array, n: int) -> Float[np.ndarray, "n d"]:
        eta = np.asarray(jax.random.normal(key, (n, self.family.dim)), np.float64)
        return eta @ self.dp_factor.T

    @functools.cached_property
    def _draws(self) -> Float[np.ndarray, "draws d"]:
        return self.draw(jax.random.key(0), _DRAWS)
