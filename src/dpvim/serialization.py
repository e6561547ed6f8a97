"""Fits as files: arrays and a page of json in one archive, no code.

A saved fit holds what was released (the trace, and sums of the released gradients), the plan, the
statement, the supports of the sites, a Gaussian that stands for their prior, and draws of the
posterior where no Gaussian can. That is enough to draw from the posterior without the data and
without the model's source. Nothing in a file is ever executed: arrays are read without pickle,
names are looked up in fixed tables.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import constraints

from dpvim import _validate, archives
from dpvim.archives import FileError
from dpvim.bridge.latent_space import LatentSpace, Site
from dpvim.inference.blocks import Blocks
from dpvim.inference.families import FAMILIES, Family
from dpvim.inference.release_sums import ReleaseSums
from dpvim.inference.steering import SteeredReleases
from dpvim.inference.trace import Trace
from dpvim.privacy.plan import NonPrivatePlan, Plan, PrivacyPlan
from dpvim.privacy.statement import COUNTS, GRADIENTS, NoPrivacy, PrivacyStatement

if TYPE_CHECKING:
    from dpvim.posterior.from_releases.exact_prior import PriorDraws
    from dpvim.posterior.from_releases.regression import GaussianPrior

__all__ = ["FORMAT", "VERSION", "FileError", "SavedFit", "read", "write"]

FORMAT = "dpvim fit"
VERSION = 1

_RELEASES, _WINDOWS, _PRIOR, _DRAWS = "releases", "windows", "prior", "draws"
# Supports without parameters, by the name of their class.
_PLAIN_SUPPORTS = {
    type(c).__name__: c
    for c in vars(constraints).values()
    if isinstance(c, constraints.ParameterFreeConstraint)
}
# Supports with bounds: the constructor and the names of its arguments.
_BOUNDED_SUPPORTS = {
    "_Interval": (constraints.interval, ("lower_bound", "upper_bound")),
    "_OpenInterval": (constraints.open_interval, ("lower_bound", "upper_bound")),
    "_GreaterThan": (constraints.greater_than, ("lower_bound",)),
    "_GreaterThanEq": (constraints.greater_than_eq, ("lower_bound",)),
    "_LessThan": (constraints.less_than, ("upper_bound",)),
    "_LessThanEq": (constraints.less_than_eq, ("upper_bound",)),
}


class SavedFit(NamedTuple):
    """Contents of a file; files of older versions have no releases, no prior and no draws."""

    plan: Plan
    privacy: PrivacyStatement | NoPrivacy
    trace: Trace
    space: LatentSpace
    family: Family
    releases: ReleaseSums | SteeredReleases | None = None
    prior: GaussianPrior | None = None
    several_modes: tuple[str, ...] = ()
    is_mixture: bool = False
    draws: PriorDraws | None = None
    blocks: Blocks | None = None


def write(path: str | Path, saved: SavedFit) -> None:
    """Write a fit; an existing file is replaced only when the new one is complete."""
    meta = {
        "format": FORMAT,
        "version": VERSION,
        "family": saved.family.name,
        "family_options": dict(saved.family.options),
        "scale_transform": saved.family.scale_transform,
        "several_modes": list(saved.several_modes),
        "is_mixture": saved.is_mixture,
        "blocks": None if saved.blocks is None else list(saved.blocks.labels),
        "sites": [_site_to_json(site) for site in saved.space.sites],
        "plan": plan_to_json(saved.plan),
        "privacy": privacy_to_json(saved.privacy),
    }
    arrays = {"steps": saved.trace.steps, **saved.trace.params._asdict()}
    kind = _WINDOWS if isinstance(saved.releases, SteeredReleases) else _RELEASES
    for group, part in ((kind, saved.releases), (_PRIOR, saved.prior), (_DRAWS, saved.draws)):
        if part is not None:
            arrays |= {f"{group}.{name}": array for name, array in part._asdict().items()}
    archives.write(path, meta, arrays)


def read(path: str | Path) -> SavedFit:
    """Read a fit, or say what is wrong with the file."""
    from dpvim.posterior.from_releases.exact_prior import PriorDraws
    from dpvim.posterior.from_releases.regression import GaussianPrior

    with archives.opened(path) as archive:
        meta = archive.meta
        archive.check_version(FORMAT, VERSION)
        space = LatentSpace([_site_from_json(site) for site in meta["sites"]])
        if space.dim > archive.num_bytes:
            raise ValueError(f"a latent with {space.dim} entries, for which the file is too small")
        family = _family(meta, space)
        arrays = archive.arrays(("steps", *_shapes_of(family)._fields))
        releases = _optional(archive, _RELEASES, ReleaseSums)
        if releases is None:
            releases = _steered_releases(archive)
        prior = _optional(archive, _PRIOR, GaussianPrior)
        draws = _optional(archive, _DRAWS, PriorDraws)
        saved = _assemble(meta, space, family, arrays, releases, prior)
        return saved if draws is None else _with_draws(saved, draws)


def _optional(archive: archives.Archive, group: str, kind: Any) -> Any:
    """A group of arrays that a file need not have."""
    names = [f"{group}.{field}" for field in kind._fields]
    return kind(*archive.arrays(names).values()) if names[0] in archive else None


def _steered_releases(archive: archives.Archive) -> SteeredReleases | None:
    """Files of older versions say of each coordinate if it is known."""
    name = f"{_WINDOWS}.informed"
    if name not in archive:
        return _optional(archive, _WINDOWS, SteeredReleases)
    known = archive.arrays([name])[name] > 0
    directions = {
        "origin": np.zeros(len(known)),
        "basis": np.eye(len(known))[:, known],
        "at_a_place": np.array(float(known.sum())),
    }
    fields = [field for field in SteeredReleases._fields if field not in directions]
    arrays = archive.arrays(f"{_WINDOWS}.{field}" for field in fields)
    return SteeredReleases(**dict(zip(fields, arrays.values(), strict=True)), **directions)


def _family(meta: dict[str, Any], space: LatentSpace) -> Family:
    options = meta.get("family_options", {})
    return FAMILIES[meta["family"]](space.layout, meta["scale_transform"], **options)


def _shapes_of(family: Family) -> Any:
    """Shapes of the family's parameters."""
    return jax.eval_shape(family.init, jax.ShapeDtypeStruct((family.dim,), jnp.float32), 1.0)


