"""Directions of the latent that a likelihood depends on: found for models as users write them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from dpvim.bridge.data import prepare
from dpvim.bridge.model import bridge


def normals(name, size, scale=3.0):
    return numpyro.sample(name, dist.Normal(0, scale).expand([size]).to_event(1))


def observe(distribution, y):
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", distribution, obs=y)


def effects(age, region, y):
    """An intercept and an effect for each level of two columns."""
    base = numpyro.sample("base", dist.Normal(0, 10))
    mean = base + normals("age", 4)[age] + normals("region", 7)[region]
    observe(dist.Normal(mean, numpyro.sample("sigma", dist.Exponential(1.0))), y)


def classes(X, y):
    w = numpyro.sample("w", dist.Normal(0, 2).expand([2, 3]).to_event(2))
    observe(dist.Categorical(logits=X @ w), y)


def regression(X, y):
    observe(dist.Bernoulli(logits=X @ normals("b", 2)), y)


def many(X, y):
    """Most made-up outcomes are impossible ones, and tell nothing."""
    observe(dist.Bernoulli(logits=X @ normals("b", X.shape[1])), y)


def powers(x, y):
    """Of numbers from zero to one these would be nearly alike."""
    b = normals("b", 4)
    observe(dist.Normal(b[0] + b[1] * x + b[2] * x**2 + b[3] * x**3, 1.0), y)


def product(x, y):
    """Whatever one factor is, the other matters."""
    observe(dist.Normal(normals("a", 1)[0] * normals("b", 1)[0] * x, 0.3), y)


def late(x, y):
    """No made-up row is as late as the last coefficient: it may go with any other."""
    b = normals("b", 3)
    observe(dist.Normal(b[0] + b[1] + b[2] * (x > 1e12), 1.0), y)


def knots(x, y):
    b = normals("b", 6)
    observe(dist.Normal(jnp.interp(x, jnp.linspace(0, 100, 6), b), 1.0), y)


def looped(group, y):
    """In a loop, where a number is the index: JAX makes a slice of it."""
    a, b = jnp.asarray(normals("a", 3)), normals("b", 1)
    observe(dist.Normal(jax.lax.map(lambda level: a[level], group) + b[0], 1.0), y)


X, LEVELS, YES = np.zeros((9, 2)), np.zeros(9, int), np.zeros(9, bool)
NUMBERS = np.zeros(9)
# By site: age, base, region, sigma.
EFFECTS = [
    [1, 1, 1, 1, -1, 0, 0, 0, 0, 0, 0, 0, 0],
    [0, 0, 0, 0, -1, 1, 1, 1, 1, 1, 1, 1, 0],
]
# A model, its data, and combinations of parameters, by the names of
# their sites, that its likelihood does not depend on.
CASES = {
    "effects": (effects, (LEVELS, LEVELS, NUMBERS), EFFECTS),
    "classes": (classes, (X, LEVELS), [[1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1]]),
    "regression": (regression, (X, YES), []),
    "many": (many, (np.tile(X, (1, 50)), YES.astype(np.float32)), []),
    "more": (many, (np.tile(X, (1, 64)), YES.astype(np.float32)), []),
    "powers": (powers, (NUMBERS, NUMBERS), []),
    "product": (product, (NUMBERS, NUMBERS), []),
    "late": (late, (NUMBERS, NUMBERS), []),
    "knots": (knots, (NUMBERS, NUMBERS), []),
    "looped": (looped, (LEVELS, NUMBERS), [[1, 1, 1, -1]]),
}


@pytest.mark.parametrize("name", CASES)
def test_combinations_that_do_not_matter_are_found(name):
    model, data, unknown = CASES[name]
    bridged = bridge(model, prepare(data, {}))
    order = np.argsort([site.name for site in bridged.space.sites], kind="stable")
    sizes = [site.raw_size for site in bridged.space.sites]
    starts = np.cumsum([0, *sizes])
    by_name = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in order])
    span = bridged.informed().span[by_name]
    assert span.shape == (sum(sizes), sum(sizes) - len(unknown))
    np.testing.assert_allclose(span.T @ span, np.eye(span.shape[1]), atol=1e-5)
    np.testing.assert_allclose(np.array(unknown).reshape(-1, sum(sizes)) @ span, 0, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_parameters_that_act_only_together_are_found(name):
    model, data, _ = CASES[name]
    informed = bridge(model, prepare(data, {})).informed()
    fewer = {"product": 1}.get(name, 0)
    assert informed.at_a_place == informed.span.shape[1] - fewer


def test_values_of_the_data_do_not_matter():
    some = bridge(effects, prepare((LEVELS, LEVELS, NUMBERS), {})).informed().span
    data = (LEVELS + 3, LEVELS + 2, NUMBERS + 1e6)
    np.testing.assert_array_equal(some, bridge(effects, prepare(data, {})).informed().span)
