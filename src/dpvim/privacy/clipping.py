r"""The clip: per-record gradients are bounded in norm before they are summed.

For one record with gradient g the release sees E g, with E linear and public, and
:math:`|E g|^2 = \sum_i w_i g_i^2 = |\sqrt w\, g|^2` with public weights w >= 0. So clip and sum
work on the weighted gradient h = sqrt(w) g, and E / sqrt(w), an isometry, is applied once to the
sum:

.. math:: R = \mathrm{grid} \cdot \Big( \mathrm{round}\big(E w^{-1/2} \sum_x
          \mathrm{round}(h_x \min(1, C'/|h_x|)) / \mathrm{grid}\big) + \mathrm{round}(z) \Big).

With a matrix instead of weights (`Whitening`) rows become L' g before they are clipped, and a
record's share of the release has a second part: one of `NUM_NORM_BINS` counts, that of the norms
like its own,

.. math:: \big[\sqrt{1 - s^2}\; \mathrm{clip}(L' g_x),\; s\, C\, e_{\mathrm{bin}(|L' g_x|)}\big],
          \qquad s^2 = \mathrm{COUNT\_SHARE}.

Its norm is at most C, so sums and counts together are one release with one sensitivity.

`clip_factors` is the clip rule, the only one. What is rounded, and how the sum meets the noise, is
the business of `dpvim.privacy.lattice`.

>>> import jax.numpy as jnp
>>> gradients = jnp.array([[3.0, 4.0], [0.3, 0.4], [jnp.nan, 0.0], [9.0, 9.0]])
>>> is_padding = jnp.array([False, False, False, True])
>>> total = clipped_sum(lambda: gradients, jnp.ones(2), is_padding, 1.0)
>>> [f"{value:.3f}" for value in total]
['0.900', '1.200']
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun
from jaxtyping import Array, Bool, Float

from dpvim._compile import single_precision
from dpvim.privacy.lattice import exact_sum
from dpvim.privacy.norm_counts import COUNT_SHARE, NORM_BIN_ENDS, NUM_NORM_BINS
from dpvim.privacy.records import over_records
from dpvim.types import Latent, LogLikelihood, Mask, Record, Weights, Whitening

Tree = TypeVar("Tree")

# Components are clamped before squaring; 1e25 squared is infinite in single precision. Squares
# that underflow (components below 1e-19) hide far less than any clip norm's margin.
_LARGEST_COMPONENT = 1e15
# XLA's library of small operations shares a sum of more numbers among threads. For a few times as
# many that takes longer than the sum itself.
_NUMBERS_ALONE, _MOST_BLOCKS = 2**15, 4
# The two parts of a share with a count: squares that add up to one.
_GRADIENT_PART, _COUNT_PART = math.sqrt(1 - COUNT_SHARE), math.sqrt(COUNT_SHARE)


@single_precision
def clip_factors(
    norms: Float[Array, " batch"], is_padding: Mask, bound: float
) -> Float[Array, " batch"]:
    r"""The clip rule: factors :math:`\min(1, \mathrm{bound} / |h_x|)` from the rows' norms.

    Every clipped sum takes its factors from here, whatever way it finds the norms.

    Guarantees:
        ``factor * norm`` is at most `bound`, but for the rounding that `Lattice` allows for. A row
        of zeros has factor 1. Padding, and rows whose norm is not finite, have factor 0. With an
        infinite bound nothing is clipped.
    """
    usable = jnp.isfinite(norms) & ~is_padding
    if math.isinf(bound):
        return usable.astype(jnp.float32)
    # The minimum sees no NaN: vectorised programs may pass over one.
    return jnp.where(usable, jnp.minimum(1.0, bound / jnp.where(usable, norms, 1.0)), 0.0)


def clamp(numbers: Array) -> Array:
    """Clamp numbers to +-1e15, so that their squares do not overflow; a NaN stays one."""
    return jnp.clip(numbers, -_LARGEST_COMPONENT, _LARGEST_COMPONENT)


def finite_or_nan(numbers: Array) -> Array:
    """Clamp finite numbers; infinite ones become NaN, which takes their record out."""
    return jnp.where(jnp.isfinite(numbers), clamp(numbers), jnp.nan)


@single_precision
def clipped_sum(
    gradients: Callable[[], Float[Array, "batch d"]],
    weights: Weights,
    is_padding: Mask,
    bound: float,
) -> Float[Array, " r"]:
    r""":math:`\sum_x \min(1, \mathrm{bound} / |\sqrt w g_x|)\, g_x` over rows that are no padding.

    Args:
        gradients: Computes the gradients, one row for each record.
        weights: Public, not negative; None for ones.
        is_padding: Rows that do not count.
        bound: Largest norm of a row's share; infinite without privacy.

    Returns:
        The sum; of a `Whitening` that of the rows L' g, and counts: see the module's docstring.

    Guarantees:
        Whatever one row holds (zeros, 1e30, inf, NaN), its share is bounded, and others' shares
        do not depend on it. A row with a non-finite gradient contributes zero: raising would tell
        something about one record. All padding gives zero. With an infinite bound nothing is
        clipped or rounded.
    """
    if isinstance(weights, Whitening):
        return _sum_and_counts(gradients, weights, is_padding, bound)
    scale = scales_of(weights)

    if math.isinf(bound):
        rows = gradients()
        usable = jnp.isfinite(rows).all(axis=1) & ~is_padding
        return jnp.sum(jnp.where(usable[:, None], rows, 0.0), axis=0)

    def weighted_rows() -> Float[Array, "batch d"]:
        rows = gradients().astype(jnp.float32)  # half precision would break the bound
        weighted = rows if scale is None else rows * scale
        return jnp.where(jnp.isfinite(rows), clamp(weighted), jnp.nan)

    rows = materialize(weighted_rows, is_padding)
    factors = clip_factors(jnp.sqrt(_squared_norms(rows)), is_padding, bound)
    total = exact_sum(factors, jnp.where((factors > 0)[:, None], rows, 0.0), bound)
    return unscaled(total, scale)


def _sum_and_counts(
    gradients: Callable[[], Float[Array, "batch d"]],
    whitening: Whitening,
    is_padding: Mask,
    bound: float,
) -> Float[Array, " r"]:
    """The clipped sum of the whitened rows, and counts of their norms, as one vector."""

    def whitened_rows() -> Float[Array, "batch d"]:
        rows = gradients().astype(jnp.float32)
        finite = jnp.isfinite(rows).all(axis=1, keepdims=True)
        rows = _whiten(jnp.where(finite, clamp(rows), 0.0), whitening.factor)
        return jnp.where(finite & jnp.isfinite(rows), clamp(rows), jnp.nan)

    rows: Array = materialize(whitened_rows, is_padding)
    norms = jnp.sqrt(jnp.sum(rows * rows, axis=1))
    factors = clip_factors(norms, is_padding, bound) * _GRADIENT_PART
    usable = factors > 0
    rows = jnp.where(usable[:, None], rows, 0.0)
    if math.isinf(bound):
        total = jnp.sum(rows, axis=0) * _GRADIENT_PART
        return jnp.concatenate([total, jnp.zeros(NUM_NORM_BINS)])
    total = exact_sum(factors, rows, bound)
    in_bin = _in_bins(jnp.where(usable, norms, 0.0), bound) & usable[:, None]
    counts = jnp.sum(in_bin, axis=0, dtype=jnp.int32)
    with jax.enable_x64(True):
        return jnp.concatenate([total, counts.astype(jnp.float64) * (_COUNT_PART * bound)])


def _squared_norms(rows: Float[Array, "batch d"]) -> Float[Array, " batch"]:
    """Of small batches in blocks of rows, which are not shared among threads: the same numbers."""
    count = -(-rows.size // _NUMBERS_ALONE)
    if not 1 < count <= _MOST_BLOCKS:
        return jnp.sum(rows * rows, axis=1)
    size = -(-len(rows) // count)
    blocks = [rows[first : first + size] for first in range(0, len(rows), size)]
    return jnp.concatenate([jnp.sum(each * each, axis=1) for each in blocks])


def _whiten(
    rows: Float[Array, "batch d"], factor: Float[Array, "d d"] | Float[Array, " d"]
) -> Float[Array, "batch d"]:
    """L' g for each row g, by itself."""
    if factor.ndim == 1:
        return rows * factor
    return jnp.matmul(rows, factor, precision=jax.lax.Precision.HIGHEST)


