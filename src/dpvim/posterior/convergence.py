r"""Convergence tests: for each parameter, a window of last snapshots that has converged.

A trace goes from its initial value to the optimum and then wanders around it. Averaging wants all
of the second part and nothing of the first. The trace is a DP output: looking at it costs nothing.

>>> noise = np.random.default_rng(0).normal(size=(2000, 2))
>>> auto_windows(noise + 20 * np.exp(-np.arange(2000)[:, None] / 40))
Windows(lengths=array([1414, 1414]), converged=array([ True,  True]))
>>> auto_windows(noise + np.linspace(0, 300, 2000)[:, None]).converged
array([False, False])

A rule tries a few lengths and takes the longest window that passes:

========= =================================== =====================================================
``slope`` regression slope below 0.05         the paper's; in the units of the parameter
``rhat``  split R-hat below 1.05              sees a short transient by its ranks, not its distance
``auto``  start agrees with end; window of 50 free of units; the one to use
          autocorrelation times or more
========= =================================== =====================================================

A parameter whose windows all fail is marked as not converged and gets the shortest one (under
``auto`` the one with the largest effective sample size). A NaN or an infinity in its trace has the
same effect, on this parameter only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
import scipy
from jaxtyping import Bool, Float, Int

from dpvim import _validate

Snapshots: TypeAlias = Float[np.ndarray, "snapshots p"]
PerParameter: TypeAlias = Float[np.ndarray, " p"]

# A window of so many autocorrelation times shows how far noise moves its average.
MIN_TIMES = 50.0
# Entries that are worked on at a time: a block of parameters and its transforms stay small.
_BLOCK_ENTRIES = 2**19


class Windows(NamedTuple):
    """Number of last snapshots to use for each parameter, and if they pass the convergence test."""

    lengths: Int[np.ndarray, " p"]
    converged: Bool[np.ndarray, " p"]


def slope_windows(
    trace: Snapshots, *, threshold: float = 0.05, min_window: int = 10, num_candidates: int = 20
) -> Windows:
    r"""The longest window with :math:`|\sum_t (x_t - \bar x) y_t| / \sum_t (x_t - \bar x)^2 < c`.

    Here y is a parameter's trace in the window and x goes from 0 to 1 over the window: the test of
    section 3.2 of the paper. The slope of a converged trace is noise with standard deviation
    :math:`s \sqrt{12 \tau / w}` (s that of the trace, w the window, :math:`\tau` the
    autocorrelation time), so a fixed bound is lenient where s is small and harsh where it is large.

    Args:
        trace: Snapshots of the parameters.
        threshold: The bound c, in the units of the parameters.
        min_window: No window is shorter, unless the trace is.
        num_candidates: Tried are 1/n, 2/n, ..., n/n of the trace for this n.
    """
    _validate.positive("threshold", threshold)
    steps = np.arange(1, _validate.positive_int("num_candidates", num_candidates) + 1)
    lengths = _candidate_lengths(trace, steps / num_candidates, min_window)
    return _longest_passing(trace, lengths, lambda window: np.abs(_slope(window)) < threshold)


def rhat_windows(
    trace: Snapshots, *, threshold: float = 1.05, min_window: int = 10, num_candidates: int = 10
) -> Windows:
    """The longest window whose `split_rhat` is below the threshold.

    Ranks do not see distance: a transient in the first twentieth of a window passes even if it is
    so far away that it spoils the mean. `auto_windows` does not have this fault.

    Args:
        trace: Snapshots of the parameters.
        threshold: Bound on the split R-hat.
        min_window: No window is shorter, unless the trace is.
        num_candidates: So many are tried, each shorter by the square root of 2 than the last one.
    """
    _validate.positive("threshold", threshold)
    lengths = _candidate_lengths(trace, _geometric_fractions(num_candidates), min_window)
    return _longest_passing(trace, lengths, lambda window: split_rhat(window) < threshold)


def auto_windows(
    trace: Snapshots,
    *,
    min_times: float = MIN_TIMES,
    max_drift: float = 2.0,
    min_window: int = 10,
    num_candidates: int = 10,
) -> Windows:
    r"""The longest window with drift below `max_drift` and :math:`w / \tau` at least `min_times`.

    The drift is `drift_score`; :math:`w / \tau` is `effective_sample_size`. Neither has units.
    Where no window passes, the one without drift that has the largest effective sample size is
    taken (a slow parameter wants a long window), or the shortest one if all of them drift.

    On 2000 snapshots of an autoregressive process that starts up to 50 standard deviations away
    the root mean squared error of the average is at most 1.3 times that of the best fixed window
    (a test). `min_times` is set so high because short pieces of a slow walk often look mixed;
    benchmarks/coverage.py measures the coverage of intervals that this rule calls converged.

    Args:
        trace: Snapshots of the parameters.
        min_times: Length of a converged window in autocorrelation times.
        max_drift: Bound on the drift, in standard errors.
        min_window: No window is shorter, unless the trace is.
        num_candidates: So many are tried, each shorter by the square root of 2 than the last one.
    """
    _validate.positive("min_times", min_times)
    _validate.positive("max_drift", max_drift)
    lengths = _candidate_lengths(trace, _geometric_fractions(num_candidates), min_window)
    usable = np.flatnonzero(np.isfinite(trace).all(axis=0))
    sizes = np.zeros((len(lengths), trace.shape[1]))
    for row, length in enumerate(lengths):
        window = trace[-length:, usable]
        steady = drift_score(window) < max_drift
        sizes[row, usable[steady]] = effective_sample_size(window[:, steady])
    passed = (sizes >= min_times) & (lengths > 1)[:, None]
    longest = np.where(passed, np.arange(len(lengths))[:, None], -1).max(axis=0)
    converged = longest >= 0
    return Windows(lengths[np.where(converged, longest, sizes.argmax(axis=0))], converged)


WINDOW_RULES: dict[str, Callable[..., Windows]] = {
    "slope": slope_windows,
    "rhat": rhat_windows,
    "auto": auto_windows,
}


def split_rhat(window: Snapshots, *, num_pieces: int = 2) -> PerParameter:
    r"""Rank-normalised split R-hat, :math:`\sqrt{(B / W + m - 1) / m}`, of one series in pieces.

    B / m is the variance of the means of the pieces, W the mean of their variances, m their length;
    all of normal scores of ranks. The larger one of two is returned: of the values, and of their
    distances to the median (Vehtari et al. 2021). What does not fill a piece is left out at the
    old end. Two halves are what split R-hat means for one chain. ArviZ refuses one chain; given
    the halves as two chains it splits them again, which is ``num_pieces=4``.

    Edge cases: a constant series has 1; pieces that are constant and differ have infinity, but for
    rounding; fewer than two pieces or two snapshots in each, or a value that is not finite, NaN.
    """
    length = len(window) // _validate.positive_int("num_pieces", num_pieces)
    if num_pieces < 2 or length < 2:
        return np.full(window.shape[1], np.nan)

    def rhat(values: Snapshots) -> PerParameter:
        ranks = scipy.stats.rankdata(values, axis=0)
        scores = scipy.special.ndtri((ranks - 0.375) / (len(values) + 0.25))
        pieces = scores.reshape(num_pieces, length, -1)
        between = pieces.mean(axis=1).var(axis=0, ddof=1)
        within = pieces.var(axis=1, ddof=1).mean(axis=0)
        constant = (values == values[0]).all(axis=0)
        return np.where(constant, 1.0, np.sqrt(_ratio(between, within) + 1 - 1 / length))

    def larger(block: Snapshots) -> PerParameter:
        return np.maximum(rhat(block), rhat(np.abs(block - np.median(block, axis=0))))

    return _by_blocks(window[-num_pieces * length :], larger)


def effective_sample_size(window: Snapshots) -> PerParameter:
    r"""Number :math:`w / \tau` of independent draws whose mean varies like that of the window.

    A window cannot show correlations longer than itself, so the result is too large for short
    ones: on average by 10 % at twenty autocorrelation times, by 30 % at ten, threefold at two.

    Edge cases: a constant series has w; a value that is not finite gives NaN.
    """
    return len(window) / autocorrelation_time(window)


def autocorrelation_time(window: Snapshots) -> PerParameter:
    r"""The time :math:`\tau = 1 + 2 \sum_{k \ge 1} \rho_k`, in snapshots.

    It is :math:`(1 + \rho) / (1 - \rho)` if :math:`\rho_k = \rho^k`. The sum of the estimates
    :math:`\rho_{2k} + \rho_{2k+1}` ends where they turn negative, and they are kept from rising
    (Geyer's initial monotone sequence). Series that alternate have less than 1, but no less than
    :math:`1 / \log_{10} w`; a constant one has 1.
    """
    return _by_blocks(window, _autocorrelation_time)


def drift_score(window: Snapshots) -> PerParameter:
    r"""Distance of the oldest tenth from the newest half, in standard errors (after Geweke 1992).

    .. math:: |\bar y_{old} - \bar y_{new}| / \sqrt{s^2 \tau (1 / w_{old} + 1 / w_{new})}

    The variance :math:`s^2` and the autocorrelation time :math:`\tau` are those of the newest
    half: a transient at the old end cannot hide behind the variance it makes.

    Edge cases: a constant series has 0; one that is constant in its newest half only has infinity,
    but for rounding; a value that is not finite gives NaN.
    """

    def score(block: Snapshots) -> PerParameter:
        deviations = block - block[0]
        old, new = deviations[: -(-len(block) // 10)], deviations[len(block) // 2 :]
        variance = new.var(axis=0) * _autocorrelation_time(new) * (1 / len(old) + 1 / len(new))
        return np.sqrt(_ratio((old.mean(axis=0) - new.mean(axis=0)) ** 2, variance))

    return _by_blocks(window, score)


def _autocorrelation_time(block: Snapshots) -> PerParameter:
    length = len(block)
    # Relative to its first snapshot a constant series is exactly zero.
    deviations = block - block[0]
    deviations -= deviations.mean(axis=0)
    # Padding to twice the length keeps the end of the series from being correlated with its start.
    padded = scipy.fft.next_fast_len(2 * length, real=True)
    spectrum = scipy.fft.rfft(deviations, padded, axis=0)
    autocovariance = scipy.fft.irfft(np.abs(spectrum) ** 2, padded, axis=0)
    pairs = autocovariance[: length - 1 : 2] + autocovariance[1:length:2]
    # Clamped at zero, a running minimum stays there: it ends the sum and keeps it monotone.
    total = np.minimum.accumulate(np.maximum(pairs, 0.0), axis=0).sum(axis=0)
    time = np.where(autocovariance[0] == 0, 1.0, 2 * _ratio(total, autocovariance[0]) - 1)
    return np.maximum(time, 1 / max(1.0, math.log10(length)))


def _slope(window: Snapshots) -> PerParameter:
    regressor = np.linspace(-0.5, 0.5, len(window))
    weights = regressor / np.square(regressor).sum()
    return _by_blocks(window, lambda block: weights @ block)


def _ratio(numerator: PerParameter, denominator: PerParameter) -> PerParameter:
    """a / b with 0 / 0 = 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(numerator == 0, 0.0, numerator / denominator)


def _by_blocks(window: Snapshots, statistic: Callable[[Snapshots], PerParameter]) -> PerParameter:
    """A statistic of each parameter, in double precision, for a few of them at a time."""
    result = np.empty(window.shape[1])
    width = max(1, _BLOCK_ENTRIES // len(window))
    for start in range(0, len(result), width):
        columns = slice(start, start + width)
        with np.errstate(invalid="ignore"):
            block = window[:, columns].astype(float)
            finite = np.isfinite(block).all(axis=0)
            result[columns] = np.where(finite, statistic(block), np.nan)
    return result


def _candidate_lengths(
    trace: Snapshots, fractions: Float[np.ndarray, " n"], min_window: int
) -> Int[np.ndarray, " candidates"]:
    """Window lengths in ascending order, none below `min_window`, none beyond the trace."""
    if trace.ndim != 2 or len(trace) == 0:
        raise ValueError(
            f"trace: expected an array [snapshots, parameters] with at least one snapshot, got "
            f"shape {trace.shape}. Flatten what a snapshot holds into one axis."
        )
    shortest = min(_validate.positive_int("min_window", min_window), len(trace))
    return np.unique(np.maximum(np.rint(len(trace) * fractions).astype(int), shortest))


def _geometric_fractions(num_candidates: int) -> Float[np.ndarray, " n"]:
    """1, 2^(-1/2), 2^(-1), ..."""
    return 2.0 ** (-np.arange(_validate.positive_int("num_candidates", num_candidates)) / 2)


def _longest_passing(
    trace: Snapshots,
    lengths: Int[np.ndarray, " candidates"],
    passes: Callable[[Snapshots], Bool[np.ndarray, " p"]],
) -> Windows:
    chosen = np.full(trace.shape[1], lengths[0])
    converged = np.zeros(trace.shape[1], dtype=bool)
    undecided = np.flatnonzero(np.isfinite(trace).all(axis=0))
    # Convergence cannot be tested with one snapshot.
    for length in lengths[lengths > 1][::-1]:
        passed = passes(trace[-length:, undecided])
        chosen[undecided[passed]] = length
        converged[undecided[passed]] = True
        undecided = undecided[~passed]
    return Windows(chosen, converged)
