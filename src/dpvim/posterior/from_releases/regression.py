r"""Linear regression of released gradients on the points where they were taken, by windows.

Near a reference point r, the mean point of the end of the run, the log-likelihood of the data is
close to a quadratic, and a release is

.. math:: G_t = g - H (\theta_t - r) + b_{w(t)} + e_t

with g the gradient at r (the intercept), H the curvature (the slope), e the noise, and b the
remainder: the log-likelihood is not exactly a quadratic. Within a window b drops out, so the sums
of squares and products about the window's means are informative about H; the means of the windows
are informative about g. This module turns sums into these statistics and estimates the variance of
the noise and the size of b; the model over g and H is `dpvim.posterior.from_releases.curvature`.

The remainder b is of third order in the distance. With D the mean of
:math:`(\theta - r)' H (\theta - r)` over a window, a log-likelihood of N similar records has
:math:`b \approx \gamma D N^{-1/2} H^{1/2} u`, u a vector of order one and gamma the skewness of one
record's log-likelihood. The part of D that comes from the random draws of theta has the same u in
every window; the part that comes from the optimiser's walk does not.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float
from scipy.stats import chi2, norm

from dpvim.inference.release_sums import ReleaseSums
from dpvim.privacy.plan import PrivacyPlan

# The curvature of one coordinate is exp(N(log(N C^2 / d) + _LOG_CENTRE, LOG_SPREAD^2)) a priori.
# The trace of the Fisher information of N records is at most N C^2 if C is the largest norm of a
# gradient, so N C^2 / d is what a coordinate can have on average; most have less by far.
_LOG_CENTRE = -3.5
LOG_SPREAD = 2.0
# gamma, and the share of N that D may reach before a window is left out.
_SKEWNESS = 0.2
_MAX_DISTANCE_SHARE = 0.5
# With fewer degrees of freedom residuals do not determine their variance.
_MIN_RESIDUAL_DF = 8
# The share of a run's windows whose mean is the reference point.
_LAST_SHARE = 0.25
_LOWER_TAIL = float(norm.cdf(-1))
_GRID = np.linspace(-4.0, 4.0, 401)[:, None]


class GaussianPrior(NamedTuple):
    """Independent Gaussians that stand for the model's prior of the unconstrained latent."""

    loc: Float[np.ndarray, " d"]
    scale: Float[np.ndarray, " d"]

    @classmethod
    def from_draws(cls, draws: Float[np.ndarray, "n d"]) -> GaussianPrior:
        """Median and half the distance of the 16 % and 84 % quantiles of draws from a prior.

        Quantiles, because a prior with heavy tails has no standard deviation that helps.
        """
        low, middle, high = np.quantile(
            np.asarray(draws, np.float64), [_LOWER_TAIL, 0.5, 1 - _LOWER_TAIL], 0
        )
        return cls(middle, 0.5 * (high - low))


class RegressionStats(NamedTuple):
    """Statistics that the model of g and H conditions on; points are relative to the reference.

    Attributes:
        log_centre: Centre of the prior of the logarithm of each coordinate's curvature.
        xx, xg: Sums of squares and products about the windows' means, of points with points and
            of points with gradients: [d, d], or [d] if only diagonals were kept.
        noise: Variance of one release, by coordinate.
        x, g: Means of points and gradients by window, [windows, d].
        weight: Inverse covariance over windows of what separates their means from the line, by
            coordinate: [d, windows, windows]. Windows that are left out have zeros.
        prior_loc, prior_variance: The model's prior of the latent.
        sampling_share: 1 if theta is the truth that the data are a sample from, so that the
            maximum of the likelihood is theta plus N(0, H^-1); 0 if theta is that maximum.
    """

    log_centre: Float[np.ndarray, " d"]
    xx: Float[np.ndarray, "d d"] | Float[np.ndarray, " d"]
    xg: Float[np.ndarray, "d d"] | Float[np.ndarray, " d"]
    noise: Float[np.ndarray, " d"]
    x: Float[np.ndarray, "windows d"]
    g: Float[np.ndarray, "windows d"]
    weight: Float[np.ndarray, "d windows windows"]
    prior_loc: Float[np.ndarray, " d"]
    prior_variance: Float[np.ndarray, " d"]
    sampling_share: float = 1.0