def _in_bins(norms: Float[Array, " batch"], bound: float) -> Bool[Array, "batch bins"]:
    """The one bin that each norm is in."""
    ends = jnp.asarray(NORM_BIN_ENDS[1:], jnp.float32) * bound
    bins = jnp.sum(norms[:, None] >= ends, axis=1)
    return bins[:, None] == jnp.arange(NUM_NORM_BINS)


@single_precision
def scales_of(weights: Weights) -> Float[Array, " d"] | None:
    """Square roots of the weights; zero, which takes a coordinate out, for those not finite."""
    if isinstance(weights, Whitening):
        raise TypeError("expected weights: this clipped sum cannot whiten rows.")
    return None if weights is None else jnp.sqrt(jnp.where(jnp.isfinite(weights), weights, 0.0))


def unscaled(total: Float[Array, " d"], scale: Float[Array, " d"] | None) -> Float[Array, " d"]:
    """A sum of weighted rows as one of gradients; zero where the scale is."""
    if scale is None:
        return total
    with jax.enable_x64(True):
        return jnp.where(scale > 0, total / jnp.where(scale > 0, scale, 1.0), 0.0)


def materialize(make: Callable[[], Tree], is_padding: Mask) -> Tree:
    """Compute the arrays that `make` returns once, and store them for whoever uses them.

    A compiler may work out a number twice, here for the norm and for the sum, and round
    differently (with a fused multiply-add in one of them); where numbers cancel the difference
    knows no bound. What a branch returns is stored. There is a choice of two branches here, and
    the compiler cannot know that it is always the first.
    """

    program, shapes = jax.make_jaxpr(make, return_shape=True)()  # traced once
    leaves, structure = jax.tree.flatten(shapes)

    def nothing() -> list[Array]:
        return [jnp.zeros(leaf.shape, leaf.dtype) for leaf in leaves]

    found = jax.lax.cond(_opaque_true(is_padding), jaxpr_as_fun(program), nothing)
    return jax.tree.unflatten(structure, found)