def _assemble(
    meta: dict[str, Any],
    space: LatentSpace,
    family: Family,
    arrays: dict[str, np.ndarray],
    releases: ReleaseSums | SteeredReleases | None,
    prior: GaussianPrior | None,
) -> SavedFit:
    steps = arrays.pop("steps")
    if (
        steps.ndim != 1
        or steps.dtype.kind not in "iu"
        or steps[0] < 0
        or (np.diff(steps) <= 0).any()
    ):
        raise ValueError("the steps of the trace are not numbers that grow")
    like = _shapes_of(family)
    params = type(like)(**arrays)
    for name, array in arrays.items():
        wanted = (len(steps), *getattr(like, name).shape)
        if array.shape != wanted or array.dtype.kind != "f":
            raise ValueError(f"the array {name!r} has shape {array.shape} and type {array.dtype}")
    plan = plan_from_json(meta["plan"])
    privacy = privacy_from_json(meta["privacy"], plan)
    if isinstance(privacy, PrivacyStatement) and privacy.steps_done < steps[-1]:
        raise ValueError(f"{steps[-1]} steps were taken, {privacy.steps_done} are accounted for")
    blocks = _blocks_from_json(meta.get("blocks"), space.dim)
    if releases is not None:
        _check_like(_RELEASES, releases, _zeros_like(releases, space.dim, blocks))
        if releases.steps.sum() > steps[-1]:
            raise ValueError(f"{steps[-1]} steps were taken, {releases.steps.sum():g} are summed")
    if prior is not None:
        zeros = type(prior)(np.zeros(space.dim), np.zeros(space.dim))
        _check_like("prior", prior, zeros)
        if isinstance(releases, SteeredReleases) and not releases.directions.are_orthogonal(
            prior.scale
        ):
            raise ValueError("the array 'windows.basis' has no orthogonal directions")
    saved = SavedFit(plan, privacy, Trace(steps, params), space, family, releases, prior)
    return saved._replace(
        several_modes=_sites_with_several_modes(meta.get("several_modes", False), space),
        is_mixture=bool(meta.get("is_mixture", False)),
        blocks=blocks,
    )


def _blocks_from_json(labels: list[int] | None, dim: int) -> Blocks | None:
    """Files of older versions have none."""
    if labels is None:
        return None
    blocks = Blocks.from_labels(labels)
    if list(blocks.labels) != labels or len(labels) != dim:
        raise ValueError("the blocks of its latent are not numbered in order")
    return blocks


