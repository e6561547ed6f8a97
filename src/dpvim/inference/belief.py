r"""The belief of a steered run about place and curvature, and how a window changes it.

A window's releases are regressed on its points: `measure`. `advance` puts the result into the
belief: a Kalman update of the curvature :math:`A = L' H L`, a Newton step, a new L. All of it is a
function of releases, the prior and the plan.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from dpvim.inference.windows import Window

# The logarithm of an eigenvalue of A has a t-distribution a priori, around that of the middle one,
# which is itself around zero: A is the identity where L is right, and may be anything where not.
_LOG_EIGENVALUE_SCALE, _LOG_EIGENVALUE_DF = 0.5, 4.0
_LOG_GRID = np.linspace(-6.0, 6.0, 241)[:, None]
# Eigenvalues above this are taken as they are.
_LARGE_EIGENVALUE = math.exp(5)
# How far the centre moves at most, in widths of the probes; and how fast scales may grow.
_LONGEST_MOVE = 2.0
_MIN_EIGENVALUE = 0.5
# Process noise of the belief about A, relative to its diagonal: always, and for a change of the
# frame (logarithm) or of the centre (in widths of the probes) by one.
_DRIFT, _DRIFT_PER_CHANGE, _MOST_DRIFT = 0.1, 0.5, 2.0
_SURPRISE = 3.0
# Where L is right, few records are clipped. Where it is too large, many are, and their gradients
# tell less of the curvature than there is: scales shrink by the share above this one.
_CLIPPED_TARGET = 0.05


class Belief(NamedTuple):
    """The place of the next window, and what is known about the curvature there.

    Attributes:
        centre: m.
        factor: L, lower triangular.
        curvature: A = L' H L, as measured: symmetric, not always positive.
        variance: Variances of its entries.
        spread: Covariance of the optimum's distance from the centre, in units of L.
    """

    centre: Float[np.ndarray, " d"]
    factor: Float[np.ndarray, "d d"]
    curvature: Float[np.ndarray, "d d"]
    variance: Float[np.ndarray, "d d"]
    spread: Float[np.ndarray, "d d"]

    @classmethod
    def from_prior(cls, loc: np.ndarray, scale: np.ndarray, width: float) -> Belief:
        """Probes of `width` times the approximation are as wide as the prior."""
        dim = len(loc)
        return cls(
            np.array(loc, float),
            np.diag(scale) / width,
            np.zeros((dim, dim)),
            np.full((dim, dim), 1e12),
            width**2 * np.eye(dim),
        )


class Measurement(NamedTuple):
    """A window's regression of whitened gradients on points.

    Attributes:
        steps: Number of steps.
        point, gradient: Means.
        curvature, variance: A and the variances of its entries; only of this window.
        noise: Variance of one whitened gradient, by coordinate: at least the known one.
        residual: Variance about the line, by coordinate, as it was measured.
    """

    steps: int
    point: Float[np.ndarray, " d"]
    gradient: Float[np.ndarray, " d"]
    curvature: Float[np.ndarray, "d d"]
    variance: Float[np.ndarray, "d d"]
    noise: Float[np.ndarray, " d"]
    residual: Float[np.ndarray, " d"]


def measure(
    points: Float[np.ndarray, "n d"], gradients: Float[np.ndarray, "n d"], known_variance: float
) -> Measurement:
    """Regress gradients on points: the slope is minus the curvature."""
    steps, dim = points.shape
    point, gradient = points.mean(axis=0), gradients.mean(axis=0)
    x, g = points - point, gradients - gradient
    inverse = np.linalg.inv(x.T @ x)
    slope = inverse @ (x.T @ g)
    residual_df = steps - dim - 1
    residual = np.square(g - x @ slope).sum(axis=0) / residual_df
    # Only what cannot be chance is more than the known noise.
    noise = np.maximum(known_variance, residual - known_variance * math.sqrt(2 / residual_df))
    entries = np.outer(np.diagonal(inverse), noise)
    variance = 0.25 * (entries + entries.T)
    np.fill_diagonal(variance, np.diagonal(entries))
    curvature = -0.5 * (slope + slope.T)
    return Measurement(steps, point, gradient, curvature, variance, noise, residual)


def shrunk_curvature(
    curvature: Float[np.ndarray, "d d"], variance: Float[np.ndarray, "d d"]
) -> Float[np.ndarray, "d d"]:
    """Shrink the entries off the diagonal by how much of their sum of squares is noise."""
    off = ~np.eye(len(curvature), dtype=bool)
    if not off.any():
        return curvature
    diagonal, error = np.diagonal(curvature), np.sqrt(np.diagonal(variance))
    size = np.maximum(diagonal, error)
    unit = np.outer(size, size)
    squares, noise = np.square(curvature) / unit, variance / unit
    weight = np.where(off, 1 / (noise + 0.1), 0.0)
    signal = max(0.0, float(np.sum(weight * (squares - noise)) / weight.sum()))
    return np.where(off, curvature * signal / (signal + noise + 1e-30), curvature)


def _log_eigenvalue_weights(
    measured: Float[np.ndarray, " d"], error: Float[np.ndarray, " d"], centre: float
) -> Float[np.ndarray, "grid d"]:
    log_weight = -0.5 * np.square((measured - np.exp(_LOG_GRID)) / error)
    away = np.square((_LOG_GRID - centre) / _LOG_EIGENVALUE_SCALE)
    log_weight -= 0.5 * (_LOG_EIGENVALUE_DF + 1) * np.log1p(away / _LOG_EIGENVALUE_DF)
    weight = np.exp(log_weight - log_weight.max(axis=0))
    return weight / weight.sum(axis=0)


def log_eigenvalue_grid() -> Float[np.ndarray, " grid"]:
    """The values that `Spectrum.weights` are for."""
    return _LOG_GRID[:, 0]


class Spectrum(NamedTuple):
    """Eigenvalues of the shrunk curvature as measured, their errors, and their eigenvectors."""

    values: Float[np.ndarray, " d"]
    errors: Float[np.ndarray, " d"]
    vectors: Float[np.ndarray, "d d"]

    @classmethod
    def of(cls, belief: Belief) -> Spectrum:
        """The spectrum of a belief."""
        shrunk = shrunk_curvature(belief.curvature, belief.variance)
        values, vectors = np.linalg.eigh(shrunk)
        squares = np.square(vectors)
        errors = np.sqrt(np.einsum("ik,ij,jk->k", squares, belief.variance, squares))
        return cls(values, np.maximum(errors, 1e-3), vectors)

    def weights(self) -> Float[np.ndarray, "grid d"]:
        """Posterior of each eigenvalue's logarithm on `log_eigenvalue_grid`."""
        middle = np.median(self.values, keepdims=True)
        # The standard error of a median is a quarter larger than that of a mean.
        error = 1.25 * np.sqrt(np.mean(np.square(self.errors), keepdims=True) / len(self.values))
        centre = float(np.sum(_log_eigenvalue_weights(middle, error, 0.0) * _LOG_GRID))
        return _log_eigenvalue_weights(self.values, self.errors, centre)

    def positive(self) -> Float[np.ndarray, "d d"]:
        """A with the eigenvalues that are likely given the measured ones: positive definite."""
        weights = self.weights()
        likely = np.exp(np.sum(weights * _LOG_GRID, axis=0))
        values = np.where(self.values > _LARGE_EIGENVALUE, self.values, likely)
        return (self.vectors * values) @ self.vectors.T


