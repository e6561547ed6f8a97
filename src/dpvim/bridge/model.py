"""From a NumPyro model, written for the whole data set, to plain functions of one record.

Records are evaluated one at a time, each as a data set of one row, and log-probabilities are
taken without the scale of a subsampled plate. So the model needs neither N nor a subsample size;
models that have them work too.

What is checked about a model is checked on made-up rows: an error must not depend on the data.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jaxtyping import Array, Float
from numpyro import handlers
from numpyro.distributions import biject_to

from dpvim._compile import jit_once, jit_quickly, single_precision
from dpvim.bridge.data import ModelInput
from dpvim.bridge.gather_gradients import gradients_by_record
from dpvim.bridge.latent_space import LatentSpace, Site, elementary
from dpvim.bridge.structured import StructuredModel
from dpvim.inference.gradient import Problem
from dpvim.privacy.clipping import Likelihood
from dpvim.types import Latent, ModelError, Record, Scalar

Model = Callable[..., Any]

# The distribution of numpyro.factor.
_FACTOR = "Unit"


class BridgedModel(NamedTuple):
    """A NumPyro model as the engine sees it.

    Attributes:
        space: Its latent sites.
        problem: Its likelihood and prior as plain functions.
        on_made_up_row: Calls a model or guide with arguments like the data's, but made up.
        draw_prior: ``key -> latent``, a draw from the prior.
        several_modes: Whether the model declares that its posterior has several modes, by an
            attribute of that name.
    """

    space: LatentSpace
    problem: Problem
    on_made_up_row: Callable[[Model], Any]
    draw_prior: Callable[[Array], Latent]
    several_modes: bool


@single_precision
def bridge(model: Model, inputs: ModelInput) -> BridgedModel:
    """Find the sites of `model`, check that it can be fitted, and return it as plain functions."""
    run = _Runner(model, inputs.call)
    probes = _probes(inputs.records)
    declared, elsewhere = _declared_twice(run, probes)
    space = _latent_space(run, probes, declared, elsewhere)
    roles = _observed_roles(run, space, probes)
    for name in roles.prior:
        if declared[name].kind != _FACTOR:
            raise ModelError(
                f"site {name!r}: expected an observation among the model's arguments, got one that "
                "does not depend on them. What a model holds by itself is public, and nothing "
                "would protect it: pass what was observed as an argument. A public term of the "
                "prior can be written as numpyro.factor."
            )
    one_row = probes[0].rows(1)

    def log_prior(latent: Latent) -> Scalar:
        values = space.constrain(latent)
        terms = run.log_probs(values, one_row, rows=1)
        fixed = [terms[s.name] for s in space.sites] + [terms[name] for name in roles.prior]
        return jnp.sum(jnp.stack(fixed)) + space.log_det(latent)

    def log_prob_of_sites(values: dict[str, Array], record: Record) -> Scalar:
        row = jax.tree.map(lambda leaf: leaf[None], record)
        terms = run.log_probs(values, row, rows=1)
        return jnp.sum(jnp.stack([terms[name] for name in roles.likelihood]))

    def log_prob(latent: Latent, record: Record) -> Scalar:
        return log_prob_of_sites(space.constrain(latent), record)

    def gradients(latent: Latent, batch: Record) -> Float[Array, "batch d"]:
        return gradients_by_record(log_prob_of_sites, space, latent, batch)

    problem = Problem(space.dim, Likelihood.from_gradients(log_prob, gradients), log_prior)
    call = inputs.call
    own_sum = None
    if isinstance(model, StructuredModel):
        batch_of = model.batch_of
        own_sum, own_prior = model.clipped_sum_for(space), model.log_prior_for(space)
        if own_sum is not None:
            likelihood = problem.likelihood._replace(clipped_sum=own_sum)
            arrange = jit_quickly(lambda records: call(batch_of, records))
            problem = problem._replace(likelihood=likelihood, arrange=arrange)
        if own_prior is not None:
            problem = problem._replace(log_prior=own_prior)
    if own_sum is None:  # refuses what could mix records, before any budget is spent
        jax.eval_shape(gradients, np.zeros(space.dim, np.float32), one_row)

    def draw_prior(key: Array) -> Latent:
        sites = run.prior_draw(one_row, key)
        return space.unconstrain({site.name: sites[site.name]["value"] for site in space.sites})

    several_modes = bool(getattr(model, "several_modes", False))
    return BridgedModel(
        space, problem, lambda model: call(model, one_row), draw_prior, several_modes
    )


class _Runner:
    """Runs the model on given rows and latent values, and reads off its sites. Keeps no data."""

    def __init__(self, model: Model, call: Callable[[Model, Record], Any]) -> None:
        self._model = model
        self._call = call

    def declared(
        self, rows_of_data: Record, *, rows: int, moved: Scalar | float = 0.0
    ) -> dict[str, _Declared]:
        """The sites of the model with latents somewhere in their supports; `moved` moves them,
        each in a direction of its own.

        To be traced, not run: a model that is run operation by operation takes seconds to compile.
        """
        seeded = handlers.seed(self._model, rng_seed=0)
        placed = handlers.substitute(seeded, substitute_fn=_somewhere(moved))
        sites = self._run(placed, rows_of_data, _RowPlates(rows))
        return {
            name: _Declared.of(site)
            for name, site in sites.items()
            if site["type"] in ("sample", "param")
        }

    def prior_draw(self, rows_of_data: Record, key: Array) -> dict[str, Any]:
        """The sites of the model with latents drawn from their priors."""
        return self._run(handlers.seed(self._model, rng_seed=key), rows_of_data, _RowPlates(1))

    def log_probs(
        self, values: dict[str, Array], rows_of_data: Record, *, rows: int
    ) -> dict[str, Scalar]:
        """Log-probability of every sample site, without the scale of subsampled plates."""
        plates = _RowPlates(rows)
        model = handlers.seed(handlers.substitute(self._model, data=values), rng_seed=0)
        sites = self._run(model, rows_of_data, plates)
        return {
            name: jnp.sum(site["fn"].log_prob(site["value"])) * plates.scale_left(site)
            for name, site in sites.items()
            if site["type"] == "sample"
        }

    def _run(self, model: Model, rows_of_data: Record, plates: _RowPlates) -> dict[str, Any]:
        with numpyro.validation_enabled(False), handlers.trace() as sites, plates:
            self._call(model, rows_of_data)
        return sites


class _Declared(NamedTuple):
    """What a model says about a site before anything is computed; latents have a support."""

    is_param: bool
    is_latent: bool
    kind: str
    shape: tuple[int, ...]
    support: Any

    @classmethod
    def of(cls, site: dict[str, Any]) -> _Declared:
        is_param = site["type"] == "param"
        is_latent = not (is_param or site["is_observed"])
        support = site["fn"].support if is_latent else None
        return cls(
            is_param, is_latent, type(site["fn"]).__name__, jnp.shape(site["value"]), support
        )


def _somewhere(moved: Scalar | float) -> Callable[[dict[str, Any]], Array | None]:
    """Values for latents, not drawn from their priors: that takes seconds to compile."""
    rng = np.random.default_rng(7)

    def value(site: dict[str, Any]) -> Array | None:
        latent = site["type"] == "sample" and not site["is_observed"]
        if not latent or site["fn"].support.is_discrete:
            return None
        transform = biject_to(site["fn"].support)
        shape = site["fn"].shape(site["kwargs"].get("sample_shape", ()))
        raw, direction = rng.normal(scale=0.5, size=(2, *transform.inverse_shape(shape)))
        return transform(raw.astype(np.float32) + moved * direction.astype(np.float32))

    return value


class _RowPlates(numpyro.primitives.Messenger):
    """Turns off a plate's own subsampling: dpvim draws the batches.

    A plate ``(N, subsample_size=rows)`` or ``(rows, subsample_size=anything)`` is over the rows at
    hand. Other plates are left alone.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._sizes: dict[str, int] = {}
        super().__init__(None)

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] != "plate":
            return
        size, subsample_size = msg["args"]
        self._sizes[msg["name"]] = size
        if subsample_size is not None and self._rows in (size, subsample_size):
            msg["args"] = (size, self._rows)
            msg["value"] = jnp.arange(self._rows)

    def scale_left(self, site: dict[str, Any]) -> Any:
        """The scale that the user put on a site, without what subsampled plates put there."""
        scale = 1.0 if site["scale"] is None else site["scale"]
        for frame in site["cond_indep_stack"]:
            scale = scale * frame.size / self._sizes.get(frame.name, frame.size)
        return scale


