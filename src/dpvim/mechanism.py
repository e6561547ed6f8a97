r"""Clip, sum, noise: the one place where data become a release.

For one record with gradient g the release sees E g, with E linear and public, and
:math:`|E g|^2 = \sum_i w_i g_i^2` with public weights w >= 0. So the clip factor needs the weights
only, and E is applied once to the sum:

.. math:: R = E \sum_x \min(1, C / |E g_x|)\, g_x + \sigma C z.

>>> import jax.numpy as jnp
>>> gradients = jnp.array([[3.0, 4.0], [0.3, 0.4], [jnp.nan, 0.0], [9.0, 9.0]])
>>> total = clipped_sum(gradients, jnp.ones(2), jnp.array([False, False, False, True]), 1.0)
>>> [f"{value:.3f}" for value in total]
['0.900', '1.200']
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dpvim.types import Latent, LogLikelihood, Mask, Record

# A single-precision clip to C returns norms up to C (1 + 7e-8): aim a little below.
_CLIP_MARGIN = 1e-6
# Components are clamped before squaring; 1e25 squared is infinite in single precision. At 1e10 a
# weight that underflows (below 1e-38) hides a contribution of at most 1e-9, far below any clip.
_LARGEST_COMPONENT = 1e10
# Accelerators would otherwise round the operands to ten bits, and the bound would not hold.
_PRECISION = jax.lax.Precision.HIGHEST


def clip_factors(
    gradients: Float[Array, "batch d"], weights: Float[Array, " d"], clip_norm: float
) -> Float[Array, " batch"]:
    r"""Factors :math:`\min(1, C / |E g_x|)` with :math:`|E g|^2 = \sum_i w_i g_i^2`.

    Guarantees:
        ``factor * |E g| <= clip_norm`` for every finite row. A zero gradient has factor 1. A row
        whose norm is not finite has factor 0.
    """
    squared_norms = jnp.matmul(gradients * gradients, weights, precision=_PRECISION)
    factors = jnp.minimum(1.0, clip_norm * (1 - _CLIP_MARGIN) * jax.lax.rsqrt(squared_norms))
    return jnp.where(jnp.isfinite(squared_norms), factors, 0.0)


def clipped_sum(
    gradients: Float[Array, "batch d"],
    weights: Float[Array, " d"],
    is_padding: Mask,
    clip_norm: float,
) -> Float[Array, " d"]:
    r""":math:`\sum_x \min(1, C/|E g_x|) g_x` over the rows that are no padding.

    Guarantees:
        Whatever one row holds (zeros, 1e30, inf, NaN), E times its share has norm at most
        `clip_norm`. A row with a non-finite gradient contributes zero: raising would tell
        something about one record. All padding gives zero.
    """
    usable = jnp.isfinite(gradients).all(axis=1) & ~is_padding
    safe = jnp.where(usable[:, None], gradients, 0.0)
    safe = jnp.clip(safe, -_LARGEST_COMPONENT, _LARGEST_COMPONENT)
    factors = clip_factors(safe, weights, clip_norm)
    return jnp.matmul(factors, safe, precision=_PRECISION)


class ClippedSum(Protocol):
    """Sum of clipped per-example gradients of a batch at `latent`, as `clipped_sum` defines it."""

    def __call__(
        self,
        latent: Latent,
        weights: Float[Array, " d"],
        batch: Record,
        is_padding: Mask,
        clip_norm: float,
    ) -> Float[Array, " d"]: ...


class Likelihood(NamedTuple):
    """A likelihood that factorises over records, and the way to its clipped gradient sum.

    A model with structure may bring a faster `clipped_sum` than the one made from autodiff; it
    must return the same numbers.
    """

    log_prob: LogLikelihood
    clipped_sum: ClippedSum

    @classmethod
    def from_log_prob(cls, log_prob: LogLikelihood) -> Likelihood:
        """The default: one gradient for each record by autodiff."""
        gradient = jax.vmap(jax.grad(log_prob), in_axes=(None, 0))
        return cls.from_gradients(log_prob, gradient)

    @classmethod
    def from_gradients(
        cls,
        log_prob: LogLikelihood,
        gradients: Callable[[Latent, Record], Float[Array, "batch d"]],
    ) -> Likelihood:
        """From a function that returns the gradients of a whole batch."""

        def clipped_gradient_sum(
            latent: Latent,
            weights: Float[Array, " d"],
            batch: Record,
            is_padding: Mask,
            clip_norm: float,
        ) -> Float[Array, " d"]:
            return clipped_sum(gradients(latent, batch), weights, is_padding, clip_norm)

        return cls(log_prob, clipped_gradient_sum)


def add_noise(encoded_sum: Float[Array, " r"], noise: Float[Array, " r"]) -> Float[Array, " r"]:
    """The release. Everything that leaves the data's side of the computation passes here.

    Guarantees:
        The sum is rounded to the noise's precision first: bits of it that are finer than the
        noise would come through untouched.
    """
    return encoded_sum.astype(noise.dtype) + noise
