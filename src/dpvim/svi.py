"""The step-by-step face, with the verbs of NumPyro's SVI.

>>> import jax, numpyro, optax, numpyro.distributions as dist
>>> import numpy as np
>>> def model(x):
...     mean = numpyro.sample("mean", dist.Normal(0, 1))
...     with numpyro.plate("records", x.shape[0]):
...         numpyro.sample("x", dist.Normal(mean, 1), obs=x)
>>> x = np.random.default_rng(0).normal(0.5, 1, 2000)
>>> plan = PrivacyPlan(num_examples=2000, sampling_prob=0.1, num_steps=500, clip_norm=1.0)
>>> svi = DPSVI(model, "mean_field", optax.adam(0.01), plan.calibrate(epsilon=1.0, delta=1e-5))
>>> result = svi.run(jax.random.key(0), 500, x, progress_bar=False)
>>> sorted(result.params)
['auto_loc', 'auto_scale']
"""

from __future__ import annotations

import copy
import functools
import operator
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float
from numpyro.infer.autoguide import AutoGuide

from dpvim import _validate
from dpvim._compile import jit_once, jit_quickly, single_precision
from dpvim.bridge.data import ModelInput, map_arrays, prepare
from dpvim.bridge.guides import family_name, guide_for, init_scale_of
from dpvim.bridge.latent_space import LatentSpace
from dpvim.bridge.model import BridgedModel, bridge
from dpvim.inference.engine import Engine, Info, State, eta_for, make_engine
from dpvim.inference.families import FAMILIES, Family, Params
from dpvim.inference.gradient import default_width, width_schedule
from dpvim.inference.loop import Run, run, run_many, runs_per_program
from dpvim.inference.monitor import RunMonitor, monitoring
from dpvim.inference.release_sums import LARGEST_FULL_DIM, ReleaseSums
from dpvim.inference.trace import Trace, default_trace_every
from dpvim.inference.variants import Variant, make_variant
from dpvim.privacy.plan import NonPrivatePlan, Plan, PrivacyPlan
from dpvim.privacy.randomness import SecretStreams
from dpvim.privacy.source import BatchNoiseSource
from dpvim.privacy.statement import NoPrivacy, PrivacyStatement
from dpvim.types import BudgetExceededError, NotForReleaseWarning, Origin

if TYPE_CHECKING:
    from dpvim.posterior.from_releases.regression import GaussianPrior

# Where the means start if nothing else is said: close to the middle of every support, but not
# all alike, so that exchangeable parts of a model can part ways.
_INIT_LOC_SPREAD = 0.1
_PRIOR_DRAWS = 10_000


class RunResult(NamedTuple):
    """What `DPSVI.run` returns. There are no losses: they are private.

    Attributes:
        params: Parameters by NumPyro's names, for `numpyro.infer.Predictive` and guides.
        state: Where to continue from.
        trace: Snapshots of the variational parameters.
        interrupted: Whether Ctrl-C ended the run early.
        releases: Sums of the released gradients and their points; None for variants that release
            something else.
    """

    params: dict[str, Array]
    state: State
    trace: Trace
    interrupted: bool
    releases: ReleaseSums | None


