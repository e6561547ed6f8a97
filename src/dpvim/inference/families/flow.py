"""A normalising flow: any shape of posterior. Needs flowjax (``pip install 'dpvim[flows]'``)."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from dpvim import _validate
from dpvim._compile import single_precision
from dpvim._extras import require
from dpvim.inference.families.base import (
    Family,
    Layout,
    gaussian_entropy,
    own_numpyro_params,
    scale_transform_of,
)
from dpvim.types import Latent, Scalar

# Weights start so close to zero that the flow is close to the identity.
_INIT_SCALE = 0.1
# A file may ask for any flow; none that would fill the memory is made.
_MOST_LAYERS, _LARGEST_WIDTH = 32, 1024


class FlowParams(NamedTuple):
    """loc m_q and raw_scale s_q around the flow, and the flow's weights in one vector."""

    loc: Float[Array, "*snapshots d"]
    raw_scale: Float[Array, "*snapshots d"]
    weights: Float[Array, "*snapshots k"]


@single_precision
def flow(
    layout: Layout | int,
    scale_transform: str = "softplus",
    *,
    layers: int = 4,
    width: int = 32,
) -> Family:
    r"""A flow between a location and scales, :math:`\theta = m + T(s) F_w(\eta)`.

    F is a coupling flow of affine layers, whose shifts and scales are small neural networks of the
    other half of the coordinates. The likelihood sees :math:`\theta` alone, so the gradient that
    is noised has d entries however many weights there are: alignment for any reparametrised guide.
    There is no per-parameter slope to clip by, so the other variants are not served.

    Args:
        layout: Blocks of the latent; only their total counts.
        scale_transform: T.
        layers: Coupling layers.
        width: Units of the hidden layer of each network.
    """
    transform = scale_transform_of(scale_transform)
    layout = Layout.of(layout)
    dim = layout.dim
    layers, width = _validate.positive_int("layers", layers), _validate.positive_int("width", width)
    if layers > _MOST_LAYERS or width > _LARGEST_WIDTH:
        raise ValueError(
            f"layers and width: expected at most {_MOST_LAYERS} and {_LARGEST_WIDTH}, got {layers} "
            f"and {width}."
        )
    initial, bijection_of = _coupling_flow(dim, layers, width)

    def init(loc: Latent, scale: Scalar | float) -> FlowParams:
        return FlowParams(loc, transform.inverse(jnp.full_like(loc, scale)), initial)

    def reparametrise(params: FlowParams, eta: Array) -> Latent:
        scale = transform.forward(params.raw_scale)
        return params.loc + scale * bijection_of(params.weights).transform(eta)

    def entropy(params: FlowParams, eta: Array) -> Scalar:
        _, log_det = bijection_of(params.weights).transform_and_log_det(eta)
        return gaussian_entropy(transform.forward(params.raw_scale)) + log_det

    def log_density(params: FlowParams, latent: Latent) -> Scalar:
        scale = transform.forward(params.raw_scale)
        inverse = bijection_of(params.weights).inverse_and_log_det
        eta, log_det = inverse((latent - params.loc) / scale)
        base = jnp.sum(jax.scipy.stats.norm.logpdf(eta))
        return base + log_det - jnp.sum(jnp.log(scale))

    return Family(
        name="flow",
        options={"layers": layers, "width": width},
        layout=layout,
        scale_transform=transform.name,
        base_size=dim,
        num_params=2 * dim + initial.size,
        init=init,
        reparametrise=reparametrise,
        entropy=entropy,
        pack=lambda params: jnp.concatenate(params),
        unpack=lambda flat: FlowParams(flat[:dim], flat[dim : 2 * dim], flat[2 * dim :]),
        numpyro_params=own_numpyro_params,
        log_density=log_density,
    )


def _coupling_flow(dim: int, layers: int, width: int) -> tuple[Float[Array, " k"], Any]:
    """Initial weights, and the function from weights to flowjax's bijection."""
    flows = require("flowjax.flows", extra="flows")
    distributions = require("flowjax.distributions", extra="flows")
    equinox, paramax = require("equinox", extra="flows"), require("paramax", extra="flows")
    # One coordinate has no other half: an autoregressive flow of it is an affine map.
    make = flows.coupling_flow if dim > 1 else flows.masked_autoregressive_flow
    made = make(
        jax.random.key(0),
        base_dist=distributions.Normal(jnp.zeros(dim)),
        flow_layers=layers,
        nn_width=width,
        invert=False,  # fast from the base draw to the latent, the way that every step goes
    )
    arrays, rest = equinox.partition(
        made.bijection,
        equinox.is_inexact_array,
        is_leaf=lambda leaf: isinstance(leaf, paramax.NonTrainable),
    )
    weights, unravel = ravel_pytree(arrays)

    def bijection_of(weights: Float[Array, " k"]) -> Any:
        return paramax.unwrap(equinox.combine(unravel(weights), rest))

    return _INIT_SCALE * weights, bijection_of
