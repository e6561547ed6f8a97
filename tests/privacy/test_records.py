"""Programs over records: none can reach another, and what might is refused."""

from __future__ import annotations

import functools
import sys

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import jax.scipy.linalg
import jax.scipy.special as special
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive

from dpvim.privacy.records import KEEP_RECORDS_APART, inner_jaxprs, over_records
from dpvim.types import ModelError

SIZE = 4
ROWS = 9
KNOTS = np.array([-1.0, 0.0, 0.4, 2.0], np.float32)


def whole(x):
    return jnp.floor(jnp.nan_to_num(10 * jnp.clip(x, -5, 5))).astype(jnp.int32)


def unit(x):
    return jax.nn.sigmoid(x)


def positive(x):
    return 0.1 + jnp.abs(x)


def matrix(x):
    return jnp.outer(x, x) + jnp.diag(positive(x))


def place(x):
    return whole(x)[0] % SIZE


def looped(x):
    """As many rounds as the record says."""

    def step(carried):
        count, total = carried
        return count + 1, jnp.sin(total) * 1.1 + x[0]

    return lax.while_loop(lambda c: c[0] < jnp.abs(whole(x)[0]), step, (0, x.sum()))[1]


def sampled(x):
    key = jax.random.fold_in(jax.random.split(jax.random.key(3))[0], whole(x)[0])
    return jax.random.normal(key, (3,)) * x[0]


def solved(x):
    lu, pivots, permutation = lax.linalg.lu(matrix(x))
    orthogonal = lax.linalg.householder_product(matrix(x), unit(x))
    moved = lax.linalg.lu_pivots_to_permutation(pivots, SIZE)
    return lu, permutation, moved, orthogonal, jnp.linalg.solve(matrix(x), x)


@jax.custom_jvp
def doubled(x):
    return 2 * x


doubled.defjvp(lambda primals, tangents: (2 * primals[0], 2 * tangents[0]))


@jax.custom_vjp
def tripled(x):
    return 3 * x


tripled.defvjp(lambda x: (3 * x, None), lambda _, g: (3 * g,))


