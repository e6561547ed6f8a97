r"""The belief of a steered run about place and curvature, and how a window changes it.

A window's releases are regressed on its points: `measure`. `advance` puts the result into the
belief: a Kalman update of the curvature :math:`A = L' H L`, a Newton step, a new L, both with the
curvatures that A may be (`dpvim.inference.noisy_curvature`). All of it is a function of releases,
the prior and the plan.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from dpvim.inference.noisy_curvature import draw_curvatures, number_of_chains
from dpvim.inference.windows import Window

# How far the centre moves at most, in widths of the probes; and how fast scales may grow.
_LONGEST_MOVE = 2.0
_MIN_EIGENVALUE = 0.5
# By how much a curvature may have changed since it was last measured, in parts of its size: values
# to choose from, and what is expected.
_CHANGES = (0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 4.0, 8.0)
_EXPECTED_CHANGE = 0.5
# For the curvature that a window goes on with: the most chains, and entries of their matrices
# together; the fewest sweeps, and parameters for one of more. A third of the sweeps is kept.
_MOST_CHAINS, _MOST_ENTRIES = 4, 2**15
_FEWEST_SWEEPS, _PARAMETERS_PER_SWEEP = 24, 3
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
    if window.is_wide:
        belief = _as_it_may_have_changed(belief, measured)
    gain = belief.variance / (belief.variance + measured.variance)
    belief = belief._replace(
        curvature=belief.curvature + gain * (measured.curvature - belief.curvature),
        variance=(1 - gain) * belief.variance,
    )
    factor, dim = belief.factor, len(belief.factor)
    sweeps = max(_FEWEST_SWEEPS, dim // _PARAMETERS_PER_SWEEP)
    curvature = draw_curvatures(
        belief.curvature,
        belief.variance,
        np.random.default_rng(window.first),
        chains=number_of_chains(dim, most=_MOST_CHAINS, entries=_MOST_ENTRIES),
        sweeps=sweeps,
        kept=sweeps // 3,
    ).middle()
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
    return _reframed(belief, shrunk, vectors)


def _as_it_may_have_changed(belief: Belief, measured: Measurement) -> Belief:
    """The belief about A with less certainty, as much as the window contradicts it.

    Places and clipped shares differ between windows, and with them the curvature. The change that
    makes what was measured likeliest tells by how much, so windows that agree are used together.
    """
    size = np.diagonal(measured.curvature) - 2 * np.sqrt(np.diagonal(measured.variance))
    size = np.maximum(np.abs(np.diagonal(belief.curvature)), np.maximum(size, 0.1))
    unit = np.outer(size, size)
    entries = np.triu_indices(len(size))
    gap = np.square(measured.curvature - belief.curvature)[entries]

    def likelihood(change: float) -> float:
        total = (belief.variance + measured.variance + change**2 * unit)[entries]
        return -0.5 * float(np.sum(np.log(total) + gap / total)) - change / _EXPECTED_CHANGE

    change = max(_CHANGES, key=likelihood)
    return belief._replace(variance=belief.variance + change**2 * unit)


def _spread(
    belief: Belief, window: Window, vectors: np.ndarray, width: float
) -> Float[np.ndarray, " d"]:
    """Variance of the optimum's distance along each eigenvector, before the window is used."""
    if window.searches:
        return np.full(len(vectors), width**2)
    if window.is_wide:
        return np.full(len(vectors), 0.25 * width**2)
    return np.einsum("ik,ij,jk->k", vectors, belief.spread, vectors)


def _reframed(belief: Belief, values: np.ndarray, vectors: np.ndarray) -> Belief:
    """The belief in units of the new approximation."""
    values = np.maximum(values, _MIN_EIGENVALUE)
    root = belief.factor @ (vectors / np.sqrt(values))
    factor = np.linalg.cholesky(root @ root.T)
    change = np.linalg.solve(belief.factor, factor)  # u = change @ new u
    back = np.linalg.inv(change)
    squares = np.square(change)
    return belief._replace(
        factor=factor,
        curvature=change.T @ belief.curvature @ change,
        variance=squares.T @ belief.variance @ squares,
        spread=back @ belief.spread @ back.T,
    )
