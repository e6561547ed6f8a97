r"""Gradient estimators, each a pair of small functions around clip, sum and noise: the paper's
five, and `whitened`.

``encode`` maps the per-example gradient g (with respect to the latent) to what is clipped and
noised; ``decode`` maps the noised mean back to a direction for the variational parameters. Both
are made from ``(params, eta)`` alone: the signature is the privacy argument. With J the Jacobian
of the reparametrisation, D and F^-1 the family's diagonal scalings, and ``free`` the gradient of
(log prior + entropy) / N, which no data enter:

=================  ============  ==============================  ==============
variant            encode        decode                          numbers noised
=================  ============  ==============================  ==============
vanilla            J'            r + free                        dim xi
preconditioned     D J'          D^-1 r + free                   dim xi
natural            F^-1 J'       r + F^-1 free                   dim xi
aligned            identity      J' r + free                     d
aligned_natural    F_m^-1        F^-1 (J' F_m r + free)          d
whitened           L'            J' L'^-1 r + free               d and counts
=================  ============  ==============================  ==============

``weights`` gives w with :math:`|E g|^2 = \sum_i w_i g_i^2`, which is all the clip needs. `whitened`
clips in the metric of the approximation, :math:`\theta = m + L \eta`: what is noised is the
gradient with respect to eta. By the information identity the mean of :math:`|H^{-1/2} g|^2` over
records is d / N at the optimum, so where L L' is close to the posterior's covariance a clip norm
of a few sqrt(d / N) suits every model (`whitened_clip_norm`). A record is also counted by its
norm, in the same release (`dpvim.privacy.clipping`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dpvim import _validate
from dpvim._extras import MissingExtraError
from dpvim.inference.families import FAMILIES, Family, Params, pull_back
from dpvim.privacy.norm_counts import COUNT_SHARE, NUM_NORM_BINS
from dpvim.types import Latent, Weights, Whitening

# Clip norms in units of the root mean square of the norms: from, to, and how many are compared.
_CLIP_FACTORS = (2.5, 8.0, 56)
# The mean of what norms have above the first of these, and the length of their tail, about as
# logistic and linear regressions have them; and the part of all that the clip takes off by which
# it shifts the sum.
_TAIL_EXCESS, _TAIL_LENGTH, CLIP_SHIFT = 0.045, 0.8, 0.3


class Variant(NamedTuple):
    """A gradient estimator for one family.

    Attributes:
        name: What it is called in `VARIANTS`.
        num_released: Length of a release.
        weights: ``(params, eta) -> w``, or None for ones; or a `Whitening`, and then rows are
            encoded before they are clipped and summed.
        encode: ``(params, eta, g) -> E g``, linear in g; without counts, which are zeros.
        decode: ``(params, eta, release, free) -> direction``, affine in the release.
        releases_gradient: Whether a release is a noisy gradient with respect to the latent, as it
            is, and the point where it was taken enters in no other way.
        whitens: Whether a release is a noisy gradient with respect to eta, and counts.
    """

    name: str
    num_released: int
    weights: Callable[[Params, Array], Weights]
    encode: Callable[[Params, Array, Latent], Float[Array, " r"]]
    decode: Callable[[Params, Array, Float[Array, " r"], Params], Params]
    releases_gradient: bool = False
    whitens: bool = False


class UnservedVariantError(ValueError):
    """The family does not have what the variant needs."""


def vanilla(family: Family) -> Variant:
    """DPVI of Jalko et al. (2017): the gradient of every variational parameter is noised."""
    return _in_parameter_space(
        family,
        "vanilla",
        scaling=lambda params: jax.tree.map(jnp.ones_like, params),
        decode=lambda params, r, free: _add(r, free),
    )


def preconditioned(family: Family) -> Variant:
    """Scale gradients are divided by T' before the clip and multiplied by it after the noise."""
    if family.preconditioners is None:
        raise UnservedVariantError
    scaling = family.preconditioners.unit_slope
    return _in_parameter_space(
        family,
        "preconditioned",
        scaling=scaling,
        decode=lambda params, r, free: _add(_divide(r, scaling(params)), free),
    )


