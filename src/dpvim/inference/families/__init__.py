"""Variational families, by name. A new one is a module here and a line in `FAMILIES`.

>>> family("low_rank", rank=2).make(3).num_params
12
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from dpvim import _validate
from dpvim.inference.families.base import (
    SCALE_TRANSFORMS,
    Family,
    FamilyFactory,
    Layout,
    Params,
    Preconditioners,
    pull_back,
    standard_deviations,
)
from dpvim.inference.families.block_diagonal import block_diagonal
from dpvim.inference.families.flow import flow
from dpvim.inference.families.full_rank import full_rank
from dpvim.inference.families.low_rank import low_rank
from dpvim.inference.families.mean_field import mean_field

__all__ = [
    "FAMILIES",
    "SCALE_TRANSFORMS",
    "Family",
    "FamilyFactory",
    "FamilyKind",
    "FamilySpec",
    "Layout",
    "Params",
    "Preconditioners",
    "block_diagonal",
    "family",
    "flow",
    "full_rank",
    "low_rank",
    "mean_field",
    "pull_back",
    "standard_deviations",
]


class FamilyKind(NamedTuple):
    """An entry of the registry.

    Attributes:
        make: Makes the family for a latent.
        guide: NumPyro's automatic guide that users may name instead; None if there is none.
        guide_options: Options of the family that such a guide brings, as attributes.
    """

    make: FamilyFactory
    guide: str | None = None
    guide_options: tuple[str, ...] = ()

    def __call__(
        self, layout: Layout | int, scale_transform: str = "softplus", **options: Any
    ) -> Family:
        """The family for a latent."""
        return self.make(layout, scale_transform, **options)


FAMILIES: dict[str, FamilyKind] = {
    "mean_field": FamilyKind(mean_field, "AutoDiagonalNormal"),
    "full_rank": FamilyKind(full_rank, "AutoMultivariateNormal"),
    "low_rank": FamilyKind(low_rank, "AutoLowRankMultivariateNormal", ("rank",)),
    "block_diagonal": FamilyKind(block_diagonal),
    "flow": FamilyKind(flow),
}


@dataclasses.dataclass(frozen=True)
class FamilySpec:
    """A family that was asked for, before the dimension of the model is known."""

    name: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def make(self, layout: Layout | int, scale_transform: str = "softplus") -> Family:
        """The family for a latent."""
        return FAMILIES[self.name](layout, scale_transform, **self.options)


def family(name: str, **options: Any) -> FamilySpec:
    """A family with options, for the argument ``family=`` of `dpvim.fit` and `dpvim.DPSVI`.

    Args:
        name: A key of `dpvim.FAMILIES`.
        options: ``rank`` for ``"low_rank"``; ``layers`` and ``width`` for ``"flow"``.
    """
    return FamilySpec(_validate.one_of("family", name, FAMILIES), options)
