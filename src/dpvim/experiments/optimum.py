"""Optimum of the ELBO of a regression in the mean-field family, without privacy and exactly.

Under a mean-field Gaussian the linear predictor of a record is normal with variance x^2 s^2, so
that every expectation is one-dimensional. By the theorems of Bonnet and Price the optimum has

.. math:: s_j^{-2} = \\lambda_j + \\sum_n x_{nj}^2 E[-l_n''], \\qquad
          \\lambda_j m_j = \\sum_n x_{nj} E[l_n'].

Newton steps for m and the fixed point of s, in turn, find it to machine precision, where a
stochastic fit leaves an error of its own.

>>> import numpy as np
>>> rng = np.random.default_rng(0)
>>> X = rng.normal(size=(500, 2))
>>> found = mean_field_optimum(X, rng.poisson(np.exp(X @ [0.5, -0.2])), "poisson")
>>> bool(np.abs(found.loc - [0.5, -0.2]).max() < 4 * found.scale.max())
True
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy import special

_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(24)
_WEIGHTS = _WEIGHTS / _WEIGHTS.sum()
_MAX_ITERATIONS = 100


class MeanField(NamedTuple):
    """Means and standard deviations of independent Gaussians."""

    loc: Float[np.ndarray, " d"]
    scale: Float[np.ndarray, " d"]


Moments = tuple[np.ndarray, np.ndarray]


def _logistic(y: np.ndarray, mean: np.ndarray, scale: np.ndarray) -> Moments:
    fitted = special.expit(mean[:, None] + scale[:, None] * _NODES)
    return y - fitted @ _WEIGHTS, (fitted * (1 - fitted)) @ _WEIGHTS


def _poisson(y: np.ndarray, mean: np.ndarray, scale: np.ndarray) -> Moments:
    rate = np.exp(mean + scale**2 / 2)
    return y - rate, rate


# E[l'] and E[-l''] of a record, from mean and standard deviation of its linear predictor.
_MOMENTS: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray], Moments]] = {
    "logistic": _logistic,
    "poisson": _poisson,
}


def mean_field_optimum(
    X: Float[np.ndarray, "n d"],
    y: np.ndarray,
    kind: str,
    *,
    prior_scale: float | Float[np.ndarray, " d"] = 1.0,
    offset: float | Float[np.ndarray, " n"] = 0.0,
) -> MeanField:
    """The mean-field Gaussian with the largest ELBO, for coefficients with a normal prior.

    Args:
        X, y: Records.
        kind: ``logistic`` or ``poisson``.
        prior_scale: Standard deviations of the prior, whose mean is zero.
        offset: Added to the linear predictors.
    """
    X = np.asarray(X, float)
    squares = X**2
    dim = X.shape[1]
    prior = np.broadcast_to(1.0 / np.square(prior_scale), (dim,))
    loc, scale = np.zeros(dim), np.full(dim, 0.01)
    for _ in range(_MAX_ITERATIONS):
        slope, curvature = _MOMENTS[kind](y, X @ loc + offset, np.sqrt(squares @ scale**2))
        step = np.linalg.solve((X.T * curvature) @ X + np.diag(prior), X.T @ slope - prior * loc)
        # A Poisson regression may overshoot from zero.
        loc = loc + step / max(1.0, np.abs(step).max())
        scale = 1 / np.sqrt(squares.T @ curvature + prior)
        if np.abs(step / scale).max() < 1e-8:
            return MeanField(loc, scale)
    raise RuntimeError(f"no optimum was found in {_MAX_ITERATIONS} Newton steps.")