def natural(family: Family) -> Variant:
    """The natural gradient is clipped and noised (eqs. 7 and 8 of the paper)."""
    if family.preconditioners is None or family.preconditioners.inverse_fisher is None:
        raise UnservedVariantError
    scaling = family.preconditioners.inverse_fisher
    return _in_parameter_space(
        family,
        "natural",
        scaling=scaling,
        decode=lambda params, r, free: _add(r, _multiply(scaling(params), free)),
    )


def aligned(family: Family) -> Variant:
    """Only the d gradients of the latent are noised; the rest is post-processing (algorithm 1).

    It asks nothing of the family but a reparametrisation.
    """
    return Variant(
        name="aligned",
        num_released=family.dim,
        weights=lambda params, eta: None,
        encode=lambda params, eta, g: g,
        decode=lambda params, eta, r, free: _add(pull_back(family, params, eta, r), free),
        releases_gradient=True,
    )


def aligned_natural(family: Family) -> Variant:
    """The natural gradient of the means is noised, the rest follows from it (algorithm 2)."""
    if family.preconditioners is None or family.preconditioners.inverse_fisher is None:
        raise UnservedVariantError
    inverse_fisher = family.preconditioners.inverse_fisher

    def decode(params: Params, eta: Array, r: Float[Array, " r"], free: Params) -> Params:
        scaling = inverse_fisher(params)
        return _multiply(scaling, _add(pull_back(family, params, eta, r / scaling.loc), free))

    return Variant(
        name="aligned_natural",
        num_released=family.dim,
        weights=lambda params, eta: inverse_fisher(params).loc ** 2,
        encode=lambda params, eta, g: inverse_fisher(params).loc * g,
        decode=decode,
    )


def whitened(family: Family) -> Variant:
    """The gradient with respect to the standardised latent is clipped, counted and noised.

    It asks for a Gaussian family.
    """
    if family.factor is None:
        raise UnservedVariantError
    factor, kept = family.factor, math.sqrt(1 - COUNT_SHARE)

    def encode(params: Params, eta: Array, g: Latent) -> Float[Array, " r"]:
        scale = factor(params)
        moved = scale * g if scale.ndim == 1 else scale.T @ g
        return jnp.concatenate([kept * moved, jnp.zeros(NUM_NORM_BINS)])

    def decode(params: Params, eta: Array, r: Float[Array, " r"], free: Params) -> Params:
        scale, sums = factor(params), r[: family.dim] / kept
        if scale.ndim == 1:
            g = sums / scale
        else:
            g = jax.scipy.linalg.solve_triangular(scale, sums, trans="T", lower=True)
        return _add(pull_back(family, params, eta, g), free)

    return Variant(
        name="whitened",
        num_released=family.dim + NUM_NORM_BINS,
        weights=lambda params, eta: Whitening(factor(params)),
        encode=encode,
        decode=decode,
        whitens=True,
    )


def whitened_clip_norm(*, num_examples: int, dim: int, noise: float) -> float:
    r"""The clip norm of the whitened variant: :math:`c \sqrt{d / N}`, c from 3 to 6 or so.

    The norms of whitened gradients have the mean square d / N. With c the noise is
    :math:`\sigma c \sqrt{d/N}` a coordinate, and the clip shifts the sum by a part of
    :math:`N \sqrt{d/N}\, E(|u| - c)_+`, u the norms in units of their root mean square. c makes the
    sum of both squares least, for norms with an ordinary tail. All of it is public.

    Args:
        num_examples, dim: N and d.
        noise: Noise multiplier of the mean of all releases, :math:`\sigma`: that of one release
            over the sampling probability and the root of the number of steps.

    >>> round(whitened_clip_norm(num_examples=5000, dim=10, noise=3.7) / (10 / 5000) ** 0.5, 1)
    3.5
    """
    factors = np.linspace(*_CLIP_FACTORS)
    excess = _TAIL_EXCESS * np.exp(-(factors - _CLIP_FACTORS[0]) / _TAIL_LENGTH)
    noises = noise * factors * math.sqrt(dim / num_examples) * math.sqrt(dim)
    shifts = CLIP_SHIFT * math.sqrt(num_examples * dim) * excess
    best = factors[np.argmin(np.square(noises) + np.square(shifts))]
    return float(best) * math.sqrt(dim / num_examples)


