r"""Noise-aware Gaussian posterior from a trace.

Its mean is the last iterate or the average over a window, in the unconstrained space. The
noise of the run moves it: by the spread of the trace if it is one iterate, by less if it is an
average. That variance is added to the variance of the approximation (section 3.2 of the paper):

.. math:: \Sigma = \Sigma_q + \Sigma_{DP}.

All of it is post-processing of DP outputs; no data enter.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jaxtyping import Array, Bool, Float, Int

from dpvim import _validate
from dpvim.inference.families import Family
from dpvim.inference.trace import Trace
from dpvim.posterior.averaging import (
    mean_covariance,
    mean_variance,
    window_covariance,
    window_mean,
    window_variance,
)
from dpvim.posterior.convergence import WINDOW_RULES, Windows
from dpvim.posterior.reparametrised import ReparametrisedPosterior, means_of_draws

EstimateName: TypeAlias = Literal["average", "last"]
NoiseAwareness: TypeAlias = Literal["average", "iterate"] | None
WindowRule: TypeAlias = str | int

ESTIMATES = ("average", "last")
NOISE_AWARE = ("average", "iterate")

# Windows are selected for small drift, and their effective sample size n comes out too large; both
# make the variance of the average too small, by about 10 / n (measured: benchmarks/coverage.py).
_SELECTION_BIAS = 10.0


class DivergedError(RuntimeError):
    """The run diverged: its parameters are not finite, so there is no posterior."""


class GaussianPosterior(NamedTuple):
    """A Gaussian over the unconstrained latent, with the DP part of its standard deviation.

    Attributes:
        loc: Mean.
        factor: Standard deviations [d] if coordinates are independent, else a Cholesky factor.
        dp_scale: Standard deviation that the noise of the run adds to each coordinate.
        windows: Number of snapshots used for each mean, and if they pass the convergence test.
    """

    loc: Float[np.ndarray, " d"]
    factor: Float[np.ndarray, " d"] | Float[np.ndarray, "d d"]
    dp_scale: Float[np.ndarray, " d"]
    windows: Windows

    @property
    def scale(self) -> Float[np.ndarray, " d"]:
        """Standard deviations."""
        return self.factor if self.factor.ndim == 1 else np.linalg.norm(self.factor, axis=1)

    @property
    def covariance(self) -> Float[np.ndarray, "d d"]:
        """Covariance."""
        return np.diag(self.factor**2) if self.factor.ndim == 1 else self.factor @ self.factor.T

    def of(self, members: Int[np.ndarray, " k"]) -> GaussianPosterior:
        """The posterior of some of the coordinates."""
        factor = self.factor[members]
        if self.factor.ndim == 2:
            factor = np.linalg.cholesky(factor @ factor.T)
        windows = Windows(*(part[members] for part in self.windows))
        return GaussianPosterior(self.loc[members], factor, self.dp_scale[members], windows)

    def draw(self, key: Array, n: int) -> Float[np.ndarray, "n d"]:
        """`n` independent draws."""
        eta = np.asarray(jax.random.normal(key, (n, self.loc.size)))
        return self.loc + (eta * self.factor if self.factor.ndim == 1 else eta @ self.factor.T)

    def log_density(self, latents: Float[np.ndarray, "*n d"]) -> np.ndarray:
        """Log-density at one latent or at several."""
        gaussian = scipy.stats.multivariate_normal(self.loc, self.covariance, allow_singular=True)
        return gaussian.logpdf(latents)

    def quantiles(self, tails: Float[np.ndarray, " q"]) -> Float[np.ndarray, "d q"]:
        """Quantiles of each coordinate."""
        return self.loc[:, None] + self.scale[:, None] * scipy.stats.norm.ppf(tails)


def posterior_from_trace(
    trace: Trace,
    family: Family,
    *,
    estimate: EstimateName = "average",
    noise_aware: NoiseAwareness = "average",
    window: WindowRule = "auto",
) -> GaussianPosterior | ReparametrisedPosterior:
    """Compute the posterior from a trace: a Gaussian if the family is.

    Args:
        trace: Snapshots of a run.
        family: The variational family of the parameters.
        estimate: ``"average"`` of the window, or the ``"last"`` iterate.
        noise_aware: The variance to add: that of an ``"iterate"``, that of the window's
            ``"average"``, or nothing (None).
        window: A rule of `dpvim.posterior.convergence`, or a number of snapshots.

    Raises:
        DivergedError: If the trace ends in numbers that are not finite.
    """
    _validate.one_of("estimate", estimate, ESTIMATES)
    if noise_aware is not None:
        _validate.one_of("noise_aware", noise_aware, NOISE_AWARE)
    _refuse_diverged(trace)
    means = trace.loc if family.is_gaussian else means_of_draws(family, trace.params)
    windows = find_windows(means, window)
    if estimate == "last":
        params = trace.last
    else:
        params = jax.tree.map(lambda leaf: _window_average(leaf, window), trace.params)
        params = params._replace(loc=window_mean(trace.loc, windows.lengths))
    if family.factor is None:
        added = _dp_covariance(means, windows.lengths, noise_aware)
        return ReparametrisedPosterior(family, params, _root(added), windows)
    # In double precision: it is squared and added to.
    factor = np.asarray(family.factor(jax.tree.map(jnp.asarray, params)), np.float64)
    if factor.ndim == 1:
        dp_scale = np.sqrt(_dp_variance(trace.loc, windows.lengths, noise_aware))
        return GaussianPosterior(params.loc, np.hypot(factor, dp_scale), dp_scale, windows)
    added = _dp_covariance(trace.loc, windows.lengths, noise_aware)
    total = np.linalg.cholesky(factor @ factor.T + added) if noise_aware else factor
    return GaussianPosterior(params.loc, total, np.sqrt(np.diagonal(added)), windows)


def find_windows(values: Float[np.ndarray, "snapshots p"], window: WindowRule) -> Windows:
    """A window for each parameter, by a rule or of a given length (which is not tested)."""
    if isinstance(window, str):
        return WINDOW_RULES[_validate.one_of("window", window, WINDOW_RULES)](values)
    length = min(_validate.positive_int("window", window), len(values))
    num = values.shape[1]
    return Windows(np.full(num, length), np.ones(num, bool))


def _window_average(leaf: np.ndarray, window: WindowRule) -> np.ndarray:
    flat = leaf.reshape(len(leaf), -1)
    return window_mean(flat, find_windows(flat, window).lengths).reshape(leaf.shape[1:])


def _root(covariance: Float[np.ndarray, "d d"]) -> Float[np.ndarray, "d d"]:
    """A square root of a matrix that may have no inverse."""
    values, vectors = np.linalg.eigh(covariance)
    return vectors * np.sqrt(np.maximum(values, 0.0))


def _dp_variance(
    loc: np.ndarray, lengths: Int[np.ndarray, " d"], noise_aware: NoiseAwareness
) -> Float[np.ndarray, " d"]:
    if noise_aware is None:
        return np.zeros(loc.shape[1])
    iterate = window_variance(loc, lengths)
    if noise_aware == "iterate":
        return iterate
    average = mean_variance(loc, lengths)
    share = np.divide(average, iterate, out=np.zeros_like(average), where=iterate > 0)
    return average * (1 + _SELECTION_BIAS * share)


def _dp_covariance(
    loc: np.ndarray, lengths: Int[np.ndarray, " d"], noise_aware: NoiseAwareness
) -> Float[np.ndarray, "d d"]:
    """Covariance of the noise: correlations from the shortest window, which is part of all others,
    and variances from each parameter's own."""
    variance = _dp_variance(loc, lengths, noise_aware)
    if noise_aware is None:
        return np.diag(variance)
    common = int(lengths.min())
    joint = (mean_covariance if noise_aware == "average" else window_covariance)(loc, common)
    scale = np.sqrt(np.diagonal(joint))
    ratio = np.divide(np.sqrt(variance), scale, out=np.zeros_like(scale), where=scale > 0)
    return joint * np.outer(ratio, ratio)


def _refuse_diverged(trace: Trace) -> None:
    leaves = [leaf.reshape(len(trace), -1) for leaf in jax.tree.leaves(trace.params)]
    finite: Bool[np.ndarray, " snapshots"] = np.all(
        [np.isfinite(leaf).all(axis=1) for leaf in leaves], axis=0
    )
    if not finite.all():
        step = int(trace.steps[np.flatnonzero(~finite)[0]])
        raise DivergedError(
            f"the run diverged: from step {step} on its parameters are not finite. What was "
            "released has been paid for. Try a smaller learning rate or a smaller clip norm."
        )
