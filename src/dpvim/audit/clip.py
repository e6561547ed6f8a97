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

from dpvim._compile import jit_on_one_thread, jit_quickly
from dpvim.audit.canaries import Records, concat, fuzzed_rows, take
from dpvim.audit.findings import Finding
from dpvim.audit.paths import CANARY, CodePath
from dpvim.audit.sums import full_batch_checks, sum_checks
from dpvim.audit.target import AdversaryView, Target, VectorizedRuns, step_once
from dpvim.privacy.sampling import EMPTY

CHECK = "clip"
_ROWS = 6
_FUZZED_ROWS = 2000
_RANDOM_BATCHES = 500
# Slow runners are tried with these.
_FEW_CANARIES = (CANARY, "-1e25", "one nan")
_WITH_OTHERS = "with other rows"


def clip_checks(target: Target, *, thorough: bool) -> Iterator[Finding]:
    """Checks of the sensitivity of releases to one row.

    With `thorough` steps are run in every way, else in those that fits are.
    """
    step = _compiled(target)
    compiled = _compiled_runner(target, step)
    yield _sensitivity(target, "compiled", compiled)
    yield from sum_checks(CHECK, target, step)
    vectorized = _VectorizedChecks(target)
    yield vectorized.sensitivity()
    yield vectorized.fuzzed_rows()
    yield vectorized.nonfinite_rows_count_for_nothing()
    if thorough:
        yield from full_batch_checks(CHECK, target, step)
        other_runners = _other_runners(target)
        for name, runner in other_runners.items():
            yield _sensitivity(target, name, runner)
        yield _runners_agree(target, [compiled, *other_runners.values()])


class StepRunner:
    """A way to take a step without noise: compiled, eager, ..."""

    def __init__(
        self, target: Target, run: Callable[[Any, np.ndarray], Any], *, is_slow: bool
    ) -> None:
        self.is_slow = is_slow
        self._run, self._target = run, target
        self.release = functools.cache(self._release)

    def _release(self, canary: str | None, bystanders: str) -> np.ndarray:
        """The release with a canary, or without one, among bystanders."""
        others = _bystanders(self._target.path)[bystanders]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that values are outside of supports
            return np.asarray(self._run(*_make_batch(self._target, canary, others)), float)


def _compiled(target: Target) -> Callable[..., AdversaryView]:
    """The first step, ``(records, rows, noise) -> AdversaryView``."""
    step = jax.jit(functools.partial(step_once, target, target.etas()[0], 0))
    return lambda *given: jax.tree.map(np.asarray, step(*given))


def _compiled_runner(target: Target, step: Callable[..., AdversaryView]) -> StepRunner:
    return StepRunner(
        target, lambda *batch: step(*batch, target.zero_noise()).release, is_slow=False
    )


def _other_runners(target: Target) -> dict[str, StepRunner]:
    eta, noise = target.etas()[0], jnp.asarray(target.zero_noise())

    def release(records: Any, rows: Any) -> Any:
        return step_once(target, eta, 0, records, jnp.asarray(rows), noise).release

    def as_constant(records: Any, rows: Any) -> Any:
        return jax.jit(lambda: release(records, rows))()

    return {
        "compiled quickly": StepRunner(target, jit_quickly(release), is_slow=False),
        "on one thread": StepRunner(target, jit_on_one_thread(release), is_slow=False),
        "eager": StepRunner(target, release, is_slow=True),
        "compiled as a constant": StepRunner(target, as_constant, is_slow=True),
    }


def _bystanders(path: CodePath) -> dict[str, list[int]]:
    """Row numbers of those who are in a batch with the canary, by name."""
    first = len(path.names)
    return {
        _WITH_OTHERS: list(range(first + 1, first + _ROWS)),
        "alone": [],
        "with one other row": [first],
        "with a long row five times": [path.row_number(CANARY)] * (_ROWS - 1),
    }


def _make_batch(target: Target, canary: str | None, others: list[int]) -> tuple[Any, np.ndarray]:
    """Six records and row numbers, with the canary in the first place, or with nobody there.

    Records that are not drawn hold something.
    """
    path = target.path
    first = len(path.names) if canary is None else path.row_number(canary)
    filler = [0] * (_ROWS - 1 - len(others))
    rows = np.array([*range(1 + len(others)), *[EMPTY] * len(filler)], np.int32)
    rows[0] = EMPTY if canary is None else 0
    return target.prepare(take(path.rows, [first, *others, *filler])), rows


