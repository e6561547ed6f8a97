"""Full-rank: a Gaussian with any covariance."""

from __future__ import annotations

from typing import NamedTuple

import jax
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

    # Masks and places are constants. What a program works out by itself leaves the loop of steps
    # once for each use, so the compiler does not see that the factor is the same every time.
    def strictly_lower(matrix: Float[Array, "d d"]) -> Float[Array, "d d"]:
        return jnp.where(np.tri(dim, k=-1, dtype=bool), matrix, 0.0)

    def diagonal_of(matrix: Float[Array, "d d"]) -> Latent:
        at = np.arange(dim, dtype=np.int32)
        return matrix.at[at, at].get(mode="promise_in_bounds")

    @jax.custom_vjp
    def diag(diagonal: Latent) -> Float[Array, "d d"]:
        return jnp.where(np.eye(dim, dtype=bool), diagonal[:, None], 0.0)

    # JAX would sum over the matrix, and XLA would do that on two threads.
    diag.defvjp(lambda diagonal: (diag(diagonal), None), lambda _, grad: (diagonal_of(grad),))

    def scale_tril(params: FullRankParams) -> Float[Array, "d d"]:
        diagonal = transform.forward(diagonal_of(params.raw_tril))
        return strictly_lower(params.raw_tril) + diag(diagonal)

    def init(loc: Latent, scale: Scalar | float) -> FullRankParams:
        return FullRankParams(loc, diag(transform.inverse(jnp.full_like(loc, scale))))

    def place(loc: Latent, scale_tril: Float[Array, "d d"]) -> FullRankParams:
        diagonal = transform.inverse(diagonal_of(scale_tril))
        return FullRankParams(loc, strictly_lower(scale_tril) + diag(diagonal))

    def slopes(params: FullRankParams, eta: Array) -> FullRankParams:
        below = strictly_lower(jnp.broadcast_to(eta, (dim, dim)))
        on = diag(eta * transform.derivative(diagonal_of(params.raw_tril)))
        return FullRankParams(jnp.ones_like(eta), below + on)

    def unit_slope(params: FullRankParams) -> FullRankParams:
        below = strictly_lower(jnp.ones((dim, dim)))
        on = diag(1 / transform.derivative(diagonal_of(params.raw_tril)))
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
        entropy=lambda p, eta: gaussian_entropy(transform.forward(diagonal_of(p.raw_tril))),
        pack=lambda params: jnp.concatenate([params.loc, params.raw_tril[tuple(places())]]),
        unpack=unpack,
        guide="AutoMultivariateNormal",
        numpyro_params=lambda p: {"auto_loc": p.loc, "auto_scale_tril": scale_tril(p)},
        factor=scale_tril,
        place=place,
        slopes=slopes,
        preconditioners=Preconditioners(unit_slope, None),
    )
