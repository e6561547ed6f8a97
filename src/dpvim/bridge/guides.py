"""Families by name or by one of NumPyro's automatic guides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpyro import handlers
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoGuide, AutoMultivariateNormal

from dpvim import _validate
from dpvim.inference.families import FAMILIES

_GUIDES: dict[type[AutoGuide], str] = {
    AutoDiagonalNormal: "mean_field",
    AutoMultivariateNormal: "full_rank",
}


def family_name(family: Any) -> str:
    """The name of a family given as a name, a guide or a guide's class."""
    kind = family if isinstance(family, type) else type(family)
    if kind in _GUIDES:
        return _GUIDES[kind]
    if isinstance(family, str):
        return _validate.one_of("family", family, FAMILIES)
    known = ", ".join([*map(repr, FAMILIES), *(guide.__name__ for guide in _GUIDES)])
    raise ValueError(f"family: expected one of {known}, got {kind.__name__}. Use one of these.")


def init_scale_of(family: Any, otherwise: float) -> float:
    """The initial scale that a guide was made with; else the given one."""
    return float(getattr(family, "_init_scale", otherwise))


def guide_for(
    name: str, model: Any, init_scale: float, on_made_up_row: Callable[[Any], Any]
) -> AutoGuide:
    """NumPyro's guide that samples from parameters of the named family, set up and ready."""
    kind = next(guide for guide, known in _GUIDES.items() if known == name)
    guide = kind(model, init_scale=init_scale)
    # A guide learns the model's sites from its first call; it should not see data for that.
    on_made_up_row(handlers.seed(guide, rng_seed=0))
    return guide
