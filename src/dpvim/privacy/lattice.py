r"""Integers all the way: rows are rounded, summed exactly, and noised on a lattice.

Rows are rounded before they are summed and the sum is one of integers, so it is exact in any
order. The sum is rounded to the grid of the noise, and the noise is added as integers: a release
has no bits below the grid. Rows are clipped to C' a little below C, so that one record moves the
release's integers by at most C / grid whatever the roundings do: `Lattice` has the bound,
docs/privacy.md derives it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dpvim._compile import single_precision
from dpvim.privacy.plan import Plan

# Rows are rounded to 2^20 levels up to the clip norm, so that 2^10 of them sum within 32 bits.
_QUANTIZATION_LEVELS = 2**20
_BLOCK_ROWS = 2**10
_PARTIAL_SUMS = 16
# Floats from 2^23 on are integers with consecutive bit patterns. Adding this rounds a number below
# 2^22 to an integer and leaves it in the low bits: cheaper than rounding and converting.
_SHIFT = np.float32(1.5 * 2**23)
_SINGLE, _DOUBLE = 2.0**-24, 2.0**-53
# A margin above this would be a loss worth a complaint.
_LARGEST_MARGIN = 0.05


class Lattice(NamedTuple):
    """The public numbers of clip, rounding and noise.

    Attributes:
        row_bound: Norm C' that rows are clipped to; infinite without privacy.
        grid: Spacing of the releases, a power of two; 0 without privacy.

    Guarantees:
        With `row_bound` one record moves the rounded sum by at most the plan's clip norm.
    """

    row_bound: float
    grid: float

    @classmethod
    def of(cls, plan: Plan, *, dim: int, num_released: int) -> Lattice:
        """The lattice of a plan for a latent of `dim` and releases of `num_released` numbers."""
        if math.isinf(plan.clip_norm):
            return cls(math.inf, 0.0)
        rows = plan.max_batch_size
        margin = (
            # Norms, factors, products and weights in single precision: sums of up to d squares.
            (2 * dim + 32) * _SINGLE
            # Every row is rounded to a multiple of at most 2 C / levels.
            + math.sqrt(dim) / _QUANTIZATION_LEVELS
            # E w^-1/2 applied to the sum (and the sum itself where a likelihood brings its own)
            # in double precision, in both worlds.
            + 2 * (rows + 16) * rows * _DOUBLE
            # The sum is rounded to the grid, in both worlds.
            + math.sqrt(num_released) * plan.noise_grid / plan.clip_norm
        )
        if margin > _LARGEST_MARGIN:
            raise ValueError(
                f"the roundings of {rows} rows, {dim} latents and {num_released} released numbers "
                f"would take {margin:.1%} of the clip norm, {_LARGEST_MARGIN:.0%} is the most. "
                "Use smaller batches, fewer parameters, or the aligned variant."
            )
        return cls(plan.clip_norm * (1 - margin), plan.noise_grid)


@single_precision
def exact_sum(
    factors: Float[Array, " batch"], rows: Float[Array, "batch d"], bound: float
) -> Float[Array, " d"]:
    r""":math:`\sum_x f_x h_x` with every row rounded to a multiple of bound / 2^20 or so.

    Args:
        factors, rows: ``|f_x h_x|`` must not exceed `bound` by more than rounding.
        bound: What the rows were clipped to.

    Guarantees:
        The sum of the rounded rows is exact whatever the number and order of the rows: it is one
        of integers, in blocks that fit 32 bits and in double precision beyond.

    Returns:
        Double precision.
    """
    quantum = 2.0 ** math.ceil(math.log2(bound)) / _QUANTIZATION_LEVELS
    blocks = -(-len(rows) // _BLOCK_ROWS)
    more = -len(rows) % (blocks * _PARTIAL_SUMS)
    scaled = jnp.pad(factors * (1 / quantum), (0, more))
    shifted = scaled[:, None] * jnp.pad(rows, [(0, more), (0, 0)]) + _SHIFT
    bits = jax.lax.bitcast_convert_type(shifted.astype(jnp.float32), jnp.int32)
    # Sums over contiguous rows are the fastest that XLA has. What overflows on the way comes back
    # when the shifts' own bits are taken off: integers are added modulo 2^32.
    partial = jnp.sum(bits.reshape(_PARTIAL_SUMS, -1, rows.shape[1]), axis=0, dtype=jnp.int32)
    by_block = partial.reshape(-1, blocks, rows.shape[1])
    counts = jnp.sum(by_block, axis=0, dtype=jnp.int32)
    shifts = int(_SHIFT.view(np.int32)) * (len(shifted) // blocks) % 2**32
    counts = counts - np.uint32(shifts).view(np.int32)
    with jax.enable_x64(True):
        return counts.astype(jnp.float64).sum(axis=0) * quantum


@single_precision
def add_noise(
    encoded_sum: Float[Array, " r"], noise: Int[Array, " r"], grid: float
) -> Float[Array, " r"]:
    """The release. Everything that leaves the data's side of the computation passes here.

    Args:
        encoded_sum: Double precision; private.
        noise: Integers, in units of `grid`.
        grid: Spacing of the release; with 0 there is no privacy, and the sum is returned as it is.

    Guarantees:
        The release is a whole multiple of `grid`: the sum and the noise are integers when they
        meet, and double precision holds integers up to 2^53. What single precision drops after
        that is post-processing.
    """
    if grid == 0:
        return encoded_sum.astype(jnp.float32)
    counts = on_grid(encoded_sum, grid)
    with jax.enable_x64(True):
        return ((counts + noise.astype(jnp.float64)) * grid).astype(jnp.float32)


def on_grid(encoded_sum: Float[Array, " r"], grid: float) -> Float[Array, " r"]:
    """The sum in whole units of the grid: integers, in double precision."""
    with jax.enable_x64(True):
        return jnp.rint(encoded_sum.astype(jnp.float64) * (1 / grid))
