r"""Blocks of a latent, found in the program of a record's log-likelihood.

Coordinates are in one block unless the log-likelihood of every record is a sum of terms of which
none depends on both of them. The program is followed once, for a record of which shapes and types
are known and nothing else. Each entry of each array has the set of coordinates that it depends on;
each array has the sets of the terms that it is a sum of. Sums, and products with what depends on
data alone, leave terms as they are. Any other operation makes one term of all that goes into an
entry.

A record that looks up one row of a table, ``w[group]``, depends on one of its rows, whichever it
is. So a lookup is a set for each value of the index, and lookups by the same index go together: the
coefficients of each group are a block of their own. Lookups by different indices can meet in any
combination, and make one block.

What is not known to keep coordinates apart is taken to bring them together: blocks may be larger
than they could be, never smaller.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jaxtyping import Bool

from dpvim.bridge.latent_space import LatentSpace
from dpvim.inference.blocks import NO_BLOCK, Blocks
from dpvim.types import Latent, Record, Scalar

# Latents with more coordinates are followed by site.
_MOST_COORDINATES = 4096
# Tables with more rows are taken as a whole.
_MOST_ROWS = 4096

# Entries from the entries at the same place, or from one number.
_ENTRYWISE = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp
    convert_element_type copy cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt
    integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter not or
    polygamma pow reduce_precision rem round rsqrt select_n sign sin sinh sqrt square stop_gradient
    sub tan tanh xor zeta""".split()  # noqa: SIM905
)
_REDUCTIONS = frozenset(
    ["reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"]
)
_CUMULATIVE = frozenset(["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"])
# Sums of what goes into them, entry by entry; structural operations are too.
_SUMS = frozenset(["add", "add_any", "sub", "neg", "copy", "reduce_sum", "cumsum"])
_BODIES = ("jaxpr", "call_jaxpr", "fun_jaxpr")
# Programs within the program; loops and branches are not looked into.
_CALLS = frozenset(
    """checkpoint closed_call core_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr jit
    pjit remat remat2""".split()  # noqa: SIM905
)


def find_blocks(
    log_prob: Callable[[Latent, Record], Scalar],
    space: LatentSpace,
    informed: Bool[np.ndarray, " d"],
    record: Record,
) -> Blocks:
    """Blocks of the latent. Of the record shapes and types are used.

    Args:
        log_prob: The log-likelihood of one record.
        space: The latent's sites.
        informed: Coordinates that the likelihood depends on at all.
        record: One record, or something of its shape.
    """
    dim = space.dim
    units = np.arange(dim)
    if dim > _MOST_COORDINATES:
        sizes = [site.raw_size for site in space.sites]
        units = np.repeat(np.arange(len(sizes)), sizes)
    leaves, structure = jax.tree.flatten(record)
    shapes = [jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype) for leaf in leaves]
    program = jax.make_jaxpr(
        lambda latent, *leaves: log_prob(latent, jax.tree.unflatten(structure, leaves))
    )(jax.ShapeDtypeStruct((dim,), jnp.float32), *shapes)
    reader = _Reader(int(units.max()) + 1)
    latent = _Value.of(np.array([1 << int(unit) for unit in units], object))
    data = [reader.data(shape.shape, ("record", i)) for i, shape in enumerate(shapes)]
    consts = [reader.const(value) for value in program.consts]
    (total,) = reader.run(program.jaxpr, consts, [latent, *data])
    groups = _Groups(int(units.max()) + 1)
    for term in total.terms:
        for together in reader.combinations(term):
            groups.join(_bits(together))
    labels = np.array([groups.of(int(unit)) for unit in units])
    return Blocks.from_labels(np.where(informed, labels, NO_BLOCK))


