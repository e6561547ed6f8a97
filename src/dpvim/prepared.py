"""A model set up for data of one shape: what `fit`, `DPSVI` and a resumed `Fit` have in common."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float
from numpyro.infer.autoguide import AutoGuide

from dpvim import _validate
from dpvim._compile import jit_once, jit_quickly, single_precision
from dpvim.bridge.data import ModelInput
from dpvim.bridge.guides import guide_for
from dpvim.bridge.latent_space import LatentSpace
from dpvim.bridge.model import BridgedModel, bridge
from dpvim.inference.engine import Info, State, eta_for, make_engine
from dpvim.inference.families import Family, Params
from dpvim.inference.loop import Run, placed, run, run_many
from dpvim.inference.monitor import RunMonitor, monitoring
from dpvim.inference.progress import NOBODY, Keeper
from dpvim.inference.release_sums import ReleaseSums
from dpvim.inference.sharing import Sharing
from dpvim.inference.steering import SteeredReleases, Steering
from dpvim.inference.trace import Trace, default_trace_every
from dpvim.ledger.book import Job
from dpvim.ledger.payment import Account, Tally, paid
from dpvim.mapped import are_mapped
from dpvim.options import FitOptions
from dpvim.privacy.plan import Plan, PrivacyPlan
from dpvim.privacy.randomness import SecretStreams
from dpvim.privacy.steps import StepCounter
from dpvim.types import LogPrior, Origin

if TYPE_CHECKING:
    from dpvim.posterior.from_releases.regression import GaussianPrior

# Where the means start if nothing else is said: close to the middle of every support, but not
# all alike, so that exchangeable parts of a model can part ways.
_INIT_LOC_SPREAD = 0.1
_PRIOR_DRAWS = 10_000


class RunResult(NamedTuple):
    """The end of a run. There are no losses: they are private.

    Attributes:
        params: Parameters by NumPyro's names, for `numpyro.infer.Predictive` and guides.
        state: Where to continue from.
        trace: Snapshots of the variational parameters.
        interrupted: Whether Ctrl-C ended the run early.
        releases: Sums of the released gradients and their points, by window if the run was
            steered; None for variants that release something else.
        steering: What steered the run, to go on with.
    """

    params: dict[str, Array]
    state: State
    trace: Trace
    interrupted: bool
    releases: ReleaseSums | SteeredReleases | None
    steering: Steering | None = None


class PreparedFit:
    """A model, a plan and options, checked against data of one shape and compiled once.

    It holds no data, no randomness and no count: whoever takes steps with it counts them.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        plan: Plan,
        options: FitOptions,
        inputs: ModelInput,
        bridged: BridgedModel | None = None,
        prior: GaussianPrior | None = None,
        sharing: Sharing | None = None,
    ) -> None:
        plan.check_num_rows(inputs.num_rows)
        if plan.max_rows_per_person != inputs.max_rows_per_person:
            raise ValueError(
                f"max_rows_per_person: expected data by {plan.unit.value}, as the plan has it, got "
                "others. Give group_by= with a plan for persons, and leave it out with others."
            )
        if inputs.on_disk and plan.sampling_prob == 1:
            raise ValueError(
                "sampling_prob: expected less than 1 for arrays on the disk, of which a batch is "
                "read at every step, got 1. Leave it out, or load the arrays."
            )
        self.model = model
        self.plan = plan
        self.options = options
        self.signature = inputs.signature
        self.bridged = bridge(model, inputs) if bridged is None else bridged
        self._prior = prior
        family, variant = options.parts(self.space.layout)
        # Clipped sums that models bring know weights, not matrices.
        problem = self.bridged.by_record if variant.whitens else self.bridged.problem
        dim = self.num_informed if options.is_steered else problem.dim
        width_at = options.width_at(
            plan,
            dim,
            largest_block=dim if problem.blocks is None else problem.blocks.largest,
            several_modes=bool(self.bridged.several_modes),
        )
        optimizer = optax.set_to_zero() if options.is_steered else options.optimizer
        self.engine = make_engine(problem, family, variant, optimizer, plan, width_at, sharing)
        # The way from Python takes longer than a step by itself.
        self.one_step = jit_quickly(self._one_step)

    @property
    def family(self) -> Family:
        """The variational family."""
        return self.engine.family

    @property
    def num_informed(self) -> int:
        """Number of directions of the latent that the likelihood depends on."""
        return self.bridged.informed().span.shape[1]

    @property
    def space(self) -> LatentSpace:
        """The model's latent sites."""
        return self.bridged.space

    @property
    @single_precision
    def guide(self) -> AutoGuide:
        """NumPyro's guide for the parameters of a `RunResult`."""
        scale, rows = self.options.init_scale or 0.1, self.bridged.on_made_up_row
        return guide_for(self.family, self.model, scale, rows)

    @property
    def released(self) -> str:
        """A description of what a run releases, for its privacy statement."""
        iterates = "all iterates of the variational parameters"
        variant = self.engine.variant
        sums = ", sums of the noisy gradients" if variant.releases_gradient else ""
        if variant.whitens:
            unit = f"{self.plan.unit.value}s"
            sums = f", sums of the noisy gradients, counts of {unit} by the length of theirs"
        return iterates + sums

    def gaussian_prior(self) -> GaussianPrior:
        """Independent Gaussians that stand for the model's prior of the unconstrained latent."""
        if self._prior is None:
            self._prior = gaussian_prior(self.bridged)
        return self._prior

    @property
    def log_prior(self) -> LogPrior:
        """The log-density of the model's prior of the unconstrained latent."""
        return self.bridged.by_record.log_prior

    def steering(self, init_params: Mapping[str, Any] | None = None) -> Steering | None:
        """Steering of a run from its beginning; None if an optimiser moves it."""
        if not self.options.is_steered:
            return None
        prior = self.gaussian_prior()
        loc = prior.loc
        if init_params is not None:
            loc = np.asarray(self._override(jnp.asarray(loc, jnp.float32), init_params), float)
        width = self.options.wide_probes(self.plan, self.num_informed)
        return Steering(self.plan, loc, prior.scale, self.bridged.informed(), width)

    @single_precision
    def init(
        self, key: Array, origin: Origin, init_params: Mapping[str, Any] | None = None
    ) -> State:
        """The state before the first step."""
        loc, key_eta = _random_start(key, self.family.dim)
        steering = self.steering(init_params)
        if steering is not None:
            state = self.engine.init(key_eta, loc, 1.0)
            return with_origin(state._replace(params=placed(self.engine, steering)), origin)
        if init_params is not None:
            loc = self._override(loc, init_params)
        scale = self.options.init_scale or 0.1
        return with_origin(self.engine.init(key_eta, loc, scale), origin)

    def trace_every(self, given: int | None, num_steps: int) -> int:
        """Steps between snapshots, by the default rule if not given."""
        if given is not None:
            return _validate.positive_int("trace_every", given)
        return default_trace_every(num_steps=num_steps, num_params=self.family.num_params)

    @single_precision
    def run(
        self,
        states: list[State],
        records: Any,
        *,
        streams: list[SecretStreams],
        num_steps: int,
        trace_every: int,
        monitor: RunMonitor,
        stacked: bool = False,
        steerings: list[Steering | None] | None = None,
        keeper: Keeper = NOBODY,
    ) -> list[RunResult]:
        """Take `num_steps` steps from each state, as one vectorised program if there are several.

        With `stacked` the records have a leading axis of data sets, one a run. `keeper` keeps the
        progress of a run that is alone.
        """
        settings: dict[str, Any] = {
            "num_steps": num_steps,
            "trace_every": trace_every,
            "monitor": monitor,
        }
        until = int(states[0].step) + num_steps
        # An axis of one run would only cost time; rows on the disk are read by one run at a time.
        if (len(states) == 1 or are_mapped(records)) and not stacked:
            apart = [
                run(
                    self.engine,
                    state,
                    records,
                    streams=streams[i],
                    steering=None if steerings is None else steerings[i],
                    keeper=keeper,
                    **settings,
                )
                for i, state in enumerate(states)
            ]
            return [self._result(each, until) for each in apart]
        together = run_many(
            self.engine,
            jax.tree.map(lambda *leaves: jnp.stack(leaves), *states),
            records,
            stacked=stacked,
            streams=streams,
            steerings=steerings,
            **settings,
        )
        return [self._result(one, until) for one in together]

    def run_counted(
        self,
        counter: StepCounter,
        seed: int | None,
        state: State,
        records: Any,
        *,
        num_steps: int,
        trace_every: int | None,
        progress: bool,
        steering: Steering | None = None,
        account: Account | None = None,
    ) -> RunResult:
        """Take steps from one state, counted and paid for before they are taken."""
        state = spend(counter, state, num_steps)
        tally = Tally()
        jobs = [] if account is None else [Job(cast(PrivacyPlan, self.plan).with_steps(num_steps))]
        try:
            with (
                monitoring(num_steps, progress=progress) as monitor,
                paid(account, jobs, [tally], data=records, seeded=seed is not None),
            ):
                (result,) = self.run(
                    [state],
                    records,
                    streams=[SecretStreams(seed, start_step=int(state.step))],
                    num_steps=num_steps,
                    trace_every=self.trace_every(trace_every, num_steps),
                    monitor=monitor._replace(begin=tally.add),
                    steerings=[steering],
                )
        finally:
            counter.give_back(num_steps - tally.steps)
        return result

    def _one_step(
        self, state: State, records: Any, rows: Array, noise: Array
    ) -> tuple[State, Info]:
        eta = eta_for(self.family, state.key, state.step)
        return self.engine.step(state, eta, records, rows, noise)

    def _result(self, done: Run, until: int) -> RunResult:
        params = numpyro_params(self.family, done.state.params)
        stopped = int(done.state.step) < until
        return RunResult(params, done.state, done.trace, stopped, done.releases, done.steering)

    def _override(self, loc: Array, init_params: Mapping[str, Any]) -> Array:
        names = [site.name for site in self.space.sites]
        for name, value in init_params.items():
            _validate.one_of("init_params", name, names)
            expected = self.space.sites[names.index(name)].shape
            _check_start(name, value, expected)
        given = {name: jnp.asarray(value, jnp.float32) for name, value in init_params.items()}
        return self.space.unconstrain(self.space.constrain(loc) | given)


