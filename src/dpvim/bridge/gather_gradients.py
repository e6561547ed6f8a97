r"""Gradients of records that gather one level from a table: ``jnp.log(probs).T[x]``.

Where a table t is made of one site, and no entry of it of more than one of the site's events (the
rows of `probs`, say), its derivatives by the raw values u of an event are a table too, which all
records share. A record that gathers one entry for each event e has the gradient

.. math:: \frac{d \log p(x)}{du_{ei}} = \frac{d \log p(x)}{dt_e[x]} \, \frac{dt_e}{du_{ei}}[x]:

a product for each coordinate, where the general way fills in the zeros of the other levels and
multiplies by the Jacobian of the transform. Sites that records use in another way go the general
way (a number for an index, as in ``table[x[0]]``, is another way: JAX makes a slice of it). Nothing
here looks at data: the gathers are read off the program.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jax.lax import GatherScatterMode
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from dpvim.bridge.latent_space import LatentSpace, Site
from dpvim.privacy.clipping import materialize
from dpvim.privacy.records import inner_jaxprs, over_records
from dpvim.types import Latent, Record, Scalar

LogProbOfSites = Callable[[dict[str, Array], Record], Scalar]

# Primitives that compute an entry from the entries at the same place.
_ENTRYWISE = frozenset(
    """abs add and clamp convert_element_type copy div eq exp exp2 expm1 ge gt integer_pow is_finite
    le log log1p logistic lt max min mul ne neg not or pow select_n sign sqrt square stop_gradient
    sub tanh""".split()  # noqa: SIM905
)
# At an index outside the table there may be: the nearest entry inside, a constant, anything.
_MODES = (
    GatherScatterMode.CLIP,
    GatherScatterMode.FILL_OR_DROP,
    GatherScatterMode.PROMISE_IN_BOUNDS,
)


def gradients_by_record(
    log_prob: LogProbOfSites, space: LatentSpace, latent: Latent, batch: Record
) -> Float[Array, "batch d"]:
    """Gradients of the log-probability of every record with respect to the latent."""
    raw, values = space.unpack(latent), space.constrain(latent)
    gathers = {}
    if any(map(_Source.of, space.sites)):
        program = _inline(jax.make_jaxpr(log_prob)(values, jax.tree.map(lambda a: a[0], batch)))
        gathers = _find_gathers(program, space.sites)
    if not gathers:
        return space.pull_back(latent, over_records(jax.grad(log_prob), values, batch))
    inputs = program.jaxpr.invars
    tables = [gather.table for gather in gathers.values()]
    indices = [gather.indices for gather in gathers.values()]
    gathered = [gather.result for gather in gathers.values()]
    make_tables = _subprogram(program, inputs[: len(values)], tables)
    run_gathers = _subprogram(program, [*tables, *inputs], [*indices, *gathered])
    use_gathered = _subprogram(program, [*gathered, *inputs], program.jaxpr.outvars)

    def tables_with(site: Site, value: Array) -> dict[str, Array]:
        made = make_tables(*jax.tree.leaves(values | {site.name: value}))
        return dict(zip(gathers, made, strict=True))

    def slopes(site: Site) -> Float[Array, " numbers"]:
        by = site.derivatives(raw[site.name], lambda value: tables_with(site, value)[site.name])
        # Flat, which leaves the compiler no other order to store them in.
        return jnp.moveaxis(by, 0, -1).reshape(-1)

    def shared() -> tuple[list[Array], list[Array]]:
        from_tables = [site for site in space.sites if site.name in gathers]
        return make_tables(*jax.tree.leaves(values)), [slopes(site) for site in from_tables]

    # The compiler would work out an entry anew for every record that gathers it.
    made, slopes_by_site = materialize(shared, jnp.isnan(latent))

    def of_record(shared: tuple[Any, ...], record: Record) -> dict[str, Array]:
        """Gradients at the values of plain sites, and at the raw values of the others."""
        made, slopes_by_site, values = shared
        plain = {name: value for name, value in values.items() if name not in gathers}
        leaves = jax.tree.leaves(record)
        results = run_gathers(*made, *jax.tree.leaves(values), *leaves)
        where, entries = results[: len(indices)], results[len(indices) :]

        def log_prob_of(entries: list[Array], plain: dict[str, Array]) -> Scalar:
            return use_gathered(*entries, *jax.tree.leaves(values | plain), *leaves)[0]

        by_entry, by_value = jax.grad(log_prob_of, (0, 1))(entries, plain)
        moved = map(_Gather.pull_back, gathers.values(), by_entry, slopes_by_site, where)
        return by_value | dict(zip(gathers, moved, strict=True))

    by_site = over_records(of_record, (made, slopes_by_site, values), batch)
    for site in space.sites:
        if site.name not in gathers:
            by_site[site.name] = site.pull_back(raw[site.name], by_site[site.name])
    return jnp.concatenate([by_site[site.name] for site in space.sites], axis=1)


class _Source(NamedTuple):
    """Provenance of a variable that is made of one site, each entry of one of the site's events.

    Attributes:
        name, size: Those of the site.
        axes: Axes of the variable that count the site's events.
    """

    name: str
    size: int
    axes: tuple[int, ...]

    @classmethod
    def of(cls, site: Site) -> _Source | None:
        """The site itself; None if its events are numbers, from which nothing is gathered."""
        event_dim = site.transform.codomain.event_dim
        axes = tuple(range(len(site.shape) - event_dim))
        return cls(site.name, math.prod(site.shape), axes) if event_dim else None

    def after(self, equation: JaxprEqn) -> _Source | None:
        """Source of an equation's result, if operands have this one or none; None if unknown."""
        name, params = equation.primitive.name, equation.params
        if name in _ENTRYWISE:
            return self
        if not self.axes:  # there is one event, which meets no other
            # What is within other programs may have derivatives in one direction only.
            is_simple = name == "custom_jvp_call" or not inner_jaxprs(equation)
            return self if is_simple else None
        if name == "transpose":
            return self._replace(axes=tuple(map(params["permutation"].index, self.axes)))
        if name in ("reduce_sum", "reduce_max") and not set(self.axes) & set(params["axes"]):
            left = [a for a in range(len(_shape(equation.invars[0]))) if a not in params["axes"]]
            return self._replace(axes=tuple(map(left.index, self.axes)))
        if name == "broadcast_in_dim":
            old, new = _shape(equation.invars[0]), _shape(equation.outvars[0])
            axes = tuple(params["broadcast_dimensions"][axis] for axis in self.axes)
            if [old[axis] for axis in self.axes] == [new[axis] for axis in axes]:
                return self._replace(axes=axes)
        return None


