"""Deterministic properties of clip, sum and release: no statistics, no luck.

The same noise is added with and without a canary, so the difference of two releases is the
canary's share. Several ways to run a step are compared: XLA folds constants differently from
values it meets at run time, and has more than one code generator.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from dpvim.audit.findings import Finding
from dpvim.audit.target import Target, make_player, step_once
from dpvim.compiling import jit_quickly
from dpvim.randomness import SecretStreams

CHECK = "clip"
_ROWS = 6
_MANY_ROWS = 5000
_MANY_RUNS = 2000


def canaries(dim: int, clip_norm: float) -> dict[str, np.ndarray]:
    """Rows an adversary would try, by name."""
    axis = np.zeros(dim, np.float32)
    axis[0] = clip_norm
    spread = np.full(dim, clip_norm / np.sqrt(dim), np.float32)
    infinite, mixed = axis.copy(), axis.copy()
    infinite[0], mixed[-1] = np.inf, np.nan
    return {
        "zero": 0 * axis,
        "tiny": axis * np.float32(1e-30),
        "just below the clip": axis * np.float32(0.999),
        "at the clip": spread,
        "far above the clip": -100 * spread,
        "1e19": axis / clip_norm * np.float32(1e19),
        "1e25": -spread / clip_norm * np.float32(1e25),
        "3e38": axis / clip_norm * np.float32(3e38),
        "inf": infinite,
        "-inf": np.full(dim, -np.inf, np.float32),
        "nan": np.full(dim, np.nan, np.float32),
        "one nan": mixed,
    }


def _batches(dim: int, clip_norm: float) -> dict[str, np.ndarray]:
    """Company for the canary, one row short of a full batch."""
    axis = np.zeros((_ROWS - 1, dim), np.float32)
    lone = axis.copy()
    lone[0, 0] = clip_norm
    axis[:, 0] = 5 * clip_norm
    rng = np.random.default_rng(0)
    return {
        "alone": 0 * axis,
        "with one other row": lone,
        "with rows at the clip": axis,
        "with random rows": rng.normal(size=axis.shape).astype(np.float32) * clip_norm,
    }


def clip_checks(target: Target) -> list[Finding]:
    """What one row can do to a release, and what else it can do."""
    return [
        *(_sensitivity(target, mode, run) for mode, run in _modes(target).items()),
        _ways_agree(target),
        _not_finite_is_nothing(target),
        _large_batch(target),
        _sum_lies_on_the_lattice(target),
        _nothing_but_the_release(target),
    ]


Runner = Callable[[np.ndarray, np.ndarray], np.ndarray]


def _modes(target: Target) -> dict[str, Runner]:
    """The ways to take the same step, without noise."""
    silent = jnp.zeros(target.engine.variant.num_released, jnp.int32)

    def release(records: jax.Array, is_padding: jax.Array) -> jax.Array:
        return step_once(target, records, is_padding, silent)[0]

    compiled, quickly = jax.jit(release), jit_quickly(release)
    return {
        "eager": lambda r, p: np.asarray(release(jnp.asarray(r), jnp.asarray(p))),
        "compiled": lambda r, p: np.asarray(compiled(r, p)),
        "compiled quickly": lambda r, p: np.asarray(quickly(r, p)),
        "compiled as a constant": lambda r, p: np.asarray(
            jax.jit(lambda: release(jnp.asarray(r), jnp.asarray(p)))()
        ),
    }


def _sensitivity(target: Target, mode: str, run: Runner) -> Finding:
    dim, clip_norm = target.engine.family.dim, target.plan.clip_norm
    # Compiling one constant after another takes long; the other ways try all company.
    few = mode == "compiled as a constant"
    worst, where = -1.0, ""
    for company, rows in list(_batches(dim, clip_norm).items())[: 2 if few else None]:
        absent = run(*_padded(rows))
        for name, canary in canaries(dim, clip_norm).items():
            present = run(*_padded(np.concatenate([canary[None], rows])))
            shift = float(np.linalg.norm(present.astype(float) - absent))
            shift = np.inf if np.isnan(shift) else shift
            if shift > worst:
                worst, where = shift, f"{name}, {company}"
    observed = f"at most {worst / clip_norm:.6f} C ({where})"
    question = f"share of one row, {mode}"
    return Finding.rule(CHECK, question, observed, holds=worst <= clip_norm)


def _padded(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A full batch; what is beyond the rows is padding, and is not zero."""
    filler = np.full((_ROWS - len(rows), rows.shape[1]), 7.0, np.float32)
    return np.concatenate([rows, filler]), np.arange(_ROWS) >= len(rows)


