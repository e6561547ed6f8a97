r"""Variational families: how a draw of the base becomes a latent.

A family is a handful of functions of ``(params, eta)``; it cannot see data. Gaussian families
also know their `slopes`: every parameter moves exactly one coordinate of the latent, so the
Jacobian J of the reparametrisation has one number a parameter, and :math:`J' g` is that number
times one entry of g. That is why per-example gradients are never wider than d.

>>> import jax.numpy as jnp
>>> family = mean_field(3)
>>> params = family.init(jnp.zeros(3), 0.1)
>>> [f"{scale:.2f}" for scale in family.factor(params)]
['0.10', '0.10', '0.10']
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dpvim import _validate
from dpvim.types import Latent, Scalar

Params: TypeAlias = Any
"""Variational parameters xi: a NamedTuple of arrays, unconstrained."""


class ScaleTransform(NamedTuple):
    """T from the whole line to positive scales, with derivative T' and inverse."""

    name: str
    forward: Callable[[Array], Array]
    derivative: Callable[[Array], Array]
    inverse: Callable[[Array], Array]


SCALE_TRANSFORMS = {
    "softplus": ScaleTransform(
        "softplus",
        jax.nn.softplus,
        jax.nn.sigmoid,
        lambda scale: scale + jnp.log(-jnp.expm1(-scale)),
    ),
    "exp": ScaleTransform("exp", jnp.exp, jnp.exp, jnp.log),
}


class Preconditioners(NamedTuple):
    """Diagonal scalings of parameter space, as functions of the parameters.

    Attributes:
        unit_slope: D with the scale parameters divided by T', or None.
        inverse_fisher: F^-1, or None where the Fisher matrix is not diagonal.
    """

    unit_slope: Callable[[Params], Params]
    inverse_fisher: Callable[[Params], Params] | None


class Family(NamedTuple):
    """A reparametrised variational family over a d-dimensional latent.

    Attributes:
        name: What it is called in `FAMILIES`.
        dim: d.
        scale_transform: Name of T in `SCALE_TRANSFORMS`.
        num_params: Length of a packed parameter vector, dim xi.
        init: ``(loc, scale) -> params``.
        base_draw: ``key -> eta``.
        reparametrise: ``(params, eta) -> latent``, f(xi, eta).
        entropy: ``params -> H(q)``.
        factor: ``params ->`` standard deviations [d] if coordinates are independent, else the
            Cholesky factor [d, d] of the covariance.
        pack, unpack: parameters (or their gradients) to a flat vector and back.
        slopes: ``(params, eta) ->`` pytree like params, first axis d: how much each parameter
            moves its latent coordinate. None for a family without that structure.
        preconditioners: diagonal scalings, or None.
    """

    name: str
    dim: int
    scale_transform: str
    num_params: int
    init: Callable[[Latent, Scalar | float], Params]
    base_draw: Callable[[Array], Array]
    reparametrise: Callable[[Params, Array], Latent]
    entropy: Callable[[Params], Scalar]
    factor: Callable[[Params], Float[Array, " d"] | Float[Array, "d d"]]
    pack: Callable[[Params], Float[Array, " k"]]
    unpack: Callable[[Float[Array, " k"]], Params]
    slopes: Callable[[Params, Array], Params] | None = None
    preconditioners: Preconditioners | None = None


class MeanField(NamedTuple):
    """loc m_q and raw_scale s_q; the standard deviations are T(raw_scale)."""

    loc: Float[Array, "*snapshots d"]
    raw_scale: Float[Array, "*snapshots d"]


class FullRank(NamedTuple):
    """loc m_q and raw_tril a_q: the Cholesky factor, with T^-1 of its diagonal. The strict upper
    triangle is zero and stays so."""

    loc: Float[Array, "*snapshots d"]
    raw_tril: Float[Array, "*snapshots d d"]


class FamilyFactory(Protocol):
    """Makes a family for a dimension."""

    def __call__(self, dim: int, scale_transform: str = "softplus") -> Family: ...


