"""One small twin for all tests that need one."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from dpvim.synthesis.schema import Schema
from dpvim.synthesis.twin import Twin, synthesize

SCHEMA = """
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
def schema(tmp_path_factory) -> Schema:
    path = tmp_path_factory.mktemp("schema") / "schema.toml"
    path.write_text(SCHEMA)
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
def twin(patients, schema) -> Twin:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return synthesize(
            patients, schema, epsilon=5.0, target="visits", components=2, num_steps=200, seed=0
        )


@pytest.fixture
def model_file(tmp_path) -> Path:
    """A model of the columns sex and visits."""
    path = tmp_path / "mine.py"
    path.write_text(OWN_MODEL)
    return path
