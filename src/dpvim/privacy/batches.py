"""Batches as row numbers: which records of the data a step uses, and sums over microbatches.

A batch is gathered a microbatch at a time, and microbatches are about as large as batches usually
are. A batch has room for far more rows than it usually holds, since a cut would cost privacy;
microbatches that hold nobody are not worked on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dpvim.privacy.clipping import ClippedSum
from dpvim.privacy.norm_counts import NUM_NORM_BINS
from dpvim.privacy.plan import Plan
from dpvim.privacy.sampling import EMPTY
from dpvim.privacy.shards import Shard
from dpvim.types import Latent, Mask, Record, Weights, Whitening

# A microbatch has at most so many rows, which is what `lattice.exact_sum` adds up at once, and so
# many numbers, 4 MB: faster than larger ones, which leave the caches (twice at d 50, five at
# d 700), and the memory of a step does not grow with its batch.
_MICROBATCH_ROWS = 2**10
_MICROBATCH_ENTRIES = 2**20
# More rows than the mean by so many standard deviations are left to a second microbatch.
_USUAL_EXCESS = 2.5
# Sums over rows are fastest over a multiple of this many.
_ROWS_MULTIPLE = 16

BatchSum = Callable[[Latent, Weights, Record, Int[Array, " batch"], float], Float[Array, " r"]]
"""``(latent, weights, records, rows, bound)``: a `ClippedSum` over the rows of a batch."""


def num_rows_of(records: Record) -> int:
    """Length of the common leading axis."""
    return int(jax.tree.leaves(records)[0].shape[0])


def select(records: Record, rows: Int[Array, " batch"]) -> tuple[Record, Mask]:
    """The records with these numbers, and which of them are padding."""
    is_padding = rows == EMPTY
    places = jnp.where(is_padding, 0, rows)
    return jax.tree.map(lambda leaf: leaf.at[places].get(mode="clip"), records), is_padding


def with_public_shape(records: Record, plan: Plan) -> Record:
    """Records whose arrays have a public number of rows; rows that were added are never drawn.

    The number of rows decides which program is compiled, and two programs may round differently.
    """
    if not plan.num_rows_is_private:
        return records
    more = plan.num_examples - num_rows_of(records)
    return jax.tree.map(
        lambda leaf: jnp.pad(leaf, [(0, more)] + [(0, 0)] * (leaf.ndim - 1)), records
    )


def filled_up(records: Record, shard: Shard, size: int) -> Record:
    """Records of a shard, with zeros where nobody is: at least a microbatch of `size`, or as many
    as there are in all shards."""
    before, after = shard.padding(size)
    return jax.tree.map(
        lambda leaf: jnp.pad(
            leaf[: shard.num_rows], [(before, after)] + [(0, 0)] * (leaf.ndim - 1)
        ),
        records,
    )


class BatchReader:
    """Reads the rows of batches from arrays on the disk, as records of their own.

    The records that are read have a place for every row that the batches could hold, in the order
    of the batches: a public number. A row's place in the file does not reach the program.

    Attributes:
        numbers_a_row: How many numbers a record has.
    """

    def __init__(self, records: Record, arrange: Callable[[Record], Record]) -> None:
        self._records, self._arrange = records, arrange
        leaves = jax.tree.leaves(records)
        self.numbers_a_row = sum(math.prod(leaf.shape[1:]) for leaf in leaves)

    def places(self, rows: Int[np.ndarray, "steps batch"]) -> Int[np.ndarray, "steps batch"]:
        """Numbers of the rows among those that are read."""
        return np.where(
            rows == EMPTY, EMPTY, np.arange(rows.size, dtype=np.int32).reshape(rows.shape)
        )

    def read(self, rows: Int[np.ndarray, "steps batch"], num_steps: int) -> Record:
        """The records of the first `num_steps` batches; zeros where nobody is."""
        is_taken = rows.reshape(-1) != EMPTY
        is_taken[num_steps * rows.shape[1] :] = False
        taken = rows.reshape(-1)[is_taken]

        def read_leaf(leaf: Any) -> np.ndarray:
            found = np.zeros((rows.size, *leaf.shape[1:]), leaf.dtype)
            found[is_taken] = leaf[taken]
            return found

        return self._arrange(jax.tree.map(read_leaf, self._records))


def microbatch_size(plan: Plan, dim: int) -> int:
    """Rows of a microbatch: enough for most batches of the plan, unless they are very large."""
    spread = math.sqrt(plan.expected_batch_size * (1 - plan.sampling_prob))
    usual = plan.expected_batch_size + _USUAL_EXCESS * spread
    entries = dim * (plan.max_rows_per_person or 1)
    return _round_up(min(usual, _MICROBATCH_ROWS, max(1, _MICROBATCH_ENTRIES // entries)))


def microbatched(clipped_sum: ClippedSum, size: int, shard: Shard | None = None) -> BatchSum:
    """The sum over a batch, `size` rows at a time; no row numbers means all rows.

    Of the records of a `shard` rows are worked on in the shapes that all records would have in one
    process: a program for other shapes could round them otherwise.

    How a batch is cut is public, so it is cut alike with and without a record. How many
    microbatches hold somebody does not change the sum: the others add zeros. Sums of whole
    multiples of a quantum are exact in any order; others, which are in double precision, take no
    more additions than `lattice.Lattice` allows for.
    """

    def total(
        latent: Latent,
        weights: Weights,
        records: Record,
        rows: Int[Array, " batch"],
        bound: float,
    ) -> Float[Array, " r"]:
        takes_all = rows.shape[0] == 0
        num_rows = num_rows_of(records) if takes_all else rows.shape[0]
        if (shard.total if shard and takes_all else num_rows) <= size:
            if takes_all:
                is_padding = jnp.zeros(num_rows, bool)
                if shard is not None:
                    is_padding = jnp.asarray(shard.is_absent(size))
                return clipped_sum(latent, weights, records, is_padding, bound)
            return clipped_sum(latent, weights, *select(records, rows), bound)
        count: Any = -(-num_rows // size)
        if takes_all:
            take = lambda i: _slice(records, i * size, size)  # noqa: E731
            if shard is not None:
                # One block, too, is a loop that the compiler cannot take apart.
                count = jax.lax.optimization_barrier(jnp.int32(count))
                if shard.num_rows < size:
                    take = lambda i: (records, jnp.asarray(shard.is_absent(size)))  # noqa: E731
        else:
            padded = jnp.pad(rows, (0, count * size - num_rows), constant_values=EMPTY)
            last = jnp.max(jnp.where(rows == EMPTY, 0, jnp.arange(1, num_rows + 1)))
            count = (last + size - 1) // size
            take = lambda i: select(  # noqa: E731
                records, jax.lax.dynamic_slice_in_dim(padded, i * size, size)
            )

        def add(i: Int[Array, ""], so_far: Float[Array, " r"]) -> Float[Array, " r"]:
            share = clipped_sum(latent, weights, *take(i), bound)
            with jax.enable_x64(True):
                return so_far + share.astype(jnp.float64)

        counts = NUM_NORM_BINS if isinstance(weights, Whitening) else 0
        with jax.enable_x64(True):
            nothing = jnp.zeros(latent.size + counts, jnp.float64)
        return jax.lax.fori_loop(0, count, add, nothing)

    return total


def _slice(records: Record, start: Int[Array, ""], size: int) -> tuple[Record, Mask]:
    """The `size` records from `start` on; at the end of the data, records before it as padding."""
    first = jnp.minimum(start, num_rows_of(records) - size)
    batch = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, first, size), records)
    return batch, first + jnp.arange(size) < start


def _round_up(rows: float) -> int:
    return math.ceil(rows / _ROWS_MULTIPLE) * _ROWS_MULTIPLE
