"""Deterministic properties of clip, sum and release: no statistics, no luck.

The same noise is added with and without a canary, so the difference of two releases is the
canary's share. Several ways to run a step are compared: XLA folds constants differently from
values it meets at run time, has more than one code generator, and vectorises many runs.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpvim._compile import jit_quickly
from dpvim.audit.canaries import Records, join, take, wild_rows
from dpvim.audit.findings import Finding
from dpvim.audit.paths import CANARY, Path
from dpvim.audit.sums import full_batch_checks, sum_checks
from dpvim.audit.target import Seen, Target, Vectorised, step_once
from dpvim.privacy.sampling import EMPTY

CHECK = "clip"
_ROWS = 6
_WILD_ROWS = 2000
_RANDOM_BATCHES = 500
# Where a way to run a step takes long it is tried with these.
_FEW_CANARIES = (CANARY, "-1e25", "one nan")
_OTHERS = "with other rows"


def clip_checks(target: Target, *, thorough: bool) -> Iterator[Finding]:
    """What one row can do to a release, and what else it can do.

    With `thorough` steps are run in every way, else in those that fits are.
    """
    step = _compiled(target)
    compiled = _compiled_way(target, step)
    yield _sensitivity(target, "compiled", compiled)
    yield from sum_checks(CHECK, target, step)
    side_by_side = _SideBySide(target)
    yield side_by_side.sensitivity()
    yield side_by_side.wild_rows()
    yield side_by_side.not_finite_is_nothing()
    if thorough:
        yield from full_batch_checks(CHECK, target, step)
        other_ways = _other_ways(target)
        for name, way in other_ways.items():
            yield _sensitivity(target, name, way)
        yield _ways_agree(target, [compiled, *other_ways.values()])


class Way:
    """A way to take a step without noise; `few` if it takes long."""

    def __init__(self, target: Target, run: Callable[[Any, np.ndarray], Any], *, few: bool) -> None:
        self.few = few
        self._run, self._target, self._batches = run, target, _Batches(target)
        self.release = functools.cache(self._release)

    def _release(self, canary: str | None, company: str) -> np.ndarray:
        """The release with a canary, or without one, in some company."""
        others = _companies(self._target.path)[company]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that values are outside of supports
            return np.asarray(self._run(*self._batches.of(canary, others)), float)


def _compiled(target: Target) -> Callable[..., Seen]:
    """The first step, ``(records, rows, noise) -> Seen``."""
    step = jax.jit(functools.partial(step_once, target, target.etas()[0], 0))
    return lambda *given: jax.tree.map(np.asarray, step(*given))


def _silence(target: Target) -> np.ndarray:
    return np.zeros(target.engine.variant.num_released, np.int32)


def _compiled_way(target: Target, step: Callable[..., Seen]) -> Way:
    return Way(target, lambda *batch: step(*batch, _silence(target)).release, few=False)


def _other_ways(target: Target) -> dict[str, Way]:
    eta, silence = target.etas()[0], jnp.asarray(_silence(target))

    def release(records: Any, rows: Any) -> Any:
        return step_once(target, eta, 0, records, jnp.asarray(rows), silence).release

    def as_constant(records: Any, rows: Any) -> Any:
        return jax.jit(lambda: release(records, rows))()

    return {
        "compiled quickly": Way(target, jit_quickly(release), few=False),
        "eager": Way(target, release, few=True),
        "compiled as a constant": Way(target, as_constant, few=True),
    }


def _companies(path: Path) -> dict[str, list[int]]:
    """Company for the canary, by number."""
    first = len(path.names)
    return {
        _OTHERS: list(range(first + 1, first + _ROWS)),
        "alone": [],
        "with one other row": [first],
        "with a long row five times": [path.number(CANARY)] * (_ROWS - 1),
    }


class _Batches:
    """Batches of six rows, as the engine takes them; rows that are not drawn hold something."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def of(self, canary: str | None, company: list[int]) -> tuple[Any, np.ndarray]:
        """A batch with the canary in the first place, or with nobody there."""
        path = self._target.path
        first = len(path.names) if canary is None else path.number(canary)
        filler = [0] * (_ROWS - 1 - len(company))
        rows = np.array([*range(1 + len(company)), *[EMPTY] * len(filler)], np.int32)
        rows[0] = EMPTY if canary is None else 0
        return self._target.ready(take(path.rows, [first, *company, *filler])), rows


def _sensitivity(target: Target, name: str, way: Way) -> Finding:
    worst = _Worst(target.plan.clip_norm)
    for company in [_OTHERS] if way.few else _companies(target.path):
        absent = way.release(None, company)
        for canary in _FEW_CANARIES if way.few else target.path.names:
            shift = np.linalg.norm(way.release(canary, company) - absent)
            worst.see([shift], [f"{canary}, {company}"])
    return worst.finding(f"share of one row, {name}")


