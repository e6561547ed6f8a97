"""Full-rank: a Gaussian with any covariance."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dpvim.inference.families.base import (
    Family,
    Layout,
    Preconditioners,
    gaussian_entropy,
    scale_transform_of,
)
from dpvim.types import Latent, Scalar


class FullRankParams(NamedTuple):
    """loc m_q and raw_tril a_q: the Cholesky factor, with T^-1 of its diagonal. The strict upper
    triangle is zero and stays so."""

    loc: Float[Array, "*snapshots d"]
    raw_tril: Float[Array, "*snapshots d d"]


def full_rank(layout: Layout | int, scale_transform: str = "softplus") -> Family:
    r"""A Gaussian with any covariance, :math:`\theta = m + T(a) \eta` (eq. 10 of the paper)."""
    transform = scale_transform_of(scale_transform)
    layout = Layout.of(layout)
    dim = layout.dim

    def places() -> np.ndarray:  # made when needed: a family by itself takes no memory
        return np.asarray(np.tril_indices(dim), np.int32)

    def scale_tril(params: FullRankParams) -> Float[Array, "d d"]:
        diagonal = transform.forward(jnp.diagonal(params.raw_tril))
        return jnp.tril(params.raw_tril, -1) + jnp.diag(diagonal)

    def init(loc: Latent, scale: Scalar | float) -> FullRankParams:
        return FullRankParams(loc, jnp.diag(transform.inverse(jnp.full_like(loc, scale))))

    def place(loc: Latent, scale_tril: Float[Array, "d d"]) -> FullRankParams:
        diagonal = transform.inverse(jnp.diagonal(scale_tril))
        return FullRankParams(loc, jnp.tril(scale_tril, -1) + jnp.diag(diagonal))

    def slopes(params: FullRankParams, eta: Array) -> FullRankParams:
        below = jnp.tril(jnp.broadcast_to(eta, (dim, dim)), -1)
        on = jnp.diag(eta * transform.derivative(jnp.diagonal(params.raw_tril)))
        return FullRankParams(jnp.ones_like(eta), below + on)

    def unit_slope(params: FullRankParams) -> FullRankParams:
        below = jnp.tril(jnp.ones((dim, dim)), -1)
        on = jnp.diag(1 / transform.derivative(jnp.diagonal(params.raw_tril)))
        return FullRankParams(jnp.ones_like(params.loc), below + on)

    def unpack(flat: Float[Array, " k"]) -> FullRankParams:
        raw_tril = jnp.zeros((dim, dim)).at[tuple(places())].set(flat[dim:])
        return FullRankParams(flat[:dim], raw_tril)

    return Family(
        name="full_rank",
        layout=layout,
        scale_transform=transform.name,
        base_size=dim,
        num_params=dim + dim * (dim + 1) // 2,
        init=init,
        reparametrise=lambda params, eta: params.loc + scale_tril(params) @ eta,
        entropy=lambda p, eta: gaussian_entropy(transform.forward(jnp.diagonal(p.raw_tril))),
        pack=lambda params: jnp.concatenate([params.loc, params.raw_tril[tuple(places())]]),
        unpack=unpack,
        guide="AutoMultivariateNormal",
        numpyro_params=lambda p: {"auto_loc": p.loc, "auto_scale_tril": scale_tril(p)},
        factor=scale_tril,
        place=place,
        slopes=slopes,
        preconditioners=Preconditioners(unit_slope, None),
    )
