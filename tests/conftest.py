"""Shared pieces: small problems with known answers."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from dpvim.estimator import Problem
from dpvim.family import FAMILIES
from dpvim.mechanism import Likelihood
from dpvim.plan import NonPrivatePlan
from dpvim.variants import VARIANTS, served_variants

DIM = 3
COMBINATIONS = [
    (family, variant) for family in FAMILIES for variant in served_variants(FAMILIES[family](DIM))
]


def pytest_generate_tests(metafunc: Any) -> None:
    """Tests that ask for `family_name` and `variant_name` run for every pair that exists."""
    if {"family_name", "variant_name"} <= set(metafunc.fixturenames):
        metafunc.parametrize(("family_name", "variant_name"), COMBINATIONS)
    elif "family_name" in metafunc.fixturenames:
        metafunc.parametrize("family_name", FAMILIES)


@pytest.fixture(autouse=True, scope="session")
def cache_of_the_tests(tmp_path_factory: Any) -> Iterator[None]:
    """One cache for all tests, and not the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DPVIM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(params=["softplus", "exp"])
def scale_transform(request: Any) -> str:
    return request.param


def gaussian_log_likelihood(latent, record):
    """A linear regression with unit noise, on a latent of three numbers."""
    return -0.5 * jnp.square(record["y"] - record["x"] @ latent)


def standard_normal_log_prior(latent):
    return -0.5 * jnp.sum(jnp.square(latent))


@pytest.fixture
def problem() -> Problem:
    likelihood = Likelihood.from_log_prob(gaussian_log_likelihood)
    return Problem(DIM, likelihood, standard_normal_log_prior)


@pytest.fixture
def records() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50, DIM)).astype(np.float32)
    y = (x @ np.array([1.0, -0.5, 0.2]) + rng.normal(size=50)).astype(np.float32)
    return {"x": jnp.asarray(x), "y": jnp.asarray(y)}


@pytest.fixture
def whole_data_plan() -> NonPrivatePlan:
    return NonPrivatePlan(num_examples=50, sampling_prob=1.0, num_steps=10)


def make_parts(family_name: str, variant_name: str, dim: int = DIM, transform: str = "softplus"):
    family = FAMILIES[family_name](dim, transform)
    return family, VARIANTS[variant_name](family)


def random_params(family: Any, seed: int = 0) -> Any:
    """Parameters of no special form: every allowed entry is different."""
    rng = np.random.default_rng(seed)
    return family.unpack(jnp.asarray(rng.normal(scale=0.7, size=family.num_params), jnp.float32))


def normal_mean_model(x):
    """Conjugate: a normal mean in each column, unit noise, standard normal prior."""
    mean = numpyro.sample("mean", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("x", dist.Normal(mean, 1).to_event(1), obs=x)


def logistic_model(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def linear_model(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, 1.0), obs=y)


@pytest.fixture
def ctrl_c():
    """Presses Ctrl-C after so many seconds; SIGINT is what it is in a terminal."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    timers = []

    def press_after(seconds):
        timers.append(threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)))
        timers[-1].start()

    yield press_after
    for timer in timers:
        timer.cancel()
    signal.signal(signal.SIGINT, previous)
