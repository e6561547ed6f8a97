"""Regressions: the structured clipped sums are the general ones, and no row exceeds the bound."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import summing_raw_records
from numpyro.distributions import constraints
from numpyro.infer import Predictive
from numpyro.infer.util import log_density

import dpvim
from dpvim.bridge.data import prepare
from dpvim.bridge.latent_space import LatentSpace, Site
from dpvim.bridge.model import bridge
from dpvim.inference.families import mean_field
from dpvim.inference.variants import VARIANTS
from dpvim.models.regression import GLM_FAMILIES, Regression, linear, logistic, poisson
from dpvim.privacy.clipping import Likelihood

NUM_ROWS, NUM_COLUMNS = 60, 5
BOUND = 0.7
MODELS = {
    **{kind: Regression(kind, prior_scale=0.8) for kind in GLM_FAMILIES},
    "linear through 0": Regression("linear", intercept=False),
}


def make_data(model, seed=0, rows=NUM_ROWS):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(rows, NUM_COLUMNS)).astype(np.float32)
    X[:, 0] *= 4
    mean = X @ np.array([0.5, -0.4, 0.3, 0.0, 0.2])
    y = {
        "logistic": (rng.random(rows) < 1 / (1 + np.exp(-mean))).astype(np.int32),
        "poisson": rng.poisson(np.exp(0.3 * mean)).astype(np.int32),
        "linear": (mean + 0.5 * rng.normal(size=rows)).astype(np.float32),
    }[model.kind]
    return X, y


@functools.cache
def setting(model):
    """The structured likelihood, the general one, and a batch as the engine has it."""
    inputs = prepare(make_data(model), {})
    found = summing_raw_records(bridge(model, inputs))
    general = Likelihood.from_log_prob(found.problem.likelihood.log_prob)
    return found, general, inputs.records


def weights_of(variant_name, dim, seed=0):
    rng = np.random.default_rng(seed)
    family = mean_field(dim)
    params = family.unpack(jnp.asarray(rng.normal(scale=0.7, size=2 * dim), jnp.float32))
    eta = jnp.asarray(rng.normal(size=dim), jnp.float32)
    return VARIANTS[variant_name](family).weights(params, eta)


@pytest.mark.parametrize("name", MODELS)
def test_log_density_is_numpyros(name):
    model = MODELS[name]
    found, general, batch = setting(model)
    latent = 0.4 * jax.random.normal(jax.random.key(0), (found.space.dim,))
    ours = jax.vmap(general.log_prob, (None, 0))(latent, batch).sum()
    ours += found.problem.log_prior(latent)
    theirs, _ = log_density(model, batch, {}, found.space.constrain(latent))
    np.testing.assert_allclose(ours, theirs + found.space.log_det(latent), rtol=1e-4)


@pytest.mark.parametrize("bound", [BOUND, 100.0, float("inf")])
@pytest.mark.parametrize("name", MODELS)
def test_the_structured_sum_is_the_general_one(name, bound):
    found, general, batch = setting(MODELS[name])
    latent = 0.4 * jax.random.normal(jax.random.key(1), (found.space.dim,))
    is_padding = jnp.arange(NUM_ROWS) % 7 == 3
    ours = jax.jit(found.problem.likelihood.clipped_sum, static_argnums=4)
    theirs = jax.jit(general.clipped_sum, static_argnums=4)
    # Rows are rounded to 2^-18 of the bound, in either sum.
    quantum = 0 if np.isinf(bound) else 2 * bound / 2**18 * np.sqrt(NUM_ROWS)
    for variant_name in VARIANTS.keys() - {"whitened"}:
        weights = weights_of(variant_name, found.space.dim)
        scale = 1.0 if weights is None else np.sqrt(weights)
        one, other = (
            np.asarray(each(latent, weights, batch, is_padding, bound)) * scale
            for each in (ours, theirs)
        )
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 + quantum)


@pytest.mark.parametrize("name", MODELS)
def test_rows_that_are_not_finite_and_padding_contribute_nothing(name):
    found, _, (X, y) = setting(MODELS[name])
    dim = found.space.dim
    latent = 0.4 * jax.random.normal(jax.random.key(1), (dim,))
    clipped_sum = jax.jit(found.problem.likelihood.clipped_sum, static_argnums=4)
    odd = X.at[3, 1].set(jnp.nan).at[4, 2].set(jnp.inf).at[5].set(jnp.nan)
    is_padding = jnp.arange(NUM_ROWS) == 5
    clean = jnp.isin(jnp.arange(NUM_ROWS), jnp.array([3, 4, 5]))
    for bound in (BOUND, float("inf")):
        ours = clipped_sum(latent, jnp.ones(dim), [odd, y], is_padding, bound)
        wanted = clipped_sum(latent, jnp.ones(dim), [X, y], clean, bound)
        np.testing.assert_allclose(ours, wanted, rtol=1e-6, atol=1e-6)
        for bad in (latent.at[1].set(jnp.nan), jnp.full(dim, jnp.nan)):
            assert not np.any(clipped_sum(bad, jnp.ones(dim), [X, y], is_padding, bound))
        every = jnp.ones(NUM_ROWS, bool)
        assert not np.any(clipped_sum(latent, jnp.ones(dim), [X, y], every, bound))


@pytest.mark.parametrize("name", MODELS)
def test_a_weight_that_is_not_finite_takes_its_coordinate_out(name):
    found, _, batch = setting(MODELS[name])
    weights = jnp.ones(found.space.dim).at[2].set(jnp.nan).at[0].set(0.0)
    nothing = jnp.zeros(NUM_ROWS, bool)
    total = found.problem.likelihood.clipped_sum(
        jnp.zeros(found.space.dim), weights, batch, nothing, BOUND
    )
    assert not np.any(np.asarray(total)[[0, 2]])
    assert np.isfinite(total).all()


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_no_row_exceeds_the_bound(name, weighted):
    """One row at a time, at latents, covariates and weights of all sizes."""
    model = MODELS[name]
    found, _, _ = setting(model)
    dim, rng, nothing = found.space.dim, np.random.default_rng(5), jnp.zeros(1, bool)
    alone = jax.jit(
        jax.vmap(
            lambda latent, weights, x, y: found.problem.likelihood.clipped_sum(
                latent, weights if weighted else None, [x[None], y[None]], nothing, BOUND
            )
        )
    )
    cases = 3000
    sizes = 10.0 ** rng.uniform(-3, 4, (cases, 1))
    latents = (rng.normal(size=(cases, dim)) * sizes).astype(np.float32)
    weights = (10.0 ** rng.uniform(-12, 8, (cases, dim))).astype(np.float32)
    weights = weights if weighted else np.ones_like(weights)
    spread = 10.0 ** rng.uniform(-6, 8, (cases, NUM_COLUMNS))
    X = (rng.normal(size=(cases, NUM_COLUMNS)) * spread).astype(np.float32)
    _, y = make_data(model, seed=3, rows=cases)
    shares = np.asarray(alone(latents, weights, X, y), np.float64)
    norms = np.sqrt((shares**2 * weights.astype(np.float64)).sum(axis=1))
    allowed = 1 + (2 * dim + 32) * 2.0**-24 + np.sqrt(dim) / 2**18
    assert np.isfinite(norms).all()
    assert norms.max() <= BOUND * allowed
    assert (norms > 0.99 * BOUND).mean() > 0.2  # the bound was put to the test


@pytest.mark.parametrize("size", [1e-19, 1e-17, 1e-15])
@pytest.mark.parametrize("weight", [1.0, 1e-10])
def test_tiny_covariates_with_a_huge_score_are_within_the_bound(size, weight):
    """Squares that underflow must not hide a row that a number makes large again."""
    model, bound, dim = Regression("poisson", intercept=False), 1e-5, 100
    space = LatentSpace([Site("coefficients", (dim,), (dim,), constraints.real)])
    batch = model.batch_of(np.full((1, dim), size / np.sqrt(weight)), np.array([3e38]))
    weights = jnp.full(dim, weight)
    args = (jnp.zeros(dim), weights, batch, jnp.zeros(1, bool), bound)
    total = np.asarray(model.clipped_sum_for(space)(*args))
    assert np.linalg.norm(total) * np.sqrt(weight) <= bound * (1 + 1e-5)


@pytest.mark.long
@pytest.mark.parametrize("model", [logistic, poisson, linear], ids=lambda m: m.kind)
def test_a_private_fit_finds_the_coefficients(model):
    rng = np.random.default_rng(2)
    X = rng.normal(size=(8000, 2)).astype(np.float32)
    predictor = X @ np.array([0.8, -0.5]) + 0.4
    y = np.asarray(
        GLM_FAMILIES[model.kind].distribution(jnp.asarray(predictor), 0.5).sample(jax.random.key(0))
    )
    plan = dpvim.PrivacyPlan(
        num_examples=8000, sampling_prob=0.1, num_steps=800, clip_norm=3.0, noise_multiplier=1.0
    )
    svi = dpvim.DPSVI(model, "mean_field", optax.adam(0.02), plan, seed=0)
    result = svi.run(jax.random.key(0), 800, X, y, progress_bar=False)
    values = svi.space.constrain(result.trace.params.loc[-200:].mean(axis=0))
    np.testing.assert_allclose(values["coefficients"], [0.8, -0.5], atol=0.1)
    np.testing.assert_allclose(values["intercept"], 0.4, atol=0.1)
    draws = jax.tree.map(lambda leaf: jnp.stack([leaf] * 20), values)
    predicted = Predictive(model, posterior_samples=draws)(jax.random.key(1), X[:50])
    assert predicted["y"].shape == (20, 50)


def test_wrong_settings_are_refused():
    with pytest.raises(ValueError, match=r"kind: expected one of .*logistic"):
        Regression("logit")
    with pytest.raises(ValueError, match="prior_scale"):
        Regression("linear", prior_scale=0)


def test_a_model_without_a_sum_of_its_own_uses_the_general_one():
    class Plain(Regression):
        def clipped_sum_for(self, space):
            return None

    found, _, batch = setting(Plain("logistic"))
    own, _, _ = setting(logistic)
    latent, nothing = jnp.full(found.space.dim, 0.1), jnp.zeros(NUM_ROWS, bool)
    sums = [
        f.problem.likelihood.clipped_sum(latent, jnp.ones(f.space.dim), batch, nothing, BOUND)
        for f in (found, own)
    ]
    np.testing.assert_allclose(*sums, atol=1e-4)