class _Worst:
    """The largest of many shares."""

    def __init__(self, clip_norm: float) -> None:
        self._clip_norm = clip_norm
        self._share, self._where = -1.0, ""

    def see(self, shares: Sequence[Any] | np.ndarray, where: Sequence[str]) -> None:
        values = np.nan_to_num(np.asarray(shares, float), nan=np.inf)
        if values.max() > self._share:
            self._share, self._where = float(values.max()), where[int(values.argmax())]

    def finding(self, question: str) -> Finding:
        observed = f"at most {self._share / self._clip_norm:.6f} C ({self._where})"
        return Finding.rule(CHECK, question, observed, holds=self._share <= self._clip_norm)


def _ways_agree(target: Target, ways: list[Way]) -> Finding:
    apart = 0.0
    for canary in _FEW_CANARIES:
        first, *others = (way.release(canary, _OTHERS) for way in ways)
        apart = max(apart, *(float(np.max(np.abs(first - other))) for other in others))
    # Each may round to the other side of the lattice, no more.
    clip_norm = target.plan.clip_norm
    holds = apart <= 2e-4 * clip_norm
    observed = f"to {apart / clip_norm:.1e} C"
    return Finding.rule(CHECK, "all ways agree", observed, holds=holds)


class _SideBySide:
    """Thousands of batches as one program, vectorised as many fits are."""

    def __init__(self, target: Target) -> None:
        self._target, self._path = target, target.path
        self._program = Vectorised(target)
        rows: Records = join([self._path.rows, wild_rows(self._path.ordinary, _WILD_ROWS)])
        self._steps = target.plan.num_steps
        ready = target.ready(rows)
        self._records = jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (self._steps, *leaf.shape)), ready
        )

    def _releases(self, rows: np.ndarray) -> np.ndarray:
        """Of batches [batches, rows], at every step: [batches, steps, r].

        All calls have the same shape, and share one program.
        """
        chunks = []
        for start in range(0, len(rows), _WILD_ROWS):
            part = rows[start : start + _WILD_ROWS]
            padded = np.pad(part, [(0, _WILD_ROWS - len(part)), (0, 0)], constant_values=EMPTY)
            by_step = np.broadcast_to(padded[:, None], (_WILD_ROWS, self._steps, _ROWS))
            chunks.append(self._program.silent(self._records, by_step).release[: len(part)])
        return np.concatenate(chunks)

    def sensitivity(self) -> Finding:
        names, worst = self._path.names, _Worst(self._target.plan.clip_norm)
        for company, others in _companies(self._path).items():
            rows = np.full((len(names) + 1, _ROWS), EMPTY)
            rows[:-1, 0] = np.arange(len(names))
            rows[:, 1 : 1 + len(others)] = others
            releases = self._releases(rows).astype(float)
            shifts = np.linalg.norm(releases[:-1] - releases[-1], axis=2)
            worst.see(_largest(shifts), [f"{name}, {company}" for name in names])
        return worst.finding("share of one row, side by side")

    def wild_rows(self) -> Finding:
        worst = _Worst(self._target.plan.clip_norm)
        rows = np.full((_WILD_ROWS, _ROWS), EMPTY)
        first = len(self._path.rows[0])
        rows[:, 0] = first + np.arange(_WILD_ROWS)
        shifts = np.linalg.norm(self._releases(rows).astype(float), axis=2)
        worst.see(_largest(shifts), [f"row {i}" for i in range(_WILD_ROWS)])
        return worst.finding(f"share of one row, {_WILD_ROWS} random ones")

    def not_finite_is_nothing(self) -> Finding:
        """Random batches with a row that is not finite, and with nobody in its place.

        Releases must be the same to the last bit. A program for many runs is vectorised as no
        other is, and a minimum in it may pass over a NaN.
        """
        rng = np.random.default_rng(3)
        first, count = len(self._path.names), len(self._path.ordinary[0])
        rows = rng.integers(first, first + count, (_RANDOM_BATCHES, _ROWS))
        rows[rng.random(rows.shape) < 0.3] = EMPTY
        rows[:, 0] = EMPTY
        without = self._releases(rows)
        differ = 0
        for name in self._path.not_finite:
            rows[:, 0] = self._path.number(name)
            differ += int(np.any(self._releases(rows) != without, axis=(1, 2)).sum())
        tried = len(self._path.not_finite) * _RANDOM_BATCHES
        observed = f"{differ} of {tried} runs differ from those without it"
        return Finding.rule(CHECK, "a row not finite is nothing", observed, holds=differ == 0)


def _largest(by_step: np.ndarray) -> np.ndarray:
    """The largest share over the steps; one that is no number is larger than any."""
    return np.nan_to_num(by_step, nan=np.inf).max(axis=1)
