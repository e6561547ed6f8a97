"""The mean-field optimum of regressions is where the ELBO has no slope."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import logistic_model

import dpvim
from dpvim.experiments.optimum import mean_field_optimum


def data(kind):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(400, 3)) @ np.array([[1.0, 0.5, 0], [0, 1, 0.3], [0, 0, 1]])
    predictor = X @ np.array([0.8, -0.4, 0.1])
    if kind == "poisson":
        return X, rng.poisson(np.exp(predictor))
    return X, (rng.random(400) < 1 / (1 + np.exp(-predictor))).astype(int)


def elbo(X, y, kind, loc, scale, prior_scale):
    """By a large sum over draws, the same for every argument."""
    eta = np.random.default_rng(1).normal(size=(20_000, len(loc)))
    eta = np.concatenate([eta, -eta])
    predictor = X @ (loc + scale * eta).T
    if kind == "poisson":
        likelihood = (y[:, None] * predictor - np.exp(predictor)).sum(axis=0).mean()
    else:
        likelihood = (y[:, None] * predictor - np.logaddexp(0, predictor)).sum(axis=0).mean()
    prior = -0.5 * np.sum((loc**2 + scale**2) / prior_scale**2)
    return likelihood + prior + np.log(scale).sum()


@pytest.mark.parametrize("kind", ["logistic", "poisson"])
def test_the_elbo_is_largest_there(kind):
    X, y = data(kind)
    found = mean_field_optimum(X, y, kind, prior_scale=2.0)
    best = elbo(X, y, kind, found.loc, found.scale, 2.0)
    for i in range(3):
        for step in (-0.3, 0.3):
            loc, scale = found.loc.copy(), found.scale.copy()
            loc[i] += step * scale[i]
            assert elbo(X, y, kind, loc, found.scale, 2.0) < best
            scale[i] *= np.exp(step)
            assert elbo(X, y, kind, found.loc, scale, 2.0) < best


@pytest.mark.long
def test_a_fit_without_noise_ends_there():
    X, y = data("logistic")
    found = mean_field_optimum(X, y, "logistic")
    X = X.astype(np.float32)
    fit = dpvim.fit_nonprivate(
        logistic_model, X, y, sampling_prob=1.0, num_steps=8000, learning_rate=1e-2, seed=0
    )
    half = len(fit.trace) // 2
    np.testing.assert_allclose(fit.trace.loc[half:].mean(axis=0), found.loc, atol=0.02)
    scale = np.logaddexp(fit.trace.raw_scale[half:].mean(axis=0), 0)
    np.testing.assert_allclose(scale, found.scale, rtol=0.08)
