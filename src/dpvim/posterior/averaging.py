r"""Averages over a window of the trace, and the variance that noise gives them.

The last iterate and the average of a window are both estimates of the optimum. The first one
varies like the trace, the second one less by the window's effective sample size.

>>> trace = np.array([[9.0, 9.0], [1.0, 9.0], [2.0, 3.0], [3.0, 4.0]])
>>> window_mean(trace, [3, 2])
array([2. , 3.5])
>>> window_variance(trace, [3, 2])
array([1. , 0.5])
>>> (mean_variance(trace, [3, 2]) < window_variance(trace, [3, 2])).all()
np.True_

Parameters with windows of equal length are worked on together, each window in two passes and in
double precision: a trace of 1e6 plus or minus 1e-3 keeps its variance. A NaN or an infinity in a
window gives NaN for that parameter and leaves the others alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from jaxtyping import Float, Int

from dpvim import _validate
from dpvim.posterior.convergence import PerParameter, Snapshots, effective_sample_size

Lengths: TypeAlias = Int[np.ndarray, " p"] | list[int] | int


def window_mean(trace: Snapshots, lengths: Lengths) -> PerParameter:
    r"""The average :math:`\bar y = \frac 1 w \sum_{t > T - w} y_t` of each parameter's window.

    Args:
        trace: Snapshots of the parameters.
        lengths: Number of last snapshots to use, for each parameter or for all of them.
    """
    return _by_length(trace, lengths, lambda window: window.mean(axis=0))


def window_variance(trace: Snapshots, lengths: Lengths) -> PerParameter:
    r"""Variance of one iterate, :math:`\frac{1}{w - 1} \sum_{t > T - w} (y_t - \bar y)^2`.

    The variance that noise adds if the estimate is the last iterate; 0 for a window of one.
    """
    return _by_length(trace, lengths, _variance)


def mean_variance(trace: Snapshots, lengths: Lengths) -> PerParameter:
    r"""Variance of `window_mean`: that of one iterate over the effective sample size.

    The variance that noise adds if the estimate is the window's average. Like the effective sample
    size it is too optimistic for windows that are short in autocorrelation times.
    """
    return _by_length(trace, lengths, _mean_variance)


def window_covariance(trace: Snapshots, length: int) -> Float[np.ndarray, "p p"]:
    """Covariance of one iterate in the last `length` snapshots; 0 for a window of one."""
    window = _window(trace, length)
    centred = window - window.mean(axis=0)
    return centred.T @ centred / max(1, length - 1)


def mean_covariance(trace: Snapshots, length: int) -> Float[np.ndarray, "p p"]:
    r"""Covariance of the average of the last `length` snapshots, autocorrelation and all.

    .. math:: C = D^{1/2} R D^{1/2}

    D is the diagonal of `mean_variance`, R the correlation matrix of the means of
    :math:`\lfloor \sqrt w \rfloor` consecutive batches. The batches show how the parameters move
    together over long times; single iterates correlate differently if some parameters are
    slower than others. Their variances are not used: batches that are not much longer than an
    autocorrelation time make them too small.

    C is positive semidefinite. Its rank is less than the number of batches, so where there are
    more parameters it is for adding to a covariance, not for inverting. Windows of fewer than four
    snapshots, and parameters that do not move, have no correlations.
    """
    window = _window(trace, length)
    num_batches = math.isqrt(length)
    size = length // num_batches
    means = window[-num_batches * size :].reshape(num_batches, size, -1).mean(axis=1)
    scores = means - means.mean(axis=0)
    norms = np.sqrt(np.square(scores).sum(axis=0))
    scores /= np.where(norms > 0, norms, 1.0)
    correlation = scores.T @ scores
    np.fill_diagonal(correlation, 1.0)
    scale = np.sqrt(_mean_variance(window))
    return correlation * np.outer(scale, scale)


def _variance(window: Snapshots) -> PerParameter:
    return window.var(axis=0, ddof=1) if len(window) > 1 else np.zeros(window.shape[1])


def _mean_variance(window: Snapshots) -> PerParameter:
    return _variance(window) / effective_sample_size(window)


def _by_length(
    trace: Snapshots, lengths: Lengths, statistic: Callable[[Snapshots], PerParameter]
) -> PerParameter:
    per_parameter = np.broadcast_to(np.asarray(lengths), trace.shape[1:])
    result = np.empty(trace.shape[1])
    for length in np.unique(per_parameter):
        columns = np.flatnonzero(per_parameter == length)
        result[columns] = statistic(_window(trace, length, columns))
    return result


def _window(
    trace: Snapshots, length: int, columns: Int[np.ndarray, " q"] | slice = slice(None)
) -> Snapshots:
    if _validate.positive_int("window", length) > len(trace):
        raise ValueError(
            f"window: expected at most the {len(trace)} snapshots of the trace, got {length}. "
            "Choose a shorter window, or keep more snapshots."
        )
    window = trace[-length:, columns].astype(float)
    window[~np.isfinite(window)] = np.nan
    return window
