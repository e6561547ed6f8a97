"""From a NumPyro model, written for the whole data set, to plain functions of one record.

Records are evaluated one at a time, each as a data set of one row, and log-probabilities are
taken without the scale of a subsampled plate. So the model needs neither N nor a subsample size;
models that have them work too.

What is checked about a model is checked on made-up rows: an error must not depend on the data.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from dpvim import _validate
from dpvim._compile import jit_once, jit_quickly, single_precision
from dpvim.bridge.data import ModelInput
from dpvim.bridge.factorization import ObservedSites, classify_observed
from dpvim.bridge.find_blocks import find_blocks
from dpvim.bridge.find_directions import find_directions
from dpvim.bridge.find_latents import Declarations, declare_twice, find_latent_space
from dpvim.bridge.gather_gradients import LogProbOfSites, gradients_by_record
from dpvim.bridge.latent_space import LatentSpace
from dpvim.bridge.made_up_rows import make_up_rows
from dpvim.bridge.model_runner import Model, ModelRunner
from dpvim.bridge.persons import log_prob_of_person
from dpvim.bridge.structured import StructuredModel
from dpvim.inference.directions import Informed
from dpvim.inference.gradient import Problem
from dpvim.privacy.clipping import ClippedSum, Likelihood
from dpvim.privacy.persons import sum_within_persons
from dpvim.types import Latent, LogPrior, ModelError, Record, Scalar

# The distribution of numpyro.factor.
_FACTOR = "Unit"


class BridgedModel(NamedTuple):
    """A NumPyro model as the engine sees it.

    Attributes:
        space: Its latent sites.
        problem: Its likelihood and prior as plain functions.
        by_record: The same with one gradient a record, also where the model brings a clipped sum.
        used: True for coordinates of the latent that the likelihood makes any use of.
        informed: ``() ->`` the directions that it depends on.
        on_made_up_row: Calls a model or guide with arguments like the data's, but made up.
        draw_prior: ``key -> latent``, a draw from the prior.
        several_modes: Sites that the model declares to have several modes, by an attribute of
            that name: True for all of them.
        is_mixture: True if an observed site is a mixture of distributions.
        observed_names: Observed sites that have a distribution to draw from.
        replicate: ``(latent, record, key) ->`` values of these sites, and replicates of them.
    """

    space: LatentSpace
    problem: Problem
    by_record: Problem
    used: Bool[np.ndarray, " d"]
    informed: Callable[[], Informed]
    on_made_up_row: Callable[[Model], Any]
    draw_prior: Callable[[Array], Latent]
    several_modes: tuple[str, ...]
    is_mixture: bool
    observed_names: list[str]
    replicate: Callable[[Latent, Record, Array], tuple[dict[str, Array], dict[str, Array]]]


@single_precision
def bridge(model: Model, inputs: ModelInput) -> BridgedModel:
    """Find the sites of `model`, check that it can be fitted, and return it as plain functions."""
    runner = ModelRunner(model, inputs.call)
    made_up = make_up_rows(inputs.rows)
    declared, elsewhere = declare_twice(runner, made_up)
    space = find_latent_space(runner, made_up[0], declared, elsewhere)
    observed = classify_observed(runner, space, made_up)
    _check_observations_are_arguments(observed, declared)
    call, one_row = inputs.call, made_up[0].first(1)
    by_row = not inputs.has_several_rows
    one_record = [jnp.zeros((1, *leaf.shape[1:]), leaf.dtype) for leaf in inputs.records]

    log_prob_of_sites = _log_prob_of_sites(runner, observed)

    def gradients(latent: Latent, batch: Record) -> Float[Array, "batch d"]:
        of_rows = functools.partial(gradients_by_record, log_prob_of_sites, space, latent)
        return of_rows(batch) if by_row else sum_within_persons(of_rows, batch)

    def log_prob_of_row(latent: Latent, row: Record) -> Scalar:
        return log_prob_of_sites(space.constrain(latent), row)

    def draw_prior(key: Array) -> Latent:
        sites = runner.prior_draw(one_row, key)
        return space.unconstrain({site.name: sites[site.name]["value"] for site in space.sites})

    drawable = [name for name in observed.likelihood if declared[name].kind != _FACTOR]

    def replicate(
        latent: Latent, record: Record, key: Array
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        row = jax.tree.map(lambda leaf: leaf[None], record)
        return runner.replicates(space.constrain(latent), drawable, row, key)

    used = _used(log_prob_of_sites, space, one_row)

    row = [jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for leaf in inputs.rows]

    @functools.cache
    @single_precision
    def informed() -> Informed:
        by_row = jit_once(jax.vmap(jax.grad(log_prob_of_row), in_axes=(None, 0)))
        return find_directions(log_prob_of_row, by_row, used, row)

    log_prob = log_prob_of_row if by_row else log_prob_of_person(log_prob_of_row)
    problem = Problem(
        space.dim,
        Likelihood.from_gradients(log_prob, gradients),
        _log_prior(runner, space, observed, one_row),
        blocks=find_blocks(log_prob_of_row, space, used, _first(one_row)),
    )
    by_record = problem
    own_sum = None
    if isinstance(model, StructuredModel):
        own_prior = model.log_prior_for(space)
        # Clipped sums that models bring clip rows: a person has one gradient.
        own_sum = model.clipped_sum_for(space) if by_row else None
        if own_sum is not None:
            problem = _with_own_sum(problem, own_sum, model.batch_of, call)
        if own_prior is not None:
            problem = problem._replace(log_prior=own_prior)
    if own_sum is None:  # refuses what could mix records, before any budget is spent
        jax.eval_shape(gradients, np.zeros(space.dim, np.float32), one_record)
    return BridgedModel(
        space,
        problem,
        by_record,
        used,
        informed,
        lambda model: call(model, one_row),
        draw_prior,
        _sites_with_several_modes(model, space),
        any(declared[name].is_mixture for name in observed.likelihood),
        drawable,
        replicate,
    )


def _used(
    log_prob_of_sites: LogProbOfSites, space: LatentSpace, one_row: Record
) -> Bool[np.ndarray, " d"]:
    """Coordinates of sites that the program of the log-likelihood makes any use of.

    Others, such as the mean of a population of groups, have a gradient of zero whatever the data.
    """
    record = _first(one_row)
    names = [site.name for site in space.sites]
    values = space.constrain(np.zeros(space.dim, np.float32))
    program = jax.make_jaxpr(
        lambda *parts: log_prob_of_sites(dict(zip(names, parts, strict=True)), record)
    )(*(values[name] for name in names)).jaxpr
    needed = {id(variable) for variable in program.outvars}
    for equation in reversed(program.eqns):
        if any(id(variable) in needed for variable in equation.outvars):
            needed |= {id(variable) for variable in equation.invars}
    used = [id(variable) in needed for variable in program.invars]
    return np.repeat(used, [site.raw_size for site in space.sites])


def _first(rows: Record) -> Record:
    return jax.tree.map(lambda leaf: leaf[0], rows)


def _sites_with_several_modes(model: Model, space: LatentSpace) -> tuple[str, ...]:
    names = [site.name for site in space.sites]
    declared = getattr(model, "several_modes", False)
    if isinstance(declared, bool):
        return tuple(names) if declared else ()
    for name in declared:
        _validate.one_of("several_modes", name, names)
    return tuple(declared)


def _check_observations_are_arguments(observed: ObservedSites, declared: Declarations) -> None:
    for name in observed.prior:
        if declared[name].kind != _FACTOR:
            raise ModelError(
                f"site {name!r}: expected an observation among the model's arguments, got one that "
                "does not depend on them. What a model holds by itself is public, and nothing "
                "would protect it: pass what was observed as an argument. A public term of the "
                "prior can be written as numpyro.factor."
            )


def _log_prob_of_sites(runner: ModelRunner, observed: ObservedSites) -> LogProbOfSites:
    """The log-likelihood of one record, by the values of the latent sites."""

    def log_prob(values: dict[str, Array], record: Record) -> Scalar:
        row = jax.tree.map(lambda leaf: leaf[None], record)
        terms = runner.log_probs(values, row, num_rows=1)
        return jnp.sum(jnp.stack([terms[name] for name in observed.likelihood]))

    return log_prob


def _log_prior(
    runner: ModelRunner, space: LatentSpace, observed: ObservedSites, one_row: Record
) -> LogPrior:
    """The log prior of the flat latent, with public factors and the log-Jacobian in it."""

    def log_prior(latent: Latent) -> Scalar:
        terms = runner.log_probs(space.constrain(latent), one_row, num_rows=1)
        names = [*(site.name for site in space.sites), *observed.prior]
        return jnp.sum(jnp.stack([terms[name] for name in names])) + space.log_det(latent)

    return log_prior


def _with_own_sum(
    problem: Problem,
    clipped_sum: ClippedSum,
    batch_of: Model,
    call: Callable[[Model, Record], Any],
) -> Problem:
    """The problem with a structured model's clipped sum, and records in the form it takes."""
    return problem._replace(
        likelihood=problem.likelihood._replace(clipped_sum=clipped_sum),
        arrange=jit_quickly(lambda records: call(batch_of, records)),
    )
