r"""Priors that are sums over the coordinates of the flat latent.

A Dirichlet(1), seen through stick-breaking with its log-Jacobian, is such a sum: with s the raw
value less log(r), r the number of levels left,

.. math:: \log p(u) = \mathrm{const} + \sum_i [\log \sigma(s_i) + r_i \log \sigma(-s_i)]
          = \mathrm{const} + \sum_i [s_i - (1 + r_i) \log(1 + e^{s_i})].

A Beta(1, 1) is the same with r = 1; normals, and log-normals on the logarithmic scale, are sums of
squares. So a whole model's prior is one line, and so is its gradient, where differentiating
through every transform takes hundreds of small operations a step.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from scipy.special import gammaln

from dpvim.bridge.latent_space import Site
from dpvim.types import Latent, LogPrior, Scalar


class _Terms(NamedTuple):
    """Terms of a site's log prior, by coordinate.

    Attributes:
        remaining: r for coordinates that break sticks, 0 for others.
        loc, precision: Of normal coordinates; the precision of others is 0.
        constant: The term that does not depend on the latent.
    """

    remaining: np.ndarray
    loc: np.ndarray
    precision: np.ndarray
    constant: float


def factorized_log_prior(sites: list[tuple[Site, dist.Distribution]]) -> LogPrior:
    """The log prior, with the log-Jacobians of the supports, of sites that have these priors.

    They must be Dirichlet(1), Beta(1, 1), normal or log-normal.
    """
    terms = [_terms(site, _elementary(prior)) for site, prior in sites]
    remaining, loc, precision = (
        np.concatenate(arrays).astype(np.float32)
        for arrays in zip(*((t.remaining, t.loc, t.precision) for t in terms), strict=True)
    )
    constant = sum(t.constant for t in terms)
    is_stick = (remaining > 0).astype(np.float32)
    shift = np.log(np.maximum(remaining, 1))

    def log_prior(latent: Latent) -> Scalar:
        sticks = latent - shift
        broken = is_stick * sticks - (is_stick + remaining) * jax.nn.softplus(sticks)
        return jnp.sum(broken - 0.5 * precision * (latent - loc) ** 2) + constant

    return log_prior


def _terms(site: Site, prior: dist.Distribution) -> _Terms:
    size, zeros = site.raw_size, np.zeros(site.raw_size)
    if isinstance(prior, dist.Dirichlet | dist.Beta):
        is_dirichlet = isinstance(prior, dist.Dirichlet)
        concentration = (
            prior.concentration if is_dirichlet else (prior.concentration1, prior.concentration0)
        )
        if np.any(np.asarray(concentration) != 1):
            raise ValueError(f"site {site.name!r}: expected concentrations of 1, got others.")
        sticks = site.raw_shape[-1] if is_dirichlet else 1
        remaining = np.tile(np.arange(sticks, 0, -1), size // sticks)
        # The uniform distribution on a simplex has density gamma(number of levels).
        return _Terms(remaining, zeros, zeros, size // sticks * float(gammaln(sticks + 1)))
    loc, scale = (
        np.broadcast_to(np.asarray(part, float), site.raw_shape).ravel()
        for part in (prior.loc, prior.scale)
    )
    constant = -float(np.sum(np.log(scale) + 0.5 * math.log(2 * math.pi)))
    return _Terms(zeros, loc, scale**-2.0, constant)


def _elementary(prior: dist.Distribution) -> dist.Distribution:
    """The distribution of one entry or event."""
    while isinstance(prior, dist.Independent | dist.ExpandedDistribution):
        prior = prior.base_dist
    return prior