class RegressionFit(NamedTuple):
    """Statistics of the regression, with its reference point and the windows that it uses.

    Attributes:
        stats: Statistics for the model of g and H.
        reference: The reference point r.
        steps: Number of steps in the windows that are used.
        distance: D by window.
        used: True for windows that are used, False for those that are too far from r.
        rough_curvature: A first estimate of the curvature of each coordinate by itself.
        last_spread: Root mean square distance of the last windows' points from r, by coordinate.
    """

    stats: RegressionStats
    reference: Float[np.ndarray, " d"]
    steps: int
    distance: Float[np.ndarray, " windows"]
    used: Bool[np.ndarray, " windows"]
    rough_curvature: Float[np.ndarray, " d"]
    last_spread: Float[np.ndarray, " d"]


def fit_regression(
    sums: ReleaseSums,
    plan: PrivacyPlan,
    prior: GaussianPrior,
    *,
    num_parameters: int | None = None,
    num_blocks: int = 1,
) -> RegressionFit:
    """Choose the reference point and the windows, and compute the regression's statistics.

    Args:
        sums: Of a latent, or of a block of one.
        plan: The plan of the run.
        prior: Of the same coordinates.
        num_parameters: Of the latent, which share the information of N records between them.
        num_blocks: Of the latent. A record may tell about one of them alone, and a quadratic of
            fewer records has a larger remainder.

    Raises:
        ValueError: If the run is too short for a regression.
    """
    sums = ReleaseSums(*(part[sums.steps > 1] for part in sums))
    dim, count = sums.dim, sums.steps
    if not sums.are_enough:
        raise ValueError(
            f"noise_aware='releases': {int(count.sum())} steps are too few for {dim} parameters."
        )
    x, g = sums.point / count[:, None], sums.gradient / count[:, None]
    xx = sums.point_point - _products(x, x, count, full=sums.is_full)
    xg = sums.point_gradient - _products(x, g, count, full=sums.is_full)
    gg = sums.gradient_squared - count[:, None] * np.square(g)
    spread = np.maximum(_diagonals(xx), 0.0) / count[:, None]

    last = np.arange(len(count)) >= (1 - _LAST_SHARE) * len(count)
    last[-1] = True
    reference = np.average(x[last], axis=0, weights=count[last])
    share = plan.num_examples * plan.clip_norm**2 / (num_parameters or dim)
    log_centre = np.full(dim, np.log(share) + _LOG_CENTRE)
    num_examples = plan.num_examples / num_blocks
    used = np.ones(len(count), bool)
    for _ in range(3):  # which windows are near depends on the curvature, and the other way round
        kept_xx, kept_xg, kept_gg = (part[used].sum(axis=0) for part in (xx, xg, gg))
        noise = _noise_variance(kept_xx, kept_xg, kept_gg, count[used], plan)
        curvature = _rough_curvature(kept_xx, kept_xg, noise, log_centre)
        walk = np.square(x - reference) @ curvature
        distance = walk + spread @ curvature
        used = last | (distance <= _MAX_DISTANCE_SHARE * num_examples)
    unit = _SKEWNESS / np.sqrt(num_examples)
    weight = _weights(noise, curvature, count, used, shared=unit * distance, own=unit * walk)
    stats = RegressionStats(
        log_centre=log_centre,
        xx=kept_xx,
        xg=kept_xg,
        noise=noise,
        x=x - reference,
        g=g,
        weight=weight,
        prior_loc=prior.loc - reference,
        prior_variance=np.square(prior.scale),
    )
    steps = int(count[used].sum())
    squares = np.square(x - reference) + spread
    last_spread = np.sqrt(np.average(squares[last], axis=0, weights=count[last]))
    return RegressionFit(stats, reference, steps, distance, used, curvature, last_spread)