class _Gather(NamedTuple):
    """A gather of one entry for each event of a site.

    Attributes:
        table, indices, result: Its operands and its result.
        params: Those of the equation.
        axes: Axes of the result that count the site's events.
    """

    table: Var
    indices: Var
    result: Var
    params: dict[str, Any]
    axes: tuple[int, ...]

    @classmethod
    def of(cls, equation: JaxprEqn, source: _Source) -> _Gather | None:
        """The gather of an equation whose table has this source; None if it is not one an event."""
        table, indices = _variables(equation.invars)
        (result,), params = equation.outvars, equation.params
        numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
        shape, result_shape = _shape(table), _shape(result)
        # Where axes of the table go: those that are taken whole, and those that indices share.
        shared, searched = numbers.operand_batching_dims, numbers.start_index_map
        taken = [a for a in range(len(shape)) if a not in (*shared, *numbers.collapsed_slice_dims)]
        to = dict(zip(taken, numbers.offset_dims, strict=True))
        to = {a: to[a] for a in taken if a not in searched and sizes[a] == shape[a]}
        others = [a for a in range(len(result_shape)) if a not in numbers.offset_dims]
        to |= zip(shared, [others[a] for a in numbers.start_indices_batching_dims], strict=True)
        axes = tuple(to[a] for a in source.axes if a in to)
        is_one_each = math.prod(result_shape) == math.prod(result_shape[a] for a in axes)
        is_small = math.prod(shape) <= source.size
        dtype = getattr(result.aval, "dtype", None)
        is_plain = dtype == jnp.float32 and params["mode"] in _MODES
        if len(axes) == len(source.axes) and is_one_each and is_small and is_plain:
            return cls(table, indices, result, params, axes)
        return None

    def pull_back(self, gradient: Array, slopes: Array, where: Array) -> Float[Array, " raw_size"]:
        """The gradient at the gathered entries, carried to the raw value of the site.

        Args:
            gradient: Shaped as the result.
            slopes: Derivatives of the table, those by the coordinates of an event last; flat.
            where: Indices. One outside the table has no derivative, unless it stands for the
                nearest one inside.
        """
        table, numbers = _shape(self.table), self.params["dimension_numbers"]
        slopes = slopes.reshape(*table, -1)
        slope = self._gather(
            slopes,
            where,
            numbers._replace(offset_dims=(*numbers.offset_dims, gradient.ndim)),
            (*self.params["slice_sizes"], slopes.shape[-1]),
        )
        # Outside, the gradient may be anything: nothing there depends on the site.
        is_inside = self._gather(jnp.ones(table), where, numbers, self.params["slice_sizes"])
        gradient = jnp.where(is_inside > 0, gradient, 0.0)
        order = (*self.axes, *(a for a in range(gradient.ndim) if a not in self.axes))  # ones last
        by_event = jnp.transpose(gradient, order).reshape(-1, 1)
        slope = jnp.transpose(slope, (*order, gradient.ndim)).reshape(len(by_event), -1)
        return (by_event * slope).reshape(-1)

    def _gather(self, table: Array, where: Array, numbers: Any, sizes: Sequence[int]) -> Array:
        """Entries of a table at these indices, and zeros for indices outside."""
        clips = self.params["mode"] == GatherScatterMode.CLIP
        mode = GatherScatterMode.CLIP if clips else GatherScatterMode.FILL_OR_DROP
        return jax.lax.gather(table, where, numbers, sizes, mode=mode, fill_value=0)


