"""The engine of a fit: one pure step, and a chunk of steps as one compiled loop.

Nothing here knows NumPyro, files or the clock.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from dpvim._compile import jit_on_one_thread, jit_once, jit_widely, single_precision
from dpvim.inference.blocks import Blocks
from dpvim.inference.families import Family, Params
from dpvim.inference.gradient import PrivateGradient, Problem, make_private_gradient
from dpvim.inference.sharing import Sharing
from dpvim.inference.variants import Variant
from dpvim.privacy.batches import filled_up, microbatch_size, with_public_shape
from dpvim.privacy.plan import Plan
from dpvim.privacy.randomness import SecretStreams
from dpvim.privacy.source import BatchNoiseSource
from dpvim.types import Origin, Record, Scalar

_ETA_BLOCK = 32
# Steps on up to so many numbers are small: mostly the way from one operation to the next.
SMALL_STEP = 2**19


class State(NamedTuple):
    """Parameters, optimiser state, key and step number, and what protects them (`Origin`).

    All of it is a DP output or public, if the origin says so.
    """

    params: Params
    opt_state: optax.OptState
    key: Array
    step: Int[Array, ""]
    origin: Int[Array, ""]


class Info(NamedTuple):
    """The release of a step and the point where it was taken: differentially private numbers.

    The point is the latent, or of a variant that whitens the standardised latent: width times eta.
    """

    point: Float[Array, " d"]
    release: Float[Array, " r"]


class Engine(NamedTuple):
    """A fit ready to run.

    Attributes:
        family, variant, plan: What it was made from.
        prepare: ``data -> records`` as `step` takes them, with a public number of rows.
        arrange: The same for rows that were picked, whose number is public already.
        init: ``(key, loc, scale) -> State``.
        step: ``(state, eta, records, rows, noise) -> (State, Info)``, pure.
        run_chunk: Many steps, compiled once for all runs of this engine; see `_run_chunk`.
        run_chunks: The same for several runs on the same data, as one vectorised program.
        run_chunks_apart: The same for several runs, each on data of its own.
        blocks: The likelihood's, if they are known.
        sharing: What it has to do with other processes, if there are any.
    """

    family: Family
    variant: Variant
    plan: Plan
    prepare: Callable[[Record], Record]
    arrange: Callable[[Record], Record]
    init: Callable[[Array, Array, float], State]
    step: Callable[[State, Array, Record, Array, Array], tuple[State, Info]]
    run_chunk: Callable[..., tuple[State, Params, Info | None]]
    run_chunks: Callable[..., tuple[State, Params, Info | None]]
    run_chunks_apart: Callable[..., tuple[State, Params, Info | None]]
    blocks: Blocks | None = None
    sharing: Sharing | None = None

    @property
    def numbers_a_step(self) -> int:
        """Numbers that a step works on at a time."""
        return _numbers_a_step(self.plan, self.family)

    def source(self, num_rows: int, streams: SecretStreams) -> BatchNoiseSource:
        """Batches and noise for a run on so many records, or on those of all processes."""
        shard = None if self.sharing is None else self.sharing.shard
        return BatchNoiseSource(
            self.plan,
            streams,
            num_rows=num_rows if shard is None else shard.total,
            num_released=self.variant.num_released,
            shard=shard,
            microbatch=microbatch_size(self.plan, self.family.dim),
        )


def make_engine(
    problem: Problem,
    family: Family,
    variant: Variant,
    optimizer: optax.GradientTransformation,
    plan: Plan,
    width_at: Callable[[Array], Array] | None = None,
    sharing: Sharing | None = None,
) -> Engine:
    """Compose problem, family, variant, optimiser and plan.

    `width_at` tells how wide a step probes, from the step's number; see `dpvim.inference.gradient`.
    With `sharing` steps are those of one process of several; see `dpvim.inference.sharing`.
    """
    gradient: PrivateGradient = make_private_gradient(problem, family, variant, plan, sharing)

    @single_precision
    @jit_once
    def init(key: Array, loc: Array, scale: Scalar | float) -> State:
        params = family.init(loc.astype(jnp.float32), scale)
        nothing, origin = jnp.zeros((), jnp.int32), jnp.int32(Origin.PRIVATE)
        return State(params, optimizer.init(params), key, nothing, origin)

    @single_precision
    def step(
        state: State, eta: Array, records: Record, rows: Array, noise: Array
    ) -> tuple[State, Info]:
        params = state.params
        width = 1.0 if width_at is None else width_at(state.step)
        release = gradient.release(params, eta, records, rows, noise, width)
        ascent = gradient.direction(params, eta, release, width)
        descent = jax.tree.map(jnp.negative, ascent)
        updates, opt_state = optimizer.update(descent, state.opt_state, params)
        params = optax.apply_updates(params, updates)
        point = width * eta if variant.whitens else gradient.probe(state.params, eta, width)
        info = Info(point, release)
        return State(params, opt_state, state.key, state.step + 1, state.origin), info

    def with_shape(data: Record) -> Record:
        if sharing is None or plan.sampling_prob < 1:
            return with_public_shape(data, plan)
        return filled_up(data, sharing.shard, microbatch_size(plan, problem.dim))

    run_chunk = functools.partial(_run_chunk, step, family, variant)
    jit = jit_on_one_thread if _numbers_a_step(plan, family) <= SMALL_STEP else jit_widely
    return Engine(
        family,
        variant,
        plan,
        single_precision(lambda data: problem.arrange(with_shape(data))),
        single_precision(problem.arrange),
        init,
        step,
        jit(run_chunk),
        jit(jax.vmap(run_chunk, (0, None, 0, 0, None))),
        jit(jax.vmap(run_chunk, (0, 0, 0, 0, None))),
        problem.blocks,
        sharing,
    )


def _numbers_a_step(plan: Plan, family: Family) -> int:
    return microbatch_size(plan, family.dim) * family.dim + family.num_params


@single_precision
def eta_for(family: Family, key: Array, step: Int[Array, ""]) -> Array:
    """The shared draw of a step; it depends on the key and the step's number alone."""
    return family.base_draw(jax.random.fold_in(key, step))


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
    every step released, if that is a gradient of the latent, or a whitened one.

    How many steps there are is a value, not a shape, so that one compilation serves all chunks.
    """
    etas = _etas(family, state, bounds[-1], noise.shape[0])

    def put(buffers: Any, new: Any, i: Int[Array, ""]) -> Any:
        update = jax.lax.dynamic_update_index_in_dim  # in place; a scatter would not be
        return jax.tree.map(lambda buffer, leaf: update(buffer, leaf, i, 0), buffers, new)

    def one_step(i: Int[Array, ""], carried: tuple[State, Any]) -> tuple[State, Any]:
        state, kept = carried
        state, info = step(state, etas[i], data, rows[i], noise[i])
        return state, None if kept is None else put(kept, info, i)

    def one_segment(i: Int[Array, ""], carried: tuple[State, Any, Params]) -> Any:
        state, kept, seen = carried
        state, kept = jax.lax.fori_loop(bounds[i], bounds[i + 1], one_step, (state, kept))
        return state, kept, put(seen, state.params, i)

    kept = None
    if variant.releases_gradient or variant.whitens:
        size = family.base_size if variant.whitens else family.dim
        kept = Info(*(jnp.zeros((noise.shape[0], n)) for n in (size, variant.num_released)))
    seen = jax.tree.map(
        lambda leaf: jnp.zeros((len(bounds) - 1, *leaf.shape), leaf.dtype), state.params
    )
    # A chunk that is not full does not wait for snapshots that nobody takes.
    segments = jnp.sum(bounds[1:] > bounds[:-1])
    state, kept, seen = jax.lax.fori_loop(0, segments, one_segment, (state, kept, seen))
    return state, seen, kept


@single_precision
def _etas(
    family: Family, state: State, num_steps: Int[Array, ""], capacity: int
) -> Float[Array, "capacity_or_more base"]:
    """The draws of the next `num_steps` steps; zeros for others.

    In blocks, so that a chunk that is not full does not wait for draws that nobody uses.
    """

    def draw_block(i: Int[Array, ""], etas: Array) -> Array:
        numbers = state.step + i * _ETA_BLOCK + jnp.arange(_ETA_BLOCK)
        block = jax.vmap(functools.partial(eta_for, family, state.key))(numbers)
        return jax.lax.dynamic_update_slice_in_dim(etas, block, i * _ETA_BLOCK, 0)

    blocks = -(-capacity // _ETA_BLOCK)
    empty = jnp.zeros((blocks * _ETA_BLOCK, family.base_size))
    return jax.lax.fori_loop(0, -(-num_steps // _ETA_BLOCK), draw_block, empty)
