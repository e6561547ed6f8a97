"""init, step, run: the optimisation loop over plain functions.

Randomness that protects privacy is drawn on the host, a chunk of steps at a time, by a background
thread while the previous chunk runs; a chunk is one compiled loop. Nothing here knows NumPyro.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from dpvim.batches import num_rows_of, usual_piece, with_public_shape
from dpvim.compiling import jit_once, single_precision
from dpvim.estimator import Estimator, Problem, make_estimator
from dpvim.family import Family, Params
from dpvim.noise import RoundedGaussianNoise
from dpvim.plan import Plan
from dpvim.progress import ProgressBar
from dpvim.randomness import SecretStreams
from dpvim.releases import Collector, ReleaseSums
from dpvim.sampling import PoissonSampler
from dpvim.trace import Trace
from dpvim.types import BudgetExceededError, Origin, Record
from dpvim.variants import Variant

# A chunk is as long as takes about this long to run: short enough for Ctrl-C and the progress
# bar, long enough that the way to and from Python does not show.
_CHUNK_SECONDS = 0.5
_CHUNK_BYTES = 64 * 2**20
_LONGEST_CHUNK = 4096
_FIRST_CHUNK = 16
_ETA_BLOCK = 32
# Vectorised runs work on so many numbers at a time, and are so many.
_LANE_NUMBERS = 2**19
_MOST_LANES = 16


class State(NamedTuple):
    """What the next step needs, and where it comes from (`Origin`).

    All of it is a DP output or public, if the origin says so.
    """

    params: Params
    opt_state: optax.OptState
    key: Array
    step: Int[Array, ""]
    origin: Int[Array, ""]


class Info(NamedTuple):
    """What a step gave away, and at which point: differentially private numbers only."""

    latent: Float[Array, " d"]
    release: Float[Array, " r"]


class Engine(NamedTuple):
    """A fit ready to run.

    Attributes:
        family, variant, plan: What it was made from.
        ready: ``data -> records`` as `step` takes them, with a public number of rows.
        init: ``(key, loc, scale) -> State``.
        step: ``(state, eta, records, rows, noise) -> (State, Info)``, pure.
        run_chunk: Many steps, compiled once for all runs of this engine; see `_run_chunk`.
        run_chunks: The same for several runs on the same data, as one vectorised program.
        run_chunks_apart: The same for several runs, each on data of its own.
    """

    family: Family
    variant: Variant
    plan: Plan
    ready: Callable[[Record], Record]
    init: Callable[[Array, Array, float], State]
    step: Callable[[State, Array, Record, Array, Array], tuple[State, Info]]
    run_chunk: Callable[..., tuple[State, Params, Info | None]]
    run_chunks: Callable[..., tuple[State, Params, Info | None]]
    run_chunks_apart: Callable[..., tuple[State, Params, Info | None]]


class Run(NamedTuple):
    """Where a run ended: before its last step if it was interrupted.

    `releases` are kept where a release is a gradient of the latent; see `dpvim.releases`.
    """

    state: State
    trace: Trace
    releases: ReleaseSums | None


def make_engine(
    problem: Problem,
    family: Family,
    variant: Variant,
    optimizer: optax.GradientTransformation,
    plan: Plan,
    width_at: Callable[[Array], Array] | None = None,
) -> Engine:
    """Compose problem, family, variant, optimiser and plan.

    `width_at` tells how wide a step probes, from the step's number; see `dpvim.estimator`.
    """
    estimator: Estimator = make_estimator(problem, family, variant, plan)

    @single_precision
    @jit_once
    def init(key: Array, loc: Array, scale: float) -> State:
        params = family.init(loc.astype(jnp.float32), scale)
        nothing, origin = jnp.zeros((), jnp.int32), jnp.int32(Origin.PRIVATE)
        return State(params, optimizer.init(params), key, nothing, origin)

    @single_precision
    def step(
        state: State, eta: Array, records: Record, rows: Array, noise: Array
    ) -> tuple[State, Info]:
        params = state.params
        width = 1.0 if width_at is None else width_at(state.step)
        release = estimator.release(params, eta, records, rows, noise, width)
        ascent = estimator.direction(params, eta, release, width)
        descent = jax.tree.map(jnp.negative, ascent)
        updates, opt_state = optimizer.update(descent, state.opt_state, params)
        params = optax.apply_updates(params, updates)
        info = Info(estimator.probe(state.params, eta, width), release)
        return State(params, opt_state, state.key, state.step + 1, state.origin), info

    run_chunk = functools.partial(_run_chunk, step, family, variant)
    return Engine(
        family,
        variant,
        plan,
        single_precision(lambda data: problem.arrange(with_public_shape(data, plan))),
        init,
        step,
        jax.jit(run_chunk),
        jax.jit(jax.vmap(run_chunk, (0, None, 0, 0, None))),
        jax.jit(jax.vmap(run_chunk, (0, 0, 0, 0, None))),
    )


class Supply:
    """The host's side of a run: batches and noise for the next steps, in order.

    Guarantees:
        No noise is handed out twice: a supply cannot be copied, stored, or used by a process
        other than the one that made it.
    """

    def __init__(self, engine: Engine, num_rows: int, streams: SecretStreams) -> None:
        plan = engine.plan
        self._takes_all = plan.sampling_prob == 1 and not plan.num_rows_is_private
        self.batch_size = num_rows if self._takes_all else plan.max_batch_size
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._sampler = PoissonSampler(
            streams,
            num_rows=num_rows,
            sampling_prob=plan.sampling_prob,
            max_batch_size=plan.max_batch_size,
            shuffled=plan.num_rows_is_private,
        )
        self._noise = RoundedGaussianNoise(
            streams,
            stddev=plan.noise_stddev,
            grid=plan.noise_grid,
            size=engine.variant.num_released,
        )

    def draw(self, num_steps: int, capacity: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows and noise of `num_steps` steps, padded with zeros to `capacity` steps."""
        if os.getpid() != self._process:
            raise RuntimeError(
                "a run was forked: its noise would be used twice. Start it in the new process."
            )
        with self._lock:
            if self._takes_all:  # every row, every step: no row numbers are needed
                rows = np.zeros((num_steps, 0), np.int32)
            else:
                rows = self._sampler.draw(num_steps)
            drawn = (rows, self._noise.draw(num_steps))
        more = [(0, capacity - num_steps), (0, 0)]
        return np.pad(drawn[0], more), np.pad(drawn[1], more)

    def __reduce__(self) -> Any:
        raise TypeError("a supply of noise is not copied or stored: noise would be used twice.")


