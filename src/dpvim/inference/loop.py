"""Runs of an engine: chunk after chunk of steps, one run alone or several as one program.

Randomness that protects privacy is drawn on the host, a chunk of steps at a time, by a background
thread while the previous chunk runs; a chunk is one compiled loop.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpvim._compile import single_precision
from dpvim.inference.engine import SMALL_STEP, Engine, Info, State
from dpvim.inference.families import Params
from dpvim.inference.monitor import UNMONITORED, RunMonitor
from dpvim.inference.progress import NOBODY, Keeper, Progress
from dpvim.inference.release_sums import Collector, ReleaseSums
from dpvim.inference.steering import SteeredReleases, Steering
from dpvim.inference.trace import Trace
from dpvim.mapped import are_mapped
from dpvim.privacy.batches import BatchReader, num_rows_of
from dpvim.privacy.randomness import SecretStreams
from dpvim.types import BudgetExceededError, Record

# A chunk is as long as takes about this long to run: short enough for Ctrl-C and the progress
# bar, long enough that the way to and from Python does not show.
_CHUNK_SECONDS = 0.5
# Memory of a chunk is asked of the system anew if it is much larger than the caches; filling such
# memory took longer than short runs of wide families.
_CHUNK_BYTES = 8 * 2**20
_LONGEST_CHUNK = 2048
_FIRST_CHUNK = 16
# Vectorised runs are so many.
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
    keeper: Keeper = NOBODY,
) -> Run:
    """Take `num_steps` steps from `state`, or fewer if `monitor` says so; see `monitoring`.

    With `steering` parameters are its own, and change at the end of its windows. If `keeper` has
    progress of this very run, it goes on from there; progress is kept between chunks, and at the
    end.

    Guarantees:
        Takes no step that the plan does not pay for. The result does not depend on how the steps
        are cut into chunks, or on where a run went on from what was kept of it: a step that is
        taken again has the same batch and the same noise, so it releases the same.
    """
    _check_budget(engine, int(state.step), num_steps)
    source = engine.source(num_rows_of(data), streams)
    reader = BatchReader(data, engine.arrange) if are_mapped(data) else None
    data = None if reader else engine.prepare(data)
    numbers_read = source.batch_size * reader.numbers_a_row if reader else 0
    capacity = _chunk_capacity(
        engine, source.batch_size, trace_every, num_steps, more_numbers=numbers_read
    )
    sharing = engine.sharing
    agreed = float if sharing is None else sharing.channel.most
    # Processes of one run take the same chunks, and stop together.
    capacity = int(-agreed(-capacity))
    if sharing is not None:
        stopped = monitor.stopped
        monitor = monitor._replace(stopped=lambda: agreed(stopped()) > 0)
    observer = _observer(engine, steering)
    before = keeper.load(state)
    if before is not None:
        observer.go_on(before.observed)
        if before.position:
            source.move_to(before.position)

    def draw(length: int, capacity: int) -> _Drawn:
        rows, noise = source.draw(length, capacity)
        position = {} if keeper is NOBODY else source.position()
        if reader is None:
            return _Drawn(rows, noise, position, data)
        return _Drawn(reader.places(rows), noise, position, reader.read(rows, length))

    def keep(
        state: State, steps: list[int], seen: Params, position: Mapping[str, np.ndarray]
    ) -> None:
        keeper.keep(Progress(state, Trace(np.asarray(steps), seen), observer.progress(), position))

    def observe(state: State, first: int, length: int, released: Info | None) -> State:
        return state._replace(params=observer.add(state.params, first, length, released))

    state, steps, seen = _loop(
        engine.run_chunk if sharing is None else sharing.chunk(engine.run_chunk),
        draw,
        state if before is None else before.state,
        span=(int(state.step), num_steps),
        capacity=capacity,
        trace_every=trace_every,
        monitor=monitor,
        observe=observe,
        steps_left=observer.steps_left,
        before=None if before is None else before.trace,
        is_due=keeper.is_due,
        keep=None if keeper is NOBODY else keep,
        agreed=agreed,
    )
    return Run(state, Trace(np.asarray(steps), seen), *observer.total())


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

    def draw(length: int, capacity: int) -> _Drawn:
        drawn = [source.draw(length, capacity) for source in sources]
        rows, noise = (np.stack(each) for each in zip(*drawn, strict=True))
        return _Drawn(rows, noise, {}, data)

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

    states, steps, seen = _loop(
        lambda state, data, rows, noise, bounds: run_chunks(state, data, rows, noise, bounds),
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
            Trace(np.asarray(steps), jax.tree.map(np.copy, _at(seen, i))),
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
        progress: Everything that changes as the run goes on.
        go_on: Goes on from the progress of another one that was made alike.
    """

    add: Callable[[Params, int, int, Info | None], Params]
    steps_left: Callable[[int], int]
    total: Callable[[], tuple[ReleaseSums | SteeredReleases | None, Steering | None]]
    progress: Callable[[], dict[str, np.ndarray]]
    go_on: Callable[[Mapping[str, np.ndarray]], None]


