"""Directions of the latent that the log-likelihood depends on, found on made-up rows.

Of an intercept and an effect for each level a likelihood knows the sums alone, of the scores of all
classes the differences. No noise leaves such directions visible for what they are, so a steered run
must not look for them.

Gradients at rows of many kinds span what the likelihood depends on. Rows are made up, so the result
is public. Integers that look up entries of tables stay within these: outside of them JAX's
gradients are not those of any data. Where some coordinate is not reached by any made-up row (that
of a knot far out, say), rows of the data may show another side, and all coordinates count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, Literal
from jaxtyping import Array, Bool, Float

from dpvim.inference.directions import Informed
from dpvim.privacy.records import inner_jaxprs
from dpvim.types import Latent, Record, Scalar

# Kinds of rows: of some all columns are alike, in others each column is of a kind of its own. There
# are so many rows of each at first, and not more than would give so many numbers.
_KINDS, _ROWS_OF_A_KIND, _MOST_NUMBERS = 24, 48, 2**24
# Places where gradients are taken.
_PLACES = 3
# Gradients that are far shorter than most of their kind are differences of what has cancelled.
_USUAL = 0.75
# A direction that gradients have less of than this, in parts of the one that they have most of, is
# one of rounding errors.
_LEAST = 1e-4
# Integers that look up nothing are made up below this number.
_SMALL_NUMBERS = 10


def find_directions(
    log_prob: Callable[[Latent, Record], Scalar],
    gradients: Callable[[Latent, Record], Float[Array, "batch d"]],
    used: Bool[np.ndarray, " d"],
    row: Record,
) -> Informed:
    """Find what the log-likelihood depends on.

    Args:
        log_prob: ``(latent, row) ->`` the log-likelihood of one row.
        gradients: ``(latent, rows) ->`` its gradients at each row.
        used: Coordinates that the program of the log-likelihood makes any use of.
        row: Shapes and types of the arrays of one row.

    Returns:
        For a span the coordinates that are used, where all combinations of them matter.
    """
    latents = np.random.default_rng(1).normal(size=(_PLACES, len(used))).astype(np.float32)
    program = jax.make_jaxpr(log_prob)(latents[0], row).jaxpr
    table_lengths = _table_lengths(program, len(row))
    dim, rows, found, before = int(used.sum()), _ROWS_OF_A_KIND, None, None
    # Outcomes that are made up may be impossible ones, and such rows tell nothing: there are more
    # rows until they show no more directions.
    while found is None or _ranks(found) not in ((dim, dim), before):
        before = found and _ranks(found)
        made_up = _made_up(row, table_lengths, rows)
        at_places = np.stack([np.asarray(gradients(each, made_up), float) for each in latents])
        found = _spanned_by(at_places[..., used])
        rows *= 2
        if 2 * at_places.size > _MOST_NUMBERS:
            break
    coordinates = np.eye(len(used))[:, used]
    if found.directions is None:
        return Informed(coordinates, dim)
    if len(found.directions) == dim:
        return Informed(coordinates, found.at_a_place)
    return Informed(coordinates @ np.linalg.qr(found.directions.T)[0], found.at_a_place)


class _Found(NamedTuple):
    """The span of gradients at all places, None if they do not tell, and its size at one."""

    directions: Float[np.ndarray, "r d"] | None
    at_a_place: int


def _ranks(found: _Found) -> tuple[int, int]:
    return 0 if found.directions is None else len(found.directions), found.at_a_place


def _spanned_by(gradients: Float[np.ndarray, "places rows d"]) -> _Found:
    """Directions of gradients at rows of all kinds, one kind after the other."""
    found = np.where(np.isfinite(gradients).all(axis=2, keepdims=True), gradients, 0.0)
    if not found.any(axis=(0, 1)).all():
        return _Found(None, 0)
    size = np.nanmedian(np.where(found == 0, np.nan, np.abs(found)), axis=(0, 1))
    kinds = (found / size).reshape(len(found) * _KINDS, -1, found.shape[2])
    lengths = np.linalg.norm(kinds, axis=2, keepdims=True)
    usual = np.quantile(lengths, _USUAL, axis=1, keepdims=True)
    kinds = kinds / np.maximum(np.maximum(lengths, usual), np.finfo(np.float32).tiny)
    by_place = kinds.reshape(found.shape)
    at_a_place = max(len(_spanned(each)) for each in by_place)
    return _Found(_spanned(by_place.reshape(-1, found.shape[2])) * size, at_a_place)


def _spanned(gradients: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "r d"]:
    """Unit vectors that span rows, up to rounding errors."""
    _, values, vectors = np.linalg.svd(gradients, full_matrices=False)
    return vectors[values > _LEAST * values[0]]


def _made_up(row: list[Any], table_lengths: list[int | None], rows_of_a_kind: int) -> Record:
    """Rows of all kinds."""
    rng = np.random.default_rng(0)
    floats: list[Callable[[tuple[int, ...]], np.ndarray]] = [
        lambda size: rng.uniform(size=size),
        lambda size: rng.normal(size=size),
        lambda size: rng.integers(0, 2, size),
        lambda size: 10 * rng.normal(size=size),
        lambda size: 100 * rng.uniform(size=size),
        lambda size: 10 ** rng.uniform(-3, 5, size),
    ]
    numbers: list[Callable[[tuple[int, ...]], np.ndarray]] = [
        lambda size: rng.integers(0, 2, size),
        lambda size: rng.integers(0, _SMALL_NUMBERS, size),
    ]

    def of_leaf(leaf: Any, length: int | None) -> Array:
        size = (rows_of_a_kind, *leaf.shape)
        if length is not None:
            return jnp.asarray(rng.integers(0, length, (_KINDS * size[0], *size[1:])), leaf.dtype)
        kinds = floats if jnp.issubdtype(leaf.dtype, jnp.floating) else numbers
        chosen = [*range(len(kinds)), *rng.integers(0, len(kinds), _KINDS - len(kinds))]
        made = np.concatenate([kinds[kind](size) for kind in chosen])
        return jnp.asarray(made.astype(leaf.dtype))

    return [of_leaf(*each) for each in zip(row, table_lengths, strict=True)]


def _table_lengths(program: Jaxpr, num_leaves: int) -> list[int | None]:
    """Of each array of a record the length of the shortest table in which it is an index."""
    lengths: list[int | None] = [None] * num_leaves
    first = len(program.invars) - num_leaves
    sources = {var: {i} for i, var in enumerate(program.invars[first:])}
    for leaf, length in _lookups(program, sources):
        lengths[leaf] = min(length, lengths[leaf] or length)
    return lengths


def _lookups(program: Jaxpr, sources: dict[Any, set[int]]) -> Iterator[tuple[int, int]]:
    """Arrays of the record, and lengths of tables in which they are looked up.

    Args:
        program: A program.
        sources: Arrays of the record that integers of the program are made of; grows.
    """

    def sources_of(atoms: Iterable[Any]) -> list[set[int]]:
        return [set() if isinstance(a, Literal) else sources.get(a, set()) for a in atoms]

    for equation in program.eqns:
        given = sources_of(equation.invars)
        for inner in inner_jaxprs(equation):
            # Operands that are not the body's come first: the predicate of a choice, say.
            within = dict(zip(inner.invars[::-1], given[::-1], strict=False))
            yield from _lookups(inner, within)
            results = [a for a in inner.outvars if not isinstance(a, Literal)]
            given.append(set().union(*(within.get(a, set()) for a in results)))
        axes: dict[int, set[int]] = {}
        if equation.primitive.name == "gather":
            numbers = equation.params["dimension_numbers"]
            axes = dict.fromkeys(numbers.start_index_map, given[1])
        elif equation.primitive.name == "dynamic_slice":
            axes = dict(enumerate(given[1:]))
        for axis, leaves in axes.items():
            table, size = _aval(equation.invars[0]), equation.params["slice_sizes"][axis]
            yield from ((leaf, table.shape[axis] - size + 1) for leaf in leaves)
        for variable in equation.outvars:
            if jnp.issubdtype(_aval(variable).dtype, jnp.integer):
                sources[variable] = set().union(*given)


def _aval(atom: Any) -> Any:
    return atom.aval