def _sensitivity(target: Target, name: str, runner: StepRunner) -> Finding:
    worst = _LargestShare(target.plan.clip_norm)
    for bystanders in [_WITH_OTHERS] if runner.is_slow else _bystanders(target.path):
        absent = runner.release(None, bystanders)
        for canary in _FEW_CANARIES if runner.is_slow else target.path.names:
            shift = np.linalg.norm(runner.release(canary, bystanders) - absent)
            worst.update([shift], [f"{canary}, {bystanders}"])
    return worst.finding(f"share of one row, {name}")


class _LargestShare:
    """The largest of many shares."""

    def __init__(self, clip_norm: float) -> None:
        self._clip_norm = clip_norm
        self._share, self._where = -1.0, ""

    def update(self, shares: Sequence[Any] | np.ndarray, where: Sequence[str]) -> None:
        values = np.nan_to_num(np.asarray(shares, float), nan=np.inf)
        if values.max() > self._share:
            self._share, self._where = float(values.max()), where[int(values.argmax())]

    def finding(self, question: str) -> Finding:
        observed = f"at most {self._share / self._clip_norm:.6f} C ({self._where})"
        return Finding.rule(CHECK, question, observed, holds=self._share <= self._clip_norm)


def _runners_agree(target: Target, runners: list[StepRunner]) -> Finding:
    apart = 0.0
    for canary in _FEW_CANARIES:
        first, *others = (runner.release(canary, _WITH_OTHERS) for runner in runners)
        apart = max(apart, *(float(np.max(np.abs(first - other))) for other in others))
    # Each may round to the other side of the lattice, no more.
    clip_norm = target.plan.clip_norm
    holds = apart <= 2e-4 * clip_norm
    observed = f"to {apart / clip_norm:.1e} C"
    return Finding.rule(CHECK, "all ways agree", observed, holds=holds)


class _VectorizedChecks:
    """Thousands of batches as one program, vectorised as many fits are."""

    def __init__(self, target: Target) -> None:
        self._target, self._path = target, target.path
        self._program = VectorizedRuns(target)
        rows: Records = concat([self._path.rows, fuzzed_rows(self._path.ordinary, _FUZZED_ROWS)])
        self._steps = target.plan.num_steps
        self._records = jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (self._steps, *leaf.shape)), target.prepare(rows)
        )

    def _releases(self, rows: np.ndarray) -> np.ndarray:
        """Of batches [batches, rows], at every step: [batches, steps, r].

        All calls have the same shape, and share one program.
        """
        chunks = []
        for start in range(0, len(rows), _FUZZED_ROWS):
            part = rows[start : start + _FUZZED_ROWS]
            padded = np.pad(part, [(0, _FUZZED_ROWS - len(part)), (0, 0)], constant_values=EMPTY)
            by_step = np.broadcast_to(padded[:, None], (_FUZZED_ROWS, self._steps, _ROWS))
            view = self._program.run_without_noise(self._records, by_step)
            chunks.append(view.release[: len(part)])
        return np.concatenate(chunks)

    def sensitivity(self) -> Finding:
        names, worst = self._path.names, _LargestShare(self._target.plan.clip_norm)
        for bystanders, others in _bystanders(self._path).items():
            rows = np.full((len(names) + 1, _ROWS), EMPTY)
            rows[:-1, 0] = np.arange(len(names))
            rows[:, 1 : 1 + len(others)] = others
            releases = self._releases(rows).astype(float)
            shifts = np.linalg.norm(releases[:-1] - releases[-1], axis=2)
            worst.update(_largest(shifts), [f"{name}, {bystanders}" for name in names])
        return worst.finding("share of one row, side by side")

    def fuzzed_rows(self) -> Finding:
        worst = _LargestShare(self._target.plan.clip_norm)
        rows = np.full((_FUZZED_ROWS, _ROWS), EMPTY)
        first = len(self._path.rows[0])
        rows[:, 0] = first + np.arange(_FUZZED_ROWS)
        shifts = np.linalg.norm(self._releases(rows).astype(float), axis=2)
        worst.update(_largest(shifts), [f"row {i}" for i in range(_FUZZED_ROWS)])
        return worst.finding(f"share of one row, {_FUZZED_ROWS} random ones")

    def nonfinite_rows_count_for_nothing(self) -> Finding:
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
            rows[:, 0] = self._path.row_number(name)
            differ += int(np.any(self._releases(rows) != without, axis=(1, 2)).sum())
        tried = len(self._path.not_finite) * _RANDOM_BATCHES
        observed = f"{differ} of {tried} runs differ from those without it"
        return Finding.rule(CHECK, "a row not finite is nothing", observed, holds=differ == 0)


def _largest(by_step: np.ndarray) -> np.ndarray:
    """The largest share over the steps; one that is no number is larger than any."""
    return np.nan_to_num(by_step, nan=np.inf).max(axis=1)
