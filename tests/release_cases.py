"""Made-up releases of quadratic log-likelihoods, and fits of one linear regression."""

from __future__ import annotations

import functools

import numpy as np
from conftest import linear_model

import dpvim
from dpvim.inference.release_sums import Collector
from dpvim.posterior.from_releases.regression import GaussianPrior
from dpvim.privacy.plan import PrivacyPlan

STEPS = 4000
H3 = 300.0 * np.array([[1.0, 0.3, 0.0], [0.3, 0.5, -0.1], [0.0, -0.1, 0.4]])
STANDARD_NORMAL = GaussianPrior(np.zeros(3), np.ones(3))

_RNG = np.random.default_rng(0)
X = _RNG.normal(size=(2000, 3)) * np.array([1.0, 0.6, 0.3])
Y = X @ np.array([0.5, -0.8, 0.4]) + _RNG.normal(size=2000)


def plan_of(**changes):
    facts = {
        "num_examples": 2000,
        "sampling_prob": 0.1,
        "num_steps": STEPS,
        "clip_norm": 3.0,
        "noise_multiplier": 20.0,
    }
    return PrivacyPlan(**(facts | changes))


def quadratic_sums(*, h, g_at_zero, plan, spread=0.1, bend=0.0, seed=0, steps=STEPS):
    """Releases of a log-likelihood with gradient g - H theta (+ bend theta^2), made up."""
    rng = np.random.default_rng(seed)
    points = spread * rng.normal(size=(steps, len(h))) + np.linspace(0, spread, steps)[:, None]
    noise = plan.noise_stddev / plan.sampling_prob * rng.normal(size=points.shape)
    gradients = g_at_zero - points @ h + bend * points**2 + noise
    return sums_of(points, gradients, plan), points, gradients


def sums_of(points, gradients, plan, chunks=None):
    """Sums of these releases, collected in chunks of these lengths."""
    collector, releases = Collector(points.shape[1], plan), gradients * plan.sampling_prob
    first = 0
    for length in chunks or [len(points)]:
        collector.add(first, length, points[first:], releases[first:])
        first += length
    return collector.total()


def fit_linear(**changes):
    """A fit of the linear regression of Y on X."""
    options = {
        "noise_multiplier": 20.0,
        "delta": 1e-5,
        "clip_norm": 3.0,
        "sampling_prob": 0.1,
        "num_steps": 1000,
        "learning_rate": 1e-2,
        "seed": 0,
    }
    return dpvim.fit(linear_model, X, Y, **(options | changes))


# One fit for all tests that ask for the same options: compiling it is what takes time.
linear_fit = functools.cache(fit_linear)
