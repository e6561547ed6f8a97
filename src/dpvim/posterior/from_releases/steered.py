r"""Posterior from the windows of a steered run: in closed form given the curvature's eigenvalues.

In the units of the last factor L, with r the last centre and A = L' H L the curvature, a narrow
window's mean whitened gradient is

.. math:: g_w = A (u^* - u_w) + e_w, \qquad u = L^{-1} (\theta - r),

with u_w the mean point of the window, known noise e_w, and u* the maximum of the likelihood. What
the clip removed is a shift of unknown direction, of about 0.3 of the length by which gradients
were too long in all; counts of the norms tell that length. So

.. math:: g = A u^* + N(0, \nu^2 + c^2), \qquad u^* \mid \theta \sim N(u, A^{-1}),

and given A and a Gaussian prior the posterior of theta is Gaussian. A is drawn from its posterior
(`dpvim.inference.noisy_curvature`), and the result is the mixture. `exact_prior` puts the model's
own prior into it.

Whatever says that a quadratic does not hold, or that the run has not arrived, is a doubt
(`steered_doubts`). Windows that disagree add to the variance of g.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from dpvim.inference.clip_relief import believed_counts, count_error, excess
from dpvim.inference.noisy_curvature import CurvatureDraws, draw_curvatures, number_of_chains
from dpvim.inference.steering import SteeredReleases
from dpvim.inference.variants import CLIP_SHIFT
from dpvim.inference.windows import NUM_NARROW
from dpvim.posterior.convergence import Windows
from dpvim.posterior.from_releases import GaussianMixture
from dpvim.posterior.from_releases.regression import GaussianPrior
from dpvim.posterior.from_releases.steered_doubts import doubts_of
from dpvim.privacy.norm_counts import NORM_BIN_ENDS
from dpvim.privacy.plan import PrivacyPlan

_COMPONENTS = 256
# Sweeps that chains of curvatures take before the first one that is kept; and the most entries of
# all chains' matrices together: fewer chains are longer.
_WARM_UP = 24
_MOST_ENTRIES, _MOST_CHAINS = 2**16, 32


class ClipShift(NamedTuple):
    """Effect of the clip in the narrow windows.

    Attributes:
        share: Share of the records whose gradients were longer than the clip norm.
        shift: Standard deviation of the shift of each coordinate of the whitened gradient.
    """

    share: float
    shift: float


class ClosedForm(NamedTuple):
    """A posterior with independent Gaussians for a prior.

    Attributes:
        mixture: The posterior.
        without_noise: Its covariance had the gradients been released exactly.
        is_gravely_doubted: True if the releases are no gradients of a quadratic.
    """

    mixture: GaussianMixture
    without_noise: Float[np.ndarray, "d d"]
    is_gravely_doubted: bool


def closed_form(
    releases: SteeredReleases,
    plan: PrivacyPlan,
    prior: GaussianPrior,
    *,
    snapshot_steps: int = 1,
    is_mixture: bool = False,
    seed: int = 0,
) -> ClosedForm:
    """Infer the posterior from the windows of a steered run, with Gaussians for a prior.

    Directions that the likelihood does not depend on have their prior. `exact_prior` puts the
    model's own in its place.

    Args:
        releases: The windows; all narrow ones must be there.
        plan: The plan of the run.
        prior: Gaussians that stand for the model's prior.
        snapshot_steps: Steps between snapshots of the trace, the unit of `windows`.
        is_mixture: Whether the model's likelihood is a mixture, which may have several modes.
        seed: For the draws of curvatures: the same each time.
    """
    directions = releases.directions
    clip = clip_shift(releases, plan)
    centre = releases.centre[-1]
    prior_loc, prior_scale = directions.prior(prior.loc, prior.scale)
    drawn = _draw_curvatures(releases, np.random.default_rng(seed))
    narrow = releases.steps[-NUM_NARROW:]
    noise = np.average(releases.noise[-NUM_NARROW:], axis=0, weights=narrow).mean() / narrow.sum()
    identity = np.eye(len(releases.factor))
    doubts = doubts_of(
        releases,
        plan,
        drawn.middle(),
        noise=noise,
        clipped=clip.share,
        prior_scale=prior_scale,
        is_mixture=is_mixture,
    )
    extra = (noise + clip.shift**2) * identity + doubts.scatter

    curvatures = drawn.matrices()
    gradients = np.stack([_mean_gradient(releases, a) for a in curvatures])
    factor = releases.factor
    prior_precision = factor.T @ (factor / np.square(prior_scale)[:, None])
    pull = factor.T @ ((prior_loc - centre) / np.square(prior_scale))
    weight = curvatures @ np.linalg.inv(curvatures + extra)
    covariance = np.linalg.inv(_symmetric(weight @ curvatures) + prior_precision)
    locs = np.einsum("kij,kj->ki", covariance, np.einsum("kij,kj->ki", weight, gradients) + pull)
    exact = np.linalg.inv(curvatures + prior_precision).mean(axis=0)

    roots = factor @ np.linalg.cholesky(_symmetric(covariance))
    unknown = directions.unknown(prior.scale)
    dim, components = len(prior.loc), len(locs)
    rest = directions.rest(prior.loc, prior.scale)
    all_locs = rest + (centre + locs @ factor.T) @ directions.basis.T
    all_roots = np.concatenate(
        [directions.basis @ roots, np.tile(unknown, (components, 1, 1))], axis=2
    )
    windows = Windows(
        np.full(dim, int(narrow.sum()) // snapshot_steps + 1), np.full(dim, not doubts.sentences)
    )
    whole = directions.basis @ factor
    without_noise = whole @ exact @ whole.T + unknown @ unknown.T
    found = GaussianMixture(
        all_locs,
        all_roots,
        np.zeros(dim),
        windows,
        np.ones(dim),
        doubts.sentences,
        clip.share,
    )
    added = np.maximum(0.0, np.square(found.scale) - np.diagonal(without_noise))
    return ClosedForm(found._replace(dp_scale=np.sqrt(added)), without_noise, doubts.are_grave)


def clip_shift(releases: SteeredReleases, plan: PrivacyPlan) -> ClipShift:
    """Estimate what the clip did, from the counts of norms in the narrow windows."""
    steps = releases.steps[-NUM_NARROW:]
    counts = np.average(releases.counts[-NUM_NARROW:], axis=0, weights=steps)
    counts = believed_counts(counts, count_error(plan, steps.sum()))
    clipped = counts[np.array(NORM_BIN_ENDS) >= 1].sum()
    too_long = plan.clip_norm * excess(counts)
    shift = CLIP_SHIFT * too_long / np.sqrt(releases.factor.shape[0])
    return ClipShift(float(clipped / plan.num_examples), float(shift))


def _draw_curvatures(releases: SteeredReleases, rng: np.random.Generator) -> CurvatureDraws:
    """Curvatures from their posterior, a component each."""
    dim = len(releases.curvature)
    chains = number_of_chains(dim, most=_MOST_CHAINS, entries=_MOST_ENTRIES)
    kept = _COMPONENTS // chains
    return draw_curvatures(
        releases.curvature,
        releases.variance,
        rng,
        chains=chains,
        sweeps=_WARM_UP + 2 * kept,
        kept=kept,
    )


def _mean_gradient(
    releases: SteeredReleases, curvature: Float[np.ndarray, "d d"]
) -> Float[np.ndarray, " d"]:
    """The gradient at the last centre, from all narrow windows, given the curvature."""
    return np.average(
        releases.gradients_at_last(curvature), axis=0, weights=releases.steps[-NUM_NARROW:]
    )


def _symmetric(matrices: Float[np.ndarray, "m d d"]) -> Float[np.ndarray, "m d d"]:
    return 0.5 * (matrices + matrices.swapaxes(1, 2))
