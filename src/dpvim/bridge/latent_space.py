r"""The flat, unconstrained latent and the sites it is made of.

The constraining transforms do not depend on data. So a per-example gradient is taken with respect
to the constrained sites and carried back by the transforms' Jacobian blocks, computed once a step:
matrix products instead of a differentiation through every transform for every record.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpyro.distributions import biject_to
from numpyro.distributions.constraints import Constraint
from numpyro.distributions.transforms import IdentityTransform, IndependentTransform, Transform

from dpvim.types import Latent, Scalar


class Site(NamedTuple):
    """A latent site: its shape, that of its raw (unconstrained) value, and its support."""

    name: str
    shape: tuple[int, ...]
    raw_shape: tuple[int, ...]
    support: Constraint

    @property
    def transform(self) -> Transform:
        """The transform from the raw value to the support."""
        return elementary(biject_to(self.support))

    @property
    def raw_size(self) -> int:
        return math.prod(self.raw_shape)

    @property
    def is_identity(self) -> bool:
        return isinstance(self.transform, IdentityTransform)

    def constrain(self, raw: Array) -> Array:
        return self.transform(raw)

    def log_det(self, raw: Array) -> Scalar:
        if self.is_identity:
            return jnp.zeros(())
        return jnp.sum(self.transform.log_abs_det_jacobian(raw, self.transform(raw)))

    def jacobian(self, raw: Array) -> Float[Array, "size raw_size"]:
        """Derivatives of every entry of the value by every entry of the raw value."""
        flat = jax.jacobian(lambda r: jnp.reshape(self.constrain(r.reshape(self.raw_shape)), -1))
        return flat(jnp.reshape(raw, -1))

    def labels(self) -> list[str]:
        """Names of the entries of the value: ``w[0]``, ``w[1]``; just ``w`` for a number."""
        return [_label(self.name, index) for index in np.ndindex(self.shape)]

    def raw_labels(self) -> list[str]:
        """Names of the entries of the raw value, told apart where the two do not match."""
        name = self.name if self.raw_shape == self.shape else f"{self.name} raw"
        return [_label(name, index) for index in np.ndindex(self.raw_shape)]

    def derivatives(self, raw: Array, of: Callable[[Array], Array]) -> Array:
        """Derivatives of a function of the value by each coordinate of a raw event, on axis 0.

        Args:
            raw: The raw value.
            of: A function that makes no entry of more than one event; an entry's derivatives are
                by the event that it is made of.
        """
        # A transform acts on events and treats every event alike, so one direction for each
        # coordinate of an event gives the Jacobian blocks of all of them.
        event = self.raw_shape[len(self.raw_shape) - self.transform.domain.event_dim :]
        size = math.prod(event)
        directions = jnp.broadcast_to(
            jnp.eye(size).reshape(size, *(1,) * (len(self.raw_shape) - len(event)), *event),
            (size, *self.raw_shape),
        )

        def along(direction: Array) -> Array:
            return jax.jvp(lambda raw: of(self.transform(raw)), (raw,), (direction,))[1]

        return jax.vmap(along)(directions)

    def pull_back(self, raw: Array, gradients: Array) -> Float[Array, "batch raw_size"]:
        """Gradients at the site's value, [batch, *shape], carried to its raw value."""
        batch = gradients.shape[0]
        if self.is_identity:
            return gradients.reshape(batch, -1)
        blocks = self.derivatives(raw, lambda value: value)
        size = len(blocks)
        num_events = self.raw_size // size
        moved = jnp.einsum(
            "nbc,ubc->nbu",
            gradients.reshape(batch, num_events, -1),
            blocks.reshape(size, num_events, -1),
            precision=jax.lax.Precision.HIGHEST,
        )
        return moved.reshape(batch, -1)


class LatentSpace:
    """All latent sites of a model in one flat vector, in a fixed order."""

    def __init__(self, sites: list[Site]) -> None:
        self.sites = sites
        self.dim = sum(site.raw_size for site in sites)

    def unpack(self, latent: Latent) -> dict[str, Array]:
        """Raw (unconstrained) values by site name."""
        raw, start = {}, 0
        for site in self.sites:
            raw[site.name] = latent[start : start + site.raw_size].reshape(site.raw_shape)
            start += site.raw_size
        return raw

    def pack(self, raw: dict[str, Array]) -> Latent:
        return jnp.concatenate([jnp.reshape(raw[site.name], -1) for site in self.sites])

    def constrain(self, latent: Latent | Float[np.ndarray, " d"]) -> dict[str, Array]:
        """Values of the sites, each in its support."""
        raw = self.unpack(jnp.asarray(latent))
        return {site.name: site.constrain(raw[site.name]) for site in self.sites}

    def unconstrain(self, values: dict[str, Array]) -> Latent:
        return self.pack({s.name: s.transform.inv(jnp.asarray(values[s.name])) for s in self.sites})

    def raw_labels(self) -> list[str]:
        """Names of the coordinates of the latent."""
        return [label for site in self.sites for label in site.raw_labels()]

    def log_det(self, latent: Latent) -> Scalar:
        """Log-determinant of the Jacobian of the transform from the latent to the sites."""
        raw = self.unpack(latent)
        return jnp.sum(jnp.stack([site.log_det(raw[site.name]) for site in self.sites]))

    def pull_back(self, latent: Latent, gradients: dict[str, Array]) -> Float[Array, "batch d"]:
        """Gradients with respect to the sites, one a record, carried to the latent."""
        raw = self.unpack(latent)
        return jnp.concatenate(
            [site.pull_back(raw[site.name], gradients[site.name]) for site in self.sites], axis=1
        )


def _label(name: str, index: tuple[int, ...]) -> str:
    return f"{name}[{', '.join(map(str, index))}]" if index else name


def elementary(transform: Transform) -> Transform:
    """The transform without declarations of independence, which change no number."""
    while isinstance(transform, IndependentTransform):
        transform = transform.base_transform
    return transform
