"""A trial: the clipped sum of a regression by kernels of our own, compiled by numba.

    pip install --target FOLDER --no-deps numba llvmlite
    NPROC=1 PYTHONPATH=FOLDER python benchmarks/own_kernel.py [--rounds 9]

The library does not do it; docs/performance.md has the numbers. Aligned logistic regression as in
`benchmarks/speed.py` (Adult, d 96, batch 301). numba's `cfunc` makes functions that XLA calls
through its FFI, without a compiler on the machine: one multiplies the rows of a batch by the
coefficients where they lie, the other adds up the clipped rows. What is between them is XLA's as
before: score and factors, a number for each row. Each kernel passes over the batch once, and
nothing is gathered.

`step` is a chunk of steps with everything drawn, `run` a whole run; CPU time, with kernels, without
and without any sum at all, in turn. `same` tells whether all releases of the chunk and the
parameters after the run are those of XLA to the last bit, on columns of zeros and ones and on
normal ones. The sum of clipped rows is one of integers and has no order. For the products numbers
are added as XLA does for 512-bit vectors and a multiple of 16 columns: in 16 lanes, which are
halved until there is one. Elsewhere XLA has other orders, and `same` is False.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import math
import sys
import time
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import speed

from dpvim.bridge.data import prepare
from dpvim.bridge.model import bridge
from dpvim.inference import gradient
from dpvim.inference.engine import make_engine
from dpvim.inference.families import FAMILIES
from dpvim.inference.variants import make_variant
from dpvim.models.regression import Regression
from dpvim.privacy.batches import microbatched
from dpvim.privacy.clipping import clip_factors, finite_or_nan, materialize
from dpvim.privacy.lattice import _QUANTIZATION_LEVELS, _SHIFT
from dpvim.privacy.randomness import SecretStreams
from dpvim.privacy.sampling import EMPTY
from dpvim.svi import DPSVI

# numba imports `coverage`, which is not the benchmark of that name.
_HERE = sys.path.pop(0)
numba: Any = importlib.import_module("numba")
ir: Any = importlib.import_module("llvmlite.ir")
cgutils: Any = importlib.import_module("numba.core.cgutils")
extending: Any = importlib.import_module("numba.extending")
sys.path.insert(0, _HERE)

DIM, LANES, AHEAD, STEPS = 96, 16, 24, 1024
BYTES_A_ROW, LINE = 4 * DIM, 64
SHIFT_BITS = int(_SHIFT.view(np.int32))
POINTER, I32, I64, F32 = (getattr(numba.types, n) for n in ("voidptr", "int32", "int64", "float32"))
LANE = ir.VectorType(ir.FloatType(), LANES)


# -- what numba has no words for ------------------------------------------------------------------


def intrinsic(result: Any, *given: Any) -> Any:
    """An operation of LLVM's, from a function of the builder and its arguments."""

    def make(generate: Any) -> Any:
        def typed(context: Any, *types: Any) -> Any:
            return result(*given), lambda context, builder, _, args: generate(builder, *args)

        names = ", ".join(f"a{i}" for i in range(len(given)))
        space: dict[str, Any] = {"typed": typed}
        exec(f"def call(context, {names}): return typed(context, {names})", space)
        return extending.intrinsic(space["call"])

    return make