class DPSVI:
    """Differentially private stochastic variational inference, step by step.

    Args:
        model: A NumPyro model, written for the whole data set.
        family: ``"mean_field"``, ``"full_rank"``, or NumPyro's AutoDiagonalNormal or
            AutoMultivariateNormal.
        optimizer: An optax optimiser.
        plan: A `PrivacyPlan` with a noise multiplier.
        variant: The gradient estimator; see `dpvim.inference.variants`.
        scale_transform: ``"softplus"`` or ``"exp"``.
        init_scale: Standard deviation that the approximation starts with; a guide brings its own.
        probe_width: How much wider than the approximation gradients are taken in the first three
            quarters of the plan's steps, or ``"auto"`` as in `dpvim.fit`; see
            `dpvim.inference.gradient`.
            For the aligned variant.
        seed: For tests only: fixes batches and noise, and with them undoes the privacy.

    Guarantees:
        The data are reached through `update`, `run` and `run_many` alone. Every step on data costs
        what one step of the plan costs, and the object counts all that it ever took, from whatever
        states and whichever verb took them: `privacy` is about all of them together. `update` and
        `run` take no step beyond the plan's number.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        family: Any,
        optimizer: optax.GradientTransformation,
        plan: Plan,
        *,
        variant: str = "aligned",
        scale_transform: str = "softplus",
        init_scale: float = 0.1,
        probe_width: float | Literal["auto"] = 1.0,
        seed: int | None = None,
    ) -> None:
        if not isinstance(plan, PrivacyPlan | NonPrivatePlan):
            raise TypeError(f"plan: expected a dpvim.PrivacyPlan, got {type(plan).__name__}.")
        plan.noise_stddev  # noqa: B018 -- refuse a plan that was not calibrated
        if seed is not None and isinstance(plan, PrivacyPlan):
            warnings.warn(
                "a seed was given: whoever knows it can take the noise away. The result is marked "
                "as not for release; leave the seed out for a private one.",
                NotForReleaseWarning,
                stacklevel=2,
            )
        self.model = model
        self._plan = plan
        self._seed = seed
        self._optimizer = _as_optax(optimizer)
        self._family_name = family_name(family)
        self._variant_name = variant
        self._scale_transform = scale_transform
        self._init_scale = _validate.positive("init_scale", init_scale_of(family, init_scale))
        # A first look at the names, before there are data that tell the dimension.
        first_look = make_variant(variant, FAMILIES[self._family_name](1, scale_transform))
        self._probe_width = _check_probe_width(probe_width, first_look)
        self._supply: BatchNoiseSource | None = None
        # Of all steps on data, by all verbs, with those that led to states given.
        self._steps_taken, self._origin = 0, _origin_of(plan, seed)
        self._lock = threading.Lock()
        self._signature: tuple[Any, ...] | None = None
        self._last_seen: tuple[list[Any], ModelInput] | None = None
        self._ready_records: Any = None  # of the data last seen, for `update`

    # -- SVI's verbs ------------------------------------------------------------------------

    @single_precision
    def init(
        self, key: Array, *args: Any, init_params: dict[str, Any] | None = None, **kwargs: Any
    ) -> State:
        """The state before the first step.

        Args:
            key: Key for the initial means and for the draws eta.
            args, kwargs: Data and constants, as the model takes them.
            init_params: Initial values by site name (in their supports); others are random.
        """
        self._read(args, kwargs)
        loc, key_eta = _random_start(key, self.family.dim)
        if init_params is not None:
            loc = self._override(loc, init_params)
        state = self._engine.init(key_eta, loc, self._init_scale)
        return _marked(state, _origin_of(self.plan, self.seed))

    @single_precision
    def update(self, state: State, *args: Any, **kwargs: Any) -> tuple[State, Info]:
        """One step on a batch drawn from the data; give it the whole data set every time.

        Returns the new state and what was released: there is no loss, which would be private.
        The same arrays given again are not read again.
        """
        _refuse_tracers((state, jax.lax.full((), 0)))  # the second is one while a program is traced
        inputs = self._read(args, kwargs)
        state = self._spend(state, 1)
        with self._lock:
            if self._supply is None:
                streams = SecretStreams(self.seed, start_step=int(state.step))
                self._supply = self._engine.source(inputs.num_rows, streams)
            if self._ready_records is None:
                self._ready_records = self._engine.prepare(inputs.records)
            source, records = self._supply, self._ready_records
        rows, noise = source.draw(1, 1)
        after = self._one_step(state, records, rows[0], noise[0])
        _refuse_tracers(after)
        return after

    @single_precision
    def get_params(self, state: State) -> dict[str, Array]:
        """Parameters by NumPyro's names: ``auto_loc`` and ``auto_scale`` or
        ``auto_scale_tril``."""
        return numpyro_params(self.family, state.params)

    @single_precision
    def run(
        self,
        key: Array,
        num_steps: int,
        *args: Any,
        progress_bar: bool = True,
        init_state: State | None = None,
        init_params: dict[str, Any] | None = None,
        trace_every: int | None = None,
        **kwargs: Any,
    ) -> RunResult:
        """Take `num_steps` steps, from `init_state` if given.

        Ctrl-C ends the run between two chunks of steps and returns what was released so far. A
        second run of all steps would cost as much again, and is refused: it takes a new object,
        whose statement is about that run alone.
        """
        num_steps = _validate.positive_int("num_steps", num_steps)
        if init_state is None:
            init_state = self.init(key, *args, init_params=init_params, **kwargs)
        inputs = self._read(args, kwargs)
        self._last_seen = self._ready_records = None
        init_state = self._spend(init_state, num_steps)
        with monitoring(num_steps, progress=progress_bar) as monitor:
            done = run(
                self._engine,
                init_state,
                inputs.records,
                num_steps=num_steps,
                streams=SecretStreams(self.seed, start_step=int(init_state.step)),
                trace_every=self._trace_every(trace_every, num_steps),
                monitor=monitor,
            )
        until = int(init_state.step) + num_steps
        with self._lock:
            self._steps_taken -= until - int(done.state.step)  # what an interrupted run left
        return self._result(done, until=until)

    @single_precision
    def run_many(
        self,
        key: Array,
        num_runs: int,
        num_steps: int,
        *args: Any,
        stacked: bool = False,
        progress_bar: bool = True,
        init_params: dict[str, Any] | None = None,
        trace_every: int | None = None,
        **kwargs: Any,
    ) -> list[RunResult]:
        """`num_runs` independent runs as one vectorised program: for experiments.

        With `stacked` the data have a leading axis of runs, and every run has a data set of its
        own. Each run costs what it would cost by itself; runs on the same data add up, and
        `privacy` counts all of them.
        """
        num_runs = _validate.positive_int("num_runs", num_runs)
        num_steps = _validate.positive_int("num_steps", num_steps)
        one_args, one_kwargs = map_arrays(
            lambda array: array[0] if stacked else array, (args, kwargs)
        )
        states = [
            self.init(each, *one_args, init_params=init_params, **one_kwargs)
            for each in jax.random.split(key, num_runs)
        ]
        self._last_seen = self._ready_records = None
        records = prepare(args, kwargs).records
        streams = [SecretStreams(self.seed, run=i) for i in range(num_runs)]
        every = self._trace_every(trace_every, num_steps)
        with self._lock:
            self._steps_taken += num_runs * num_steps
        with monitoring(num_runs * num_steps, progress=progress_bar) as monitor:
            return self._run_together(
                states, streams, records, num_steps, every, monitor, stacked=stacked
            )

    @single_precision
    def run_each(
        self,
        keys: Sequence[Array],
        seeds: Sequence[int | None],
        *args: Any,
        init_params: Sequence[dict[str, Any] | None],
        trace_every: int | None,
        monitor: RunMonitor,
        **kwargs: Any,
    ) -> list[Callable[[], list[RunResult]]]:
        """All of the plan's steps for each of several runs, in calls that may be made in parallel.

        Every call takes some of the runs, as one vectorised program, and together they take all
        of them in order.
        """
        records = self._read(args, kwargs).records
        num_steps, lanes = self.plan.num_steps, runs_per_program(self._engine)
        every = self._trace_every(trace_every, num_steps)
        # At least a call for each core, of about the same size: two sizes are compiled at most.
        calls = min(len(keys), max(os.cpu_count() or 1, -(-len(keys) // lanes)))
        prepared: list[Callable[[], list[RunResult]]] = []
        for members in np.array_split(np.arange(len(keys)), calls):
            states = [
                _marked(
                    self.init(keys[i], *args, init_params=init_params[i], **kwargs),
                    _origin_of(self.plan, seeds[i]),
                )
                for i in members
            ]
            streams = [SecretStreams(seeds[i]) for i in members]
            prepared.append(
                functools.partial(
                    self._run_together, states, streams, records, num_steps, every, monitor
                )
            )
        self._last_seen = self._ready_records = None
        return prepared

    # -- what else one may ask ----------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """What every step does to the data. Another plan takes another object."""
        return self._plan

    @property
    def seed(self) -> int | None:
        """The seed of batches and noise, in tests."""
        return self._seed

    @property
    def family(self) -> Family:
        """The variational family, once the model's dimension is known."""
        return self._ready()._engine.family

    @property
    @single_precision
    def guide(self) -> AutoGuide:
        """NumPyro's guide for the parameters of `get_params`."""
        bridged = self._ready()._bridged
        return guide_for(self._family_name, self.model, self._init_scale, bridged.on_made_up_row)

    @property
    def space(self) -> LatentSpace:
        """The model's latent sites."""
        return self._ready()._bridged.space

    @single_precision
    def gaussian_prior(self) -> GaussianPrior:
        """Independent Gaussians that stand for the model's prior of the unconstrained latent."""
        from dpvim.posterior.from_releases.regression import GaussianPrior

        keys = jax.random.split(jax.random.key(0), _PRIOR_DRAWS)
        draws = jit_once(jax.vmap(self._ready()._bridged.draw_prior))
        return GaussianPrior.from_draws(np.asarray(draws(keys)))

    def privacy(self, state: State, *, delta: float | None) -> PrivacyStatement | NoPrivacy:
        """The statement for all steps that this object took, and those that led to `state`."""
        origin = max(self._origin, int(state.origin))
        if origin == Origin.NOT_PRIVATE or not isinstance(self.plan, PrivacyPlan):
            return NoPrivacy()
        if delta is None:
            raise ValueError("delta: expected a number between 0 and 1, got None.")
        return PrivacyStatement.of(
            self.plan,
            delta=delta,
            steps_done=max(int(state.step), self._steps_taken),
            released=self._released(),
            for_testing=origin == Origin.SEEDED,
        )

    def for_run(self, seed: int | None, state: State) -> DPSVI:
        """The same machinery, compiled once for both, to go on with one of several runs.

        It has batches and noise of its own, and has taken the steps that led to `state`.
        """
        other = copy.copy(self)
        other._seed, other._supply, other._lock = seed, None, threading.Lock()
        other._steps_taken, other._origin = int(state.step), _origin_of(self.plan, seed)
        other._last_seen = other._ready_records = None
        return other

    # -- inside -------------------------------------------------------------------------------

    def _spend(self, state: State, num_steps: int) -> State:
        """Count steps from `state` on before they are taken, or refuse them.

        Returns the state, marked with what protects the steps that it will have led to.
        """
        with self._lock:
            taken = max(self._steps_taken, int(state.step)) + num_steps
            if taken > self.plan.num_steps and isinstance(self.plan, PrivacyPlan):
                raise BudgetExceededError(
                    f"{num_steps} steps: the plan pays for {self.plan.num_steps} in all, and "
                    f"{taken - num_steps} of them were taken, from this state or from others. Ask "
                    "for fewer, make a plan for more, or begin anew with another DPSVI: its cost "
                    "adds up."
                )
            self._steps_taken = taken
            self._origin = max(self._origin, Origin(int(state.origin)))
        return state if int(state.origin) == self._origin else _marked(state, self._origin)

    @single_precision
    def _run_together(
        self,
        states: list[State],
        streams: list[SecretStreams],
        records: Any,
        num_steps: int,
        trace_every: int,
        monitor: RunMonitor,
        *,
        stacked: bool = False,
    ) -> list[RunResult]:
        num_steps = _validate.positive_int("num_steps", num_steps)
        settings: dict[str, Any] = {
            "num_steps": num_steps,
            "trace_every": trace_every,
            "monitor": monitor,
        }
        if len(states) == 1 and not stacked:  # an axis of one run would only cost time
            alone = run(self._engine, states[0], records, streams=streams[0], **settings)
            return [self._result(alone, until=num_steps)]
        together = run_many(
            self._engine,
            jax.tree.map(lambda *leaves: jnp.stack(leaves), *states),
            records,
            stacked=stacked,
            streams=streams,
            **settings,
        )
        return [self._result(one, until=num_steps) for one in together]

    def _result(self, done: Run, *, until: int) -> RunResult:
        stopped = int(done.state.step) < until
        params = self.get_params(done.state)
        return RunResult(params, done.state, done.trace, stopped, done.releases)

    def _released(self) -> str:
        iterates = "all iterates of the variational parameters"
        sums = ", sums of the noisy gradients"
        return iterates + (sums if self._engine.variant.releases_gradient else "")

    def adopt(self, bridged: BridgedModel, inputs: ModelInput) -> None:
        """Get ready for data like these."""
        self.plan.check_num_rows(inputs.num_rows)
        self._bridged = bridged
        dim = self._bridged.problem.dim
        family = FAMILIES[self._family_name](dim, self._scale_transform)
        variant = make_variant(self._variant_name, family)
        self._engine: Engine = make_engine(
            self._bridged.problem, family, variant, self._optimizer, self.plan, self._width_at(dim)
        )
        self._supply = None
        # The way from Python takes longer than a step by itself.
        self._one_step = jit_quickly(self._gather_and_step)
        self._signature = inputs.signature

    def _width_at(self, dim: int) -> Callable[[Array], Array] | None:
        width = self._probe_width
        if width == "auto":
            # Wide probes tell the curvature, which is inferred only if all products are kept.
            told = dim <= LARGEST_FULL_DIM and not self._bridged.several_modes
            width = default_width(num_examples=self.plan.num_examples, dim=dim) if told else 1.0
        return None if width == 1 else width_schedule(width, self.plan.num_steps)

    def _gather_and_step(
        self, state: State, data: Any, rows: Array, noise: Array
    ) -> tuple[State, Info]:
        eta = eta_for(self._engine.family, state.key, state.step)
        return self._engine.step(state, eta, data, rows, noise)

    def _read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModelInput:
        """The data of this call, checked; a new shape or constant sets the model up anew."""
        leaves = jax.tree.leaves((args, kwargs))
        if self._last_seen is not None:
            known, inputs = self._last_seen
            if len(known) == len(leaves) and all(map(operator.is_, known, leaves)):
                return inputs
        inputs = prepare(args, kwargs)
        if self._signature != inputs.signature:
            self.adopt(bridge(self.model, inputs), inputs)
        self._last_seen, self._ready_records = (leaves, inputs), None
        return inputs

    def _trace_every(self, given: int | None, num_steps: int) -> int:
        if given is not None:
            return _validate.positive_int("trace_every", given)
        return default_trace_every(num_steps=num_steps, num_params=self.family.num_params)

    def _ready(self) -> DPSVI:
        if self._signature is None:
            raise RuntimeError("call init (or run) first: the model is not known yet.")
        return self

    def _override(self, loc: Array, init_params: dict[str, Any]) -> Array:
        space = self._bridged.space
        names = [site.name for site in space.sites]
        for name, value in init_params.items():
            _validate.one_of("init_params", name, names)
            expected = space.sites[names.index(name)].shape
            if np.shape(value) != expected:
                raise ValueError(
                    f"init_params[{name!r}]: expected shape {expected}, got {np.shape(value)}."
                )
        given = {name: jnp.asarray(value, jnp.float32) for name, value in init_params.items()}
        return space.unconstrain(space.constrain(loc) | given)


