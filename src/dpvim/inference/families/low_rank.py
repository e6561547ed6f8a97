"""Low-rank: independent Gaussians and a few directions in which they move together."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from dpvim import _validate
from dpvim.inference.families.base import (
    Family,
    Layout,
    Preconditioners,
    gaussian_entropy,
    scale_transform_of,
)
from dpvim.types import Latent, Scalar


class LowRankParams(NamedTuple):
    """loc m_q, cov_factor B and raw_scale s_q: the covariance is B B' + T(raw_scale)^2."""

    loc: Float[Array, "*snapshots d"]
    cov_factor: Float[Array, "*snapshots d rank"]
    raw_scale: Float[Array, "*snapshots d"]


def low_rank(
    layout: Layout | int, scale_transform: str = "softplus", *, rank: int | None = None
) -> Family:
    r"""A Gaussian with a few correlations, :math:`\theta = m + B \eta_r + T(s) \eta_d`.

    The base draw holds the `rank` entries of :math:`\eta_r` and then the d of :math:`\eta_d`. By
    default the rank is the root of d, and B starts at zero: NumPyro's conventions.
    """
    transform = scale_transform_of(scale_transform)
    layout = Layout.of(layout)
    rank = _validate.positive_int("rank", round(layout.dim**0.5) if rank is None else rank)
    dim, end_of_factor = layout.dim, layout.dim * (1 + rank)

    def init(loc: Latent, scale: Scalar | float) -> LowRankParams:
        raw_scale = transform.inverse(jnp.full_like(loc, scale))
        return LowRankParams(loc, jnp.zeros((dim, rank), loc.dtype), raw_scale)

    def reparametrise(params: LowRankParams, eta: Array) -> Latent:
        own = transform.forward(params.raw_scale) * eta[rank:]
        return params.loc + params.cov_factor @ eta[:rank] + own

    def entropy(params: LowRankParams, eta: Array) -> Scalar:
        # |B B' + D^2| = |I + B' D^-2 B| |D^2|: a determinant of rank by rank.
        scale = transform.forward(params.raw_scale)
        relative = params.cov_factor / scale[:, None]
        _, log_det = jnp.linalg.slogdet(jnp.eye(rank) + relative.T @ relative)
        return gaussian_entropy(scale) + 0.5 * log_det

    def factor(params: LowRankParams) -> Float[Array, "d d"]:
        variance = transform.forward(params.raw_scale) ** 2
        return jnp.linalg.cholesky(params.cov_factor @ params.cov_factor.T + jnp.diag(variance))

    def slopes(params: LowRankParams, eta: Array) -> LowRankParams:
        shared = jnp.broadcast_to(eta[:rank], (dim, rank))
        own = eta[rank:] * transform.derivative(params.raw_scale)
        return LowRankParams(jnp.ones(dim, eta.dtype), shared, own)

    def unit_slope(params: LowRankParams) -> LowRankParams:
        slope = transform.derivative(params.raw_scale)
        return LowRankParams(jnp.ones_like(params.loc), jnp.ones_like(params.cov_factor), 1 / slope)

    def unpack(flat: Float[Array, " k"]) -> LowRankParams:
        shared = flat[dim:end_of_factor].reshape(dim, rank)
        return LowRankParams(flat[:dim], shared, flat[end_of_factor:])

    def numpyro_params(params: LowRankParams) -> dict[str, Array]:
        scale = transform.forward(params.raw_scale)
        relative = params.cov_factor / scale[..., None]  # NumPyro's is in units of the scale
        return {"auto_loc": params.loc, "auto_cov_factor": relative, "auto_scale": scale}

    return Family(
        name="low_rank",
        options={"rank": rank},
        layout=layout,
        scale_transform=transform.name,
        base_size=rank + dim,
        num_params=dim * (2 + rank),
        init=init,
        reparametrise=reparametrise,
        entropy=entropy,
        pack=lambda params: jnp.concatenate([leaf.reshape(-1) for leaf in params]),
        unpack=unpack,
        guide="AutoLowRankMultivariateNormal",
        numpyro_params=numpyro_params,
        factor=factor,
        slopes=slopes,
        preconditioners=Preconditioners(unit_slope, None),
    )
