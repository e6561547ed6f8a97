r"""Posterior from the windows of a steered run: in closed form given the curvature's eigenvalues.

In the units of the last factor L, with r the last centre and A = L' H L the curvature, a narrow
window's mean whitened gradient is

.. math:: g_w = A (u^* - u_w) + e_w, \qquad u = L^{-1} (\theta - r),

with u_w the mean point of the window, known noise e_w, and u* the maximum of the likelihood. What
the clip removed is a shift of unknown direction, of about 0.3 of the length by which gradients
were too long in all; counts of the norms tell that length. So

.. math:: g = A u^* + N(0, \nu^2 + c^2), \qquad u^* \mid \theta \sim N(u, A^{-1}),

and given A and a Gaussian prior the posterior of theta is Gaussian. Eigenvalues of A are drawn from
their posterior, and the result is the mixture. `exact_prior` puts the model's own prior into it.

Whatever says that a quadratic does not hold, or that the run has not arrived, is a doubt: the
windows disagree, probes explain less than they should, a curvature is negative, many records are
clipped.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.stats import chi2

from dpvim.inference.belief import Belief, Spectrum, log_eigenvalue_grid
from dpvim.inference.clip_relief import believed_counts, count_error, excess, relief
from dpvim.inference.steering import SteeredReleases
from dpvim.inference.variants import CLIP_SHIFT
from dpvim.inference.windows import NUM_NARROW, NUM_WIDE
from dpvim.posterior.convergence import Windows
from dpvim.posterior.from_releases import GaussianMixture
from dpvim.posterior.from_releases.regression import GaussianPrior
from dpvim.privacy.norm_counts import COUNT_SHARE, NORM_BIN_ENDS
from dpvim.privacy.plan import PrivacyPlan

_COMPONENTS = 256
_SIGNIFICANCE_LEVEL = 1e-3
# The same for the gradients of the last windows, where a false alarm costs less than a miss: a
# curvature that was taken for too large hides how far the run still has to go. And the least mean
# square of their entries that matters: with the posterior's curvature they are about one where the
# centre is one standard deviation off.
_STILL_MOVING, _MATTERS = 0.05, 0.5
# Doubts: variance of gradients that a line in the point leaves, in parts of what it explains, and
# in standard errors, where a little would do and where there is much; a negative curvature in
# standard errors; the error of curvatures that are about one, and noise in units of the posterior's
# standard deviation, beyond which nothing of this could be seen; the share of records clipped.
_UNEXPLAINED = ((0.5, 3.0), (5.0, 2.3))
_NEGATIVE_ERRORS = 4.0
_MAX_CURVATURE_ERROR, _MAX_NOISE = 0.8, 1.7
_MAX_CLIPPED = 0.25
MIXTURE_DOUBT = (
    "the model is a mixture: its likelihood can have several modes, and the releases tell about "
    "one of them. Compare fits from several starts (init_params=), each at its own cost, or order "
    "what can be exchanged."
)


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
    """

    mixture: GaussianMixture
    without_noise: Float[np.ndarray, "d d"]


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

    Coordinates that the likelihood does not depend on have their prior. `exact_prior` puts the
    model's own in its place.

    Args:
        releases: The windows; all narrow ones must be there.
        plan: The plan of the run.
        prior: Gaussians that stand for the model's prior.
        snapshot_steps: Steps between snapshots of the trace, the unit of `windows`.
        is_mixture: Whether the model's likelihood is a mixture, which may have several modes.
        seed: For the draws of eigenvalues: the same each time.
    """
    informed = releases.informed > 0
    clip = clip_shift(releases, plan)
    centre = releases.centre[-1]
    prior_scale = prior.scale[informed]
    spectrum = _spectrum(releases)
    narrow = releases.steps[-NUM_NARROW:]
    noise = np.average(releases.noise[-NUM_NARROW:], axis=0, weights=narrow).mean() / narrow.sum()
    extra = noise + clip.shift**2

    curvatures = _draw_curvatures(spectrum, np.random.default_rng(seed))
    gradients = np.stack([_mean_gradient(releases, a) for a in curvatures])
    factor = releases.factor
    prior_precision = factor.T @ (factor / np.square(prior_scale)[:, None])
    pull = factor.T @ ((prior.loc[informed] - centre) / np.square(prior_scale))
    identity = np.eye(len(factor))
    weight = curvatures @ np.linalg.inv(curvatures + extra * identity)
    covariance = np.linalg.inv(_symmetric(weight @ curvatures) + prior_precision)
    locs = np.einsum("kij,kj->ki", covariance, np.einsum("kij,kj->ki", weight, gradients) + pull)
    exact = np.linalg.inv(curvatures + prior_precision).mean(axis=0)

    roots = factor @ np.linalg.cholesky(_symmetric(covariance))
    doubts = _doubts(releases, plan, spectrum, clip, noise) + (MIXTURE_DOUBT,) * is_mixture
    mixture = _with_uninformed(centre + locs @ factor.T, roots, prior, informed)
    dim = len(informed)
    windows = Windows(
        np.full(dim, int(narrow.sum()) // snapshot_steps + 1), np.full(dim, not doubts)
    )
    without_noise = np.diag(np.square(prior.scale))
    without_noise[np.ix_(informed, informed)] = factor @ exact @ factor.T
    found = GaussianMixture(*mixture, np.zeros(dim), windows, np.ones(dim), doubts, clip.share)
    added = np.maximum(0.0, np.square(found.scale) - np.diagonal(without_noise))
    return ClosedForm(found._replace(dp_scale=np.sqrt(added)), without_noise)


def clip_shift(releases: SteeredReleases, plan: PrivacyPlan) -> ClipShift:
    """Estimate what the clip did, from the counts of norms in the narrow windows."""
    steps = releases.steps[-NUM_NARROW:]
    counts = np.average(releases.counts[-NUM_NARROW:], axis=0, weights=steps)
    counts = believed_counts(counts, count_error(plan, steps.sum()))
    clipped = counts[np.array(NORM_BIN_ENDS) >= 1].sum()
    too_long = plan.clip_norm * excess(counts)
    shift = CLIP_SHIFT * too_long / np.sqrt(releases.factor.shape[0])
    return ClipShift(float(clipped / plan.num_examples), float(shift))


def _spectrum(releases: SteeredReleases) -> Spectrum:
    nothing = np.zeros_like(releases.factor)
    parts = (releases.factor, releases.curvature, releases.variance, nothing)
    return Spectrum.of(Belief(releases.centre[-1], *parts))


def _draw_curvatures(
    spectrum: Spectrum, rng: np.random.Generator
) -> Float[np.ndarray, "components d d"]:
    """Curvatures with eigenvalues drawn from their posterior, evenly spread over it."""
    cumulative = np.cumsum(spectrum.weights(), axis=0)
    ranks = (np.arange(_COMPONENTS) + 0.5) / _COMPONENTS
    ranks = rng.permuted(np.tile(ranks[:, None], (1, len(spectrum.values))), axis=0)
    grid = log_eigenvalue_grid()
    drawn = np.stack(
        [
            grid[np.searchsorted(c, r).clip(max=len(grid) - 1)]
            for c, r in zip(cumulative.T, ranks.T, strict=True)
        ],
        axis=1,
    )
    vectors = spectrum.vectors
    return np.einsum("ij,kj,lj->kil", vectors, np.exp(drawn), vectors)


def _mean_gradient(
    releases: SteeredReleases, curvature: Float[np.ndarray, "d d"]
) -> Float[np.ndarray, " d"]:
    """The gradient at the last centre, from all narrow windows, given the curvature."""
    return np.average(
        _gradients_at_last(releases, curvature), axis=0, weights=releases.steps[-NUM_NARROW:]
    )


def _gradients_at_last(
    releases: SteeredReleases, curvature: Float[np.ndarray, "d d"]
) -> Float[np.ndarray, "narrow d"]:
    recent = slice(-NUM_NARROW, None)
    away = releases.centre[recent] - releases.centre[-1]
    points = releases.point[recent] + np.linalg.solve(releases.factor, away.T).T
    return releases.gradient[recent] + points @ curvature


def _doubts(
    releases: SteeredReleases,
    plan: PrivacyPlan,
    spectrum: Spectrum,
    clip: ClipShift,
    noise: float,
) -> tuple[str, ...]:
    """Reasons to doubt the posterior, a sentence each."""
    found = []
    narrow = releases.steps[-NUM_NARROW:]
    curvature = spectrum.positive()
    gradients = _gradients_at_last(releases, curvature)
    gap = gradients - np.average(gradients, axis=0, weights=narrow)
    by_window = releases.noise[-NUM_NARROW:] / narrow[:, None]
    scatter, df = np.sum(gap**2 / by_window), gap.size - gap.shape[1]
    if chi2.sf(scatter, df) < _SIGNIFICANCE_LEVEL:
        found.append(
            "the gradients of the last windows contradict each other: the run has not arrived, or "
            "the log-likelihood is far from a quadratic there. Take more steps (num_steps=), or "
            "start closer to the answer (init_params=, from public knowledge)."
        )
    if _is_on_its_way(releases, curvature):
        found.append(
            "the gradients of the last windows all point the same way: the run is still on its "
            "way, and its curvature there is smaller than it was taken for. Take more records or a "
            "larger epsilon, or start closer to the answer (init_params=, from public knowledge)."
        )
    unexplained, errors = _unexplained(releases, plan, spectrum)
    if any(unexplained > part and errors > least for part, least in _UNEXPLAINED):
        found.append(
            "gradients are not linear in the parameters, even close to the answer: the "
            "log-likelihood is far from a quadratic. Write the model in other parameters (fewer "
            "that only act together), or with tighter priors."
        )
    if (spectrum.values < -_NEGATIVE_ERRORS * spectrum.errors).any():
        found.append(
            "the log-likelihood is not concave at the end of the run: it is at a saddle, or "
            "between several modes. Order or fix what can be exchanged, or start closer to the "
            "answer (init_params=, from public knowledge)."
        )
    if np.median(spectrum.errors) > _MAX_CURVATURE_ERROR or noise > _MAX_NOISE**2:
        found.append(
            "the noise would hide it if the log-likelihood were far from a quadratic: there is too "
            "little information for so many parameters. Take more records, a larger epsilon or "
            "fewer parameters."
        )
    if relief(releases.counts, releases.steps, plan, releases.factor.shape[0]) > 1:
        found.append(
            "a few records have gradients many times as long as the others (rare levels, "
            "outliers), and all were measured in a smaller metric for their sake: directions that "
            "the data hardly tell apart are less well known than the intervals say. Merge rare "
            "levels, bound outliers, or take a larger epsilon."
        )
    if clip.share > _MAX_CLIPPED:
        found.append(
            f"{clip.share:.0%} of the records were clipped: the scale of the posterior was not "
            "found. Take more records, a larger epsilon, or priors closer to the answer."
        )
    return tuple(found)


def _is_on_its_way(releases: SteeredReleases, curvature: Float[np.ndarray, "d d"]) -> bool:
    """True if gradients at the last centres are not zero, by more than noise and by enough to
    matter. A run that has arrived moves to and fro."""
    late = slice(-NUM_NARROW // 2, None)
    steps = releases.steps[late]
    at_centres = releases.gradient[late] + releases.point[late] @ curvature
    gradient = np.average(at_centres, axis=0, weights=steps)
    noise = np.average(releases.noise[late], axis=0, weights=steps) / steps.sum()
    is_significant = chi2.sf(np.sum(gradient**2 / noise), len(gradient)) < _STILL_MOVING
    return bool(is_significant and np.mean(gradient**2) > _MATTERS)


def _unexplained(
    releases: SteeredReleases, plan: PrivacyPlan, spectrum: Spectrum
) -> tuple[float, float]:
    """Variance of the gradients of the wide windows that neither noise nor a line explains: in
    parts of what the line does, and in standard errors."""
    wide = slice(-NUM_NARROW - NUM_WIDE, -NUM_NARROW)
    known = (plan.noise_stddev / plan.sampling_prob) ** 2 / (1 - COUNT_SHARE)
    steps, dim = releases.steps[wide], releases.factor.shape[0]
    excess = np.average(releases.residual[wide].mean(axis=1), weights=steps) - known
    error = known * np.sqrt(2 / ((steps - dim - 1).sum() * dim))
    explained = float(releases.width) ** 2 * max(0.1, spectrum.values.mean())
    return float(excess / explained), float(excess / error)


def _with_uninformed(
    locs: Float[np.ndarray, "m k"],
    roots: Float[np.ndarray, "m k k"],
    prior: GaussianPrior,
    informed: np.ndarray,
) -> tuple[Float[np.ndarray, "m d"], Float[np.ndarray, "m d d"]]:
    """Components with the prior of the coordinates that the likelihood does not depend on."""
    components, dim = len(locs), len(informed)
    all_locs = np.tile(prior.loc, (components, 1))
    all_locs[:, informed] = locs
    all_roots = np.tile(np.diag(prior.scale), (components, 1, 1))
    all_roots[np.ix_(np.arange(components), informed, informed)] = roots
    assert all_roots.shape == (components, dim, dim)
    return all_locs, all_roots


def _symmetric(matrices: Float[np.ndarray, "m d d"]) -> Float[np.ndarray, "m d d"]:
    return 0.5 * (matrices + matrices.swapaxes(1, 2))
