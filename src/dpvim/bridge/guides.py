"""Families by name or by one of NumPyro's automatic guides, and guides for families."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jaxtyping import Array
from numpyro import handlers
from numpyro.infer import autoguide
from numpyro.infer.autoguide import AutoContinuous, AutoGuide

from dpvim import _validate
from dpvim.bridge.handler_stack import numpyro_lock
from dpvim.inference.families import FAMILIES, Family, FamilySpec, Params

_BY_GUIDE = {kind.guide: name for name, kind in FAMILIES.items() if kind.guide is not None}


def family_spec(family: Any) -> FamilySpec:
    """The family that is meant by a name, a `FamilySpec`, a NumPyro guide or a guide's class."""
    if isinstance(family, FamilySpec):
        return family
    if isinstance(family, str):
        return FamilySpec(_validate.one_of("family", family, FAMILIES))
    kind = family if isinstance(family, type) else type(family)
    if issubclass(kind, AutoGuide) and kind.__name__ in _BY_GUIDE:
        name = _BY_GUIDE[kind.__name__]
        given = {option: getattr(family, option, None) for option in FAMILIES[name].guide_options}
        return FamilySpec(name, {option: value for option, value in given.items() if value})
    known = ", ".join([*map(repr, FAMILIES), *_BY_GUIDE])
    raise ValueError(f"family: expected one of {known}, got {kind.__name__}. Use one of these.")


def init_scale_of(family: Any, otherwise: float | None) -> float | None:
    """The initial scale that a guide was made with; else the given one."""
    return getattr(family, "_init_scale", otherwise)


def guide_for(
    family: Family, model: Any, init_scale: float, on_made_up_row: Callable[[Any], Any]
) -> AutoGuide:
    """A NumPyro guide that samples from parameters of the family, set up and ready."""
    if family.guide is None:
        guide: AutoGuide = FamilyGuide(model, family, init_scale)
    else:
        make = getattr(autoguide, family.guide)
        guide = make(model, init_scale=init_scale, **family.options)
    # A guide learns the model's sites from its first call; it should not see data for that.
    with numpyro_lock:
        on_made_up_row(handlers.seed(guide, rng_seed=0))
    return guide


class FamilyGuide(AutoContinuous):
    """A guide for a family that NumPyro has none for."""

    def __init__(self, model: Any, family: Family, init_scale: float) -> None:
        self._family, self._init_scale = family, init_scale
        super().__init__(model)

    def _get_posterior(self, *args: Any, **kwargs: Any) -> dist.Distribution:
        initial = self._family.init(self._init_latent, self._init_scale)
        named = self._family.numpyro_params(initial)
        params = type(initial)(*(numpyro.param(name, value) for name, value in named.items()))
        return Reparametrised(self._family, params)


class Reparametrised(dist.Distribution):
    """The distribution of a family's latent."""

    support = dist.constraints.real_vector

    def __init__(self, family: Family, params: Params) -> None:
        self._family, self._params = family, params
        super().__init__(event_shape=(family.dim,))

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        """Draws of the latent."""
        etas = jax.random.normal(key, (*sample_shape, self._family.base_size))
        draw = jnp.vectorize(self._family.reparametrise, excluded={0}, signature="(b)->(d)")
        return draw(self._params, etas)

    def log_prob(self, value: Array) -> Array:
        """Log-density of latents."""
        assert self._family.log_density is not None
        density = jnp.vectorize(self._family.log_density, excluded={0}, signature="(d)->()")
        return density(self._params, value)