class _Value(NamedTuple):
    """An array of the program.

    Attributes:
        sets: For each entry the units that it depends on, as bits of a number; higher bits are
            lookups.
        terms: The sets of the terms whose sum is a sum of these entries, each times data.
        number: The same for arrays that are the same function of data alone; None for others.
    """

    sets: np.ndarray
    terms: frozenset[int]
    number: int | None = None

    @classmethod
    def of(cls, sets: np.ndarray, number: int | None = None) -> _Value:
        """A value each of whose entries is a term."""
        return cls(sets, frozenset(int(s) for s in sets.flat) - {0}, number)

    @property
    def is_data(self) -> bool:
        """True if it depends on data alone."""
        return not self.terms and not self.sets.any()


class _Lookup(NamedTuple):
    """One entry of a table at a place that the record knows.

    Attributes:
        by: The same for lookups that go to the same place.
        sets: By place.
    """

    by: tuple[Any, ...]
    sets: tuple[int, ...]


class _Reader:
    """Follows a program."""

    def __init__(self, num_units: int) -> None:
        self._num_units = num_units
        self._lookups: dict[_Lookup, int] = {}
        self._numbers: dict[Any, int] = {}

    def data(self, shape: tuple[int, ...], what: Any) -> _Value:
        """An array that depends on data alone."""
        number = self._numbers.setdefault(what, len(self._numbers))
        return _Value(_full(shape, 0), frozenset(), number)

    def const(self, value: Any) -> _Value:
        """An array that the program holds."""
        return self.data(np.shape(value), ("const", id(value)))

    def run(self, jaxpr: Jaxpr, consts: Sequence[_Value], given: Sequence[_Value]) -> list[_Value]:
        """The program's results."""
        known: dict[Any, _Value] = {}
        known |= zip(jaxpr.constvars, consts, strict=True)
        known |= zip(jaxpr.invars, given, strict=True)

        def read(atoms: Iterable[Any]) -> list[_Value]:
            return [self._literal(a) if isinstance(a, Literal) else known[a] for a in atoms]

        for equation in jaxpr.eqns:
            known |= zip(equation.outvars, self._results(equation, read), strict=True)
        return read(jaxpr.outvars)

    def combinations(self, term: int) -> list[int]:
        """Sets of units that can meet in a term, whatever the record."""
        units, lookups = self._parts(term)
        if len({lookup.by for lookup in lookups}) == 1 and not units:
            by_place = zip(*(lookup.sets for lookup in lookups), strict=True)
            return [_union(sets) for sets in by_place]
        return [self._all_units(term)]

    def _parts(self, term: int) -> tuple[int, list[_Lookup]]:
        units = term & ((1 << self._num_units) - 1)
        every = list(self._lookups)
        return units, [every[i] for i in _bits(term >> self._num_units)]

    def _all_units(self, term: int) -> int:
        """The units of a term, with those of its lookups wherever they go."""
        units, lookups = self._parts(term)
        return _union([units, *(s for lookup in lookups for s in lookup.sets)])

    def _literal(self, literal: Literal) -> _Value:
        value = np.asarray(literal.val)
        return self.data(value.shape, ("literal", value.dtype.str, value.tobytes()))

    def _results(
        self, equation: JaxprEqn, read: Callable[[Iterable[Any]], list[_Value]]
    ) -> list[_Value]:
        name, params = equation.primitive.name, equation.params
        given = read(equation.invars)
        if name in _CALLS:
            inner = next(params[key] for key in _BODIES if key in params)
            consts = [self.const(value) for value in getattr(inner, "consts", ())]
            return self.run(getattr(inner, "jaxpr", inner), consts, given)
        shapes = [_aval(variable).shape for variable in equation.outvars]
        if all(value.is_data for value in given):
            return [
                self._same_function_of_data(equation, i, given, shape)
                for i, shape in enumerate(shapes)
            ]
        if len(shapes) == 1:
            sets = self._sets(equation, given, shapes[0])
            if sets is not None:
                if _keeps_terms(equation, given):
                    return [_Value(sets, frozenset().union(*(v.terms for v in given)))]
                return [_Value.of(sets)]
        together = _union(int(s) for value in given for s in value.sets.flat)
        return [_Value.of(_full(shape, together)) for shape in shapes]

    def _same_function_of_data(
        self, equation: JaxprEqn, result: int, given: list[_Value], shape: tuple[int, ...]
    ) -> _Value:
        numbers = [value.number for value in given]
        if None in numbers or equation.effects:
            what: Any = object()
        else:
            settings = repr(sorted(equation.params.items(), key=lambda item: item[0]))
            what = (equation.primitive.name, settings, result, *numbers)
        return self.data(shape, what)

    def _sets(
        self, equation: JaxprEqn, given: list[_Value], shape: tuple[int, ...]
    ) -> np.ndarray | None:
        """Sets of an equation's result, entry by entry; None if it is not known how."""
        name, params = equation.primitive.name, equation.params
        sets = [value.sets for value in given]
        if name in _ENTRYWISE:
            return _union_of(np.broadcast_to(part, shape) for part in sets)
        if name in _REDUCTIONS:
            return _reduced(sets[0], params["axes"])
        if name in _CUMULATIVE:
            reduced = np.expand_dims(_reduced(sets[0], (params["axis"],)), params["axis"])
            return np.broadcast_to(reduced, shape)
        if name == "dot_general":
            return _dot(sets[0], sets[1], params["dimension_numbers"])
        if name == "gather":
            return self._gathered(equation, given, shape)
        return _moved(name, params, sets, shape)

    def _gathered(
        self, equation: JaxprEqn, given: list[_Value], shape: tuple[int, ...]
    ) -> np.ndarray | None:
        """Sets of what is looked up in a table: one row, by an index that is data."""
        table, indices = given
        numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
        indexed = numbers.start_index_map
        places = [range(table.sets.shape[axis] - sizes[axis] + 1) for axis in indexed]
        is_one_row = indices.sets.size == len(indexed) and not numbers.operand_batching_dims
        if not indices.is_data or not is_one_row or math.prod(map(len, places)) > _MOST_ROWS:
            return None
        plain = np.frompyfunc(self._all_units, 1, 1)(table.sets)
        rows = []
        for place in itertools.product(*places):
            starts = dict(zip(indexed, place, strict=True))
            cut = tuple(
                slice(starts.get(axis, 0), starts.get(axis, 0) + size)
                for axis, size in enumerate(sizes)
            )
            rows.append([int(s) for s in plain[cut].flat])
        # Places outside of a table are moved into it: tables of other lengths are other lookups.
        by = (object() if indices.number is None else indices.number, *map(len, places))
        entries = [self._lookup(by, by_place) for by_place in zip(*rows, strict=True)]
        found = _full((len(entries),), 0)
        found[:] = entries
        return found.reshape(shape)

    def _lookup(self, by: tuple[Any, ...], by_place: tuple[int, ...]) -> int:
        if len(set(by_place)) == 1:
            return by_place[0]
        lookup = _Lookup(by, by_place)
        return 1 << (self._num_units + self._lookups.setdefault(lookup, len(self._lookups)))


