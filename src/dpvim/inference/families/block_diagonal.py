"""Block-diagonal: full-rank within each site of the model, independent between sites."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dpvim.inference.families.base import (
    Family,
    Layout,
    Preconditioners,
    gaussian_entropy,
    scale_transform_of,
)
from dpvim.types import Latent, Scalar


class BlockDiagonalParams(NamedTuple):
    """loc m_q and raw_blocks: row i has the entries of row i of the Cholesky factor that lie in
    the block of i, with T^-1 of the diagonal one, and zeros after that."""

    loc: Float[Array, "*snapshots d"]
    raw_blocks: Float[Array, "*snapshots d largest"]


def block_diagonal(layout: Layout | int, scale_transform: str = "softplus") -> Family:
    r"""A Gaussian with any covariance within a block of the layout, none between blocks.

    With n blocks of d / n entries it has d / n times d / 2 parameters of covariance, where a
    full-rank Gaussian has d times d / 2.
    """
    transform = scale_transform_of(scale_transform)
    layout = Layout.of(layout)
    dim, largest = layout.dim, max(layout.sizes)
    starts = np.repeat(np.cumsum((0, *layout.sizes[:-1]), dtype=np.int32), layout.sizes)
    own_place = np.arange(dim, dtype=np.int32) - starts  # of a coordinate, within its block

    # Index arrays are made when needed: a family by itself takes no memory.
    def place() -> Int[Array, "1 largest"]:
        return jnp.arange(largest, dtype=jnp.int32)[None]

    def shared(eta: Array) -> Float[Array, "d largest"]:
        """Entries of eta that entry [i, j] of the factor is multiplied with."""
        return eta[jnp.minimum(starts[:, None] + place(), dim - 1)]

    def packed_places() -> tuple[np.ndarray, ...]:
        return tuple(np.argwhere(np.arange(largest) <= own_place[:, None]).T.astype(np.int32))

    def with_diagonal(strict: Array, diagonal: Float[Array, " d"]) -> Float[Array, "d largest"]:
        on, below = place() == own_place[:, None], place() < own_place[:, None]
        return jnp.where(below, strict, jnp.where(on, diagonal[:, None], 0.0))

    def diagonal_of(params: BlockDiagonalParams) -> Float[Array, " d"]:
        return params.raw_blocks[np.arange(dim, dtype=np.int32), own_place]

    def blocks(params: BlockDiagonalParams) -> Float[Array, "d largest"]:
        return with_diagonal(params.raw_blocks, transform.forward(diagonal_of(params)))

    def init(loc: Latent, scale: Scalar | float) -> BlockDiagonalParams:
        raw_scale = transform.inverse(jnp.full_like(loc, scale))
        return BlockDiagonalParams(loc, with_diagonal(jnp.zeros((dim, largest)), raw_scale))

    def reparametrise(params: BlockDiagonalParams, eta: Array) -> Latent:
        return params.loc + jnp.sum(blocks(params) * shared(eta), axis=1)

    def scale_tril(params: BlockDiagonalParams) -> Float[Array, "d d"]:
        rows, columns = packed_places()
        entries = blocks(params)[rows, columns]
        return jnp.zeros((dim, dim)).at[rows, starts[rows] + columns].set(entries)

    def slopes(params: BlockDiagonalParams, eta: Array) -> BlockDiagonalParams:
        own = eta * transform.derivative(diagonal_of(params))
        return BlockDiagonalParams(jnp.ones_like(eta), with_diagonal(shared(eta), own))

    def unit_slope(params: BlockDiagonalParams) -> BlockDiagonalParams:
        slope = transform.derivative(diagonal_of(params))
        ones = jnp.ones((dim, largest))
        return BlockDiagonalParams(jnp.ones_like(params.loc), with_diagonal(ones, 1 / slope))

    def unpack(flat: Float[Array, " k"]) -> BlockDiagonalParams:
        entries = jnp.zeros((dim, largest)).at[packed_places()].set(flat[dim:])
        return BlockDiagonalParams(flat[:dim], entries)

    return Family(
        name="block_diagonal",
        layout=layout,
        scale_transform=transform.name,
        base_size=dim,
        num_params=dim + sum(size * (size + 1) // 2 for size in layout.sizes),
        init=init,
        reparametrise=reparametrise,
        entropy=lambda p, eta: gaussian_entropy(transform.forward(diagonal_of(p))),
        pack=lambda params: jnp.concatenate([params.loc, params.raw_blocks[packed_places()]]),
        unpack=unpack,
        guide="AutoMultivariateNormal",
        numpyro_params=lambda p: {"auto_loc": p.loc, "auto_scale_tril": scale_tril(p)},
        factor=scale_tril,
        slopes=slopes,
        preconditioners=Preconditioners(unit_slope, None),
    )