def mean_field(dim: int, scale_transform: str = "softplus") -> Family:
    r"""Independent Gaussians, :math:`\theta = m + T(s) \eta` (eq. 3 of the paper)."""
    transform = _scale_transform(scale_transform)

    def init(loc: Latent, scale: Scalar | float) -> MeanField:
        return MeanField(loc, transform.inverse(jnp.full_like(loc, scale)))

    def reparametrise(params: MeanField, eta: Array) -> Latent:
        return params.loc + transform.forward(params.raw_scale) * eta

    def slopes(params: MeanField, eta: Array) -> MeanField:
        return MeanField(jnp.ones_like(eta), eta * transform.derivative(params.raw_scale))

    def unit_slope(params: MeanField) -> MeanField:
        return MeanField(jnp.ones_like(params.loc), 1 / transform.derivative(params.raw_scale))

    def inverse_fisher(params: MeanField) -> MeanField:
        variance = transform.forward(params.raw_scale) ** 2
        return MeanField(variance, variance / (2 * transform.derivative(params.raw_scale) ** 2))

    return Family(
        name="mean_field",
        dim=dim,
        scale_transform=transform.name,
        num_params=2 * dim,
        init=init,
        base_draw=lambda key: jax.random.normal(key, (dim,)),
        reparametrise=reparametrise,
        entropy=lambda params: _gaussian_entropy(transform.forward(params.raw_scale)),
        factor=lambda params: transform.forward(params.raw_scale),
        pack=lambda params: jnp.concatenate(params),
        unpack=lambda flat: MeanField(flat[:dim], flat[dim:]),
        slopes=slopes,
        preconditioners=Preconditioners(unit_slope, inverse_fisher),
    )


def full_rank(dim: int, scale_transform: str = "softplus") -> Family:
    r"""A Gaussian with any covariance, :math:`\theta = m + T(a) \eta` (eq. 10 of the paper)."""
    transform = _scale_transform(scale_transform)
    rows, columns = np.asarray(np.tril_indices(dim), np.int32)

    def scale_tril(params: FullRank) -> Float[Array, "d d"]:
        diagonal = transform.forward(jnp.diagonal(params.raw_tril))
        return jnp.tril(params.raw_tril, -1) + jnp.diag(diagonal)

    def init(loc: Latent, scale: Scalar | float) -> FullRank:
        return FullRank(loc, jnp.diag(transform.inverse(jnp.full_like(loc, scale))))

    def slopes(params: FullRank, eta: Array) -> FullRank:
        below = jnp.tril(jnp.broadcast_to(eta, (dim, dim)), -1)
        on = jnp.diag(eta * transform.derivative(jnp.diagonal(params.raw_tril)))
        return FullRank(jnp.ones_like(eta), below + on)

    def unit_slope(params: FullRank) -> FullRank:
        below = jnp.tril(jnp.ones((dim, dim)), -1)
        on = jnp.diag(1 / transform.derivative(jnp.diagonal(params.raw_tril)))
        return FullRank(jnp.ones_like(params.loc), below + on)

    def unpack(flat: Float[Array, " k"]) -> FullRank:
        return FullRank(flat[:dim], jnp.zeros((dim, dim)).at[rows, columns].set(flat[dim:]))

    return Family(
        name="full_rank",
        dim=dim,
        scale_transform=transform.name,
        num_params=dim + dim * (dim + 1) // 2,
        init=init,
        base_draw=lambda key: jax.random.normal(key, (dim,)),
        reparametrise=lambda params, eta: params.loc + scale_tril(params) @ eta,
        entropy=lambda p: _gaussian_entropy(transform.forward(jnp.diagonal(p.raw_tril))),
        factor=scale_tril,
        pack=lambda params: jnp.concatenate([params.loc, params.raw_tril[rows, columns]]),
        unpack=unpack,
        slopes=slopes,
        preconditioners=Preconditioners(unit_slope, None),
    )


FAMILIES: dict[str, FamilyFactory] = {"mean_field": mean_field, "full_rank": full_rank}


def pull_back(family: Family, params: Params, eta: Array, gradient: Latent) -> Params:
    """J' g: a gradient with respect to the latent, carried to the parameters. Any family."""
    _, vjp = jax.vjp(lambda p: family.reparametrise(p, eta), params)
    return vjp(gradient)[0]


def _gaussian_entropy(scales: Float[Array, " d"]) -> Scalar:
    return jnp.sum(jnp.log(scales)) + scales.size * 0.5 * (1 + np.log(2 * np.pi))


def _scale_transform(name: str) -> ScaleTransform:
    return SCALE_TRANSFORMS[_validate.one_of("scale_transform", name, SCALE_TRANSFORMS)]