def _check_start(name: str, value: Any, expected: tuple[int, ...]) -> None:
    """Refuse an initial value that is none, before anything is paid for."""
    try:
        numbers = np.asarray(value, np.float32)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(
            f"init_params[{name!r}]: expected numbers, got {_validate.shown(value)}."
        ) from None
    if numbers.shape != expected:
        raise ValueError(f"init_params[{name!r}]: expected shape {expected}, got {numbers.shape}.")
    if not np.isfinite(numbers).all():
        raise ValueError(
            f"init_params[{name!r}]: expected finite numbers, got {_validate.shown(value)}."
        )


@single_precision
def gaussian_prior(bridged: BridgedModel) -> GaussianPrior:
    """Independent Gaussians that stand for a model's prior of the unconstrained latent.

    Raises:
        NotImplementedError: For a prior that cannot be drawn from.
    """
    from dpvim.posterior.from_releases.regression import GaussianPrior

    keys = jax.random.split(jax.random.key(0), _PRIOR_DRAWS)
    draws = jit_once(jax.vmap(bridged.draw_prior))
    return GaussianPrior.from_draws(np.asarray(draws(keys)))


def numpyro_params(family: Family, params: Params) -> dict[str, Array]:
    """Parameters under the names and in the form of NumPyro's automatic guides."""
    return family.numpyro_params(jax.tree.map(jnp.asarray, params))


def spend(counter: StepCounter, state: State, num_steps: int) -> State:
    """Count steps from a state on; the state, marked with what protects those after it."""
    before = Origin(int(state.origin))
    origin = counter.spend(num_steps, from_step=int(state.step), from_origin=before)
    return state if origin == before else with_origin(state, origin)


def with_origin(state: State, origin: Origin) -> State:
    """The state, marked with what protected the steps that led to it."""
    return state._replace(origin=jnp.int32(origin))


@functools.partial(jit_once, static_argnames="dim")
def _random_start(key: Array, dim: int) -> tuple[Float[Array, " d"], Array]:
    """Means to start from, and a key for the draws eta."""
    key_loc, key_eta = jax.random.split(key)
    return _INIT_LOC_SPREAD * jax.random.normal(key_loc, (dim,)), key_eta
