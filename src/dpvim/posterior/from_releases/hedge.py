"""A posterior that is not to be trusted, hedged with the prior.

Where releases cannot be read as gradients of a quadratic, the posterior that was made of them may
be any distance off, and nothing that was released tells how far. A model of that is a mixture: with
even odds they mean what was made of them, or nothing, and then there is the prior. Its intervals
reach as far as the prior does, and keep where the run has been as their likeliest part.
"""

from __future__ import annotations

import numpy as np

from dpvim.posterior.drawn import DrawnPosterior
from dpvim.posterior.from_releases import GaussianMixture
from dpvim.posterior.from_releases.regression import GaussianPrior

HALF_PRIOR = "half of this posterior is the prior"
HEDGED = (
    f"{HALF_PRIOR}, since what was released cannot be relied on: its intervals reach as far as the "
    "prior's, and its means lie between both. Do what the other doubts say before you use it."
)


def hedged(
    posterior: GaussianMixture | DrawnPosterior, prior: GaussianPrior
) -> GaussianMixture | DrawnPosterior:
    """Put the prior, as independent Gaussians, in the place of every second component or draw."""
    doubts = (*posterior.doubts, HEDGED)
    if isinstance(posterior, DrawnPosterior):
        latents = posterior.latents.copy()
        eta = np.random.default_rng(0).normal(size=latents[1::2].shape)
        latents[1::2] = prior.loc + prior.scale * eta
        return posterior._replace(latents=latents, doubts=doubts)
    locs, factors = posterior.locs.copy(), posterior.factors.copy()
    locs[1::2], factors[1::2] = prior.loc, np.diag(prior.scale)
    return posterior._replace(locs=locs, factors=factors, doubts=doubts)