def _sites_with_several_modes(declared: bool | list[str], space: LatentSpace) -> tuple[str, ...]:
    """Files of older versions say it of all sites or of none."""
    names = [site.name for site in space.sites]
    chosen = (names if declared else []) if isinstance(declared, bool) else declared
    return tuple(name for name in names if name in chosen)


def _with_draws(saved: SavedFit, draws: PriorDraws) -> SavedFit:
    nothing = np.zeros(())
    _check_like(
        _DRAWS,
        draws,
        type(draws)(np.zeros((max(2, len(draws.latents)), saved.space.dim)), *(nothing,) * 3),
    )
    return saved._replace(draws=draws)


def _zeros_like(releases: ReleaseSums | SteeredReleases, dim: int, blocks: Blocks | None) -> Any:
    """Arrays of the shapes that releases of a latent must have."""
    if isinstance(releases, ReleaseSums):
        return ReleaseSums.zeros(dim, blocks)
    return SteeredReleases.zeros(dim, len(releases.factor))


def _check_like(name: str, found: Any, wanted: Any) -> None:
    for field, array, like in zip(wanted._fields, found, wanted, strict=True):
        if array.shape != like.shape or array.dtype.kind != "f" or not np.isfinite(array).all():
            raise ValueError(f"the array '{name}.{field}' has shape {array.shape} or odd numbers")


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """The plan's fields."""
    return {"private": isinstance(plan, PrivacyPlan), **dataclasses.asdict(plan)}


def plan_from_json(fields: dict[str, Any]) -> Plan:
    """The plan with these fields."""
    fields = dict(fields)
    return (PrivacyPlan if fields.pop("private") else NonPrivatePlan)(**fields)


def privacy_to_json(privacy: PrivacyStatement | NoPrivacy) -> dict[str, Any] | None:
    """The parts of a statement that its plan does not have."""
    if isinstance(privacy, NoPrivacy):
        return None
    return {
        "delta": privacy.delta,
        "steps_done": privacy.steps_done,
        "released": privacy.released,
        "for_testing": privacy.for_testing,
        "mechanism": privacy.mechanism,
        "chosen_at": privacy.chosen_at,
    }


def privacy_from_json(fields: dict[str, Any] | None, plan: Plan) -> PrivacyStatement | NoPrivacy:
    """The statement of a plan."""
    if fields is None or not isinstance(plan, PrivacyPlan):
        return NoPrivacy()
    # The cost is computed anew: a file cannot claim less than its plan costs.
    statement = PrivacyStatement.of(plan, **fields)
    steps, chosen_at = statement.steps_done, statement.chosen_at
    if type(steps) is not int or steps < 0 or type(statement.for_testing) is not bool:
        raise ValueError("the steps of its privacy statement are no number, or it is of no kind")
    if not isinstance(statement.released, str):
        raise ValueError("its privacy statement does not say what was released")
    _validate.one_of("mechanism", statement.mechanism, (GRADIENTS, COUNTS))
    if chosen_at is not None:
        _validate.positive("chosen_at", chosen_at)
    return statement


def _site_to_json(site: Site) -> dict[str, Any]:
    support, kind = site.support, ""
    while isinstance(support, constraints._IndependentConstraint):
        support = support.base_constraint
    kind = type(support).__name__
    if kind in _PLAIN_SUPPORTS:
        bounds = {}
    elif kind in _BOUNDED_SUPPORTS:
        names = _BOUNDED_SUPPORTS[kind][1]
        bounds = {name: np.asarray(getattr(support, name)).tolist() for name in names}
    else:
        raise ValueError(
            f"site {site.name!r}: a fit with the support {kind.strip('_')} cannot be saved. Write "
            "the site as a transformation of one with a common support."
        )
    shapes = {"shape": list(site.shape), "raw_shape": list(site.raw_shape)}
    return {"name": site.name, **shapes, "support": kind, "bounds": bounds}


def _site_from_json(fields: dict[str, Any]) -> Site:
    kind, bounds = fields["support"], fields["bounds"]
    if kind in _PLAIN_SUPPORTS:
        support = _PLAIN_SUPPORTS[kind]
    else:
        make, names = _BOUNDED_SUPPORTS[kind]
        support = make(*(np.asarray(bounds[name], np.float32) for name in names))
    shapes = [tuple(fields[name]) for name in ("shape", "raw_shape")]
    for size in itertools.chain(*shapes):
        if type(size) is not int or size < 0:
            raise ValueError("a site with a shape that is none")
    if not isinstance(fields["name"], str):
        raise ValueError("a site without a name")
    shape, raw_shape = shapes
    return Site(fields["name"], shape, raw_shape, support)
