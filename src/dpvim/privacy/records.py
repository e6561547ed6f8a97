"""One program for many records, in which no record can reach another.

A model's gradient is written for one record, and vectorised over a batch. Most operations of JAX
then work on each record by itself, but not all: a call into Python sees the whole batch, a batching
rule of the user's own may do anything, and some special functions iterate until the slowest record
is done. So the program for one record is looked at before it is vectorised, and what runs is what
was looked at: operations that are known to keep records apart are allowed, and no others.

>>> import jax.numpy as jnp
>>> over_records(lambda w, x: w * x.sum(), 2.0, jnp.ones((3, 4)))
Array([8., 8., 8.], dtype=float32)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, jaxpr_as_fun

from dpvim._compile import single_precision
from dpvim.types import ModelError, Record

# Operations whose vectorised form gives every record the bits that it would have in any company,
# whatever the others hold (tests/privacy/test_records.py tries each of them). Those that run
# programs of their own (cond, scan, ...) are looked into.
_ELEMENTWISE = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    bitcast_convert_type cbrt ceil clamp clz convert_element_type copy cos cosh digamma div eq erf
    erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac integer_pow is_finite le
    le_to lgamma log log1p logistic lt lt_to max min mul ne neg nextafter not or polygamma
    population_count pow random_gamma_grad reduce_precision rem round rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh
    xor zeta
"""
_INDEXING = """
    broadcast_in_dim concatenate dynamic_slice dynamic_update_slice empty2 expand_dims gather iota
    pad reshape rev scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub scatter_max
    scatter_min scatter_mul slice split squeeze stack tile transpose unstack
"""
_REDUCTIONS = """
    argmax argmin cumlogsumexp cummax cummin cumprod cumsum dot_general reduce reduce_and reduce_max
    reduce_min reduce_or reduce_prod reduce_sum reduce_xor sort top_k
"""
_LINEAR_ALGEBRA = """
    cholesky custom_linear_solve eigh householder_product lu lu_pivots_to_permutation qr svd
    triangular_solve
"""
_RANDOM_NUMBERS = """
    random_bits random_fold_in random_seed random_split random_unwrap random_wrap threefry2x32
"""
_CALLS_AND_LOOPS = """
    checkpoint closed_call cond core_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr jit
    name optimization_barrier pjit platform_index remat remat2 scan while
"""
KEEP_RECORDS_APART = frozenset(
    (
        _ELEMENTWISE
        + _INDEXING
        + _REDUCTIONS
        + _LINEAR_ALGEBRA
        + _RANDOM_NUMBERS
        + _CALLS_AND_LOOPS
    ).split()
)
_CALLS_PYTHON = (
    "a call into Python, which sees all records of a batch at once. Write that part with jax.numpy"
)
_ADVICE = {
    "pure_callback": _CALLS_PYTHON,
    "io_callback": _CALLS_PYTHON,
    "debug_callback": "jax.debug: it would show private numbers. Take it out",
    "debug_print": "jax.debug: it would show private numbers. Take it out",
    "ffi_call": "a call into a foreign library, which sees all records of a batch at once. Write "
    "that part with jax.numpy",
    "custom_vmap_call": "a batching rule of its own (custom_vmap), which sees all records of a "
    "batch at once. Leave the rule out",
    "regularized_incomplete_beta": "the incomplete beta function, which JAX iterates until the "
    "slowest record of a batch is done. Write the likelihood without it (for a cumulative "
    "distribution function, with a sum or a table)",
}


@single_precision
def over_records(function: Callable[[Any, Record], Any], shared: Any, records: Record) -> Any:
    """Values of ``function(shared, record)`` for all records, stacked.

    Guarantees:
        The value of a record is a function of `shared` and that record.

    Raises:
        ModelError: The function uses an operation that is not known to keep records apart.
    """
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), records)
    program, shapes = jax.make_jaxpr(function, return_shape=True)(shared, one)
    check_keeps_records_apart(program.jaxpr)
    given, batch = jax.tree.leaves(shared), jax.tree.leaves(records)
    axes = (*(None for _ in given), *(0 for _ in batch))
    found = jax.vmap(jaxpr_as_fun(program), axes)(*given, *batch)
    return jax.tree.unflatten(jax.tree.structure(shapes), found)


def check_keeps_records_apart(program: Jaxpr) -> None:
    """Refuse a program for one record that could mix records when it is vectorised."""
    for equation in program.eqns:
        name = equation.primitive.name
        if name not in KEEP_RECORDS_APART:
            what = _ADVICE.get(
                name,
                f"JAX's operation {name!r}, of which it is not known whether it does. Write the "
                "likelihood without it, or ask for it to be looked at",
            )
            raise ModelError(
                "expected a likelihood that keeps the records of a batch apart, so that none can "
                f"change the gradients of others; the model uses {what}."
            )
        if name.startswith("random_"):
            _check_generator(equation)
        for inner in inner_jaxprs(equation):
            check_keeps_records_apart(inner)


def _check_generator(equation: JaxprEqn) -> None:
    """Refuse random numbers other than JAX's own: the vectorised form of others mixes keys."""
    types = [str(getattr(atom.aval, "dtype", "")) for atom in (*equation.invars, *equation.outvars)]
    if any(name.startswith("key<") and name != "key<fry>" for name in types):
        raise ModelError(
            "expected random numbers by JAX's default generator, threefry; the model uses another, "
            "which mixes the keys of the records of a batch. Leave impl= and "
            "jax_default_prng_impl alone."
        )


def inner_jaxprs(equation: JaxprEqn) -> list[Jaxpr]:
    """The programs that an equation runs: bodies of functions and loops."""
    leaves = jax.tree.leaves(
        list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")
    )
    programs = [getattr(leaf, "jaxpr", leaf) for leaf in leaves]
    return [program for program in programs if isinstance(program, Jaxpr)]