def _find_gathers(program: ClosedJaxpr, sites: list[Site]) -> dict[str, _Gather]:
    """The gathers by which a program uses sites that it uses once and in no other way.

    Args:
        program: A function of the values of the sites, by name, and a record.
        sites: All of them.

    Returns:
        By name of the site, in the order of the sites.
    """
    inputs, outputs = program.jaxpr.invars, program.jaxpr.outvars
    by_name = sorted(sites, key=lambda site: site.name)
    # Variables without an entry are constants; None stands for records and for what is not known.
    made_of: dict[Var, _Source | None] = dict.fromkeys(inputs)
    made_of |= zip(inputs, map(_Source.of, by_name), strict=False)
    gathers: dict[str, _Gather | None] = {}
    uses: Counter[str] = Counter()
    for equation in _needed_equations(program, inputs, outputs):
        operands = _variables(equation.invars)
        sources = {made_of[v] for v in operands if v in made_of}
        if not sources:
            continue
        only = sources.pop() if len(sources) == 1 else None
        result = only.after(equation) if only else None
        made_of |= dict.fromkeys(equation.outvars, result)
        if result:
            continue
        uses.update(source.name for v in operands if (source := made_of.get(v)))
        if equation.primitive.name == "gather" and (source := made_of.get(operands[0])):
            gathers[source.name] = _Gather.of(equation, source)
    uses.update(source.name for v in _variables(outputs) if (source := made_of.get(v)))
    once = {name: gather for name, gather in gathers.items() if gather and uses[name] == 1}
    return {site.name: once[site.name] for site in sites if site.name in once}


def _inline(program: ClosedJaxpr) -> ClosedJaxpr:
    """Put the bodies of functions in place of their calls."""

    def run(program: ClosedJaxpr, operands: Sequence[ArrayLike]) -> list[ArrayLike]:
        jaxpr = program.jaxpr
        names = [*jaxpr.constvars, *jaxpr.invars]
        known = dict(zip(names, [*program.consts, *operands], strict=True))

        def read(atoms: Iterable[Any]) -> list[ArrayLike]:
            return [atom.val if isinstance(atom, Literal) else known[atom] for atom in atoms]

        for equation in jaxpr.eqns:
            if equation.primitive.name in ("jit", "pjit"):
                results = run(equation.params["jaxpr"], read(equation.invars))
            else:
                given = _variables(equation.invars)
                alone = jaxpr.replace(
                    constvars=[], invars=given, outvars=equation.outvars, eqns=[equation]
                )
                results = jaxpr_as_fun(ClosedJaxpr(alone, []))(*read(given))
            known |= zip(equation.outvars, results, strict=True)
        return read(jaxpr.outvars)

    return jax.make_jaxpr(lambda *operands: run(program, operands))(*program.in_avals)


def _subprogram(
    program: ClosedJaxpr, given: Sequence[Var], wanted: Sequence[Var]
) -> Callable[..., list[Array]]:
    """The part of a program that computes the wanted variables from the given ones."""
    equations = _needed_equations(program, given, wanted)
    jaxpr = program.jaxpr.replace(invars=list(given), outvars=list(wanted), eqns=equations)
    return jaxpr_as_fun(ClosedJaxpr(jaxpr, program.consts))


def _needed_equations(
    program: ClosedJaxpr, given: Iterable[Var], wanted: Iterable[Var]
) -> list[JaxprEqn]:
    """The equations that the wanted variables need if the given ones are there."""
    there, missing, needed = set(given), set(_variables(wanted)), []
    for equation in reversed(program.jaxpr.eqns):
        if (missing & set(equation.outvars)) - there:
            needed.append(equation)
            missing |= set(_variables(equation.invars))
    return needed[::-1]


def _variables(atoms: Iterable[Any]) -> list[Var]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(atom.aval.shape)
