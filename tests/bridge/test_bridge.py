"""The NumPyro bridge: log densities equal NumPyro's, however a model is written."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from conftest import linear_model, logistic_model
from numpyro.infer.util import log_density
from numpyro_models import MODELS, X, Y, at_random, bridged, setting

from dpvim._compile import single_precision
from dpvim.bridge.data import prepare
from dpvim.bridge.model import bridge


@pytest.mark.parametrize("name", MODELS)
@single_precision
def test_log_density_is_numpyros(name):
    model, _ = MODELS[name]
    found, inputs = setting(name)

    @jax.jit
    def ours(latent, records):
        log_lik = jax.vmap(found.problem.likelihood.log_prob, (None, 0))(latent, records)
        return log_lik.sum() + found.problem.log_prior(latent)

    @jax.jit
    def theirs(latent, records):
        density, _ = log_density(model, records, {}, found.space.constrain(latent))
        return density + found.space.log_det(latent)

    latent = at_random(found.space)
    one, other = (function(latent, inputs.records) for function in (ours, theirs))
    np.testing.assert_allclose(one, other, rtol=1e-4)


def test_latents_are_packed_as_numpyros_guide_packs_them():
    """So that parameters plug into AutoDiagonalNormal; site names out of order on purpose."""

    def model(x):
        z = numpyro.sample("z", dist.Normal(0, 1))
        a = numpyro.sample("a", dist.Gamma(2.0, 1.0).expand([2]).to_event(1))
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("x", dist.Normal(z, a.sum()), obs=x)

    guide = numpyro.infer.autoguide.AutoDiagonalNormal(model)
    with numpyro.handlers.seed(rng_seed=0):
        guide(X[:, 0])
    found, _ = bridged(model, (X[:, 0],))
    latent = at_random(found.space)
    theirs = guide._unpack_and_constrain(latent, {})
    for name, value in found.space.constrain(latent).items():
        np.testing.assert_allclose(value, theirs[name], rtol=1e-5)


# -- N, subsample_size and other ways to write the same model ---------------------------------


def with_total(X, y, N):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([4]).to_event(1))
    with numpyro.plate("records", N, subsample_size=X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def with_subsample(X, y, size):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([4]).to_event(1))
    with numpyro.plate("records", X.shape[0], subsample_size=size):
        batch_x = numpyro.subsample(X, event_dim=1)
        batch_y = numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Bernoulli(logits=batch_x @ w), obs=batch_y)


def without_plate(X, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([4]).to_event(1))
    numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def as_factor(X, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([4]).to_event(1))
    numpyro.factor("lik", dist.Bernoulli(logits=X @ w).log_prob(y).sum())


@pytest.mark.parametrize(
    ("model", "extra"),
    [
        (with_total, {"N": 30}),
        (with_total, {"N": 1000}),
        (with_subsample, {"size": 10}),
        (without_plate, {}),
        (as_factor, {}),
    ],
)
def test_other_ways_to_write_the_model_give_the_same_functions(model, extra):
    plain, inputs = bridged(logistic_model, (X, Y))
    other, _ = bridged(model, (X, Y), extra)
    latent = at_random(plain.space)
    records = inputs.records
    for record in [[leaf[i] for leaf in records] for i in range(3)]:
        np.testing.assert_allclose(
            other.problem.likelihood.log_prob(latent, record),
            plain.problem.likelihood.log_prob(latent, record),
            rtol=1e-5,
        )
    np.testing.assert_allclose(
        other.problem.log_prior(latent), plain.problem.log_prior(latent), rtol=1e-5
    )


def test_a_scale_that_the_user_put_on_a_site_is_kept():
    def tempered(X, y):
        with numpyro.handlers.scale(scale=0.5):
            numpyro.sample("y", dist.Bernoulli(logits=X @ w_site(X)), obs=y)

    def w_site(X):
        return numpyro.sample("w", dist.Normal(0, 1).expand([4]).to_event(1))

    plain, inputs = bridged(without_plate, (X, Y))
    other, _ = bridged(tempered, (X, Y))
    latent, record = at_random(plain.space), [leaf[0] for leaf in inputs.records]
    np.testing.assert_allclose(
        other.problem.likelihood.log_prob(latent, record),
        0.5 * plain.problem.likelihood.log_prob(latent, record),
        rtol=1e-5,
    )


def test_outcomes_of_zeros_and_ones_may_be_floats():
    found, _ = bridged(logistic_model, (X, Y.astype(np.float32)))
    assert found.space.dim == 4


def test_keyword_data_and_pytrees():
    def model(data, *, offset):
        return linear_model(data["X"] + offset, data["y"])

    found, inputs = bridged(model, ({"X": X, "y": Y.astype(float)},), {"offset": 0.5})
    assert found.space.dim == 4
    assert len(inputs.records) == 2


def test_models_of_two_threads_do_not_meet():
    """NumPyro has one stack of handlers for all threads; a model that waits lets another one in."""

    def slow(x):
        w = numpyro.sample("w", dist.Normal(0, 1))
        time.sleep(0.02)
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("x", dist.Normal(w, 1), obs=x)

    inputs = prepare((X[:, 0],), {})
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lambda _: bridge(slow, inputs), range(3)))
    assert [[site.name for site in one.space.sites] for one in found] == [["w"]] * 3