def _origin_of(plan: Plan, seed: int | None) -> Origin:
    if not isinstance(plan, PrivacyPlan):
        return Origin.NOT_PRIVATE
    return Origin.PRIVATE if seed is None else Origin.SEEDED


def _marked(state: State, origin: Origin) -> State:
    return state._replace(origin=jnp.int32(origin))


def _refuse_tracers(values: Any) -> None:
    """Refuse to be part of a transformed program: noise would be drawn once and used often."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(values)):
        raise RuntimeError(
            "update cannot be part of a program that jax.jit, vmap, scan or grad transforms: its "
            "batch and its noise are drawn once, when the program is traced, and would be used "
            "again and again. Call it step by step, or use run or dpvim.fit_many."
        )


@functools.partial(jit_once, static_argnames="dim")
def _random_start(key: Array, dim: int) -> tuple[Float[Array, " d"], Array]:
    """Means to start from, and a key for the draws eta."""
    key_loc, key_eta = jax.random.split(key)
    return _INIT_LOC_SPREAD * jax.random.normal(key_loc, (dim,)), key_eta


def numpyro_params(family: Family, params: Params) -> dict[str, Array]:
    """Parameters under the names and in the form of NumPyro's automatic guides."""
    factor = family.factor(jax.tree.map(jnp.asarray, params))
    return {"auto_loc": params.loc, "auto_scale" if factor.ndim == 1 else "auto_scale_tril": factor}


def _check_probe_width(width: float | Literal["auto"], variant: Variant) -> float | Literal["auto"]:
    """A width of at least 1, for a variant whose releases can be taken anywhere."""
    if width == "auto":
        return "auto" if variant.releases_gradient else 1.0
    width = _validate.positive("probe_width", width, hint="Or 'auto'.")
    if width < 1:
        raise ValueError(
            f"probe_width: expected at least 1, got {width:g}. 1 takes gradients where the "
            "approximation is."
        )
    if width != 1 and not variant.releases_gradient:
        raise ValueError(
            f"probe_width: expected 1 for the variant {variant.name!r}, whose releases depend on "
            "where the gradient is taken. 'aligned' can probe wider."
        )
    return width


def _as_optax(optimizer: Any) -> optax.GradientTransformation:
    if isinstance(optimizer, optax.GradientTransformation):
        return optimizer
    raise TypeError(
        f"optimizer: expected an optax optimiser, got {type(optimizer).__name__}. Use for "
        "instance optax.adam(1e-3)."
    )
