"""`fit`: a private posterior in one call."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import optax
from jaxtyping import Array
from matplotlib.figure import Figure
from numpyro.infer.autoguide import AutoGuide

from dpvim import _validate, plots, saving
from dpvim.estimates import EstimateName, NoiseAwareness, WindowRule
from dpvim.estimates import estimate as estimate_posterior
from dpvim.family import FAMILIES, Family
from dpvim.infer import State
from dpvim.models.bridge import bridge
from dpvim.models.data import prepare
from dpvim.models.guides import family_name
from dpvim.models.latent_space import LatentSpace
from dpvim.plan import (
    NonPrivatePlan,
    Plan,
    PrivacyPlan,
    default_sampling_prob,
    resolve_num_steps,
    warn_if_delta_large,
)
from dpvim.posterior import Posterior
from dpvim.progress import wanted
from dpvim.randomness import fresh_key
from dpvim.saving import SavedFit
from dpvim.statement import NoPrivacy, PrivacyStatement
from dpvim.svi import DPSVI, numpyro_params
from dpvim.trace import Trace
from dpvim.types import ConvergenceWarning, NotForReleaseWarning, Relation
from dpvim.variants import make_variant


@dataclasses.dataclass(frozen=True, repr=False)
class Fit:
    """A fitted model. Every part of a private fit is a DP output or public; it holds no data.

    Attributes:
        plan: What the run did to the data.
        privacy: What was released, under which guarantee.
        trace: Snapshots of the variational parameters, the initial value first.
        space: The latent sites of the model.
        family: The variational family.
        session: What took the steps, to go on with; None for a fit that was loaded. It knows the
            shapes of the data, so it is for the data holder; `save` leaves it out.
    """

    plan: Plan
    privacy: PrivacyStatement | NoPrivacy
    trace: Trace
    space: LatentSpace
    family: Family
    session: Session | None = None

    @functools.cached_property
    def posterior(self) -> Posterior:
        """The averaged posterior that knows about the noise.

        Parameters that have not converged are announced with a `ConvergenceWarning`;
        `posterior.not_converged` and `posterior.summary()` name them.
        """
        found = self.posterior_at()
        if found.not_converged:
            warnings.warn(_say_not_converged(found), ConvergenceWarning, stacklevel=3)
        return found

    def posterior_at(
        self,
        estimate: EstimateName = "average",
        *,
        noise_aware: NoiseAwareness | Literal["matching"] = "matching",
        window: WindowRule = "auto",
    ) -> Posterior:
        """Another posterior from the same trace, at no cost.

        Args:
            estimate: ``"average"`` of the window, or the ``"last"`` iterate.
            noise_aware: What is added to the variance for the noise of the run: that of an
                ``"iterate"``, that of the window's ``"average"``, or None for nothing. By default
                what matches the estimate.
            window: ``"auto"``, ``"slope"`` (the paper's), ``"rhat"``, or a number of snapshots.
        """
        if noise_aware == "matching":
            noise_aware = "iterate" if estimate == "last" else "average"
        found = estimate_posterior(
            self.trace, self.family, estimate=estimate, noise_aware=noise_aware, window=window
        )
        return Posterior(found, self.space, self.trace.every, self.privacy.to_dict())

    @property
    def interrupted(self) -> bool:
        """Whether the run was stopped before its last step; `resume` takes the others."""
        return int(self.trace.steps[-1]) < self.plan.num_steps

    @property
    def params(self) -> dict[str, Array]:
        """The last iterate under NumPyro's names, for `Predictive` with `guide`."""
        return numpyro_params(self.family, self.trace.last)

    @property
    def guide(self) -> AutoGuide:
        """NumPyro's automatic guide that `params` belong to."""
        return self._session("the guide").svi.guide

    def resume(self, *data: Any, progress: bool | None = None, **keyword_data: Any) -> Fit:
        """Take the steps that an interrupted fit left, on the same data, in the same plan."""
        if not self.interrupted:
            return self
        return _continue(self, self._session("resume"), data, keyword_data, progress)

    def save(self, path: str | Path) -> None:
        """Write the fit to one file: arrays and json, no code, no data."""
        saving.write(path, SavedFit(self.plan, self.privacy, self.trace, self.space, self.family))

    def plot_trace(self, **options: Any) -> Figure:
        """The parameters as the run went on; see `dpvim.plots.plot_trace`."""
        return plots.plot_trace(self.trace, self.posterior, self.family, **options)

    def plot_posterior(self, **options: Any) -> Figure:
        """Means and intervals, with and without DP noise; see `dpvim.plots.plot_posterior`."""
        return plots.plot_posterior(self.posterior, **options)

    def plot_convergence(self, **options: Any) -> Figure:
        """How long the windows are, in their own terms; see `dpvim.plots.plot_convergence`."""
        return plots.plot_convergence(self.trace, self.posterior, **options)

    def _session(self, what: str) -> Session:
        if self.session is None:
            raise RuntimeError(f"{what} needs the model, which a loaded fit does not have.")
        return self.session

    def __repr__(self) -> str:
        kind = "Fit" if self.privacy.private else "NOT PRIVATE Fit"
        cost = f"epsilon={self.privacy.epsilon:.4g}, " if self.privacy.private else ""
        return f"<{kind}: {cost}{int(self.trace.steps[-1]):,} steps, d={self.family.dim}>"


class Session(NamedTuple):
    """What is needed to take more steps: the model's machinery and where it stopped."""

    svi: DPSVI
    state: State


def load(path: str | Path) -> Fit:
    """A fit that was saved: posterior, trace and statement, without data or model.

    Raises:
        FileError: For files that are cut short, of another kind, or from a newer dpvim.
    """
    return Fit(*saving.read(path))


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

    if seed is not None:
        warnings.warn(
            "a seed was given: whoever knows it can take the noise away. The result is marked as "
            "not for release; leave the seed out for a private one.",
            NotForReleaseWarning,
            stacklevel=2,
        )
    settings = _Settings(
        variant=variant,
        family=family,
        optimizer=optimizer,
        learning_rate=learning_rate,
        init_scale=init_scale,
        init_params=init_params,
        scale_transform=scale_transform,
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
    return Fit(svi.plan, privacy, result.trace, bridged.space, svi.family, session)


def _continue(
    fit: Fit,
    session: Session,
    data: tuple[Any, ...],
    keyword_data: dict[str, Any],
    progress: bool | None,
) -> Fit:
    svi, state = session
    result = svi.run(
        state.key,
        fit.plan.num_steps - int(state.step),
        *data,
        init_state=state,
        progress_bar=wanted(progress),
        trace_every=fit.trace.every,
        **keyword_data,
    )
    delta = fit.privacy.delta if isinstance(fit.privacy, PrivacyStatement) else None
    return dataclasses.replace(
        fit,
        privacy=svi.privacy(result.state, delta=delta),
        trace=fit.trace.then(result.trace),
        session=Session(svi, result.state),
    )


def _say_not_converged(posterior: Posterior, most: int = 8) -> str:
    names = posterior.not_converged
    shown = ", ".join(names[:most]) + (", ..." if len(names) > most else "")
    return (
        f"{len(names)} of {posterior.loc.size} parameters have not converged: {shown}. The trace "
        "is too short, or still on its way, to tell how far noise has moved them, and their "
        "intervals may be too narrow. Take more steps or a larger learning rate, or a larger "
        "epsilon."
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