class _Probe(NamedTuple):
    """Made-up rows of the same types and shapes as the data.

    They are kept as NumPy's arrays, of which rows are taken without a program being compiled.
    """

    records: list[np.ndarray]

    def rows(self, count: int) -> Record:
        """The first so many, as a model sees them."""
        return [jnp.asarray(leaf[:count]) for leaf in self.records]


_PROBE_ROWS = 3


def _probes(records: list[Array]) -> list[_Probe]:
    """Rows in the support of most likelihoods: floats in (0, 1), wider ones, zeros and ones."""
    rng = np.random.default_rng(0)

    def coins(size: tuple[int, ...]) -> np.ndarray:
        return rng.integers(0, 2, size)

    def make_up(leaf: Array, floats: Callable[..., np.ndarray]) -> np.ndarray:
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        values = (floats if is_float else coins)(size=(_PROBE_ROWS, *leaf.shape[1:]))
        return values.astype(leaf.dtype)

    styles: list[Callable[..., np.ndarray]] = [rng.uniform, rng.normal, coins]
    return [_Probe([make_up(leaf, floats) for leaf in records]) for floats in styles]


def _latent_space(
    run: _Runner,
    probes: list[_Probe],
    few: dict[str, _Declared],
    elsewhere: dict[str, _Declared],
) -> LatentSpace:
    many: dict[str, _Declared] = {}
    more_rows = probes[0].rows(_PROBE_ROWS)
    jax.eval_shape(lambda: many.update(run.declared(more_rows, rows=_PROBE_ROWS)))
    for name, site in few.items():
        if site.is_param:
            raise ModelError(
                f"site {name!r}: expected sample sites only, got numpyro.param. Give it a prior "
                "(numpyro.sample); what has no prior has no posterior."
            )
    latent = [name for name, site in few.items() if site.is_latent]
    if len(latent) == len(few):
        raise ModelError(
            "the model has no observed site: expected numpyro.sample(..., obs=data), found none. "
            "Are the observations passed in (for instance y, not y=None)?"
        )
    if not latent:
        raise ModelError("the model has no latent site: expected a parameter with a prior.")
    for name in latent:
        if few[name].support.is_discrete:
            raise ModelError(
                f"site {name!r}: expected a continuous latent, got a discrete one "
                f"({few[name].kind}). Sum it out: with "
                "numpyro.distributions.MixtureSameFamily, or by logsumexp in a numpyro.factor."
            )
        one, more = few[name].shape, many[name].shape if name in many else None
        if one != more:
            raise ModelError(
                f"site {name!r}: expected a latent shared by all records, got one that grows with "
                f"them (shape {one} for 1 row, {more} for {_PROBE_ROWS}). Local latents are not "
                "supported: integrate them out of the likelihood."
            )
    # In the model's order, as NumPyro's automatic guides pack their latents.
    return LatentSpace([_site(name, few[name], elsewhere[name]) for name in latent])