class Watch(NamedTuple):
    """Who is told about the steps of a run (``advance``), and asked whether to stop."""

    advance: Callable[[int], None]
    stopped: Callable[[], bool]


UNWATCHED = Watch(lambda steps: None, lambda: False)


@contextmanager
def watching(num_steps: int, *, progress: bool) -> Iterator[Watch]:
    """A progress bar for so many steps, if wanted; Ctrl-C stops the runs between two chunks.

    What was released until then is returned by the runs.
    """
    with ProgressBar(num_steps, show=progress) as bar, _stop_on_interrupt() as stopped:
        yield Watch(bar.advance, stopped)


@single_precision
def eta_for(family: Family, key: Array, step: Int[Array, ""]) -> Array:
    """The shared draw of a step; it depends on the key and the step's number alone."""
    return family.base_draw(jax.random.fold_in(key, step))


@single_precision
def run(
    engine: Engine,
    state: State,
    data: Record,
    *,
    num_steps: int,
    streams: SecretStreams,
    trace_every: int,
    watch: Watch = UNWATCHED,
) -> Run:
    """Take `num_steps` steps from `state`, or fewer if `watch` says so; see `watching`.

    Guarantees:
        Takes no step that the plan does not pay for. The result does not depend on how the steps
        are cut into chunks.
    """
    _check_budget(engine, int(state.step), num_steps)
    supply = Supply(engine, num_rows_of(data), streams)
    data = engine.ready(data)
    capacity = _chunk_capacity(engine, supply.batch_size, trace_every, num_steps)
    collector = _collector(engine)
    state, steps, snapshots = _loop(
        functools.partial(engine.run_chunk, data=data),
        supply.draw,
        state,
        span=(int(state.step), num_steps),
        capacity=capacity,
        trace_every=trace_every,
        watch=watch,
        collect=None if collector is None else collector.add,
    )
    sums = None if collector is None else collector.total()
    return Run(state, Trace.stack(steps, snapshots), sums)