VARIANTS: dict[str, Callable[[Family], Variant]] = {
    "vanilla": vanilla,
    "aligned": aligned,
    "natural": natural,
    "preconditioned": preconditioned,
    "aligned_natural": aligned_natural,
    "whitened": whitened,
}


def make_variant(name: str, family: Family) -> Variant:
    """The named variant for a family, or an error that says what would work."""
    factory = VARIANTS[_validate.one_of("variant", name, VARIANTS)]
    try:
        return factory(family)
    except UnservedVariantError:
        able = [f for f in FAMILIES if name in served_variants(f)]
        raise UnservedVariantError(
            f"variant: the family {family.name!r} cannot serve {name!r}, which needs slopes "
            f"or a diagonal scaling that it does not have. {family.name!r} serves "
            f"{', '.join(map(repr, served_variants(family)))}; {name!r} works with "
            f"{', '.join(map(repr, able))}."
        ) from None


def served_variants(family: Family | str) -> list[str]:
    """Names of the variants that a family can serve; none for one whose package is missing."""
    if isinstance(family, str):
        try:
            family = FAMILIES[family](2)
        except MissingExtraError:
            return []
    return [name for name, factory in VARIANTS.items() if _can_serve(factory, family)]


def _in_parameter_space(
    family: Family,
    name: str,
    *,
    scaling: Callable[[Params], Params],
    decode: Callable[[Params, Params, Params], Params],
) -> Variant:
    """A variant that noises P J' g with P = scaling(params), a diagonal matrix."""
    if family.slopes is None:
        raise UnservedVariantError
    slopes = family.slopes

    def scaled_slopes(params: Params, eta: Array) -> Params:
        return _multiply(scaling(params), slopes(params, eta))

    def weights(params: Params, eta: Array) -> Float[Array, " d"]:
        squares = jax.tree.map(jnp.square, scaled_slopes(params, eta))
        per_leaf = [leaf.reshape(family.dim, -1).sum(axis=1) for leaf in jax.tree.leaves(squares)]
        return sum(per_leaf[1:], start=per_leaf[0])

    def encode(params: Params, eta: Array, g: Latent) -> Float[Array, " r"]:
        moved = jax.tree.map(
            lambda slope: slope * g.reshape((-1,) + (1,) * (slope.ndim - 1)),
            scaled_slopes(params, eta),
        )
        return family.pack(moved)

    return Variant(
        name=name,
        num_released=family.num_params,
        weights=weights,
        encode=encode,
        decode=lambda params, eta, r, free: decode(params, family.unpack(r), free),
    )


def _add(a: Params, b: Params) -> Params:
    return jax.tree.map(jnp.add, a, b)


def _multiply(a: Params, b: Params) -> Params:
    return jax.tree.map(jnp.multiply, a, b)


def _divide(a: Params, b: Params) -> Params:
    # Parameters that do not exist (the upper triangle of a Cholesky factor) have scaling zero.
    return jax.tree.map(lambda x, y: jnp.where(y == 0, 0.0, x / jnp.where(y == 0, 1.0, y)), a, b)


def _can_serve(factory: Callable[[Family], Variant], family: Family) -> bool:
    try:
        factory(family)
    except UnservedVariantError:
        return False
    return True
