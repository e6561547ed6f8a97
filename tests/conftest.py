"""Shared pieces: small problems with known answers."""

from __future__ import annotations

import itertools
import os
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
from hypothesis import settings

from dpvim._progress import ProgressBar
from dpvim.inference.families import FAMILIES, Family, Layout
from dpvim.inference.gradient import Problem
from dpvim.inference.variants import VARIANTS, served_variants
from dpvim.privacy.clipping import Likelihood
from dpvim.privacy.plan import NonPrivatePlan

DIM = 3
# Of the families between the narrowest and the widest `make test` takes one variant.
BETWEEN = ("low_rank", "block_diagonal")
COMBINATIONS = [
    pytest.param(
        family,
        variant,
        marks=pytest.mark.long if family in BETWEEN and variant != "vanilla" else (),
    )
    for family in FAMILIES
    for variant in served_variants(family)
]
SERVED_FAMILIES = [
    pytest.param(family, marks=pytest.mark.long if family in BETWEEN else ())
    for family in FAMILIES
    if served_variants(family)
]


def pytest_configure(config: Any) -> None:
    """Share compiled programs between tests and workers; set warnings for double precision.

    Tests hand numbers in double precision to inner functions if JAX is set to it.
    """
    jax.config.update(
        "jax_compilation_cache_dir", str(config.rootpath / ".pytest_cache" / "programs")
    )
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # A test is not about how fast the machine is.
    settings.register_profile("untimed", deadline=None)
    settings.load_profile("untimed")
    if jax.config.jax_enable_x64:
        config.addinivalue_line("filterwarnings", "ignore:Explicitly requested dtype")


def pytest_generate_tests(metafunc: Any) -> None:
    """Tests that ask for `family_name` and `variant_name` run for every pair that exists."""
    if {"family_name", "variant_name"} <= set(metafunc.fixturenames):
        metafunc.parametrize(("family_name", "variant_name"), COMBINATIONS)
    elif "family_name" in metafunc.fixturenames:
        metafunc.parametrize("family_name", SERVED_FAMILIES)


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
    family = make_family(family_name, dim, transform)
    return family, VARIANTS[variant_name](family)


def make_family(name: str, dim: int = DIM, transform: str = "softplus") -> Family:
    """The family for a latent of two sites, where there are two numbers."""
    return FAMILIES[name](Layout((1, dim - 1) if dim > 1 else (1,)), transform)


def some_eta(family: Family) -> Any:
    """A base draw with entries of no special form."""
    return jnp.resize(jnp.array([0.4, -1.3, 2.1], jnp.float32), family.base_size)


def random_params(family: Any, seed: int = 0, scale: float = 0.7) -> Any:
    """Parameters of no special form: every allowed entry is different."""
    rng = np.random.default_rng(seed)
    return family.unpack(jnp.asarray(rng.normal(scale=scale, size=family.num_params), jnp.float32))


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
def ctrl_c(monkeypatch):
    """Presses Ctrl-C when a run has reported progress so many times: once for every chunk.

    SIGINT is what it is in a terminal.
    """
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)

    def press_after(chunks):
        reports = itertools.count(1)

        def advance(bar, steps):
            if next(reports) == chunks:
                os.kill(os.getpid(), signal.SIGINT)

        monkeypatch.setattr(ProgressBar, "advance", advance)

    yield press_after
    signal.signal(signal.SIGINT, previous)


# -- tables and twins -----------------------------------------------------------------------------

PATIENTS_SCHEMA = """
dpvim_schema = 1
missing = ["", "unknown"]

[[columns]]
name = "visits"
kind = "count"
upper = 30
reviewed = true

[[columns]]
name = "sex"
kind = "binary"
levels = ["f", "m"]
reviewed = true

[[columns]]
name = "code"
kind = "categorical"
levels = ["01", "02", "NA"]
nullable = true
reviewed = true

[[columns]]
name = "age"
kind = "integer"
lower = 18
upper = 99
reviewed = true

[[columns]]
name = "dose"
kind = "real"
lower = 0.1
upper = 100.0
scale = "log"
decimals = 2
nullable = true
reviewed = true
"""

OWN_MODEL = """
import numpyro, numpyro.distributions as dist

def model(values=None, missing=None, num_rows=None):
    share = numpyro.sample("share", dist.Beta(1, 1))
    rate = numpyro.sample("rate", dist.LogNormal(0, 1))
    rows = num_rows if values is None else len(values["sex"])
    with numpyro.plate("records", rows):
        sex = numpyro.sample("sex", dist.Bernoulli(share), obs=values and values["sex"])
        visits = numpyro.sample("visits", dist.Poisson(rate), obs=values and values["visits"])
    return {"sex": sex, "visits": visits}
"""


@pytest.fixture(scope="session")
def schema(tmp_path_factory) -> Any:
    from dpvim.synthesis.schema import Schema

    path = tmp_path_factory.mktemp("schema") / "schema.toml"
    path.write_text(PATIENTS_SCHEMA)
    return Schema.load(path)


@pytest.fixture(scope="session")
def patients() -> pd.DataFrame:
    """A table as a file would hold it, with values outside of the schema in it."""
    rng = np.random.default_rng(0)
    count = 400
    age = rng.integers(10, 110, count)
    return pd.DataFrame(
        {
            "dose": np.where(rng.random(count) < 0.2, np.nan, np.exp(rng.normal(1, 2, count))),
            "visits": rng.poisson(np.exp(age / 60)),
            "code": rng.choice(np.array(["01", "02", "NA", "unknown", "99"], object), count),
            "sex": rng.choice(["f", "m"], count),
            "age": age,
            "name": "left out",
        }
    )


@pytest.fixture(scope="session")
def twin(patients, schema) -> Any:
    """One small twin for all tests that need one, seeded."""
    from dpvim.synthesis.fitting import synthesize

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return synthesize(
            patients,
            schema,
            epsilon=5.0,
            engine="dpvi",
            target="visits",
            components=2,
            num_steps=200,
            seed=0,
        )


@pytest.fixture
def model_file(tmp_path) -> Path:
    """A model of the columns sex and visits."""
    path = tmp_path / "mine.py"
    path.write_text(OWN_MODEL)
    return path


def summing_raw_records(bridged):
    """The bridged model with a clipped sum that takes records as the model does."""
    likelihood = bridged.problem.likelihood

    def clipped_sum(latent, weights, batch, is_padding, bound):
        return likelihood.clipped_sum(
            latent, weights, bridged.problem.arrange(batch), is_padding, bound
        )

    own = likelihood._replace(clipped_sum=clipped_sum)
    return bridged._replace(problem=bridged.problem._replace(likelihood=own))


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The address of a PostgreSQL server of these tests' own, without a table."""
    import postgres_server

    if reason := postgres_server.why_not():
        pytest.skip(reason)
    with postgres_server.running() as address:
        yield address


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    """Ibis, connected to a session of Spark's of these tests' own."""
    import spark_session

    if reason := spark_session.why_not():
        pytest.skip(reason)
    with spark_session.running() as backend:
        yield backend