def _ways_agree(target: Target) -> Finding:
    dim, clip_norm = target.engine.family.dim, target.plan.clip_norm
    modes = _modes(target)
    apart = 0.0
    for canary in canaries(dim, clip_norm).values():
        first, *others = (run(*_padded(canary[None])) for run in modes.values())
        apart = max(apart, *(float(np.max(np.abs(first - other))) for other in others))
    # Each may round to the other side of the lattice of rows, no more.
    holds = apart <= 1e-4 * clip_norm
    return Finding.rule(CHECK, "eager and compiled agree", f"to {apart:.1e}", holds=holds)


def _not_finite_is_nothing(target: Target) -> Finding:
    """Many runs as one program, with a row that is not finite and with zeros in its place.

    Batches and noise are the same, so releases must be the same to the last bit. A program for
    many runs is vectorised as no other is, and a minimum in it may pass over a NaN.
    """
    plan, dim = target.plan, target.engine.family.dim
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(plan.num_steps, plan.num_examples, dim)).astype(np.float32)
    play = make_player(target)

    def releases_with(value: float) -> np.ndarray:
        rows[:, 0] = 0.0
        rows[:, 0, -1] = value
        return np.asarray(play(rows, num_runs=_MANY_RUNS, streams=SecretStreams(0)).release)

    without = releases_with(0.0)
    differ = sum(
        int(np.any(releases_with(value) != without, axis=(1, 2)).sum())
        for value in (np.nan, np.inf, -np.inf)
    )
    observed = f"{differ} of {3 * _MANY_RUNS} runs differ from those with zeros"
    return Finding.rule(CHECK, "a row not finite is nothing", observed, holds=differ == 0)


def _large_batch(target: Target) -> Finding:
    """Thousands of rows at the clip in one direction: the sum is right, and one more adds C."""
    clip_norm = target.plan.clip_norm
    rows = np.zeros((_MANY_ROWS, target.engine.family.dim), np.float32)
    rows[:, 0] = 5 * clip_norm
    run = _modes(target)["compiled"]
    padding = np.zeros(_MANY_ROWS, bool)
    whole = run(rows, padding).astype(float)
    padding[-1] = True
    without = run(rows, padding).astype(float)
    shift, size = float(np.linalg.norm(whole - without)), float(np.linalg.norm(whole))
    # Single precision holds the release of so large a sum to a few millionths of C.
    holds = shift <= clip_norm * (1 + 1e-4) and abs(size / (clip_norm * _MANY_ROWS) - 1) < 0.01
    each = f"one of them adds {shift / clip_norm:.6f} C"
    observed = f"{_MANY_ROWS} rows sum to {size / clip_norm:.1f} C, {each}"
    return Finding.rule(CHECK, "many rows in one direction", observed, holds=holds)


def _sum_lies_on_the_lattice(target: Target) -> Finding:
    """A sum of numbers with many digits, without noise, must have no bits below the grid."""
    dim, grid = target.engine.family.dim, target.plan.noise_grid
    rng = np.random.default_rng(1)
    run = _modes(target)["compiled"]
    releases = np.stack(
        [
            run(*_padded(rng.normal(scale=scale, size=(_ROWS, dim)).astype(np.float32)))
            for scale in (1e-6, 1e-3, 1e-1)
        ]
    )
    below = int(np.sum(releases.astype(float) % grid != 0))
    observed = f"{below} of {releases.size} sums have bits below the grid"
    return Finding.rule(CHECK, "sums lie on the lattice", observed, holds=below == 0)


def _nothing_but_the_release(target: Target) -> Finding:
    """Two batches of different size, with noise that makes their releases equal.

    The parameters after the step must then be the same to the last bit: whatever leaves the step
    is a function of the release. A division by the realised batch size is not.
    """
    dim, clip_norm, grid = target.engine.family.dim, target.plan.clip_norm, target.plan.noise_grid
    step = jax.jit(lambda r, p, noise: step_once(target, r, p, noise))
    silent = np.zeros(target.engine.variant.num_released, np.int32)
    rng = np.random.default_rng(2)
    rows = rng.normal(scale=0.05 * clip_norm, size=(_ROWS, dim)).astype(np.float32)
    apart = 0.0
    reference = step(*_padded(rows[:1]), silent)
    for size in range(2, _ROWS + 1):
        batch = _padded(rows[:size])
        difference = np.asarray(reference[0], float) - np.asarray(step(*batch, silent)[0], float)
        release, update = step(*batch, np.rint(difference / grid).astype(np.int32))
        if not np.array_equal(release, reference[0]):
            return Finding.rule(
                CHECK, "nothing but the release", "sum and noise do not add up", holds=False
            )
        apart = max(apart, float(np.max(np.abs(update - reference[1]))))
    observed = f"updates for equal releases differ by {apart:.1e}"
    return Finding.rule(CHECK, "nothing but the release", observed, holds=apart == 0)
