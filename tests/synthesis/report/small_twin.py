"""A small twin with names that a page has to escape."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import pandas as pd

from dpvim.synthesis.fitting import synthesize
from dpvim.synthesis.schema import Categorical, Count, Integer, Real, Schema
from dpvim.synthesis.twin import Twin

EVIL_LEVEL = "<script>alert('level')</script>"
EVIL_NAME = "cost $x_$ <img src=x onerror=alert(1)>"


class Made(NamedTuple):
    original: pd.DataFrame
    twin: Twin
    tables: list[pd.DataFrame]


def table(num_rows: int, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    age = rng.integers(18, 90, num_rows)
    return pd.DataFrame(
        {
            "visits": rng.poisson(np.exp(0.02 * (age - 40))),
            "group": rng.choice(["a", "b", EVIL_LEVEL], num_rows, p=[0.5, 0.3, 0.2]),
            EVIL_NAME: np.where(rng.random(num_rows) < 0.2, np.nan, rng.lognormal(3, 1, num_rows)),
            "age": age,
        }
    )


SCHEMA = Schema(
    (
        Count(name="visits", upper=40, reviewed=True),
        Categorical(name="group", levels=("a", "b", EVIL_LEVEL), reviewed=True),
        Real(name=EVIL_NAME, lower=0.1, upper=1e4, scale="log", nullable=True, reviewed=True),
        Integer(name="age", lower=0, upper=100, reviewed=True),
    )
)


@functools.cache
def small_twin() -> Made:
    """By DPVI; fitted once for all tests, with a seed: it is not private."""
    original = table(400)
    twin = synthesize(
        original,
        SCHEMA,
        epsilon=5.0,
        engine="dpvi",
        target="visits",
        components=2,
        num_steps=200,
        learning_rate=0.05,
        seed=0,
    )
    return Made(original, twin, list(twin.datasets(4, 200, seed=1)))


@functools.cache
def counted_twin() -> Made:
    """From noisy counts; likewise."""
    original = table(300)
    twin = synthesize(original, SCHEMA, epsilon=5.0, target="visits", components=2, seed=0)
    return Made(original, twin, list(twin.datasets(4, 200, seed=1)))