@jax.custom_batching.custom_vmap
def _opaque_true(is_padding: Bool[Array, "*runs batch"]) -> Bool[Array, ""]:
    """True, which the compiler cannot know: there is no more padding than there are rows."""
    return jnp.sum(is_padding) <= is_padding.size


@_opaque_true.def_vmap
def _opaque_true_vmapped(
    axis_size: int, in_batched: list[bool], is_padding: Bool[Array, "*runs batch"]
) -> tuple[Bool[Array, ""], bool]:
    # One answer for all: a choice that differed between runs would be made after both branches.
    return _opaque_true(is_padding), False


class ClippedSum(Protocol):
    """Sum of clipped per-example gradients of a batch at `latent`, as `clipped_sum` defines it.

    One that does not end in `exact_sum` must sum in double precision.
    """

    def __call__(
        self,
        latent: Latent,
        weights: Weights,
        batch: Record,
        is_padding: Mask,
        bound: float,
    ) -> Float[Array, " r"]: ...


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
        return cls.from_gradients(log_prob, functools.partial(over_records, jax.grad(log_prob)))

    @classmethod
    def from_gradients(
        cls,
        log_prob: LogLikelihood,
        gradients: Callable[[Latent, Record], Float[Array, "batch d"]],
    ) -> Likelihood:
        """From a function that returns the gradients of a whole batch."""

        def clipped_gradient_sum(
            latent: Latent,
            weights: Weights,
            batch: Record,
            is_padding: Mask,
            bound: float,
        ) -> Float[Array, " r"]:
            return clipped_sum(lambda: gradients(latent, batch), weights, is_padding, bound)

        return cls(log_prob, clipped_gradient_sum)
