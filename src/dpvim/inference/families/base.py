r"""The interface of a variational family: how a draw of the base becomes a latent.

A family is a handful of functions of ``(params, eta)``; it cannot see data. Gaussian families
also know their `slopes`: every parameter moves exactly one coordinate of the latent, so the
Jacobian J of the reparametrisation has one number a parameter, and :math:`J' g` is that number
times one entry of g. That is why per-example gradients are never wider than d.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dpvim import _validate
from dpvim.types import Latent, Scalar

Params: TypeAlias = Any
"""Variational parameters xi: a NamedTuple of arrays, unconstrained, `loc` the first of them."""

# Draws for the standard deviations of a family that has no formula for them.
_DRAWS = 1000


class Layout(NamedTuple):
    """The blocks that the flat latent is made of: one for each site of the model.

    >>> Layout.of(3), Layout((1, 2)).dim
    (Layout(sizes=(3,)), 3)
    """

    sizes: tuple[int, ...]

    @classmethod
    def of(cls, layout: Layout | int) -> Layout:
        """A layout as it is, or one block of so many entries."""
        return cls((layout,)) if isinstance(layout, int) else layout

    @property
    def dim(self) -> int:
        """Entries of the latent, d."""
        return sum(self.sizes)


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


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """A reparametrised variational family over a d-dimensional latent.

    Attributes:
        name: Its key in `FAMILIES`.
        options: What it was made with besides layout and scale transform; saved with a fit.
        layout: Blocks of the latent.
        scale_transform: Name of T in `SCALE_TRANSFORMS`.
        base_size: Length of a base draw eta.
        num_params: Length of a packed parameter vector, dim xi.
        init: ``(loc, scale) -> params``.
        reparametrise: ``(params, eta) -> latent``, f(xi, eta).
        entropy: ``(params, eta) ->`` H(q), or an unbiased estimate of it from the draw.
        pack, unpack: Parameters (or their gradients) to a flat vector and back.
        guide: Name of NumPyro's automatic guide for the family; None if there is none.
        numpyro_params: ``params ->`` the guide's parameters, by NumPyro's names. Without a guide
            of NumPyro's: the parameters themselves, in order; see `own_numpyro_params`.
        factor: Of a Gaussian family: ``params ->`` standard deviations [d] if coordinates are
            independent, else the Cholesky factor [d, d] of the covariance. Its latent is linear in
            eta.
        place: ``(loc, Cholesky factor) -> params`` of that Gaussian, for a family that has all
            Gaussians; its base draw is as long as the latent.
        log_density: Of any other family: ``(params, latent) -> log q(latent)``.
        slopes: ``(params, eta) ->`` pytree like params, first axis d: how much each parameter
            moves its latent coordinate. None for a family without that structure, which serves
            the aligned variant alone.
        preconditioners: Diagonal scalings, or None.
    """

    name: str
    layout: Layout
    scale_transform: str
    base_size: int
    num_params: int
    init: Callable[[Latent, Scalar | float], Params]
    reparametrise: Callable[[Params, Array], Latent]
    entropy: Callable[[Params, Array], Scalar]
    pack: Callable[[Params], Float[Array, " k"]]
    unpack: Callable[[Float[Array, " k"]], Params]
    numpyro_params: Callable[[Params], dict[str, Array]]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    guide: str | None = None
    factor: Callable[[Params], Float[Array, " d"] | Float[Array, "d d"]] | None = None
    place: Callable[[Latent, Float[Array, "d d"]], Params] | None = None
    log_density: Callable[[Params, Latent], Scalar] | None = None
    slopes: Callable[[Params, Array], Params] | None = None
    preconditioners: Preconditioners | None = None

    @property
    def dim(self) -> int:
        """Entries of the latent, d."""
        return self.layout.dim

    @property
    def is_gaussian(self) -> bool:
        """A Gaussian whose latent is linear in the base draw."""
        return self.factor is not None

    def base_draw(self, key: Array) -> Float[Array, " base"]:
        """A standard normal eta."""
        return jax.random.normal(key, (self.base_size,))


FamilyFactory: TypeAlias = Callable[..., Family]
"""``(layout, scale_transform, **options) -> Family``; the options are the family's own."""


def pull_back(family: Family, params: Params, eta: Array, gradient: Latent) -> Params:
    """J' g: a gradient with respect to the latent, carried to the parameters. Any family."""
    _, vjp = jax.vjp(lambda p: family.reparametrise(p, eta), params)
    return vjp(gradient)[0]


def standard_deviations(family: Family, params: Params) -> Float[Array, " d"]:
    """Standard deviations of the latent: exact for Gaussians, else from a thousand draws."""
    if family.factor is not None:
        factor = family.factor(params)
        return factor if factor.ndim == 1 else jnp.linalg.norm(factor, axis=1)
    etas = jax.random.normal(jax.random.key(0), (_DRAWS, family.base_size))
    return jnp.std(jax.vmap(lambda eta: family.reparametrise(params, eta))(etas), axis=0)


def own_numpyro_params(params: Params) -> dict[str, Array]:
    """Parameters of a family that NumPyro does not have, as a guide of NumPyro's names them."""
    return {f"auto_{name}": value for name, value in params._asdict().items()}


def gaussian_entropy(scales: Float[Array, " d"]) -> Scalar:
    """Entropy of a Gaussian from the diagonal of its Cholesky factor."""
    return jnp.sum(jnp.log(scales)) + scales.size * 0.5 * (1 + np.log(2 * np.pi))


def scale_transform_of(name: str) -> ScaleTransform:
    """The named transform, or an error that says which there are."""
    return SCALE_TRANSFORMS[_validate.one_of("scale_transform", name, SCALE_TRANSFORMS)]