def _observer(engine: Engine, steering: Steering | None) -> _Observer:
    """Steering, or sums of the releases where they are gradients of the latent."""
    if steering is not None:
        steering = copy.deepcopy(steering)  # a run that is resumed twice starts from the same
        return _Observer(
            functools.partial(_steer, engine, steering),
            steering.steps_left,
            lambda: (steering.releases(), steering),
            steering.progress,
            steering.go_on,
        )
    collector = None
    if engine.variant.releases_gradient:
        collector = Collector(engine.family.dim, engine.plan, engine.blocks)

    def add(params: Params, first: int, length: int, released: Info | None) -> Params:
        if collector is not None and released is not None:
            collector.add(first, length, *released)
        return params

    def no_limit(step: int) -> int:
        return engine.plan.num_steps

    if collector is None:
        return _Observer(add, no_limit, lambda: (None, None), dict, lambda progress: None)
    total, progress, go_on = collector.total, collector.progress, collector.go_on
    return _Observer(add, no_limit, lambda: (total(), None), progress, go_on)


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


class _Drawn(NamedTuple):
    """Batches and noise of a chunk, the position in their streams after it, and the records."""

    rows: np.ndarray
    noise: np.ndarray
    position: Mapping[str, np.ndarray]
    data: Record


def _loop(
    run_chunk: Callable[..., tuple[State, Params, Info | None]],
    draw: Callable[[int, int], _Drawn],
    state: State,
    *,
    span: tuple[int, int],
    capacity: int,
    trace_every: int,
    monitor: RunMonitor,
    observe: Callable[[State, int, int, Info | None], State],
    steps_left: Callable[[int], int],
    axis: int = 0,
    before: Trace | None = None,
    is_due: Callable[[], bool] = NOBODY.is_due,
    keep: Callable[[State, list[int], Params, Mapping[str, np.ndarray]], None] | None = None,
    agreed: Callable[[float], float] = float,
) -> tuple[State, list[int], Params]:
    """Chunk after chunk until the span is done or the monitor says stop.

    Returns the last state, the numbers of the steps with a snapshot, and the snapshots along
    `axis`. `observe` sees the releases of every chunk and returns
    the state to go on with; no chunk has more than `steps_left` steps. With `before`, the trace of
    steps that were taken before, the state is the one after them. `keep` gets the progress when it
    `is_due`, and at the end. How long a chunk took is what all processes have `agreed` on.
    """
    first, num_steps = span

    _, is_snapshot = _segments(first, num_steps, trace_every, first + num_steps)
    snapshots, done = _Snapshots(state.params, 1 + sum(is_snapshot), axis), 0
    if before is None:
        snapshots.add_one(first, state.params)
    else:
        snapshots.add(before.steps.tolist(), before.params)
        done = int(state.step) - first
        monitor.advance(done)
    pace = _Pace(capacity)

    def next_length(left: int) -> int:
        return min(pace.next_length(), left, steps_left(first + num_steps - left)) if left else 0

    with ThreadPoolExecutor(1, "dpvim-source") as background:
        length = next_length(num_steps - done)
        drawing = background.submit(draw, length, capacity)
        while done < num_steps and not monitor.stopped():
            drawn, this_length = drawing.result(), length
            length = next_length(num_steps - done - this_length)
            if length > 0:
                drawing = background.submit(draw, length, capacity)
            start = first + done
            ends, is_snapshot = _segments(start, this_length, trace_every, first + num_steps)
            bounds = np.full(capacity // trace_every + 3, this_length, np.int32)
            bounds[: len(ends) + 1] = [0, *(end - start for end in ends)]
            monitor.begin(this_length)
            began = time.perf_counter()
            state, seen, released = jax.block_until_ready(
                run_chunk(state, data=drawn.data, rows=drawn.rows, noise=drawn.noise, bounds=bounds)
            )
            pace.record(this_length, agreed(time.perf_counter() - began))
            done += this_length
            snapshots.add([end for end, kept in zip(ends, is_snapshot, strict=True) if kept], seen)
            state = observe(state, start, this_length, released)
            monitor.advance(this_length)
            is_over = done == num_steps
            if keep is not None and (is_over or monitor.stopped() or is_due()):
                # At the end nothing secret is left to go on with.
                position = {} if is_over else drawn.position
                keep(state, snapshots.steps, snapshots.params(), position)
    if snapshots.steps[-1] != first + done:  # interrupted between two snapshots
        snapshots.add_one(first + done, state.params)
    return state, snapshots.steps, snapshots.params()


class _Snapshots:
    """Room for all snapshots of a run, along an axis of the parameters.

    They are copied once: out of the memory of a chunk, which the next one uses again.
    """

    def __init__(self, params: Params, most: int, axis: int) -> None:
        self.steps: list[int] = []
        self._axis = axis
        self._room = jax.tree.map(
            lambda leaf: np.empty((*leaf.shape[:axis], most, *leaf.shape[axis:]), leaf.dtype),
            params,
        )

    def add_one(self, step: int, params: Params) -> None:
        """Add the parameters after a step."""
        self.add([step], jax.tree.map(lambda leaf: np.expand_dims(leaf, self._axis), params))

    def add(self, steps: list[int], params: Params) -> None:
        """Add the snapshots after these steps; there may be others behind them."""
        before = len(self.steps)
        self.steps += steps
        to = jax.tree.leaves(self._between(self._room, before, len(self.steps)))
        taken = jax.tree.leaves(self._between(jax.tree.map(np.asarray, params), 0, len(steps)))
        for room, leaf in zip(to, taken, strict=True):
            room[...] = leaf

    def params(self) -> Params:
        """Those that were added."""
        return self._between(self._room, 0, len(self.steps))

    def _between(self, params: Params, first: int, end: int) -> Params:
        where = (*(slice(None) for _ in range(self._axis)), slice(first, end))
        return jax.tree.map(lambda leaf: leaf[where], params)


def runs_per_program(engine: Engine) -> int:
    """Number of runs that are best taken together as one vectorised program.

    Small steps are mostly the way from one operation to the next, which vectorised runs share.
    Large ones gain nothing and lose the caches.
    """
    return max(1, min(_MOST_RUNS_TOGETHER, SMALL_STEP // engine.numbers_a_step))


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


def _chunk_capacity(
    engine: Engine, batch_size: int, trace_every: int, num_steps: int, *, more_numbers: int = 0
) -> int:
    """Most steps in a chunk, so that row numbers, noise, draws and snapshots stay small."""
    family = engine.family
    numbers = (
        more_numbers + batch_size + 2 * engine.variant.num_released + family.dim + family.base_size
    )
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
