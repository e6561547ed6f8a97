"""Mixtures of all kinds, their rows, and their bridged forms, made once for all tests."""

from __future__ import annotations

import functools

import jax
import numpy as np
from conftest import summing_raw_records
from numpyro.distributions import biject_to

from dpvim.bridge.data import prepare
from dpvim.bridge.model import bridge
from dpvim.models.columns import CategoricalColumn, CountColumn, NormalColumn, Response
from dpvim.models.mixture import Mixture
from dpvim.privacy.clipping import Likelihood

NUM_ROWS = 64
MIXED = (
    CategoricalColumn("a", 5, nullable=True),
    CountColumn("n", upper=30, nullable=True),
    CountColumn("m", upper=300, overdispersed=True),
    NormalColumn("x", nullable=True),
    NormalColumn("age", lower=18, upper=90, integral=True),
    CategoricalColumn("b", 2),
    CategoricalColumn("y", 2, nullable=True),
)
MODELS = {
    "paper": Mixture(
        [*(CategoricalColumn(f"c{i}", n) for i, n in enumerate((4, 2, 3))), MIXED[-1]],
        5,
        Response("y", "poisson"),
    ),
    "mixed": Mixture(MIXED, 3, Response("x", "linear"), prior_scale=0.5),
    "counts": Mixture(MIXED[:2] + MIXED[3:4], 2, Response("n", "poisson")),
    "no levels": Mixture(
        [NormalColumn("x"), CountColumn("n", upper=9), CategoricalColumn("y", 2)],
        1,
        Response("y", "logistic"),
    ),
    "histograms": Mixture(
        [
            NormalColumn("x", nullable=True, num_bins=6),
            NormalColumn("k", lower=-3, upper=1, integral=True, num_bins=5),
            CategoricalColumn("c", 3),
            CategoricalColumn("y", 2),
        ],
        3,
        Response("y", "logistic"),
    ),
    # Columns that are called as features of others are.
    "alike": Mixture(
        [
            NormalColumn("b=1"),
            CategoricalColumn("b", 3),
            NormalColumn("x", nullable=True),
            NormalColumn("x missing"),
            CountColumn("intercept", upper=9),
            CountColumn("n", upper=30),
        ],
        2,
        Response("n", "poisson"),
    ),
}


@functools.cache
def setting(name):
    """The bridged model, the general likelihood, and rows as a batch."""
    model = MODELS[name]
    inputs = prepare(some_rows(model), {})
    found = summing_raw_records(bridge(model, inputs))
    return found, Likelihood.from_log_prob(found.problem.likelihood.log_prob), inputs.records


def some_rows(model, seed=0):
    """Rows of the right form, from no model at all."""
    rng = np.random.default_rng(seed)

    def values(column):
        if isinstance(column, CategoricalColumn):
            return rng.integers(0, column.num_levels, NUM_ROWS).astype(np.int32)
        if isinstance(column, CountColumn):
            return rng.binomial(column.upper, 0.2, NUM_ROWS).astype(np.int32)
        numbers = column.lower + (column.upper - column.lower) * rng.beta(2, 3, NUM_ROWS)
        return numbers.astype(np.int32 if column.integral else np.float32)

    missing = {column.name: rng.random(NUM_ROWS) < 0.2 for column in model.nullable}
    return {column.name: values(column) for column in model.columns}, missing


@functools.cache
def draw_of(model):
    """Values of all sites, of no special form."""
    priors = model._priors()

    @jax.jit
    def draw():
        raw = {n: biject_to(p.support).inverse_shape(p.shape()) for n, p in priors.items()}
        keys = jax.random.split(jax.random.key(0), len(priors))
        return {
            name: biject_to(priors[name].support)(0.7 * jax.random.normal(key, shape))
            for key, (name, shape) in zip(keys, raw.items(), strict=True)
        }

    return draw()


def latent_of(space, seed=1, scale=0.5):
    return scale * jax.random.normal(jax.random.key(seed), (space.dim,))