# Functions of one record, a vector, that use the operations between them.
PROGRAMS = {
    "arithmetic": lambda x: (
        x + x[::-1] - x * 2.0 / positive(x), -x, jnp.abs(x), jnp.sign(x), lax.rem(x, positive(x)),
        lax.integer_pow(x, 3), positive(x) ** x, lax.square(x), lax.nextafter(x, x + 1),
        lax.reduce_precision(x, 5, 10), lax.clamp(-1.0, x, 1.0), lax.stop_gradient(x),
        lax.optimization_barrier(x), jax.grad(lambda x: jnp.sum(x * jnp.sin(x)))(x),
        jnp.array(x, copy=True),
    ),
    "rounding": lambda x: (jnp.ceil(x), jnp.floor(x), lax.round(x)),
    "comparisons": lambda x: (
        x < 0, x <= 0, x > 0, x >= 0, x == 0, x != 0, jnp.isfinite(x), jnp.where(x > 0, x, 0),
        jnp.maximum(x, 0.1), jnp.minimum(x, 0.1), (x > 0) & (x < 1), (x > 0) | (x < -1), ~(x > 0),
        (x > 0) ^ (x < 1), jnp.all(x > 0), jnp.any(x > 0), lax.reduce_xor(whole(x), (0,)),
    ),
    "places among knots": lambda x: (
        jnp.searchsorted(KNOTS, x), jnp.searchsorted(KNOTS, x, side="right"),
        jnp.interp(x, KNOTS, x[::-1]), jnp.interp(x, jnp.sort(x), KNOTS),
        jnp.digitize(x, KNOTS), jnp.searchsorted(jnp.sort(x), x, method="sort"),
    ),
    "powers": lambda x: (
        jnp.exp(x), lax.exp2(x), jnp.expm1(x), jnp.log(positive(x)), jnp.log1p(positive(x)),
        jnp.sqrt(positive(x)), lax.rsqrt(positive(x)), jnp.cbrt(x), jax.nn.sigmoid(x),
        jnp.tanh(x), jnp.sinh(x), jnp.cosh(x), jnp.arcsinh(x), jnp.arccosh(1 + positive(x)),
        lax.atanh(unit(x)),
    ),
    "angles": lambda x: (
        jnp.sin(x), jnp.cos(x), jnp.tan(x), lax.asin(unit(x)), lax.acos(unit(x)), lax.atan(x),
        jnp.arctan2(x, positive(x)), lax.acosh(1 + positive(x)), lax.asinh(x),
    ),
    "special functions": lambda x: (
        special.gammaln(positive(x)), special.digamma(positive(x)), special.erf(x), special.erfc(x),
        special.erfinv(unit(x)), special.i0e(x), special.i1e(x),
        special.polygamma(2, positive(x)), special.zeta(1 + positive(x), positive(x)),
    ),
    "incomplete gamma": lambda x: (
        special.gammainc(positive(x[::-1]), positive(x)),
        special.gammaincc(positive(x[::-1]), positive(x)),
        lax.igamma_grad_a(positive(x[::-1]), positive(x)),
    ),
    "gradients of incomplete gamma": jax.grad(
        lambda x: special.gammainc(positive(x[::-1]), positive(x)).sum()
    ),
    "bits": lambda x: (
        lax.bitcast_convert_type(x, jnp.int32), lax.clz(whole(x)), lax.population_count(whole(x)),
        whole(x) << 2, whole(x) >> 1, lax.shift_right_logical(whole(x), 1),
    ),
    "places": lambda x: (
        x[:2], x[::-1], x[None, :].T, x.reshape(2, 2), jnp.pad(x, 1), jnp.concatenate([x, x]),
        jnp.stack([x, x]), jnp.tile(x, 2), jnp.split(x, 2), jnp.arange(SIZE) * x[0], x[place(x)],
        lax.dynamic_slice(x, (place(x),), (2,)), x.at[place(x)].set(1.0), x.at[place(x)].add(1.0),
        lax.dynamic_update_slice(x, x[:2], (place(x),)), x.at[place(x)].multiply(2.0),
        x.at[place(x)].max(0.0), x.at[place(x)].min(0.0), x[whole(x)], lax.rev(x, (0,)),
        lax.expand_dims(x, (0,)), jnp.unstack(x), x.at[whole(x)].add(x, mode="drop"),
        x.at[place(x)].subtract(1.0), *lax.split(x, (1, 3)),
    ),
    "reductions": lambda x: (
        x.sum(), x.max(), x.min(), x.prod(), jnp.argmax(x), jnp.argmin(x), jnp.cumsum(x),
        jnp.cumprod(x), lax.cummax(x), lax.cummin(x), lax.cumlogsumexp(x), jnp.sort(x),
        lax.top_k(x, 2), jax.nn.logsumexp(x),
        lax.reduce(x, jnp.float32(0), lambda a, b: a + 2 * b, (0,)),
    ),
    "products": lambda x: (x @ x, matrix(x) @ x, matrix(x) @ matrix(x), jnp.ones((3, SIZE)) @ x),
    "cholesky": lambda x: jnp.linalg.cholesky(matrix(x)),
    "triangular solve": lambda x: (
        jax.scipy.linalg.solve_triangular(matrix(x), x),
        jax.scipy.linalg.solve_triangular(jnp.eye(SIZE) + 0.1, x),
    ),
    "solve": solved,
    "decompositions": lambda x: (
        jnp.linalg.eigh(matrix(x)), jnp.linalg.svd(matrix(x)), jnp.linalg.qr(matrix(x)),
        jnp.linalg.slogdet(matrix(x)),
    ),
    "random numbers": sampled,
    "random bits": lambda x: jax.random.normal(jax.random.PRNGKey(whole(x)[0]), (2,)),
    "choice": lambda x: lax.cond(x[0] > 0, lambda: jnp.sin(x), lambda: x**2),
    "loop": looped,
    "scan": lambda x: lax.scan(lambda total, each: (0.5 * total + each, total), 0.0, x),
    "gradient of a scan": jax.grad(
        lambda x: lax.scan(lambda total, each: (jnp.sin(total * each), total), 0.5, x)[0]
    ),
    "gradient of a solution": jax.grad(
        lambda x: jax.scipy.linalg.solve_triangular(matrix(x), x, lower=True)[0]
        + lax.cond(x[0] > 0, lambda: jnp.outer(x, x).sum(), lambda: 0.0)
    ),
    "functions": lambda x: (
        jax.jit(jnp.sin)(x), doubled(x), tripled(x), jax.nn.relu(x),
        jax.grad(lambda x: jax.checkpoint(lambda x: jnp.sin(x).sum())(x))(x),
        jax.ad_checkpoint.checkpoint_name(x, "kept"),
    ),
}  # fmt: skip
# Operations that programs have only within others.
WITHIN_OTHERS = {"closed_call", "platform_index", "threefry2x32"}


def names_in(program):
    for equation in program.eqns:
        yield equation.primitive.name
        for inner in inner_jaxprs(equation):
            yield from names_in(inner)


