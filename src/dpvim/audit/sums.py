"""Sums of many rows: right, on the lattice, and the only thing that leaves a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import numpy as np

from dpvim.audit.canaries import take
from dpvim.audit.findings import Finding
from dpvim.audit.paths import CANARY, OPPOSITE
from dpvim.audit.target import AdversaryView, Target
from dpvim.privacy.sampling import EMPTY

_ROWS = 6
_MANY_ROWS = 5000
# More than a piece of a batch, and no multiple of one.
_ALL_ROWS = 1300
# Gradients in single precision, and the rest of what the clip leaves for roundings.
_TOLERANCE = 3e-4

Step = Callable[..., AdversaryView]
"""``(records, rows, noise) -> AdversaryView``, the first step of a target."""


def sum_checks(check: str, target: Target, step: Step) -> Iterator[Finding]:
    """Checks of sums of a few ordinary rows."""
    sums = _SumChecks(check, target, step)
    yield sums.shares_match_autodiff()
    yield sums.on_the_lattice()
    yield sums.nothing_but_the_release()


def full_batch_checks(check: str, target: Target, step: Step) -> Iterator[Finding]:
    """Checks of sums of thousands of rows."""
    sums = _SumChecks(check, target, step)
    yield sums.many_rows()
    yield sums.every_row()


class _SumChecks:
    def __init__(self, check: str, target: Target, step: Step) -> None:
        self._check, self._target, self._step = check, target, step
        self._path, self._plan = target.path, target.plan
        self._shares = target.shares()[0]  # of the first step
        self._zero_noise = target.zero_noise()

    def _finding(self, question: str, observed: str, *, holds: bool) -> Finding:
        return Finding.rule(self._check, question, observed, holds=holds)

    def _release(self, numbers: np.ndarray) -> np.ndarray:
        """The sum of rows with these numbers, without noise."""
        return self._release_of(numbers, np.arange(len(numbers), dtype=np.int32))

    def _release_of(
        self, numbers: np.ndarray, rows: np.ndarray, noise: np.ndarray | None = None
    ) -> np.ndarray:
        records = self._target.prepare(take(self._path.rows, numbers))
        noise = self._zero_noise if noise is None else noise
        return self._step(records, rows, noise).release.astype(float)

    def _batch(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A batch of six with these rows; the first row of all stands where nobody is."""
        filled = np.append(numbers, np.zeros(_ROWS - len(numbers), int))
        return filled, np.where(np.arange(_ROWS) < len(numbers), np.arange(_ROWS), EMPTY)

    def _error(self, release: np.ndarray, numbers: np.ndarray) -> float:
        """Distance from the expected sum in units of C for each row, beyond the lattice's part.

        Rows are clipped to a little less than C, to leave room for the rounding of their sum.
        """
        distance = float(np.linalg.norm(release - self._shares[numbers].sum(axis=0)))
        rounding = np.sqrt(len(self._zero_noise)) * self._plan.noise_grid
        return max(0.0, distance / len(numbers) - rounding) / self._plan.clip_norm

    def shares_match_autodiff(self) -> Finding:
        """A clipped sum is that of the gradients, as autodiff in double precision has them."""
        first = len(self._path.names)
        error = 0.0
        for row in range(first, len(self._path.rows[0])):
            numbers = np.array([row])
            filled, rows = self._batch(numbers)
            error = max(
                error, self._error(self._release_of(filled, rows.astype(np.int32)), numbers)
            )
        observed = f"ordinary rows differ from autodiff by {error:.1e} C at most"
        return self._finding("shares are right", observed, holds=bool(error < _TOLERANCE))

    def many_rows(self) -> Finding:
        """Thousands of rows at the clip in one direction: the sum is right, and one more adds C."""
        clip_norm = self._plan.clip_norm
        long = [self._path.row_number(name) for name in (CANARY, OPPOSITE)]
        longest = max(long, key=lambda row: float(np.linalg.norm(self._shares[row])))
        numbers = np.full(_MANY_ROWS, longest)
        rows = np.arange(_MANY_ROWS, dtype=np.int32)
        without = np.where(rows < _MANY_ROWS - 1, rows, EMPTY).astype(np.int32)
        whole = self._release_of(numbers, rows)
        # Single precision holds a release to a ten-millionth of itself. With noise that takes the
        # sum away releases are small, and one row's share is exact.
        noise = -np.rint(whole / self._plan.noise_grid).astype(np.int32)
        small = [self._release_of(numbers, drawn, noise) for drawn in (rows, without)]
        shift, size = float(np.linalg.norm(small[0] - small[1])), float(np.linalg.norm(whole))
        holds = shift <= clip_norm and self._error(whole, numbers) < _TOLERANCE
        each = f"one of them adds {shift / clip_norm:.6f} C"
        observed = f"{_MANY_ROWS} rows sum to {size / clip_norm:.1f} C, {each}"
        return self._finding("many rows in one direction", observed, holds=holds)

    def every_row(self) -> Finding:
        """A step on all rows, of which no numbers are drawn."""
        first, count = len(self._path.names), len(self._path.ordinary[0])
        numbers = first + np.arange(_ALL_ROWS) % count
        error = self._error(self._release_of(numbers, np.zeros(0, np.int32)), numbers)
        observed = f"a step on all of {_ALL_ROWS} rows differs from their sum by {error:.1e} C each"
        return self._finding("every row taken", observed, holds=bool(error < _TOLERANCE))

    def on_the_lattice(self) -> Finding:
        """A sum of numbers with many digits, without noise, must have no bits below the grid."""
        ordinary = len(self._path.names) + np.arange(3 * _ROWS).reshape(3, _ROWS)
        releases = np.stack([self._release(numbers) for numbers in ordinary])
        below = int(np.sum(releases % self._plan.noise_grid != 0))
        observed = f"{below} of {releases.size} sums have bits below the grid"
        return self._finding("sums lie on the lattice", observed, holds=below == 0)

    def nothing_but_the_release(self) -> Finding:
        """Two batches of different size, with noise that makes their releases equal.

        The parameters after the step must then be the same to the last bit: whatever leaves the
        step is a function of the release. A division by the realised batch size is not.
        """
        question = "nothing but the release"
        rows = len(self._path.names) + np.arange(_ROWS)
        error = 0.0
        reference = self._view(rows[:1], self._zero_noise)
        for size in range(2, _ROWS + 1):
            noiseless = self._view(rows[:size], self._zero_noise)
            difference = reference.release.astype(float) - noiseless.release.astype(float)
            noise = np.rint(difference / self._plan.noise_grid).astype(np.int32)
            view = self._view(rows[:size], noise)
            if not np.array_equal(view.release, reference.release):
                return self._finding(question, "sum and noise do not add up", holds=False)
            error = max(error, float(np.max(np.abs(view.update - reference.update))))
        observed = f"updates for equal releases differ by {error:.1e}"
        return self._finding(question, observed, holds=error == 0)

    def _view(self, numbers: np.ndarray, noise: np.ndarray) -> AdversaryView:
        filled, rows = self._batch(numbers)
        records = self._target.prepare(take(self._path.rows, filled))
        return jax.tree.map(np.asarray, self._step(records, rows.astype(np.int32), noise))