def advance(
    belief: Belief,
    measured: Measurement,
    window: Window,
    *,
    width: float,
    clipped: float,
    relief: float = 1.0,
    prior_loc: Float[np.ndarray, " d"],
    prior_scale: Float[np.ndarray, " d"],
) -> Belief:
    """The belief after a window.

    Args:
        belief: Before it.
        measured: The window's regression.
        window: Its place in the run.
        width: Width of wide probes, in units of L.
        clipped: Share of the records that were clipped, as it was released.
        relief: By how much L is to be smaller than the approximation, because of the clip.
        prior_loc, prior_scale: The model's prior.
    """
    # The optimum is where it was, in however small a metric.
    width = width * relief
    gain = belief.variance / (belief.variance + measured.variance)
    belief = belief._replace(
        curvature=belief.curvature + gain * (measured.curvature - belief.curvature),
        variance=(1 - gain) * belief.variance,
    )
    curvature = Spectrum.of(belief).positive()
    factor = belief.factor
    information = curvature + factor.T @ (factor / np.square(prior_scale)[:, None])
    values, vectors = np.linalg.eigh(information)
    at_centre = measured.gradient + curvature @ measured.point
    ascent = at_centre + factor.T @ ((prior_loc - belief.centre) / np.square(prior_scale))
    noise = float(measured.noise.mean()) / measured.steps
    ahead = vectors.T @ ascent
    spread = _spread(belief, window, vectors, width)
    if not window.searches:  # the belief was too sure of itself
        surprising = np.square(ahead) > _SURPRISE**2 * (noise + np.square(values) * spread)
        innovation = (np.square(ahead) - noise) / np.square(values)
        spread = np.where(surprising, np.maximum(spread, np.minimum(width**2, innovation)), spread)
    gains = values * spread / (np.square(values) * spread + noise)
    longest = _LONGEST_MOVE * width
    move = np.clip(gains * ahead, -longest, longest)
    belief = belief._replace(
        centre=belief.centre + factor @ (vectors @ move),
        spread=(vectors * (spread * (1 - gains * values))) @ vectors.T,
    )
    if not window.is_wide:
        return belief
    too_many = np.clip(clipped - _CLIPPED_TARGET, -_CLIPPED_TARGET, 1.0)
    shrunk = values * relief**2 * np.exp(2 * too_many)
    return _reframed(belief, shrunk, vectors, move / width)


def _spread(
    belief: Belief, window: Window, vectors: np.ndarray, width: float
) -> Float[np.ndarray, " d"]:
    """Variance of the optimum's distance along each eigenvector, before the window is used."""
    if window.searches:
        return np.full(len(vectors), width**2)
    if window.is_wide:
        return np.full(len(vectors), 0.25 * width**2)
    return np.einsum("ik,ij,jk->k", vectors, belief.spread, vectors)


def _reframed(belief: Belief, values: np.ndarray, vectors: np.ndarray, moved: np.ndarray) -> Belief:
    """The belief in units of the new approximation, with less certainty the more has changed."""
    values = np.maximum(values, _MIN_EIGENVALUE)
    root = belief.factor @ (vectors / np.sqrt(values))
    factor = np.linalg.cholesky(root @ root.T)
    change = np.linalg.solve(belief.factor, factor)  # u = change @ new u
    back = np.linalg.inv(change)
    curvature = change.T @ belief.curvature @ change
    squares = np.square(change)
    changes = np.square(np.log(values)) + np.square(moved)
    drift = _DRIFT**2 + np.square(vectors) @ (_DRIFT_PER_CHANGE**2 * changes)
    drift = np.minimum(drift, _MOST_DRIFT**2)
    scale = np.sqrt(drift) * np.maximum(np.abs(np.diagonal(curvature)), 0.1)
    return belief._replace(
        factor=factor,
        curvature=curvature,
        variance=squares.T @ belief.variance @ squares + np.outer(scale, scale),
        spread=back @ belief.spread @ back.T,
    )