def lack_of_fit_p_values(
    regression: RegressionFit, curvature: np.ndarray
) -> Float[np.ndarray, " d"]:
    """P-values of a lack-of-fit test by coordinate: do the windows' means lie on one line?

    Deviations by noise, and by the remainder b that the model allows for, are in the null
    hypothesis. Small values say that the log-likelihood is further from a quadratic, over the
    points of the run, than the model allows.

    Args:
        regression: The regression of a run.
        curvature: H, [d, d] or its diagonal [d].
    """
    stats, weight = regression.stats, regression.stats.weight
    slope = curvature if curvature.ndim == 2 else np.diag(curvature)
    intercepts = stats.g + stats.x @ slope
    gap = intercepts - np.einsum("jvw,wj->j", weight, intercepts) / weight.sum(axis=(1, 2))
    scatter = np.einsum("jvw,vj,wj->j", weight, gap, gap)
    return chi2.sf(scatter, max(1, int(regression.used.sum()) - 1))


def _products(a: np.ndarray, b: np.ndarray, count: np.ndarray, *, full: bool) -> np.ndarray:
    """Products count a b' by window, or their diagonals."""
    return np.einsum("w,wi,wj->wij" if full else "w,wi,wi->wi", count, a, b)


def _diagonals(products: np.ndarray) -> np.ndarray:
    return np.einsum("wii->wi", products) if products.ndim == 3 else products


def _noise_variance(
    xx: np.ndarray, xg: np.ndarray, gg: np.ndarray, count: np.ndarray, plan: PrivacyPlan
) -> Float[np.ndarray, " d"]:
    """Variance of a release about the line: at least the DP noise, more for drawing batches."""
    if xx.ndim == 2:
        scale = np.sqrt(np.maximum(np.diagonal(xx), np.finfo(float).tiny))
        correlation = xx / np.outer(scale, scale) + 1e-9 * np.eye(len(xx))
        scaled = xg / scale[:, None]
        explained = np.einsum("ij,ij->j", scaled, np.linalg.solve(correlation, scaled))
        residual_df = (count - 1).sum() - len(xx)
    else:
        explained = np.square(xg) / np.maximum(xx, np.finfo(float).tiny)
        residual_df = (count - 1).sum() - 1
    known = (plan.noise_stddev / plan.sampling_prob) ** 2
    if residual_df < _MIN_RESIDUAL_DF:
        return np.full(len(gg), known)
    return np.maximum(known, (gg - explained) / residual_df)


def _rough_curvature(
    xx: np.ndarray, xg: np.ndarray, noise: np.ndarray, log_centre: np.ndarray
) -> Float[np.ndarray, " d"]:
    """Curvature of each coordinate by itself: exp of the posterior mean of its logarithm."""
    weights = _grid_weights(_diagonal(xx), _diagonal(xg), noise, log_centre)
    return np.exp(np.sum(weights * (log_centre + LOG_SPREAD * _GRID), axis=0))


def _grid_weights(
    xx: np.ndarray, xg: np.ndarray, noise: np.ndarray, log_centre: np.ndarray
) -> Float[np.ndarray, "grid d"]:
    """Posterior of a coordinate's log-curvature from the scatter within windows."""
    h = np.exp(log_centre + LOG_SPREAD * _GRID)
    log_weight = -0.5 * _GRID**2 - (0.5 * h**2 * xx + h * xg) / noise
    weight = np.exp(log_weight - log_weight.max(axis=0))
    return weight / weight.sum(axis=0)


def _diagonal(product: np.ndarray) -> np.ndarray:
    return np.diagonal(product) if product.ndim == 2 else product


def _weights(
    noise: np.ndarray,
    curvature: np.ndarray,
    count: np.ndarray,
    used: np.ndarray,
    *,
    shared: np.ndarray,
    own: np.ndarray,
) -> Float[np.ndarray, "d windows windows"]:
    weight = np.zeros((len(noise), len(count), len(count)))
    chosen = np.ix_(used, used)
    for j in range(len(noise)):
        covariance = np.diag(noise[j] / count + curvature[j] * own**2)
        covariance += curvature[j] * np.outer(shared, shared)
        weight[j][chosen] = np.linalg.inv(covariance[chosen])
    return weight