@pytest.fixture(scope="module")
def rows():
    return np.random.default_rng(0).normal(size=(ROWS, SIZE)).astype(np.float32)


def bits_of(found):
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(found)]
    return [leaf.reshape(ROWS, -1).view(np.uint8) for leaf in leaves]


ODD = [np.nan, np.inf, -np.inf, 0.0, 1e30, -1e30, 1e-38, 0.37]


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_record_changes_the_bits_of_another(name, rows):
    """Whatever it holds, in a compiled program over the batch."""
    run = jax.jit(functools.partial(over_records, lambda _, x: PROGRAMS[name](x), ()))
    usual = bits_of(run(rows))
    others = np.arange(ROWS) != 5
    for value in ODD:
        changed = rows.copy()
        changed[5] = value
        for before, after in zip(usual, bits_of(run(changed)), strict=True):
            np.testing.assert_array_equal(before[others], after[others])


def test_every_operation_that_is_allowed_was_tried(rows):
    met = set()
    with jax.enable_x64(False):
        for function in PROGRAMS.values():
            met |= set(names_in(jax.make_jaxpr(function)(rows[0]).jaxpr))
    known = {
        value.name
        for module in list(sys.modules.values())
        if getattr(module, "__name__", "").startswith("jax")
        for value in vars(module).values()
        if isinstance(value, Primitive)
    }
    assert (KEEP_RECORDS_APART & known) - met - WITHIN_OTHERS == set()


def statistic(batch):
    return np.broadcast_to(np.mean(batch), batch.shape).astype(np.float32)


def by_callback(how):
    def of_record(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return x - jax.pure_callback(statistic, shape, x, vmap_method=how)

    return of_record


@jax.custom_batching.custom_vmap
def by_own_rule(x):
    return x


@by_own_rule.def_vmap
def _mixing_rule(axis_size, in_batched, x):
    return x - x.mean(axis=0), True


@jax.custom_jvp
def by_hidden_rule(x):
    return x


by_hidden_rule.defjvp(
    lambda primals, tangents: (primals[0], by_callback("expand_dims")(primals[0]) * tangents[0])
)


MIXING = {
    "pure_callback, expand_dims": (by_callback("expand_dims"), "call into Python"),
    "pure_callback, broadcast_all": (by_callback("broadcast_all"), "call into Python"),
    "pure_callback, sequential": (by_callback("sequential"), "call into Python"),
    "custom_vmap": (by_own_rule, "batching rule of its own"),
    "hidden in a derivative": (jax.grad(lambda x: by_hidden_rule(x).sum()), "call into Python"),
    "hidden in a loop": (
        lambda x: lax.fori_loop(0, 3, lambda i, y: by_own_rule(y), x),
        "batching rule of its own",
    ),
    "hidden in a choice": (
        lambda x: lax.cond(x[0] > 0, by_callback("expand_dims"), lambda y: y, x),
        "call into Python",
    ),
    "jax.debug": (lambda x: (jax.debug.print("{x}", x=x), x)[1], "private numbers"),
    "foreign library": (
        lambda x: jax.ffi.ffi_call("mix", jax.ShapeDtypeStruct(x.shape, x.dtype))(x),
        "foreign library",
    ),
    "incomplete beta": (lambda x: special.betainc(2.0, 3.0, unit(x)), "incomplete beta"),
    "another generator": (
        lambda x: jax.random.normal(jax.random.key(place(x), impl="rbg"), (2,)),
        "threefry",
    ),
    "unknown": (lambda x: jnp.fft.fft(x).real, "'fft', of which it is not known"),
}


@pytest.mark.parametrize("name", MIXING)
def test_what_could_mix_records_is_refused(name, rows):
    function, message = MIXING[name]
    with pytest.raises(ModelError, match=message):
        over_records(lambda _, x: function(x), (), rows)


def test_values_are_those_of_single_records(rows):
    def function(shared, record):
        return {"a": shared["w"] @ record["x"], "b": (record["y"], shared["c"])}

    shared = {"w": jnp.arange(4.0), "c": jnp.ones(2)}
    records = {"x": jnp.asarray(rows), "y": jnp.arange(ROWS)}
    together = over_records(function, shared, records)
    singles = [
        function(shared, jax.tree.map(lambda leaf, i=i: leaf[i], records)) for i in range(ROWS)
    ]
    for ours, theirs in zip(
        jax.tree.leaves(together),
        jax.tree.leaves(jax.tree.map(lambda *each: jnp.stack(each), *singles)),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