def _declared_twice(
    run: _Runner, probes: list[_Probe]
) -> tuple[dict[str, _Declared], dict[str, _Declared]]:
    """The sites as they are for one record and latent, and for others.

    Bounds of the supports are all that is computed.
    """
    found: dict[str, _Declared] = {}

    @jit_once
    def bounds(moved: Scalar | float, rows: Record) -> dict[str, list[Array]]:
        found.update(run.declared(rows, rows=1, moved=moved))
        return {
            name: [leaf for leaf in jax.tree.leaves(site.support) if _is_traced(leaf)]
            for name, site in found.items()
        }

    def at(moved: float, probe: _Probe) -> dict[str, _Declared]:
        values = bounds(moved, probe.rows(1))
        return {
            name: site._replace(support=_with_values(site.support, values[name]))
            for name, site in found.items()
        }

    return at(0.0, probes[0]), at(1.0, probes[1])


def _with_values(support: Any, values: list[Array]) -> Any:
    """The support with values for those of its bounds that were traced."""
    left = iter(values)
    return jax.tree.map(lambda leaf: next(left) if _is_traced(leaf) else leaf, support)


def _is_traced(leaf: Any) -> bool:
    return isinstance(leaf, jax.core.Tracer)


def _site(name: str, site: _Declared, elsewhere: _Declared) -> Site:
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