class _Groups:
    """Units that have been joined."""

    def __init__(self, size: int) -> None:
        self._parents = list(range(size))

    def of(self, unit: int) -> int:
        while self._parents[unit] != unit:
            unit = self._parents[unit]
        return unit

    def join(self, units: Sequence[int]) -> None:
        for other in units[1:]:
            first, second = sorted((self.of(units[0]), self.of(other)))
            self._parents[second] = first


def _keeps_terms(equation: JaxprEqn, given: list[_Value]) -> bool:
    """True if sums of an equation's results are sums of its operands, each times data."""
    name = equation.primitive.name
    is_data = [value.is_data for value in given]
    if name in _SUMS or name in _MOVES:
        return True
    if name in ("mul", "dot_general"):
        return any(is_data)
    if name == "div":
        return is_data[1]
    if name == "select_n":
        return is_data[0]
    if name == "convert_element_type":
        kinds = [_aval(atom).dtype for atom in (equation.invars[0], equation.outvars[0])]
        return all(jnp.issubdtype(kind, jnp.floating) for kind in kinds)
    return False


def _aval(atom: Any) -> Any:
    return atom.aval


def _reshaped(sets: list[np.ndarray], params: Any, shape: tuple[int, ...]) -> np.ndarray:
    return sets[0].reshape(shape)


