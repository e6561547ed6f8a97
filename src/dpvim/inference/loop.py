"""Runs of an engine: chunk after chunk of steps, one run alone or several as one program.

Randomness that protects privacy is drawn on the host, a chunk of steps at a time, by a background
thread while the previous chunk runs; a chunk is one compiled loop.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpvim._compile import single_precision
from dpvim.inference.engine import Engine, Info, State
from dpvim.inference.families import Params
from dpvim.inference.monitor import UNMONITORED, RunMonitor
from dpvim.inference.release_sums import Collector, ReleaseSums
from dpvim.inference.steering import SteeredReleases, Steering
from dpvim.inference.trace import Trace
from dpvim.privacy.batches import microbatch_size, num_rows_of
from dpvim.privacy.randomness import SecretStreams
from dpvim.types import BudgetExceededError, Record

# A chunk is as long as takes about this long to run: short enough for Ctrl-C and the progress
# bar, long enough that the way to and from Python does not show.
_CHUNK_SECONDS = 0.5
_CHUNK_BYTES = 64 * 2**20
_LONGEST_CHUNK = 4096
_FIRST_CHUNK = 16
# Vectorised runs work on so many numbers at a time, and are so many.
_NUMBERS_TOGETHER = 2**19
_MOST_RUNS_TOGETHER = 16


class Run(NamedTuple):
    """The end of a run: before its last step if it was interrupted.

    `releases` are kept where a release is a gradient of the latent: `dpvim.inference.release_sums`,
    and by what steered the run, if anything did.
    """

    state: State
    trace: Trace
    releases: ReleaseSums | SteeredReleases | None
    steering: Steering | None = None


@single_precision
def run(
    engine: Engine,
    state: State,
    data: Record,
    *,
    num_steps: int,
    streams: SecretStreams,
    trace_every: int,
    monitor: RunMonitor = UNMONITORED,
    steering: Steering | None = None,
) -> Run:
    """Take `num_steps` steps from `state`, or fewer if `monitor` says so; see `monitoring`.

    With `steering` parameters are its own, and change at the end of its windows.

    Guarantees:
        Takes no step that the plan does not pay for. The result does not depend on how the steps
        are cut into chunks.
    """
    _check_budget(engine, int(state.step), num_steps)
    source = engine.source(num_rows_of(data), streams)
    data = engine.prepare(data)
    capacity = _chunk_capacity(engine, source.batch_size, trace_every, num_steps)
    observer = _observer(engine, steering)

    def observe(state: State, first: int, length: int, released: Info | None) -> State:
        return state._replace(params=observer.add(state.params, first, length, released))

    state, steps, snapshots = _loop(
        functools.partial(engine.run_chunk, data=data),
        source.draw,
        state,
        span=(int(state.step), num_steps),
        capacity=capacity,
        trace_every=trace_every,
        monitor=monitor,
        observe=observe,
        steps_left=observer.steps_left,
    )
    return Run(state, Trace.stack(steps, snapshots), *observer.total())


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
    monitor: RunMonitor = UNMONITORED,
    steerings: Sequence[Steering | None] | None = None,
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
        monitor: Whom to tell about progress, and who may end the runs.
        steerings: What steers each run, if anything does.
    """
    first = int(states.step[0])
    _check_budget(engine, first, num_steps)
    one = jax.tree.map(lambda leaf: leaf[0], data) if stacked else data
    sources = [engine.source(num_rows_of(one), each) for each in streams]
    data = jax.vmap(engine.prepare)(data) if stacked else engine.prepare(data)

    def draw(length: int, capacity: int) -> tuple[np.ndarray, np.ndarray]:
        drawn = [source.draw(length, capacity) for source in sources]
        return jax.tree.map(lambda *leaves: np.stack(leaves), *drawn)

    capacity = _chunk_capacity(engine, sources[0].batch_size, trace_every, num_steps)
    run_chunks = engine.run_chunks_apart if stacked else engine.run_chunks
    steerings = [None] * len(sources) if steerings is None else steerings
    observers = [_observer(engine, steering) for steering in steerings]

    def observe(states: State, first: int, length: int, released: Info | None) -> State:
        released = jax.tree.map(np.asarray, released)
        params = [
            observer.add(_at(states.params, i), first, length, _at(released, i))
            for i, observer in enumerate(observers)
        ]
        if steerings[0] is None:
            return states
        return states._replace(params=jax.tree.map(lambda *leaves: np.stack(leaves), *params))

    states, steps, snapshots = _loop(
        lambda state, rows, noise, bounds: run_chunks(state, data, rows, noise, bounds),
        draw,
        states,
        span=(first, num_steps),
        capacity=max(1, capacity // len(sources)),
        trace_every=trace_every,
        monitor=RunMonitor(
            lambda steps: monitor.advance(steps * len(sources)),
            monitor.stopped,
            lambda steps: monitor.begin(steps * len(sources)),
        ),
        axis=1,
        observe=observe,
        steps_left=observers[0].steps_left,
    )
    return [
        Run(
            _at(states, i),
            Trace.stack(steps, [_at(snapshot, i) for snapshot in snapshots]),
            *observers[i].total(),
        )
        for i in range(len(sources))
    ]


def _at(tree: Any, i: int) -> Any:
    """The part of one run in a tree of many."""
    return jax.tree.map(lambda leaf: leaf[i], tree)


class _Observer(NamedTuple):
    """Somebody who sees what a run released, chunk after chunk.

    Attributes:
        add: ``(params, first step, length, released) ->`` the parameters to go on with.
        steps_left: ``step ->`` the most steps that the next chunk may have.
        total: What is kept of the releases, and what steered the run.
    """

    add: Callable[[Params, int, int, Info | None], Params]
    steps_left: Callable[[int], int]
    total: Callable[[], tuple[ReleaseSums | SteeredReleases | None, Steering | None]]


def _observer(engine: Engine, steering: Steering | None) -> _Observer:
    """Steering, or sums of the releases where they are gradients of the latent."""
    if steering is not None:
        steering = copy.deepcopy(steering)  # a run that is resumed twice starts from the same
        return _Observer(
            functools.partial(_steer, engine, steering),
            steering.steps_left,
            lambda: (steering.releases(), steering),
        )
    collector = None
    if engine.variant.releases_gradient:
        collector = Collector(engine.family.dim, engine.plan, engine.blocks)

    def add(params: Params, first: int, length: int, released: Info | None) -> Params:
        if collector is not None and released is not None:
            collector.add(first, length, *released)
        return params

    total = None if collector is None else collector.total
    return _Observer(add, lambda step: engine.plan.num_steps, lambda: (total and total(), None))


def _steer(
    engine: Engine,
    steering: Steering,
    params: Params,
    first: int,
    length: int,
    released: Info | None,
) -> Params:
    assert released is not None  # kept by every engine that can be steered
    return placed(engine, steering) if steering.add(first, length, *released) else params


def placed(engine: Engine, steering: Steering) -> Params:
    """The family's parameters where the next steps probe."""
    assert engine.family.place is not None
    centre, factor = (jnp.asarray(part, jnp.float32) for part in steering.place())
    return engine.family.place(centre, factor)


def _loop(
    run_chunk: Callable[..., tuple[State, Params, Info | None]],
    draw: Callable[[int, int], tuple[np.ndarray, np.ndarray]],
    state: State,
    *,
    span: tuple[int, int],
    capacity: int,
    trace_every: int,
    monitor: RunMonitor,
    observe: Callable[[State, int, int, Info | None], State],
    steps_left: Callable[[int], int],
    axis: int = 0,
) -> tuple[State, list[int], list[Params]]:
    """Chunk after chunk until the span is done or the monitor says stop.

    Returns the last state, the numbers of the steps with a snapshot, and the snapshots in pieces,
    which have their snapshots along `axis`. `observe` sees the releases of every chunk and returns
    the state to go on with; no chunk has more than `steps_left` steps.
    """
    first, num_steps = span

    def one_snapshot(params: Params) -> Params:
        return jax.tree.map(lambda leaf: np.expand_dims(np.asarray(leaf), axis), params)

    steps, snapshots = [first], [one_snapshot(state.params)]
    done, pace = 0, _Pace(capacity)
    with ThreadPoolExecutor(1, "dpvim-source") as background:
        length = min(pace.next_length(), num_steps, steps_left(first))
        drawing = background.submit(draw, length, capacity)
        while done < num_steps and not monitor.stopped():
            (rows, noise), this_length = drawing.result(), length
            length = min(pace.next_length(), num_steps - done - this_length)
            if length > 0:
                length = min(length, steps_left(first + done + this_length))
                drawing = background.submit(draw, length, capacity)
            start = first + done
            ends, is_snapshot = _segments(start, this_length, trace_every, first + num_steps)
            bounds = np.full(capacity // trace_every + 3, this_length, np.int32)
            bounds[: len(ends) + 1] = [0, *(end - start for end in ends)]
            monitor.begin(this_length)
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
            state = observe(state, start, this_length, released)
            monitor.advance(this_length)
    if steps[-1] != first + done:  # interrupted between two snapshots
        steps.append(first + done)
        snapshots.append(one_snapshot(state.params))
    return state, steps, snapshots


def runs_per_program(engine: Engine) -> int:
    """Number of runs that are best taken together as one vectorised program.

    Small steps are mostly the way from one operation to the next, which vectorised runs share.
    Large ones gain nothing and lose the caches.
    """
    dim = engine.family.dim
    numbers_a_step = microbatch_size(engine.plan, dim) * dim + engine.family.num_params
    return max(1, min(_MOST_RUNS_TOGETHER, _NUMBERS_TOGETHER // numbers_a_step))


def _check_budget(engine: Engine, first: int, num_steps: int) -> None:
    if first + num_steps > engine.plan.num_steps:
        raise BudgetExceededError(
            f"{num_steps} steps from step {first} on: the plan pays for {engine.plan.num_steps} "
            "in all. Ask for fewer, or make a plan for more."
        )


def _segments(start: int, length: int, trace_every: int, last: int) -> tuple[list[int], list[bool]]:
    """Ends of the segments of a chunk, and which of them are snapshots of the trace."""
    end = start + length
    marks = [*range((start // trace_every + 1) * trace_every, end + 1, trace_every)]
    ends = marks if marks and marks[-1] == end else [*marks, end]
    return ends, [e % trace_every == 0 or e == last for e in ends]


def _chunk_capacity(engine: Engine, batch_size: int, trace_every: int, num_steps: int) -> int:
    """Most steps in a chunk, so that row numbers, noise, draws and snapshots stay small."""
    family = engine.family
    numbers = batch_size + 2 * engine.variant.num_released + family.dim + family.base_size
    per_step = 4 * (numbers + family.num_params / trace_every)
    return int(max(1, min(_CHUNK_BYTES / per_step, _LONGEST_CHUNK, num_steps)))


class _Pace:
    """Lengths of the next chunks, from the time that the last ones took."""

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
