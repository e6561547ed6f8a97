"""The latent sites of a model: found, and refused where they cannot be fitted."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jaxtyping import Array
from numpyro.distributions import biject_to

from dpvim._compile import jit_once
from dpvim.bridge.latent_space import LatentSpace, Site, elementary
from dpvim.bridge.made_up_rows import NUM_ROWS, MadeUpRows
from dpvim.bridge.model_runner import ModelRunner, SiteDeclaration
from dpvim.types import ModelError, Record, Scalar

Declarations = dict[str, SiteDeclaration]


def declare_twice(
    runner: ModelRunner, made_up: list[MadeUpRows]
) -> tuple[Declarations, Declarations]:
    """The sites for one record and latent, and for another record and latent.

    Bounds of the supports are all that is computed.
    """
    found: Declarations = {}

    @jit_once
    def bounds(shift: Scalar | float, data: Record) -> dict[str, list[Array]]:
        found.update(runner.declarations(data, num_rows=1, shift=shift))
        return {
            name: [leaf for leaf in jax.tree.leaves(site.support) if _is_traced(leaf)]
            for name, site in found.items()
        }

    def declare(shift: float, rows: MadeUpRows) -> Declarations:
        values = bounds(shift, rows.first(1))
        return {
            name: site._replace(support=_fill_in_bounds(site.support, values[name]))
            for name, site in found.items()
        }

    return declare(0.0, made_up[0]), declare(1.0, made_up[1])


def find_latent_space(
    runner: ModelRunner, rows: MadeUpRows, declared: Declarations, elsewhere: Declarations
) -> LatentSpace:
    """The latent sites of a model, all of them continuous, global and with a fixed support.

    Args:
        runner: Runs the model.
        rows: Made-up data.
        declared: The sites for one record.
        elsewhere: The sites for another record and latent.
    """
    for_many: Declarations = {}
    data = rows.first(NUM_ROWS)
    jax.eval_shape(lambda: for_many.update(runner.declarations(data, num_rows=NUM_ROWS)))
    for name, site in declared.items():
        if site.is_param:
            raise ModelError(
                f"site {name!r}: expected sample sites only, got numpyro.param. Give it a prior "
                "(numpyro.sample); what has no prior has no posterior."
            )
    latent = [name for name, site in declared.items() if site.is_latent]
    if len(latent) == len(declared):
        raise ModelError(
            "the model has no observed site: expected numpyro.sample(..., obs=data), found none. "
            "Are the observations passed in (for instance y, not y=None)?"
        )
    if not latent:
        raise ModelError("the model has no latent site: expected a parameter with a prior.")
    for name in latent:
        _check_is_continuous(name, declared[name])
        _check_is_global(name, declared[name], for_many.get(name))
    # In the model's order, as NumPyro's automatic guides pack their latents.
    return LatentSpace([_fixed_site(name, declared[name], elsewhere[name]) for name in latent])


def _check_is_continuous(name: str, site: SiteDeclaration) -> None:
    if site.support.is_discrete:
        raise ModelError(
            f"site {name!r}: expected a continuous latent, got a discrete one "
            f"({site.kind}). Sum it out: with "
            "numpyro.distributions.MixtureSameFamily, or by logsumexp in a numpyro.factor."
        )


def _check_is_global(name: str, site: SiteDeclaration, for_many: SiteDeclaration | None) -> None:
    one, more = site.shape, for_many.shape if for_many is not None else None
    if one != more:
        raise ModelError(
            f"site {name!r}: expected a latent shared by all records, got one that grows with "
            f"them (shape {one} for 1 row, {more} for {NUM_ROWS}). Local latents are not "
            "supported: integrate them out of the likelihood."
        )


def _fixed_site(name: str, site: SiteDeclaration, elsewhere: SiteDeclaration) -> Site:
    supports = [site.support, elsewhere.support]
    bounds = [jax.tree.leaves(support) for support in supports]
    if not all(np.array_equal(a, b) for a, b in zip(*bounds, strict=True)):
        raise ModelError(
            f"site {name!r}: expected a fixed support, got one that depends on other latents or "
            "on the data. Write it on a fixed scale, for instance "
            "high * numpyro.sample('u', Uniform(0, 1))."
        )
    raw_shape = elementary(biject_to(site.support)).inverse_shape(site.shape)
    return Site(name, site.shape, raw_shape, site.support)


def _fill_in_bounds(support: Any, values: list[Array]) -> Any:
    """The support with values for those of its bounds that were traced."""
    left = iter(values)
    return jax.tree.map(lambda leaf: next(left) if _is_traced(leaf) else leaf, support)


def _is_traced(leaf: Any) -> bool:
    return isinstance(leaf, jax.core.Tracer)