def _dot(builder: Any, row: Any, coefficients: Any) -> Any:
    total, fma = (
        ir.Constant(LANE, [0.0] * LANES),
        cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(LANE, [LANE] * 3), f"llvm.fma.v{LANES}f32"
        ),
    )
    for place in range(DIM // LANES):
        parts = []
        for address in (row, coefficients):
            pointer = builder.inttoptr(address, LANE.as_pointer())
            parts.append(builder.load(builder.gep(pointer, [ir.Constant(ir.IntType(32), place)])))
            parts[-1].align = 4
        total = builder.call(fma, [*parts, total])
    width = LANES
    while width > 1:
        halves = [
            builder.shuffle_vector(
                total, total, ir.Constant(ir.VectorType(ir.IntType(32), width // 2), [*part])
            )
            for part in (range(width // 2), range(width // 2, width))
        ]
        total, width = builder.fadd(*halves), width // 2
    return builder.extract_element(total, ir.Constant(ir.IntType(32), 0))


def _prefetch(builder: Any, address: Any) -> Any:
    pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
    call = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    how = [ir.Constant(number, n) for n in (0, 3, 1)]  # to read, soon again, data
    builder.call(call, [builder.inttoptr(address, pointer), *how])
    return ir.Constant(number, 0)


pointer = intrinsic(POINTER, I64)(lambda b, a: b.inttoptr(a, ir.IntType(8).as_pointer()))
bits_of = intrinsic(I32, F32)(lambda b, x: b.bitcast(x, ir.IntType(32)))
dot = intrinsic(F32, I64, I64)(_dot)
prefetch = intrinsic(I32, I64)(_prefetch)
carray: Any = numba.carray


# -- kernels, which read XLA's call frame by its offsets (xla/ffi/api/c_api.h) --------------------


def _part(address: Any, place: Any) -> Any:
    """The number at a place of a struct of 64-bit numbers."""
    return carray(pointer(address), (place + 1,), np.int64)[place]


def _say_version(extension: Any) -> Any:
    """XLA asks once, with an extension of the frame, which version of its FFI this is: 0.3."""
    version = carray(pointer(part(extension, 3)), (8,), np.int32)
    version[6] = 0
    version[7] = 3


part = numba.njit(inline="always")(_part)
say_version = numba.njit(inline="always")(_say_version)


def _dots(frame: Any) -> Any:
    """(X, rows, coefficients) -> a product for each row number; zero where nobody is."""
    of = carray(frame, (15,), np.int64)
    if of[1] != 0:
        say_version(of[1])
        return pointer(0)
    first, found = part(part(of[9], 0), 3), part(of[14], 0)
    count = part(part(found, 5), 0)
    rows = carray(pointer(part(part(of[9], 1), 3)), (count,), np.int32)
    coefficients = part(part(of[9], 2), 3)
    products = carray(pointer(part(found, 3)), (count,), np.float32)
    for i in range(count):
        soon = rows[min(i + AHEAD, count - 1)]
        if soon >= 0:
            for place in range(0, BYTES_A_ROW, LINE):
                prefetch(first + np.int64(soon) * BYTES_A_ROW + place)
        if rows[i] >= 0:
            products[i] = dot(first + np.int64(rows[i]) * BYTES_A_ROW, coefficients)
        else:
            products[i] = np.float32(0)
    return pointer(0)


def _sums(frame: Any) -> Any:
    """(X, rows, factors in quanta) -> the sum of rounded rows, as integers."""
    of = carray(frame, (15,), np.int64)
    if of[1] != 0:
        say_version(of[1])
        return pointer(0)
    first, count = part(part(of[9], 0), 3), part(part(part(of[9], 1), 5), 0)
    rows = carray(pointer(part(part(of[9], 1), 3)), (count,), np.int32)
    factors = carray(pointer(part(part(of[9], 2), 3)), (count,), np.float32)
    total = carray(pointer(part(part(of[14], 0), 3)), (DIM,), np.int32)
    for j in range(DIM):
        total[j] = np.int32(0)
    taken = 0
    for i in range(count):
        if rows[i] >= 0:
            taken += 1
            row = carray(pointer(first + np.int64(rows[i]) * BYTES_A_ROW), (DIM,), np.float32)
            for j in range(DIM):
                total[j] += bits_of(factors[i] * row[j] + _SHIFT)
    for j in range(DIM):
        total[j] -= np.int32((SHIFT_BITS * taken) & 0xFFFFFFFF)
    return pointer(0)


def registered() -> list[Any]:
    """The kernels, as XLA knows them; they have to live as long as its programs."""
    signature = POINTER(POINTER)
    options = {"nopython": True, "fastmath": {"contract"}, "error_model": "numpy"}
    kernels = [numba.cfunc(signature, **options)(each) for each in (_dots, _sums)]
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = (
        ctypes.py_object,
        [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
    )
    for name, kernel in zip(("dots", "sums"), kernels, strict=True):
        jax.ffi.register_ffi_target(name, new(kernel.address, None, None), platform="cpu")
    return kernels


# -- the clipped sum ------------------------------------------------------------------------------


def by_kernels(clipped_sum: Any, size: int, shard: Any = None) -> Any:
    """Instead of `batches.microbatched`, for this one model and variant."""

    def total(latent: Any, weights: Any, records: Any, rows: Any, bound: float) -> Any:
        assert weights is None
        quantum = 2.0 ** math.ceil(math.log2(bound)) / _QUANTIZATION_LEVELS
        is_padding = rows == EMPTY
        places = jnp.where(is_padding, 0, rows)
        y, squares = (leaf.at[places].get(mode="clip") for leaf in (records.y, records.squares))
        products = jax.ShapeDtypeStruct(rows.shape, jnp.float32)
        predictor = jax.ffi.ffi_call("dots", products)(records.X, rows, latent)
        score = materialize(lambda: finite_or_nan(y - jax.nn.sigmoid(predictor)), is_padding)
        factors = clip_factors(jnp.abs(score) * jnp.sqrt(squares), is_padding, bound)
        factors = jnp.where(factors > 0, factors * score, 0.0) * (1 / quantum)
        integers = jax.ShapeDtypeStruct((DIM,), jnp.int32)
        counts = jax.ffi.ffi_call("sums", integers)(records.X, rows, factors)
        with jax.enable_x64(True):
            return counts.astype(jnp.float64) * quantum

    return total


def by_nobody(clipped_sum: Any, size: int, shard: Any = None) -> Any:
    """No data at all: what kernels that took no time would leave."""

    def total(latent: Any, weights: Any, records: Any, rows: Any, bound: float) -> Any:
        with jax.enable_x64(True):
            return 1e-3 * latent.astype(jnp.float64)

    return total


WAYS = {"XLA": microbatched, "kernels": by_kernels, "no sum": by_nobody}


def data_of(columns: str) -> tuple[Any, ...]:
    X, y = speed.logistic()[1]
    if columns == "normal":
        X = np.random.default_rng(1).normal(size=X.shape).astype(np.float32)
    return X, y


def measure(columns: str, rounds: int) -> None:
    model, data, optimizer = Regression("logistic", intercept=False), data_of(columns), optax.adam
    inputs = prepare(data, {})
    plan, family = speed.plan_for(inputs.num_rows), FAMILIES["mean_field"](DIM)
    chunks, runs = {}, {}
    module: Any = gradient
    for name, way in WAYS.items():
        module.microbatched = way
        problem = bridge(model, inputs).problem
        engine = make_engine(
            problem, family, make_variant("aligned", family), optimizer(1e-3), plan
        )
        drawn = engine.source(inputs.num_rows, SecretStreams(0)).draw(STEPS, STEPS)
        start = engine.init(jax.random.key(0), jnp.zeros(DIM), 0.1)
        given = (start, engine.prepare(inputs.records), *map(jnp.asarray, drawn))
        bounds = jnp.array([0, STEPS], jnp.int32)
        chunks[name] = jax.tree_util.Partial(engine.run_chunk, *given, bounds)
        svi = DPSVI(model, "mean_field", optimizer(1e-3), plan, seed=0)
        svi.run(jax.random.key(0), 4 * STEPS, *data, progress_bar=False)  # compiled
        runs[name] = svi
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    ends: dict[str, list[np.ndarray]] = {}
    for turn in range(rounds + 1):
        for name in WAYS:
            began = time.process_time()
            _, _, info = jax.block_until_ready(chunks[name]())
            step = time.process_time() - began
            began = time.process_time()
            params = runs[name].run(jax.random.key(0), 16 * STEPS, *data, progress_bar=False).params
            run = time.process_time() - began
            if turn:
                times[name].append((1e6 * step / STEPS, 1e6 * run / (16 * STEPS)))
            else:
                ends[name] = [np.asarray(each) for each in (info.release, *params.values())]
    for name, found in times.items():
        step, run = np.median(found, axis=0)
        same = all(map(np.array_equal, ends[name], ends["XLA"]))
        print(f"{columns:>14} {name:>8}: step {step:5.1f} us, run {run:5.1f} us, same {same}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    began = time.process_time()
    kernels = registered()
    print(f"{len(kernels)} kernels compiled in {time.process_time() - began:.1f} s")
    for columns in ("zeros and ones", "normal"):
        measure(columns, options.rounds)


if __name__ == "__main__":
    main()
