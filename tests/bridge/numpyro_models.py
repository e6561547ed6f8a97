"""NumPyro models with supports of all kinds, and their bridged forms."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from conftest import logistic_model

from dpvim.bridge.data import prepare
from dpvim.bridge.model import bridge

RNG = np.random.default_rng(0)
X = RNG.normal(size=(30, 4)).astype(np.float32)
Y = (RNG.random(30) < 0.5).astype(np.int32)
CATEGORIES = RNG.integers(0, 3, 30)


def mixture(c):
    """Simplex supports, one of them with a batch of events."""
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(4)))
    probs = numpyro.sample("probs", dist.Dirichlet(jnp.ones(3)).expand([4]).to_event(1))
    with numpyro.plate("records", c.shape[0]):
        numpyro.factor("c", jax.nn.logsumexp(jnp.log(weights) + jnp.log(probs[:, c].T), axis=-1))


def positive_and_interval(x):
    scale = numpyro.sample("scale", dist.Gamma(2.0, 1.0))
    loc = numpyro.sample("loc", dist.Uniform(jnp.array([-2.0, -1.0]), 3.0).to_event(1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("x", dist.Normal(loc, scale).to_event(1), obs=x[:, :2])


def correlated(x):
    factor = numpyro.sample("factor", dist.LKJCholesky(3, 2.0))
    ordered = numpyro.sample(
        "ordered", dist.ImproperUniform(dist.constraints.ordered_vector, (), (3,))
    )
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("x", dist.MultivariateNormal(ordered, scale_tril=factor), obs=x[:, :3])


def hierarchical(x):
    spread = numpyro.sample("spread", dist.HalfCauchy(1.0))
    with numpyro.plate("columns", 4):
        loc = numpyro.sample("loc", dist.Normal(0, spread))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("x", dist.Normal(loc, 1).to_event(1), obs=x)


def penalised(x):
    """An observed site that sees no data belongs to the prior."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([4]).to_event(1))
    numpyro.factor("penalty", -jnp.sum(jnp.abs(w)))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("x", dist.Normal(w, 1).to_event(1), obs=x)


def two_outcomes(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([4]).to_event(1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("x", dist.Normal(0.5, 1).expand([4]).to_event(1), obs=x)
        numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


MODELS = {
    "mixture": (mixture, (CATEGORIES,)),
    "positive_and_interval": (positive_and_interval, (X,)),
    "correlated": (correlated, (X,)),
    "hierarchical": (hierarchical, (X,)),
    "penalised": (penalised, (X,)),
    "two_outcomes": (two_outcomes, (X, Y)),
    "logistic": (logistic_model, (X, Y)),
}


def bridged(model, args, kwargs=None):
    inputs = prepare(args, kwargs or {})
    return bridge(model, inputs), inputs


def at_random(space, seed=3):
    return jax.random.normal(jax.random.key(seed), (space.dim,), jnp.float32) * 0.5


@functools.cache
def setting(name):
    """A bridged model of `MODELS` and its data, made once for all tests."""
    return bridged(*MODELS[name])
