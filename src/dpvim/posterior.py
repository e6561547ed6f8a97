"""The posterior as a user sees it: a Gaussian over the latent, draws by site name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from dpvim import _validate
from dpvim.family import Family, Params
from dpvim.randomness import fresh_key

Constrain: TypeAlias = Callable[[jax.Array], Mapping[str, jax.Array]]
"""From one flat latent to the values of the model's sites."""


@dataclasses.dataclass(frozen=True)
class Posterior:
    """A Gaussian over the unconstrained latent, and the way back to the model's sites.

    Attributes:
        loc: Mean of the unconstrained latent.
        scale_tril: Cholesky factor of its covariance.
        constrain: One latent to a dictionary of constrained values by site name.
    """

    loc: Float[np.ndarray, " d"]
    scale_tril: Float[np.ndarray, "d d"]
    constrain: Constrain

    @classmethod
    def from_params(cls, family: Family, params: Params, constrain: Constrain) -> Posterior:
        tril = np.asarray(family.scale_tril(jax.tree.map(jnp.asarray, params)))
        return cls(np.asarray(params.loc), tril, constrain)

    @property
    def covariance(self) -> Float[np.ndarray, "d d"]:
        """Covariance of the unconstrained latent."""
        return self.scale_tril @ self.scale_tril.T

    @property
    def scale(self) -> Float[np.ndarray, " d"]:
        """Standard deviations of the unconstrained latent."""
        return np.sqrt(np.square(self.scale_tril).sum(axis=1))

    def sample(self, n: int, *, seed: int | None = None) -> dict[str, np.ndarray]:
        """`n` draws of every site, on its own scale: arrays of shape [n, ...] by site name."""
        n = _validate.positive_int("n", n)
        key = fresh_key() if seed is None else jax.random.key(seed)
        eta = jax.random.normal(key, (n, self.loc.size))
        latents = jnp.asarray(self.loc) + eta @ jnp.asarray(self.scale_tril).T
        return {name: np.asarray(v) for name, v in jax.vmap(self.constrain)(latents).items()}
