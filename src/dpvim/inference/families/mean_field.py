"""Mean-field: independent Gaussians."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from dpvim.inference.families.base import (
    Family,
    Layout,
    Preconditioners,
    gaussian_entropy,
    scale_transform_of,
)
from dpvim.types import Latent, Scalar


class MeanFieldParams(NamedTuple):
    """loc m_q and raw_scale s_q; the standard deviations are T(raw_scale)."""

    loc: Float[Array, "*snapshots d"]
    raw_scale: Float[Array, "*snapshots d"]


def mean_field(layout: Layout | int, scale_transform: str = "softplus") -> Family:
    r"""Independent Gaussians, :math:`\theta = m + T(s) \eta` (eq. 3 of the paper).

    >>> import jax.numpy as jnp
    >>> family = mean_field(3)
    >>> params = family.init(jnp.zeros(3), 0.1)
    >>> [f"{scale:.2f}" for scale in family.factor(params)]
    ['0.10', '0.10', '0.10']
    """
    transform = scale_transform_of(scale_transform)
    layout = Layout.of(layout)
    dim = layout.dim

    def init(loc: Latent, scale: Scalar | float) -> MeanFieldParams:
        return MeanFieldParams(loc, transform.inverse(jnp.full_like(loc, scale)))

    def factor(params: MeanFieldParams) -> Float[Array, " d"]:
        return transform.forward(params.raw_scale)

    def slopes(params: MeanFieldParams, eta: Array) -> MeanFieldParams:
        return MeanFieldParams(jnp.ones_like(eta), eta * transform.derivative(params.raw_scale))

    def unit_slope(params: MeanFieldParams) -> MeanFieldParams:
        slope = transform.derivative(params.raw_scale)
        return MeanFieldParams(jnp.ones_like(params.loc), 1 / slope)

    def inverse_fisher(params: MeanFieldParams) -> MeanFieldParams:
        variance = factor(params) ** 2
        slope = transform.derivative(params.raw_scale)
        return MeanFieldParams(variance, variance / (2 * slope**2))

    return Family(
        name="mean_field",
        layout=layout,
        scale_transform=transform.name,
        base_size=dim,
        num_params=2 * dim,
        init=init,
        reparametrise=lambda params, eta: params.loc + factor(params) * eta,
        entropy=lambda params, eta: gaussian_entropy(factor(params)),
        pack=lambda params: jnp.concatenate(params),
        unpack=lambda flat: MeanFieldParams(flat[:dim], flat[dim:]),
        guide="AutoDiagonalNormal",
        numpyro_params=lambda params: {"auto_loc": params.loc, "auto_scale": factor(params)},
        factor=factor,
        slopes=slopes,
        preconditioners=Preconditioners(unit_slope, inverse_fisher),
    )
