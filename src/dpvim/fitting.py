"""`fit`: a private posterior in one call; `fit_many`: many of them."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

import jax
import optax

from dpvim import _validate
from dpvim._compile import single_precision
from dpvim._progress import wanted
from dpvim.bridge.data import prepare
from dpvim.bridge.guides import family_name
from dpvim.bridge.model import bridge
from dpvim.inference.families import FAMILIES
from dpvim.inference.monitor import monitoring
from dpvim.inference.variants import make_variant
from dpvim.privacy.plan import (
    NonPrivatePlan,
    Plan,
    PrivacyPlan,
    check_sampling_prob,
    default_sampling_prob,
    resolve_num_steps,
    warn_if_delta_large,
)
from dpvim.privacy.randomness import fresh_key
from dpvim.result import Fit, Session
from dpvim.svi import DPSVI, RunResult
from dpvim.types import Relation


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Settings:
    """How to optimise: what private and non-private fits have in common."""

    variant: str
    family: Any
    optimizer: optax.GradientTransformation | None
    learning_rate: float
    init_scale: float
    init_params: dict[str, Any] | None
    scale_transform: str
    probe_width: float | Literal["auto"]
    trace_every: int | None
    seed: int | None
    progress: bool | None


def fit(
    model: Callable[..., Any],
    *data: Any,
    delta: float,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    variant: str = "aligned",
    family: Any = "mean_field",
    clip_norm: float = 1.0,
    sampling_prob: float | None = None,
    num_steps: int | None = None,
    num_epochs: float | None = None,
    num_examples: int | None = None,
    relation: str = Relation.ZERO_OUT,
    optimizer: optax.GradientTransformation | None = None,
    learning_rate: float = 1e-3,
    init_scale: float = 0.1,
    init_params: dict[str, Any] | None = None,
    scale_transform: str = "softplus",
    probe_width: float | Literal["auto"] = "auto",
    trace_every: int | None = None,
    seed: int | None = None,
    progress: bool | None = None,
    **keyword_data: Any,
) -> Fit:
    r"""Fit a NumPyro model to records under (epsilon, delta)-differential privacy.

    Args:
        model: Written for the whole data set, as for NUTS. Its observed sites must be independent
            over records given the latents.
        data, keyword_data: What the model takes: arrays with a row for each record, in dicts,
            lists and tuples as you like. Python numbers and texts given as arguments of their own
            are public constants; anything else that is public is declared: `dpvim.public(value)`.
        epsilon, delta: The budget. Or give `noise_multiplier`, and epsilon is reported.
        variant: ``aligned``, ``vanilla``, ``natural``, ``preconditioned``, ``aligned_natural``.
        family: ``mean_field``, ``full_rank``, or NumPyro's AutoDiagonalNormal or
            AutoMultivariateNormal.
        clip_norm: Largest norm C of one record's gradient; must not be taken from the data. Longer
            ones are shortened, a bias that no interval shows: choose one that few records reach.
        sampling_prob: Probability q that a record is in a batch. Default: about 2^19 / d records,
            all of them if that is half of the data.
        num_steps, num_epochs: Length of the run; an epoch is 1/q steps. Default: 10 000 steps.
        num_examples: Public number of records. Needed with ``relation="add_or_remove"``.
        relation: Which data sets are neighbours; see `dpvim.Relation`.
        optimizer: An optax optimiser; default Adam with `learning_rate`.
        init_scale: Standard deviations that the approximation starts with; a guide brings its own.
        init_params: Initial values by site name; others start near the middle of their support.
        scale_transform: ``softplus`` or ``exp``.
        probe_width: How much wider than the approximation gradients are taken in the first three
            quarters of the run, at least 1. It costs no privacy and makes the posterior from the
            releases narrower (docs/honest-posterior.md). ``"auto"``: a quarter of the root of
            records a parameter, 1 to 8; 1 for more than 128 parameters, and for variants that
            cannot probe elsewhere.
        trace_every: Steps between snapshots. Default: about 2000 snapshots.
        seed: For tests and experiments: fixes all randomness, and with it undoes the privacy.
        progress: Show a progress bar. Default: if standard error is a terminal.

    Returns:
        A `Fit` with ``.posterior``, ``.trace``, ``.privacy`` and ``.plan``. If Ctrl-C stopped the
        run it holds what was released until then, at the price of the steps taken.

    Raises:
        ValueError, TypeError: Before any budget is spent, for input that cannot be used.
    """
    make_plan = _private_plan(
        delta=delta,
        epsilon=epsilon,
        noise_multiplier=noise_multiplier,
        clip_norm=clip_norm,
        sampling_prob=sampling_prob,
        num_steps=num_steps,
        num_epochs=num_epochs,
        num_examples=num_examples,
        relation=relation,
    )
    settings = _Settings(
        variant=variant,
        family=family,
        optimizer=optimizer,
        learning_rate=learning_rate,
        init_scale=init_scale,
        init_params=init_params,
        scale_transform=scale_transform,
        probe_width=probe_width,
        trace_every=trace_every,
        seed=seed,
        progress=progress,
    )
    call = _Call(make_plan, settings)
    return _fit_all(model, data, keyword_data, [call], delta=delta)[0]


def fit_nonprivate(
    model: Callable[..., Any],
    *data: Any,
    variant: str = "aligned",
    family: Any = "mean_field",
    sampling_prob: float | None = None,
    num_steps: int | None = None,
    num_epochs: float | None = None,
    optimizer: optax.GradientTransformation | None = None,
    learning_rate: float = 1e-3,
    init_scale: float = 0.1,
    init_params: dict[str, Any] | None = None,
    scale_transform: str = "softplus",
    probe_width: float | Literal["auto"] = 1.0,
    trace_every: int | None = None,
    seed: int | None = None,
    progress: bool | None = None,
    **keyword_data: Any,
) -> Fit:
    """The same optimisation without clip and noise: a baseline, NOT PRIVATE.

    The arguments are those of `fit`, without the ones that are a matter of privacy; gradients are
    taken where the approximation is (``probe_width=1``) unless told.
    """

    def make_plan(num_rows: int, dim: int) -> NonPrivatePlan:
        length = _length(num_rows, dim, sampling_prob, num_steps, num_epochs)
        return NonPrivatePlan(num_examples=num_rows, **length)

    settings = _Settings(
        variant=variant,
        family=family,
        optimizer=optimizer,
        learning_rate=learning_rate,
        init_scale=init_scale,
        init_params=init_params,
        scale_transform=scale_transform,
        probe_width=probe_width,
        trace_every=trace_every,
        seed=seed,
        progress=progress,
    )
    call = _Call(make_plan, settings)
    return _fit_all(model, data, keyword_data, [call], delta=None)[0]


def fit_many(
    model: Callable[..., Any],
    *data: Any,
    each: Sequence[Mapping[str, Any]],
    delta: float,
    **options: Any,
) -> list[Fit]:
    """Many fits of one model to the same records: for experiments, on all cores.

    Fits with the same noise run as one compiled program, small ones several at a time.

    Args:
        model, data: As in `fit`.
        each: What is particular to each fit: any of ``epsilon``, ``noise_multiplier``, ``seed``
            and ``init_params``. ``[{"epsilon": e, "seed": s} for e in (1, 4) for s in range(10)]``
            asks for twenty fits.
        delta: As in `fit`.
        options: What all fits share: the other arguments of `fit`, and data given by keyword.

    Returns:
        A `Fit` for each, in order. If Ctrl-C stopped them they hold what was released until then.

    Each fit's statement is about that fit alone. Whoever publishes several fits of the same
    records has to add up what they cost.
    """
    if not each:
        raise ValueError("each: expected at least one fit, got an empty list.")
    signature = inspect.signature(fit)
    calls = []
    for own in each:
        for name in own:
            _validate.one_of("each", name, _PARTICULAR)
            if name in options:
                raise ValueError(f"{name}: expected in `each` or for all fits, got both.")
        bound = signature.bind(model, *data, delta=delta, **options, **own)
        bound.apply_defaults()
        given = bound.arguments
        budget = {name: given[name] for name in inspect.signature(_private_plan).parameters}
        settings = {field.name: given[field.name] for field in dataclasses.fields(_Settings)}
        calls.append(_Call(_private_plan(**budget), _Settings(**settings)))
    return _fit_all(model, data, given["keyword_data"], calls, delta=delta)


_PARTICULAR = ("epsilon", "noise_multiplier", "seed", "init_params")


class _Call(NamedTuple):
    """One fit that was asked for."""

    make_plan: Callable[[int, int], Plan]
    settings: _Settings


def _private_plan(
    *,
    delta: float,
    epsilon: float | None,
    noise_multiplier: float | None,
    clip_norm: float,
    sampling_prob: float | None,
    num_steps: int | None,
    num_epochs: float | None,
    num_examples: int | None,
    relation: str,
) -> Callable[[int, int], PrivacyPlan]:
    """What makes the plan once rows and dimension are known; the rest is checked here."""
    delta = _validate.open_unit("delta", delta, hint="A common choice is 1/(10 N).")
    _check_budget(epsilon, noise_multiplier)
    relation = Relation(_validate.one_of("relation", relation, [r.value for r in Relation]))
    if num_examples is None and relation is Relation.ADD_OR_REMOVE:
        raise ValueError(
            "num_examples: expected with relation='add_or_remove', where the number of records "
            "is private. Declare a public bound on it."
        )

    def make_plan(num_rows: int, dim: int) -> PrivacyPlan:
        rows = num_rows if num_examples is None else num_examples
        plan = PrivacyPlan(
            num_examples=rows,
            clip_norm=clip_norm,
            relation=relation,
            noise_multiplier=noise_multiplier,
            **_length(rows, dim, sampling_prob, num_steps, num_epochs),
        )
        if epsilon is None:
            warn_if_delta_large(delta, rows)
            plan.epsilon(delta)  # an accountant that fails should do so before the run
            return plan
        return plan.calibrate(epsilon=epsilon, delta=delta)

    return make_plan


@single_precision
def _fit_all(
    model: Callable[..., Any],
    data: tuple[Any, ...],
    keyword_data: dict[str, Any],
    calls: list[_Call],
    *,
    delta: float | None,
) -> list[Fit]:
    """Check everything, make the plans, take the steps."""
    shared = calls[0].settings  # but for seeds and initial values
    optimizer = shared.optimizer
    if optimizer is None:
        optimizer = optax.adam(_validate.positive("learning_rate", shared.learning_rate))
    # Names are checked before the data are looked at: a misspelt one should not cost minutes.
    make_variant(shared.variant, FAMILIES[family_name(shared.family)](1, shared.scale_transform))
    inputs = prepare(data, keyword_data)
    bridged = bridge(model, inputs)
    plans = [call.make_plan(inputs.num_rows, bridged.problem.dim) for call in calls]
    progress = wanted(shared.progress)
    with monitoring(sum(plan.num_steps for plan in plans), progress=progress) as monitor:
        groups = []
        for plan in dict.fromkeys(plans):
            members = [i for i, other in enumerate(plans) if other == plan]
            own = [calls[i].settings for i in members]
            svi = DPSVI(
                model,
                shared.family,
                optimizer,
                plan,
                variant=shared.variant,
                scale_transform=shared.scale_transform,
                init_scale=shared.init_scale,
                probe_width=shared.probe_width,
                seed=next((s.seed for s in own if s.seed is not None), None),
            )
            svi.adopt(bridged, inputs)
            runs = svi.run_each(
                [fresh_key() if s.seed is None else jax.random.key(s.seed) for s in own],
                [s.seed for s in own],
                *data,
                init_params=[s.init_params for s in own],
                trace_every=shared.trace_every,
                monitor=monitor,
                **keyword_data,
            )
            groups.append((svi, members, runs))
        results = in_parallel([run for *_, runs in groups for run in runs])
    whose = [(svi, i) for svi, members, _ in groups for i in members]
    found = {}
    for (svi, i), result in zip(whose, results, strict=True):
        machine = svi.for_run(calls[i].settings.seed, result.state)
        found[i] = Fit(
            machine.plan,
            machine.privacy(result.state, delta=delta),
            result.trace,
            bridged.space,
            machine.family,
            releases=result.releases,
            several_modes=bridged.several_modes,
            session=Session(machine, result.state),
        )
    return [found[i] for i in range(len(calls))]


def in_parallel(runs: list[Callable[[], list[RunResult]]]) -> list[RunResult]:
    """The results of all calls, in order."""
    if len(runs) == 1:
        return runs[0]()
    with ThreadPoolExecutor(os.cpu_count(), "dpvim-fit") as cores:
        parts = [cores.submit(run) for run in runs]
        return [result for part in parts for result in part.result()]


def _length(
    num_examples: int,
    dim: int,
    sampling_prob: float | None,
    num_steps: int | None,
    num_epochs: float | None,
) -> dict[str, Any]:
    """Sampling probability and number of steps, by the default rules where not given."""
    if sampling_prob is None:
        sampling_prob = default_sampling_prob(num_examples=num_examples, dim=dim)
    sampling_prob = check_sampling_prob(sampling_prob)
    steps = resolve_num_steps(
        num_steps=num_steps, num_epochs=num_epochs, sampling_prob=sampling_prob
    )
    return {"sampling_prob": sampling_prob, "num_steps": steps}


def _check_budget(epsilon: float | None, noise_multiplier: float | None) -> None:
    if (epsilon is None) == (noise_multiplier is None):
        given = "neither" if epsilon is None else f"both ({epsilon} and {noise_multiplier})"
        raise ValueError(
            f"epsilon and noise_multiplier: expected one of them, got {given}. With epsilon the "
            "noise is calibrated; with noise_multiplier epsilon is reported."
        )
    if epsilon is not None:
        _validate.positive("epsilon", epsilon)