def _broadcast(sets: list[np.ndarray], params: Any, shape: tuple[int, ...]) -> np.ndarray:
    lengths = [1] * len(shape)
    for axis, length in zip(params["broadcast_dimensions"], sets[0].shape, strict=True):
        lengths[axis] = length
    return np.broadcast_to(sets[0].reshape(lengths), shape)


def _sliced(sets: list[np.ndarray], params: Any, shape: tuple[int, ...]) -> np.ndarray:
    ends = (params["start_indices"], params["limit_indices"])
    strides = params["strides"] or (1,) * len(shape)
    return sets[0][tuple(slice(*cut) for cut in zip(*ends, strides, strict=True))]


def _padded(sets: list[np.ndarray], params: Any, shape: tuple[int, ...]) -> np.ndarray:
    # Anything but zeros at the ends is rare: all of it goes everywhere then.
    given, filling = sets
    config = params["padding_config"]
    if filling.any() or any(low < 0 or high < 0 or inside for low, high, inside in config):
        return _full(shape, _union([*given.flat, *filling.flat]))
    found, starts = _full(shape, 0), [low for low, _, _ in config]
    ends = np.add(starts, given.shape)
    found[tuple(slice(*cut) for cut in zip(starts, ends, strict=True))] = given
    return found


# Operations that move entries.
_MOVES: dict[str, Callable[[list[np.ndarray], Any, tuple[int, ...]], np.ndarray]] = {
    "reshape": _reshaped,
    "squeeze": _reshaped,
    "expand_dims": _reshaped,
    "broadcast_in_dim": _broadcast,
    "slice": _sliced,
    "pad": _padded,
    "stack": lambda sets, params, shape: np.stack(sets, params["axis"]),
    "transpose": lambda sets, params, shape: sets[0].transpose(params["permutation"]),
    "rev": lambda sets, params, shape: np.flip(sets[0], params["dimensions"]),
    "concatenate": lambda sets, params, shape: np.concatenate(sets, params["dimension"]),
}


def _moved(
    name: str, params: Any, sets: list[np.ndarray], shape: tuple[int, ...]
) -> np.ndarray | None:
    if name not in _MOVES or (name == "reshape" and params["dimensions"] is not None):
        return None
    return _MOVES[name](sets, params, shape)


def _dot(left: np.ndarray, right: np.ndarray, dimension_numbers: Any) -> np.ndarray:
    """Each entry has all of a row and all of a column."""
    (left_axes, right_axes), (left_batch, right_batch) = dimension_numbers
    count = len(left_batch)

    def rows(sets: np.ndarray, axes: Sequence[int], batch: Sequence[int]) -> np.ndarray:
        free = [a for a in range(sets.ndim) if a not in (*axes, *batch)]
        ordered = sets.transpose((*batch, *free, *axes))
        return _reduced(ordered, tuple(range(count + len(free), sets.ndim)))

    a, b = rows(left, left_axes, left_batch), rows(right, right_axes, right_batch)
    a = a.reshape((*a.shape, *(1,) * (b.ndim - count)))
    b = b.reshape((*b.shape[:count], *(1,) * (a.ndim - b.ndim), *b.shape[count:]))
    return np.asarray(np.bitwise_or(a, b), object)


def _reduced(sets: np.ndarray, axes: Sequence[int]) -> np.ndarray:
    return np.asarray(np.bitwise_or.reduce(sets, axis=tuple(axes), initial=0), object)


def _union_of(parts: Iterable[np.ndarray]) -> np.ndarray:
    total, *others = parts
    for part in others:
        # An array without axes would become a number, of which NumPy takes small ones alone.
        total = np.asarray(np.bitwise_or(total, part), object)
    return total


def _union(sets: Iterable[int]) -> int:
    total = 0
    for each in sets:
        total |= each
    return total


def _bits(number: int) -> list[int]:
    return [place for place, bit in enumerate(reversed(bin(number)[2:])) if bit == "1"]


def _full(shape: tuple[int, ...], value: int) -> np.ndarray:
    return np.full(shape, value, object)
