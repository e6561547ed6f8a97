r"""The full-rank experiment's data, its model, and what an approximation is worth.

The paper fills a correlation matrix entry by entry, which need not be positive definite, and at
none of its sizes is. Its code scales the columns of a triangular factor by the norms of the rows,
which gives variances of 1 to 4 and no correlation matrix, and has the wanted density in the factor,
where the product is nearly full. Here a triangular factor L with rows of norm one
has as many non-zero entries as give C = L L' the wanted density.

The standard deviations D of the columns are called marginal variances in the paper; its D C D has
the variances D^2.

An approximation is worth the mean over test records of log p(y | x), p averaged over the
approximation: given the noise's scale the coefficients are integrated out in closed form, and the
scale by quadrature.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpyro
import numpyro.distributions as dist
from jaxtyping import Float
from scipy import optimize, special, stats

from dpvim.models.regression import Regression

_STRENGTH = (8.0, 10.0)  # of the Beta distribution of entries
_SPREAD = 0.2  # of the logarithms of the columns' standard deviations
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(32)
_LOG_WEIGHTS = np.log(_WEIGHTS / _WEIGHTS.sum())


class Simulated(NamedTuple):
    """Records of a linear regression with noise of scale one: a training and a test part."""

    X: Float[np.ndarray, "n d"]
    y: Float[np.ndarray, " n"]
    X_test: Float[np.ndarray, "n d"]
    y_test: Float[np.ndarray, " n"]
    coefficients: Float[np.ndarray, " d"]


def correlation_factor(
    dim: int, density: float, rng: np.random.Generator
) -> Float[np.ndarray, "d d"]:
    """A lower triangular L with rows of norm one, for which L L' has about the wanted density.

    Density is the share of entries off the diagonal that are not zero.
    """
    below = np.tril_indices(dim, -1)
    order = rng.permutation(len(below[0]))
    entries = rng.beta(*_STRENGTH, size=len(order)) * rng.choice([-1.0, 1.0], size=len(order))

    def with_entries(count: int) -> np.ndarray:
        factor = np.eye(dim)
        kept = order[:count]
        factor[below[0][kept], below[1][kept]] = entries[kept]
        return factor / np.linalg.norm(factor, axis=1, keepdims=True)

    # Every further entry of the factor adds entries to the product: halve the interval.
    few, many = 0, len(order)
    while many - few > 1:
        middle = (few + many) // 2
        if density_of(with_entries(middle)) < density:
            few = middle
        else:
            many = middle
    return with_entries(many)


def density_of(factor: Float[np.ndarray, "d d"]) -> float:
    """Share of the entries of L L' off the diagonal that are not zero."""
    below = np.tril_indices(len(factor), -1)
    return float(np.mean(np.abs((factor @ factor.T)[below]) > 1e-12))


@cache
def simulate(dim: int, density: float, num_examples: int) -> Simulated:
    """Data as in the appendix on the full-rank set-up, always the same."""
    rng = np.random.default_rng([dim, round(100 * density), num_examples])
    stds = np.exp(_SPREAD * rng.normal(size=dim))
    factor = stds[:, None] * correlation_factor(dim, density, rng)
    X = rng.normal(size=(2 * num_examples, dim)) @ factor.T
    coefficients = rng.normal(size=dim)
    y = X @ coefficients + rng.normal(size=2 * num_examples)
    n = num_examples
    return Simulated(X[:n], y[:n], X[n:], y[n:], coefficients)


@dataclasses.dataclass(frozen=True)
class PaperRegression(Regression):
    """The paper's linear regression: no intercept, and a Gamma prior of the noise's scale.

    The prior is all that it changes, so that the clipped sum of `Regression` serves it.
    """

    kind: str = "linear"
    _: dataclasses.KW_ONLY
    intercept: bool = False

    def __call__(self, X: Any, y: Any = None) -> None:
        prior = dist.Normal(0, 1).expand([X.shape[1]]).to_event(1)
        predictor = X @ numpyro.sample("coefficients", prior)
        noise = numpyro.sample("noise_scale", dist.Gamma(0.1, 0.1))
        with numpyro.plate("records", X.shape[0]):
            numpyro.sample("y", dist.Normal(predictor, noise), obs=y)


model = PaperRegression()


class Approximation(NamedTuple):
    """A Gaussian of coefficients and logarithm of the noise's scale, in this order."""

    loc: Float[np.ndarray, " d_and_one"]
    covariance: Float[np.ndarray, "d_and_one d_and_one"]


def log_likelihood(
    found: Approximation, X: Float[np.ndarray, "n d"], y: Float[np.ndarray, " n"]
) -> float:
    """Mean over records of the logarithm of the predictive density."""
    loc, log_noise = found.loc[:-1], found.loc[-1]
    shared, spread = found.covariance[:-1, -1], np.sqrt(found.covariance[-1, -1])
    given_noise = found.covariance[:-1, :-1] - np.outer(shared, shared) / spread**2
    mean, slope = X @ loc, X @ shared / spread
    variance = np.einsum("ni,ni->n", X @ given_noise, X)
    densities = [
        stats.norm.logpdf(
            y, mean + slope * node, np.sqrt(variance + np.exp(2 * (log_noise + spread * node)))
        )
        for node in _NODES
    ]
    return float(special.logsumexp(np.array(densities) + _LOG_WEIGHTS[:, None], axis=0).mean())


@cache
def nonprivate_log_likelihood(dim: int, density: float, num_examples: int) -> float:
    """That of the posterior without privacy.

    Given the noise's scale it is conjugate; the scale's own posterior is taken at its mode, where
    with thousands of records its logarithm has a standard deviation of 0.01.
    """
    data = simulate(dim, density, num_examples)
    gram, moment = data.X.T @ data.X, data.X.T @ data.y
    values, vectors = np.linalg.eigh(gram)
    squares = (vectors.T @ moment) ** 2

    def negative_log_posterior(log_noise: float) -> float:
        variance = np.exp(2 * log_noise)
        fit = (data.y @ data.y - np.sum(squares / (variance + values))) / variance
        volume = np.sum(np.log1p(values / variance)) + 2 * len(data.y) * log_noise
        return float(0.5 * (fit + volume) - 0.1 * log_noise + 0.1 * np.exp(log_noise))

    log_noise = optimize.minimize_scalar(negative_log_posterior, bounds=(-2, 2)).x
    covariance = np.linalg.inv(gram / np.exp(2 * log_noise) + np.eye(dim))
    loc = covariance @ moment / np.exp(2 * log_noise)
    everything = np.zeros((dim + 1, dim + 1))
    everything[:dim, :dim], everything[dim, dim] = covariance, 0.5 / num_examples
    found = Approximation(np.append(loc, log_noise), everything)
    return log_likelihood(found, data.X_test, data.y_test)
