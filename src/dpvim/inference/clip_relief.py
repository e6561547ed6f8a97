r"""A smaller metric for a steered run, so that long gradients are not clipped too much.

In the metric of the posterior the clip norm :math:`c \sqrt{d/N}` suits norms with ordinary tails.
Some data have others: a record that is one of few with a rare level tells much about its
coefficient, and its whitened gradient is many times as long as most. In a metric that is k times
smaller all norms are, and the noise counts k times as much. k makes least

.. math:: d\, \nu^2 k^2 + \Bigl(0.3\, C \sum_x (|g_x| / C - k)_+\Bigr)^2,

the squares of the noise of the answer and of the shift by the clip. Counts of norms were released,
so this is post-processing.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float

from dpvim.inference.variants import CLIP_SHIFT
from dpvim.inference.windows import windows_of
from dpvim.privacy.norm_counts import COUNT_SHARE, NORM_BIN_ENDS
from dpvim.privacy.plan import Plan

# Counts of norms far above the clip norm are believed if they are so many standard deviations
# above zero: there a little noise would be multiplied by a large number. Norms that have a mean
# have tails that fall by half an octave, so that much is believed of other counts.
_FAR, _BELIEVED = 4.0, 3.0
# The metric shrinks for counts that are so many above zero: there are dozens of them in a run, and
# one that noise has made would widen all intervals.
_CERTAIN = 5.0
# By how much the metric may change after one window, and in all.
_CHANGES = 2.0 ** np.arange(-1.0, 1.01, 0.25)
_MOST = 8.0


def count_error(plan: Plan, steps: float) -> float:
    """Standard deviation of a count, in records, from the mean of so many releases."""
    unit = plan.clip_norm * plan.sampling_prob * math.sqrt(COUNT_SHARE)
    return plan.noise_stddev / unit / math.sqrt(steps)


def believed_counts(counts: Float[np.ndarray, " bins"], error: float) -> Float[np.ndarray, " bins"]:
    """Counts without what is likely to be noise above the clip norm."""
    ends, is_believed = np.array(NORM_BIN_ENDS), counts > _BELIEVED * error
    found = np.where((ends < _FAR) | is_believed, np.maximum(counts, 0.0), 0.0)
    for k in np.flatnonzero((ends > 1) & ~is_believed):
        found[k] = min(found[k], 0.5 * found[k - 1])
    return found


def excess(counts: Float[np.ndarray, " bins"], clip: float = 1.0) -> float:
    """The length of all gradients above `clip`, both in units of the clip norm."""
    middles = math.sqrt(2) * np.array(NORM_BIN_ENDS)
    return float(np.sum(counts * np.maximum(middles - clip, 0.0)))


def relief(
    counts: Float[np.ndarray, "windows bins"],
    steps: Float[np.ndarray, " windows"],
    plan: Plan,
    dim: int,
) -> float:
    """By how much the metric is smaller than the posterior's, after the windows so far.

    Args:
        counts: What the windows of a steered run released, in records.
        steps: Their numbers of steps; zero for windows that were not finished.
        plan: The plan of the run.
        dim: Number of coordinates.
    """
    windows = windows_of(plan.num_steps)
    narrow = sum(window.length for window in windows if not window.is_wide)
    noise = (plan.noise_stddev / plan.sampling_prob) ** 2 / (1 - COUNT_SHARE) / narrow
    found = 1.0
    for window, row, taken in zip(windows, counts, steps, strict=True):
        if window.is_wide and not window.searches and taken > 0:
            change = _change(row, count_error(plan, taken), plan.clip_norm, dim * noise)
            found = min(max(1.0, found * change), _MOST)
    return found


def _change(
    counts: Float[np.ndarray, " bins"], error: float, clip_norm: float, noise: float
) -> float:
    """The factor that one window asks for."""
    # It shrinks only for what cannot be noise: ordinary data are left alone.
    certain = np.where(np.array(NORM_BIN_ENDS) < 1, counts, counts - _CERTAIN * error)
    change = _best_change(certain.clip(min=0.0), clip_norm, noise)
    if change > 1:
        return change
    return min(1.0, _best_change(believed_counts(counts, error), clip_norm, noise))


def _best_change(counts: Float[np.ndarray, " bins"], clip_norm: float, noise: float) -> float:
    """The k with the least sum of squares of noise and shift."""
    shifts = [CLIP_SHIFT * clip_norm * excess(counts, k) for k in _CHANGES]
    return float(_CHANGES[np.argmin(noise * np.square(_CHANGES) + np.square(shifts))])
