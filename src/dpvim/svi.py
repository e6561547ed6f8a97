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

import operator
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import numpy as np
import optax
from jaxtyping import Array
from numpyro.infer.autoguide import AutoGuide

from dpvim import _validate
from dpvim._compile import single_precision
from dpvim.bridge.data import ModelInput, check_model, map_arrays, prepare
from dpvim.bridge.latent_space import LatentSpace
from dpvim.bridge.persons import GROUP_BY, read_inputs
from dpvim.inference.engine import Info, State
from dpvim.inference.families import Family
from dpvim.inference.monitor import monitoring
from dpvim.options import FitOptions
from dpvim.prepared import PreparedFit, RunResult, numpyro_params, spend
from dpvim.privacy.batches import BatchReader
from dpvim.privacy.plan import NonPrivatePlan, Plan, PrivacyPlan
from dpvim.privacy.randomness import SecretStreams
from dpvim.privacy.source import BatchNoiseSource
from dpvim.privacy.statement import NoPrivacy, PrivacyStatement
from dpvim.privacy.steps import StepCounter, origin_of
from dpvim.rendezvous import refuse_several_processes
from dpvim.types import NotForReleaseWarning, Origin


class DPSVI:
    """Differentially private stochastic variational inference, step by step.

    Args:
        model: A NumPyro model, written for the whole data set.
        family: A name from `dpvim.FAMILIES`, `dpvim.family` with options, or NumPyro's
            AutoDiagonalNormal, AutoMultivariateNormal or AutoLowRankMultivariateNormal.
        optimizer: An optax optimiser.
        plan: A `PrivacyPlan` with a noise multiplier. With ``max_rows_per_person`` every verb that
            is given data is also given ``group_by=``, the ids of persons, as in `dpvim.fit`.
        variant: The gradient estimator; see `dpvim.inference.variants`.
        scale_transform: ``"softplus"`` or ``"exp"``.
        init_scale: Standard deviation that the approximation starts with; a guide brings its own.
        probe_width: How much wider than the approximation gradients are taken in the first three
            quarters of the plan's steps, or ``"auto"`` as in `dpvim.fit`; see
            `dpvim.inference.gradient`. For the aligned variant.
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
        check_model(model)
        if not isinstance(plan, PrivacyPlan | NonPrivatePlan):
            raise TypeError(f"plan: expected a dpvim.PrivacyPlan, got {type(plan).__name__}.")
        plan.noise_stddev  # noqa: B018 -- refuse a plan that was not calibrated
        warn_of_seed(plan, seed)
        if optimizer is None:
            raise TypeError("optimizer: expected an optax optimiser, got NoneType.")
        self.model = model
        self._plan = plan
        options = FitOptions(
            variant=variant,
            family=family,
            optimizer=optimizer,
            init_scale=init_scale,
            scale_transform=scale_transform,
            probe_width=probe_width,
            seed=seed,
        )
        self._options = options.by_hand()
        self._counter = StepCounter(plan, origin_of(plan, seed))
        self._prepared: PreparedFit | None = None
        self._lock = threading.Lock()
        self._source: BatchNoiseSource | None = None  # of `update`
        self._last_read: tuple[list[Any], ModelInput] | None = None
        self._records: Any = None  # of the data last read, as steps take them; for `update`

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
        _check_key(key)
        if init_params is not None:
            expected = "a dict of values by the names of sites"
            _validate.an_instance("init_params", init_params, Mapping, expected)
        prepared, _ = self._read(args, kwargs)
        return prepared.init(key, origin_of(self.plan, self.seed), init_params)

    @single_precision
    def update(self, state: State, *args: Any, **kwargs: Any) -> tuple[State, Info]:
        """One step on a batch drawn from the data; give it the whole data set every time.

        Returns the new state and what was released: there is no loss, which would be private.
        The same arrays given again are not read again.
        """
        _refuse_tracers((state, jax.lax.full((), 0)))  # the second is one while a program is traced
        prepared, inputs = self._read(args, kwargs)
        state = spend(self._counter, state, 1)
        with self._lock:
            if self._source is None:
                streams = SecretStreams(self.seed, start_step=int(state.step))
                self._source = prepared.engine.source(inputs.num_rows, streams)
            source = self._source
            if self._records is None and not inputs.on_disk:
                self._records = prepared.engine.prepare(inputs.records)
            records = self._records
        rows, noise = source.draw(1, 1)
        if inputs.on_disk:
            reader = BatchReader(inputs.records, prepared.engine.arrange)
            records, rows = reader.read(rows, 1), reader.places(rows)
        after = prepared.one_step(state, records, rows[0], noise[0])
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
        prepared, inputs = self._read(args, kwargs)
        if init_state is None:
            init_state = prepared.init(key, origin_of(self.plan, self.seed), init_params)
        self._forget()
        return prepared.run_counted(
            self._counter,
            self.seed,
            init_state,
            inputs.records,
            num_steps=num_steps,
            trace_every=trace_every,
            progress=progress_bar,
        )

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
        if stacked and self.plan.max_rows_per_person is not None:
            raise ValueError("stacked: expected data by records, got a plan for persons.")
        one_args, one_kwargs = args, kwargs
        if stacked:
            one_args, one_kwargs = map_arrays(lambda array: array[0], (args, kwargs))
        prepared, inputs = self._read(one_args, one_kwargs)
        self._forget()
        origin = origin_of(self.plan, self.seed)
        states = [prepared.init(k, origin, init_params) for k in jax.random.split(key, num_runs)]
        records = prepare(args, kwargs).records if stacked else inputs.records
        self._counter.count(num_runs * num_steps)
        with monitoring(num_runs * num_steps, progress=progress_bar) as monitor:
            return prepared.run(
                states,
                records,
                streams=[SecretStreams(self.seed, run=i) for i in range(num_runs)],
                num_steps=num_steps,
                trace_every=prepared.trace_every(trace_every, num_steps),
                monitor=monitor,
                stacked=stacked,
            )

    # -- what else one may ask ----------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The privacy plan of every step. Another plan takes another object."""
        return self._plan

    @property
    def seed(self) -> int | None:
        """The seed of batches and noise, in tests."""
        return self._options.seed

    @property
    def family(self) -> Family:
        """The variational family, once the model's dimension is known."""
        return self._ready.family

    @property
    def guide(self) -> AutoGuide:
        """NumPyro's guide for the parameters of `get_params`."""
        return self._ready.guide

    @property
    def space(self) -> LatentSpace:
        """The model's latent sites."""
        return self._ready.space

    def privacy(self, state: State, *, delta: float | None) -> PrivacyStatement | NoPrivacy:
        """The statement for all steps that this object took, and those that led to `state`."""
        return self._counter.statement(
            delta=delta,
            step=int(state.step),
            origin=Origin(int(state.origin)),
            released=self._ready.released,
        )

    # -- inside -------------------------------------------------------------------------------

    def _read(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[PreparedFit, ModelInput]:
        """The data of this call, checked; a new shape or constant sets the model up anew."""
        refuse_several_processes("DPSVI")
        leaves = jax.tree.leaves((args, kwargs))
        if self._prepared is not None and self._last_read is not None:
            known, inputs = self._last_read
            if len(known) == len(leaves) and all(map(operator.is_, known, leaves)):
                return self._prepared, inputs
        check_model(self.model, args, [name for name in kwargs if name != GROUP_BY])
        inputs = read_inputs(
            args,
            kwargs,
            max_rows_per_person=self.plan.max_rows_per_person,
            streams=SecretStreams(self.seed),
        )
        if self._prepared is None or self._prepared.signature != inputs.signature:
            self._prepared = PreparedFit(self.model, self.plan, self._options, inputs)
            self._source = None
        self._last_read, self._records = (leaves, inputs), None
        return self._prepared, inputs

    def _forget(self) -> None:
        """Hold no data longer than a run."""
        self._last_read = self._records = None

    @property
    def _ready(self) -> PreparedFit:
        if self._prepared is None:
            raise RuntimeError("call init (or run) first: the model is not known yet.")
        return self._prepared


def warn_of_seed(plan: Plan, seed: int | None, *, stacklevel: int = 3) -> None:
    """Say that a given seed undoes the privacy."""
    if seed is not None and isinstance(plan, PrivacyPlan):
        warnings.warn(
            "a seed was given: whoever knows it can take the noise away. The result is marked "
            "as not for release; leave the seed out for a private one.",
            NotForReleaseWarning,
            stacklevel=stacklevel,
        )


def _check_key(key: object) -> None:
    if isinstance(key, jax.Array | np.ndarray):
        is_typed = key.shape == () and jax.numpy.issubdtype(key.dtype, jax.dtypes.prng_key)
        if is_typed or (key.dtype, key.shape) == (np.uint32, (2,)):
            return
    raise TypeError(f"key: expected jax.random.key(...), got {_validate.shown(key)}.")


def _refuse_tracers(values: Any) -> None:
    """Refuse to be part of a transformed program: noise would be drawn once and used often."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(values)):
        raise RuntimeError(
            "update cannot be part of a program that jax.jit, vmap, scan or grad transforms: its "
            "batch and its noise are drawn once, when the program is traced, and would be used "
            "again and again. Call it step by step, or use run or dpvim.fit_many."
        )