@single_precision
def run_many(
    engine: Engine,
    states: State,
    data: Record,
    *,
    stacked: bool,
    num_steps: int,
    streams: Sequence[SecretStreams],
    trace_every: int,
    watch: Watch = UNWATCHED,
) -> list[Run]:
    """Independent runs as one vectorised program.

    Args:
        engine: Shared by all runs.
        states: One initial state a run, stacked; all at the same step.
        data: The records of all runs, or with `stacked` a leading axis of one data set a run.
        stacked: Whether every run has data of its own.
        num_steps: Steps of each run.
        streams: The randomness of each run.
        trace_every: Steps between snapshots.
        watch: Whom to tell about progress, and who may end the runs.
    """
    first = int(states.step[0])
    _check_budget(engine, first, num_steps)
    one = jax.tree.map(lambda leaf: leaf[0], data) if stacked else data
    supplies = [Supply(engine, num_rows_of(one), each) for each in streams]
    data = jax.vmap(engine.ready)(data) if stacked else engine.ready(data)

    def draw(length: int, capacity: int) -> tuple[np.ndarray, np.ndarray]:
        drawn = [supply.draw(length, capacity) for supply in supplies]
        return jax.tree.map(lambda *leaves: np.stack(leaves), *drawn)

    capacity = _chunk_capacity(engine, supplies[0].batch_size, trace_every, num_steps)
    run_chunks = engine.run_chunks_apart if stacked else engine.run_chunks
    collectors = [_collector(engine) for _ in supplies]

    def collect(first: int, length: int, points: Array, releases: Array) -> None:
        each = zip(collectors, np.asarray(points), np.asarray(releases), strict=True)
        for one, point, release in each:
            if one is not None:
                one.add(first, length, point, release)

    states, steps, snapshots = _loop(
        lambda state, rows, noise, bounds: run_chunks(state, data, rows, noise, bounds),
        draw,
        states,
        span=(first, num_steps),
        capacity=max(1, capacity // len(supplies)),
        trace_every=trace_every,
        watch=Watch(lambda steps: watch.advance(steps * len(supplies)), watch.stopped),
        axis=1,
        collect=collect,
    )
    sums = [None if one is None else one.total() for one in collectors]
    return [
        Run(
            jax.tree.map(lambda leaf, i=i: leaf[i], states),
            Trace.stack(steps, [jax.tree.map(lambda leaf, i=i: leaf[i], s) for s in snapshots]),
            sums[i],
        )
        for i in range(len(supplies))
    ]


def _collector(engine: Engine) -> Collector | None:
    """What sums up the releases of a run, where these are gradients of the latent."""
    if not engine.variant.releases_gradient:
        return None
    return Collector(engine.family.dim, engine.plan)


def _loop(
    run_chunk: Callable[..., tuple[State, Params, Info | None]],
    draw: Callable[[int, int], tuple[np.ndarray, np.ndarray]],
    state: State,
    *,
    span: tuple[int, int],
    capacity: int,
    trace_every: int,
    watch: Watch,
    axis: int = 0,
    collect: Callable[[int, int, Array, Array], None] | None = None,
) -> tuple[State, list[int], list[Params]]:
    """Chunk after chunk until the span is done or the watch says stop.

    Returns the last state, the numbers of the steps with a snapshot, and the snapshots in pieces,
    which have their snapshots along `axis`. Points and releases of every chunk go to `collect`.
    """
    first, num_steps = span

    def one_snapshot(params: Params) -> Params:
        return jax.tree.map(lambda leaf: np.expand_dims(np.asarray(leaf), axis), params)

    steps, snapshots = [first], [one_snapshot(state.params)]
    done, pace = 0, _Pace(capacity)
    with ThreadPoolExecutor(1, "dpvim-supply") as background:
        length = min(pace.next_length(), num_steps)
        drawing = background.submit(draw, length, capacity)
        while done < num_steps and not watch.stopped():
            (rows, noise), this_length = drawing.result(), length
            length = min(pace.next_length(), num_steps - done - this_length)
            if length > 0:
                drawing = background.submit(draw, length, capacity)
            start = first + done
            ends, is_snapshot = _segments(start, this_length, trace_every, first + num_steps)
            bounds = np.full(capacity // trace_every + 3, this_length, np.int32)
            bounds[: len(ends) + 1] = [0, *(end - start for end in ends)]
            began = time.perf_counter()
            state, seen, released = jax.block_until_ready(
                run_chunk(state, rows=rows, noise=noise, bounds=bounds)
            )
            pace.record(this_length, time.perf_counter() - began)
            done += this_length
            kept = np.flatnonzero(is_snapshot)
            steps += [ends[i] for i in kept]
            snapshots.append(
                jax.tree.map(lambda leaf, at=kept: np.take(np.asarray(leaf), at, axis), seen)
            )
            if collect is not None and released is not None:
                collect(start, this_length, *released)
            watch.advance(this_length)
    if steps[-1] != first + done:  # interrupted between two snapshots
        steps.append(first + done)
        snapshots.append(one_snapshot(state.params))
    return state, steps, snapshots


def lanes_for(engine: Engine) -> int:
    """How many runs are best taken together as one vectorised program.

    Small steps are mostly the way from one operation to the next, which vectorised runs share.
    Large ones gain nothing and lose the caches.
    """
    dim = engine.family.dim
    numbers_a_step = usual_piece(engine.plan, dim) * dim + engine.family.num_params
    return max(1, min(_MOST_LANES, _LANE_NUMBERS // numbers_a_step))


def _check_budget(engine: Engine, first: int, num_steps: int) -> None:
    if first + num_steps > engine.plan.num_steps:
        raise BudgetExceededError(
            f"{num_steps} steps from step {first} on: the plan pays for {engine.plan.num_steps} "
            "in all. Ask for fewer, or make a plan for more."
        )


def _run_chunk(
    step: Callable[[State, Array, Record, Array, Array], tuple[State, Info]],
    family: Family,
    variant: Variant,
    state: State,
    data: Record,
    rows: Int[Array, "capacity batch"],
    noise: Int[Array, "capacity r"],
    bounds: Int[Array, " segments_and_one"],
) -> tuple[State, Params, Info | None]:
    """Steps 0 .. bounds[-1] of the chunk; the parameters at the end of every segment; and what
    every step released, if that is a gradient of the latent.

    How many steps there are is a value, not a shape, so that one compilation serves all chunks.
    """
    etas = _etas(family, state, bounds[-1], noise.shape[0])

    def one_step(i: Int[Array, ""], carried: tuple[State, Any]) -> tuple[State, Any]:
        state, kept = carried
        state, info = step(state, etas[i], data, rows[i], noise[i])
        if kept is not None:
            put = jax.lax.dynamic_update_index_in_dim  # in place; a scatter would not be
            kept = jax.tree.map(lambda buffer, new: put(buffer, new, i, 0), kept, info)
        return state, kept

    def one_segment(carried: tuple[State, Any], ends: Any) -> tuple[tuple[State, Any], Params]:
        carried = jax.lax.fori_loop(ends[0], ends[1], one_step, carried)
        return carried, carried[0].params

    empty = jnp.zeros((noise.shape[0], family.dim))
    kept = Info(empty, empty) if variant.releases_gradient else None
    (state, kept), seen = jax.lax.scan(one_segment, (state, kept), (bounds[:-1], bounds[1:]))
    return state, seen, kept


@single_precision
def _etas(
    family: Family, state: State, num_steps: Int[Array, ""], capacity: int
) -> Float[Array, "capacity_or_more d"]:
    """The draws of the next `num_steps` steps; zeros for others.

    In blocks, so that a chunk that is not full does not wait for draws that nobody uses.
    """

    def draw_block(i: Int[Array, ""], etas: Array) -> Array:
        numbers = state.step + i * _ETA_BLOCK + jnp.arange(_ETA_BLOCK)
        block = jax.vmap(functools.partial(eta_for, family, state.key))(numbers)
        return jax.lax.dynamic_update_slice_in_dim(etas, block, i * _ETA_BLOCK, 0)

    blocks = -(-capacity // _ETA_BLOCK)
    empty = jnp.zeros((blocks * _ETA_BLOCK, family.dim))
    return jax.lax.fori_loop(0, -(-num_steps // _ETA_BLOCK), draw_block, empty)


def _segments(start: int, length: int, trace_every: int, last: int) -> tuple[list[int], list[bool]]:
    """Ends of the segments of a chunk, and which of them are snapshots of the trace."""
    end = start + length
    marks = [*range((start // trace_every + 1) * trace_every, end + 1, trace_every)]
    ends = marks if marks and marks[-1] == end else [*marks, end]
    return ends, [e % trace_every == 0 or e == last for e in ends]


def _chunk_capacity(engine: Engine, batch_size: int, trace_every: int, num_steps: int) -> int:
    """Most steps in a chunk, so that row numbers, noise, draws and snapshots stay small."""
    numbers = batch_size + engine.variant.num_released + 3 * engine.family.dim
    per_step = 4 * (numbers + engine.family.num_params / trace_every)
    return int(max(1, min(_CHUNK_BYTES / per_step, _LONGEST_CHUNK, num_steps)))


class _Pace:
    """How many steps the next chunk should have, from how long the last ones took."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._length = min(_FIRST_CHUNK, capacity)
        self._compiled = False

    def next_length(self) -> int:
        return self._length

    def record(self, length: int, seconds: float) -> None:
        if not self._compiled:  # the first chunk's time is the compiler's
            self._compiled = True
            return
        wanted = length * _CHUNK_SECONDS / max(seconds, 1e-6)
        self._length = int(min(self._capacity, max(1, wanted), 16 * length))


@contextmanager
def _stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C into a flag; the second one is an ordinary interrupt."""
    previous = signal.getsignal(signal.SIGINT)
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or previous is signal.SIG_IGN:  # a job in the background ignores Ctrl-C
        yield lambda: False
        return
    pressed = threading.Event()

    def handler(signum: int, frame: Any) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    signal.signal(signal.SIGINT, handler)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, previous)