class _Roles(NamedTuple):
    """Names of observed sites: those that belong to records, and those that do not see data."""

    likelihood: list[str]
    prior: list[str]


def _observed_roles(run: _Runner, space: LatentSpace, probes: list[_Probe]) -> _Roles:
    """Sort the observed sites, and refuse those that do not factorise over records."""
    found = _site_totals(run, space, probes)
    latent = {site.name: site for site in space.sites}
    for name, site in latent.items():
        values = [np.append(t.by_row[name], t.whole[name]) for t in found]
        # Every entry's constants may be rounded differently for one row and for several.
        slack = 1e-5 * max(1, site.raw_size)
        if not np.allclose(values, values[0][0], rtol=1e-4, atol=slack, equal_nan=True):
            raise ModelError(
                f"site {name!r}: expected a prior that does not depend on the data, got one that "
                "changes with them (or with their number). A prior read off the data is not "
                "private; pass public constants instead."
            )
    roles = _Roles([], [])
    for name in found[0].whole:
        if name in latent:
            continue
        checks = [t for t in found if np.isfinite(t.by_row[name]).all()]
        if not checks:
            warnings.warn(
                f"site {name!r}: its log-probability is not finite at the rows made up for a "
                "check, so it is taken on trust that it factorises over records. Privacy does "
                "not depend on it, the posterior does.",
                stacklevel=4,
            )
        if all(_close(t.whole[name], t.by_row[name].sum()) for t in checks):
            roles.likelihood.append(name)
        elif all(_close(t.by_row[name], t.whole[name]) for t in checks) and _same(checks, name):
            roles.prior.append(name)
        else:
            raise ModelError(
                f"site {name!r}: expected a likelihood that factorises over records, got one "
                "whose value for all rows is not the sum over single rows. Records must be "
                "independent given the latents: no statistics over the rows (such as X.mean(0)) "
                "inside the model."
            )
    if not roles.likelihood:
        raise ModelError("the model has no observed site that depends on the data.")
    return roles


class _Totals(NamedTuple):
    whole: dict[str, Any]
    by_row: dict[str, Any]


def _site_totals(run: _Runner, space: LatentSpace, probes: list[_Probe]) -> list[_Totals]:
    """Log-probability of every site for all probe rows at once and for each by itself."""
    latent = jnp.asarray(np.random.default_rng(1).normal(scale=0.3, size=space.dim), jnp.float32)

    @functools.partial(jit_once, static_argnames="rows")
    def log_probs(latent: Latent, records: Record, rows: int) -> dict[str, Any]:
        return run.log_probs(space.constrain(latent), records, rows=rows)

    def totals(probe: _Probe) -> _Totals:
        """Rows one at a time: a vectorised model could mix them here as it does there."""
        whole = log_probs(latent, probe.records, rows=_PROBE_ROWS)
        singles = [
            log_probs(latent, [leaf[i : i + 1] for leaf in probe.records], rows=1)
            for i in range(_PROBE_ROWS)
        ]
        by_row = {name: np.array([single[name] for single in singles]) for name in whole}
        return _Totals(jax.tree.map(np.asarray, whole), by_row)

    return [totals(probe) for probe in probes]


def _close(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.allclose(a, b, rtol=1e-4, atol=1e-4))


def _same(checks: list[_Totals], name: str) -> bool:
    return all(_close(t.whole[name], checks[0].whole[name]) for t in checks)
