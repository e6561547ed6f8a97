"""Posterior from the released gradients: a mixture of Gaussians over the latent.

`regression` turns sums of releases into statistics, `curvature` has the model of them, and
docs/honest-posterior.md explains both. All of it is post-processing of DP outputs.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float
from scipy import special, stats

from dpvim.inference.release_sums import ReleaseSums
from dpvim.posterior.convergence import Windows
from dpvim.posterior.from_releases.curvature import Components, SamplerConfig, posterior_components
from dpvim.posterior.from_releases.regression import (
    GaussianPrior,
    fit_regression,
    lack_of_fit_p_values,
)
from dpvim.privacy.plan import Plan, PrivacyPlan
from dpvim.types import ConvergenceWarning

# Significance level of the lack-of-fit test, shared among coordinates (Bonferroni).
_SIGNIFICANCE_LEVEL = 1e-3
# A posterior mean that is so many times further from the end of the run than its points and the
# posterior reach is an extrapolation: the run has not arrived, and the line may not hold there.
_MAX_EXTRAPOLATION = 4.0
# A sampler with a larger ratio of total to within-chain spread has not mixed.
_MAX_R_HAT = 1.2
_BISECTIONS = 60


class GaussianMixture(NamedTuple):
    """A mixture of Gaussians of equal weight over the latent, used like a `GaussianPosterior`.

    Attributes:
        locs: Means of the components.
        factors: Their standard deviations [m, d], or Cholesky factors [m, d, d].
        dp_scale: Standard deviation that the noise of the run adds to each coordinate.
        windows: Snapshots spanned by the steps that were used; a coordinate counts as converged
            if they agree with a quadratic log-likelihood and the run has arrived.
        p_values: Of the lack-of-fit test, by coordinate.
        doubts: What speaks against all of it, a sentence each; of a steered run.
        clipped: Share of the records that were clipped; None if they were not counted.
    """

    locs: Float[np.ndarray, "m d"]
    factors: Float[np.ndarray, "m d"] | Float[np.ndarray, "m d d"]
    dp_scale: Float[np.ndarray, " d"]
    windows: Windows
    p_values: Float[np.ndarray, " d"]
    doubts: tuple[str, ...] = ()
    clipped: float | None = None

    @property
    def loc(self) -> Float[np.ndarray, " d"]:
        """Mean."""
        return self.locs.mean(axis=0)

    @property
    def scale(self) -> Float[np.ndarray, " d"]:
        """Standard deviations."""
        return np.sqrt((self._scales**2).mean(axis=0) + self.locs.var(axis=0))

    @property
    def covariance(self) -> Float[np.ndarray, "d d"]:
        """Covariance."""
        between = np.cov(self.locs, rowvar=False, bias=True).reshape(self.loc.size, -1)
        if self.factors.ndim == 2:
            return between + np.diag((self.factors**2).mean(axis=0))
        return between + np.einsum("kil,kjl->ij", self.factors, self.factors) / len(self.factors)

    def draw(self, key: Array, n: int) -> Float[np.ndarray, "n d"]:
        """`n` independent draws."""
        key_which, key_eta = jax.random.split(key)
        which = np.asarray(jax.random.randint(key_which, (n,), 0, len(self.locs)))
        eta = np.asarray(jax.random.normal(key_eta, (n, self.loc.size)), np.float64)
        moved = np.empty_like(eta)
        for component in np.unique(which):  # a factor each: none of them is copied
            chosen, factor = which == component, self.factors[component]
            moved[chosen] = eta[chosen] * factor if factor.ndim == 1 else eta[chosen] @ factor.T
        return self.locs[which] + moved

    def log_density(self, latents: Float[np.ndarray, "*n d"]) -> np.ndarray:
        """Log-density at one latent or at several."""
        logs = [
            stats.multivariate_normal.logpdf(
                latents,
                loc,
                np.diag(factor**2) if factor.ndim == 1 else factor @ factor.T,
                allow_singular=True,
            )
            for loc, factor in zip(self.locs, self.factors, strict=True)
        ]
        return special.logsumexp(logs, axis=0) - np.log(len(self.locs))

    def quantiles(self, tails: Float[np.ndarray, " q"]) -> Float[np.ndarray, "d q"]:
        """Quantiles of each coordinate, by bisection of its distribution function."""
        locs, scales = self.locs[:, :, None], self._scales[:, :, None]
        reach = 12 * scales.max(axis=0)
        low = np.repeat(locs.min(axis=0) - reach, len(tails), axis=1)
        high = np.repeat(locs.max(axis=0) + reach, len(tails), axis=1)
        for _ in range(_BISECTIONS):
            middle = 0.5 * (low + high)
            below = special.ndtr((middle - locs) / scales).mean(axis=0) < tails
            low, high = np.where(below, middle, low), np.where(below, high, middle)
        return 0.5 * (low + high)

    @property
    def _scales(self) -> Float[np.ndarray, "m d"]:
        factors = self.factors
        return factors if factors.ndim == 2 else np.linalg.norm(factors, axis=2)


def mixture_from_releases(
    sums: ReleaseSums,
    plan: Plan,
    prior: GaussianPrior,
    *,
    snapshot_steps: int = 1,
    sampler: SamplerConfig | None = None,
    num_parameters: int | None = None,
    num_blocks: int = 1,
) -> GaussianMixture:
    """Infer the posterior from the releases of a run.

    Args:
        sums: Sums of points and released gradients, of a latent or of a block of one.
        plan: The plan of the run: its noise, clip norm and sampling.
        prior: A Gaussian that stands for the model's prior of the unconstrained latent.
        snapshot_steps: Steps between snapshots of the trace, the unit of `windows`.
        sampler: Length of the Markov chains; by default they take seconds.
        num_parameters, num_blocks: Of the latent, if the sums are of a block.

    Raises:
        ValueError: For a run without noise, or one that is too short.
    """
    if not isinstance(plan, PrivacyPlan):
        raise ValueError(
            "noise_aware='releases' is for private fits: it needs the size of the noise and the "
            "clip norm. A fit without them has its answer in the trace: noise_aware='average'."
        )
    num_parameters = num_parameters or sums.dim
    regression = fit_regression(
        sums, plan, prior, num_parameters=num_parameters, num_blocks=num_blocks
    )
    found: Components = posterior_components(regression.stats, config=sampler)
    if found.r_hat > _MAX_R_HAT:
        warnings.warn(
            f"the sampler of the curvature has not mixed (R-hat {found.r_hat:.2f}): intervals are "
            "rough. Fewer parameters, or fit.averaged, avoid it.",
            ConvergenceWarning,
            stacklevel=2,
        )
    p_values = lack_of_fit_p_values(regression, found.curvature)
    lengths = np.full(sums.dim, regression.steps // snapshot_steps + 1)
    mixture = GaussianMixture(
        found.loc + regression.reference,
        found.factor,
        np.zeros(sums.dim),
        Windows(lengths, np.ones(sums.dim, bool)),
        p_values,
    )
    reach = np.hypot(mixture.scale, regression.last_spread)
    arrived = np.abs(mixture.loc - regression.reference) <= _MAX_EXTRAPOLATION * reach
    converged = arrived & (p_values >= _SIGNIFICANCE_LEVEL / num_parameters)
    mixture = mixture._replace(windows=Windows(lengths, converged))
    added = np.maximum(0.0, mixture.scale**2 - found.variance_without_noise)
    return mixture._replace(dp_scale=np.sqrt(added))
