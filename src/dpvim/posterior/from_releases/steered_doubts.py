"""Reasons to doubt the posterior of a steered run, and what each of them does to it.

Windows that disagree, or that all point one way, tell by how much: that is scatter of the gradient,
beyond its noise, and widens the posterior. Other doubts are grave: the releases cannot be read as
gradients of a quadratic at all, and say nothing of how far the answer is away (`hedge`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.stats import chi2

from dpvim.inference.clip_relief import relief
from dpvim.inference.steering import SteeredReleases
from dpvim.inference.windows import NUM_NARROW, NUM_WIDE
from dpvim.privacy.norm_counts import COUNT_SHARE
from dpvim.privacy.plan import PrivacyPlan

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
# Noise turns eigenvectors of the curvature, and moves its eigenvalues by up to twice the error of
# an entry times the root of their number. Where that is more than 2.5 times a usual one, a
# direction that the data hardly tell looks like any other.
_MAX_SPREAD = 1.25
_MAX_CLIPPED = 0.25
# Combinations of parameters along which the data have less than so many times the information of
# the prior, and the share of all that makes a doubt.
_LITTLE_INFORMATION, _MAX_UNTOLD = 4.0, 0.1
_MIXTURE = (
    "the model is a mixture: its likelihood can have several modes, and the releases tell about "
    "one of them. Compare fits from several starts (init_params=), each at its own cost, or order "
    "what can be exchanged."
)


class Doubts(NamedTuple):
    """Reasons to doubt a posterior, and what they do to it.

    Attributes:
        sentences: A reason each, with what to do.
        scatter: Variance of the whitened gradient at the centre that neither noise nor clip
            explains, as far as the windows tell.
        are_grave: True if the releases are no gradients of a quadratic.
    """

    sentences: tuple[str, ...]
    scatter: Float[np.ndarray, "d d"]
    are_grave: bool


class Spectrum(NamedTuple):
    """Eigenvalues of the measured curvature, with less noise, and their errors."""

    values: Float[np.ndarray, " d"]
    errors: Float[np.ndarray, " d"]

    @classmethod
    def of(cls, releases: SteeredReleases) -> Spectrum:
        """Of the last belief of a run."""
        shrunk = shrunk_curvature(releases.curvature, releases.variance)
        values, vectors = np.linalg.eigh(shrunk)
        squares = np.square(vectors)
        errors = np.sqrt(np.einsum("ik,ij,jk->k", squares, releases.variance, squares))
        return cls(values, np.maximum(errors, 1e-3))


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


def doubts_of(
    releases: SteeredReleases,
    plan: PrivacyPlan,
    curvature: Float[np.ndarray, "d d"],
    *,
    noise: float,
    clipped: float,
    prior_scale: Float[np.ndarray, " d"],
    is_mixture: bool,
) -> Doubts:
    """Look for reasons to doubt.

    Args:
        releases: The windows; all narrow ones must be there.
        plan: The plan of the run.
        curvature: In units of the last factor; positive definite.
        noise: Variance of the mean gradient of the narrow windows.
        clipped: Share of the records that were clipped in them.
        prior_scale: Of what the likelihood depends on.
        is_mixture: Whether the model's likelihood is a mixture.
    """
    spectrum, dim = Spectrum.of(releases), len(curvature)
    mild: list[str] = []
    scatter = np.zeros((dim, dim))
    gaps, has_scatter = _disagreement(releases, curvature)
    if has_scatter:
        scatter += gaps
        mild.append(
            "the gradients of the last windows contradict each other: the run has not arrived, or "
            "the log-likelihood is far from a quadratic there. Take more steps (num_steps=), or "
            "start closer to the answer (init_params=, from public knowledge)."
        )
    ascent, is_moving = _late_gradient(releases, curvature)
    if is_moving:
        scatter += np.outer(ascent, ascent)
        mild.append(
            "the gradients of the last windows all point the same way: the run is still on its "
            "way, and its curvature there is smaller than it was taken for. Take more records or a "
            "larger epsilon, or start closer to the answer (init_params=, from public knowledge)."
        )
    spread = np.sqrt(dim * np.median(releases.variance))
    is_blind = np.median(spectrum.errors) > _MAX_CURVATURE_ERROR or spread > _MAX_SPREAD
    if is_blind or noise > _MAX_NOISE**2:
        mild.append(
            "the noise would hide it if the log-likelihood were far from a quadratic, or if the "
            "data hardly told some combinations of parameters: there is too little information "
            "for so many parameters. Take more records, a larger epsilon or fewer parameters."
        )
    if relief(releases.counts, releases.steps, plan, dim) > 1:
        mild.append(
            "a few records have gradients many times as long as the others (rare levels, "
            "outliers), and all were measured in a smaller metric for their sake: directions that "
            "the data hardly tell apart are less well known than the intervals say. Merge rare "
            "levels, bound outliers, or take a larger epsilon."
        )
    if is_mixture:
        mild.append(_MIXTURE)

    grave: list[str] = []
    if releases.at_a_place < dim:
        grave.append(
            f"parameters act only together (factors of a product, or effects times their spread): "
            f"at any place the data can tell {releases.at_a_place:.0f} combinations of {dim}, and "
            "elsewhere others, so the log-likelihood is no quadratic. Write the model in "
            "parameters that the data can tell: one for a product, effects that are centred."
        )
    untold = _untold(releases, curvature, prior_scale)
    if untold > _MAX_UNTOLD * dim:
        # Components that have merged look like this, and then the run is lost. Elsewhere it may be
        # levels with few records, which do no harm.
        (grave if is_mixture else mild).append(
            f"of {untold} combinations of the {dim} parameters the data tell little more than the "
            "prior. If parameters act only together (factors of a product, components that "
            "merge), the log-likelihood is no quadratic over so wide a range: write the model in "
            "fewer parameters, or give tighter priors. Levels with few records do no harm."
        )
    unexplained, errors = _unexplained(releases, plan, spectrum)
    if any(unexplained > part and errors > least for part, least in _UNEXPLAINED):
        grave.append(
            "gradients are not linear in the parameters, even close to the answer: the "
            "log-likelihood is far from a quadratic. Write the model in other parameters (fewer "
            "that only act together), or with tighter priors."
        )
    if (spectrum.values < -_NEGATIVE_ERRORS * spectrum.errors).any():
        grave.append(
            "the log-likelihood is not concave at the end of the run: it is at a saddle, or "
            "between several modes. Order or fix what can be exchanged, or start closer to the "
            "answer (init_params=, from public knowledge)."
        )
    if clipped > _MAX_CLIPPED:
        grave.append(
            f"{clipped:.0%} of the records were clipped: the scale of the posterior was not "
            "found. Take more records, a larger epsilon, or priors closer to the answer."
        )
    return Doubts((*grave, *mild), scatter, bool(grave))


def _disagreement(
    releases: SteeredReleases, curvature: Float[np.ndarray, "d d"]
) -> tuple[Float[np.ndarray, "d d"], bool]:
    """Covariance of the narrow windows' mean gradient as they scatter, beyond noise; and whether
    they scatter at all."""
    narrow = releases.steps[-NUM_NARROW:]
    gradients = releases.gradients_at_last(curvature)
    gap = gradients - np.average(gradients, axis=0, weights=narrow)
    by_window = releases.noise[-NUM_NARROW:] / narrow[:, None]
    statistic, df = np.sum(gap**2 / by_window), gap.size - gap.shape[1]
    excess = gap.T @ gap / (NUM_NARROW - 1) - np.diag(by_window.mean(axis=0))
    values, vectors = np.linalg.eigh(excess / NUM_NARROW)
    covariance = (vectors * np.maximum(values, 0.0)) @ vectors.T
    return covariance, bool(chi2.sf(statistic, df) < _SIGNIFICANCE_LEVEL)


def _late_gradient(
    releases: SteeredReleases, curvature: Float[np.ndarray, "d d"]
) -> tuple[Float[np.ndarray, " d"], bool]:
    """The gradient at the last centres, and whether it is not zero, by more than noise and by
    enough to matter. A run that has arrived moves to and fro."""
    late = slice(-NUM_NARROW // 2, None)
    steps = releases.steps[late]
    at_centres = releases.gradient[late] + releases.point[late] @ curvature
    gradient = np.average(at_centres, axis=0, weights=steps)
    noise = np.average(releases.noise[late], axis=0, weights=steps) / steps.sum()
    is_significant = chi2.sf(np.sum(gradient**2 / noise), len(gradient)) < _STILL_MOVING
    return gradient, bool(is_significant and np.mean(gradient**2) > _MATTERS)


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


def _untold(
    releases: SteeredReleases,
    curvature: Float[np.ndarray, "d d"],
    prior_scale: Float[np.ndarray, " d"],
) -> int:
    """Number of directions, in units of the prior, of which the data tell little."""
    in_prior_units = np.linalg.solve(releases.factor, np.diag(prior_scale))
    information = np.linalg.eigvalsh(in_prior_units.T @ curvature @ in_prior_units)
    return int((information < _LITTLE_INFORMATION).sum())
