"""`fit`: a private posterior in one call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import optax

from dpvim import _validate
from dpvim.family import FAMILIES
from dpvim.models.bridge import bridge
from dpvim.models.data import prepare
from dpvim.models.guides import family_name
from dpvim.plan import (
    NonPrivatePlan,
    Plan,
    PrivacyPlan,
    default_sampling_prob,
    resolve_num_steps,
    warn_if_delta_large,
)
from dpvim.progress import wanted
from dpvim.randomness import fresh_key
from dpvim.result import Fit, Session
from dpvim.svi import DPSVI
from dpvim.types import Relation
from dpvim.variants import make_variant


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
    probe_width: float | Literal["auto"] = 1.0,
    trace_every: int | None = None,
    seed: int | None = None,
    progress: bool | None = None,
    **keyword_data: Any,
) -> Fit:
    r"""Fit a NumPyro model to records under (epsilon, delta)-differential privacy.

    Args:
        model: Written for the whole data set, as for NUTS. Its observed sites must be independent
            over records given the latents.
        data, keyword_data: What the model takes: arrays (or pytrees of arrays) with a row for
            each record; Python numbers are public constants.
        epsilon, delta: The budget. Or give `noise_multiplier`, and epsilon is reported.
        variant: ``aligned``, ``vanilla``, ``natural``, ``preconditioned``, ``aligned_natural``.
        family: ``mean_field``, ``full_rank``, or NumPyro's AutoDiagonalNormal or
            AutoMultivariateNormal.
        clip_norm: Largest norm C of one record's gradient; must not be taken from the data.
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
            quarters of the run, at least 1, or ``"auto"``. It costs no privacy and makes the
            posterior from the releases narrower (docs/honest-posterior.md). For the aligned
            variant.
        trace_every: Steps between snapshots. Default: about 2000 snapshots.
        seed: For tests and experiments: fixes all randomness, and with it undoes the privacy.
        progress: Show a progress bar. Default: if standard error is a terminal.

    Returns:
        A `Fit` with ``.posterior``, ``.trace``, ``.privacy`` and ``.plan``. If Ctrl-C stopped the
        run it holds what was released until then, at the price of the steps taken.

    Raises:
        ValueError, TypeError: Before any budget is spent, for input that cannot be used.
    """
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
    return _fit(model, data, keyword_data, make_plan, settings, delta=delta)


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

    The arguments are those of `fit`, without the ones that are a matter of privacy.
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
    return _fit(model, data, keyword_data, make_plan, settings, delta=None)


def _fit(
    model: Callable[..., Any],
    data: tuple[Any, ...],
    keyword_data: dict[str, Any],
    make_plan: Callable[[int, int], Plan],
    settings: _Settings,
    *,
    delta: float | None,
) -> Fit:
    """Check everything, make the plan, take the steps."""
    name = family_name(settings.family)
    optimizer = settings.optimizer
    if optimizer is None:
        optimizer = optax.adam(_validate.positive("learning_rate", settings.learning_rate))
    # Names are checked before the data are looked at: a misspelt one should not cost minutes.
    make_variant(settings.variant, FAMILIES[name](1, settings.scale_transform))
    inputs = prepare(data, keyword_data)
    bridged = bridge(model, inputs)
    svi = DPSVI(
        model,
        settings.family,
        optimizer,
        make_plan(inputs.num_rows, bridged.problem.dim),
        variant=settings.variant,
        scale_transform=settings.scale_transform,
        init_scale=settings.init_scale,
        probe_width=settings.probe_width,
        seed=settings.seed,
    )
    svi.adopt(bridged, inputs)
    num_steps = svi.plan.num_steps
    key = fresh_key() if settings.seed is None else jax.random.key(settings.seed)
    result = svi.run(
        key,
        num_steps,
        *data,
        progress_bar=wanted(settings.progress),
        init_params=settings.init_params,
        trace_every=settings.trace_every,
        **keyword_data,
    )
    privacy = svi.privacy(result.state, delta=delta)
    session = Session(svi, result.state)
    return Fit(
        svi.plan,
        privacy,
        result.trace,
        bridged.space,
        svi.family,
        releases=result.releases,
        session=session,
    )


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
    sampling_prob = _validate.probability("sampling_prob", sampling_prob)
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
