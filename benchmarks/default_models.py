"""Models of different kinds as users write them, with data of their shape: no option is chosen.

Each is a model for the whole data set, as for NUTS, and a function that makes data of a seed.
Priors are what an analyst writes without having looked at the data; parameters are of the size that
such data have, not draws from the prior.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist


class Case(NamedTuple):
    """A model, how to make the arguments for it, and draws of its posterior where NUTS fails."""

    model: Callable[..., None]
    make: Callable[[np.random.Generator], tuple[Any, ...]]
    draws: Callable[..., np.ndarray] | None = None


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


# -- regressions -------------------------------------------------------------------------------


def logistic_model(X: Any, y: Any = None) -> None:
    intercept = numpyro.sample("intercept", dist.Normal(0, 5))
    w = numpyro.sample("w", dist.Normal(0, 2).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=intercept + X @ w), obs=y)


def make_logistic(rng: np.random.Generator) -> tuple[Any, ...]:
    X = rng.normal(size=(4000, 6))
    w = np.array([1.5, -1.0, 0.5, 0.0, 0.2, 2.0])
    return X, (rng.random(4000) < _sigmoid(X @ w - 0.5)).astype(int)


def covertype_model(X: Any, y: Any = None) -> None:
    coefs = numpyro.sample("coefs", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ coefs), obs=y)


def make_covertype(rng: np.random.Generator) -> tuple[Any, ...]:
    """Standardised terrain: correlated heights and slopes, skewed distances, a column of ones."""
    n = 20_000
    common = rng.normal(size=(n, 1))
    heights = 0.7 * common + 0.7 * rng.normal(size=(n, 6))
    distances = rng.gamma(1.5, size=(n, 4))
    X = np.hstack([heights, distances])
    X = (X - X.mean(0)) / X.std(0)  # public constants would do as well
    X = np.hstack([X, np.ones((n, 1))])
    w = np.array([1.6, -0.8, 0.4, 0.0, 0.3, -0.2, 0.6, -0.5, 0.1, 0.0, -0.4])
    return X, (rng.random(n) < _sigmoid(X @ w)).astype(int)


def linear_model(X: Any, y: Any = None) -> None:
    a = numpyro.sample("a", dist.Normal(0, 10))
    b = numpyro.sample("b", dist.Normal(0, 10).expand([X.shape[1]]).to_event(1))
    sigma = numpyro.sample("sigma", dist.Exponential(1.0))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Normal(a + X @ b, sigma), obs=y)


def make_linear(rng: np.random.Generator) -> tuple[Any, ...]:
    X = rng.normal(size=(3000, 2))
    return X, 4.0 + X @ np.array([2.0, -1.0]) + 0.5 * rng.normal(size=3000)


def units_model(X: Any, y: Any = None) -> None:
    """Columns in their own units, and an outcome in thousands."""
    intercept = numpyro.sample("intercept", dist.Normal(0, 500))
    b = numpyro.sample("b", dist.Normal(0, 500).expand([X.shape[1]]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(500))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Normal(intercept + X @ b, sigma), obs=y)


def make_units(rng: np.random.Generator) -> tuple[Any, ...]:
    n = 5000
    age, female = rng.uniform(18, 80, n), rng.random(n) < 0.5
    height = rng.normal(172, 9, n) - 12 * female
    X = np.column_stack([age, height, female])
    y = 300 + 12 * age + 5 * height - 250 * female + rng.normal(0, 300, n)
    return X, y


def poisson_model(X: Any, y: Any = None) -> None:
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(X @ b)), obs=y)


def make_poisson(rng: np.random.Generator) -> tuple[Any, ...]:
    X = np.hstack([np.ones((5000, 1)), rng.normal(size=(5000, 4)), rng.random((5000, 1)) < 0.3])
    b = np.array([0.5, 0.4, -0.3, 0.2, 0.0, 0.6])
    return X, rng.poisson(np.exp(X @ b))


def negative_binomial_model(X: Any, y: Any = None) -> None:
    b = numpyro.sample("b", dist.Normal(0, 2).expand([X.shape[1]]).to_event(1))
    concentration = numpyro.sample("concentration", dist.Gamma(2.0, 0.5))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(X @ b), concentration), obs=y)


def make_negative_binomial(rng: np.random.Generator) -> tuple[Any, ...]:
    X = np.hstack([np.ones((5000, 1)), rng.normal(size=(5000, 3))])
    mean = np.exp(X @ np.array([1.0, 0.4, -0.3, 0.2]))
    return X, rng.poisson(rng.gamma(1.5, mean / 1.5))


def zero_inflated_model(X: Any, y: Any = None) -> None:
    b_gate = numpyro.sample("b_gate", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("records", X.shape[0]):
        counts = dist.Poisson(jnp.exp(X @ b))
        mixed = dist.ZeroInflatedDistribution(counts, gate_logits=X @ b_gate)
        numpyro.sample("y", mixed, obs=y)


def make_zero_inflated(rng: np.random.Generator) -> tuple[Any, ...]:
    X = np.hstack([np.ones((6000, 1)), rng.normal(size=(6000, 4))])
    gate = rng.random(6000) < _sigmoid(X @ np.array([-0.5, 0.8, 0.0, -0.4, 0.2]))
    rate = np.exp(X @ np.array([0.8, 0.3, -0.2, 0.1, 0.0]))
    return X, np.where(gate, 0, rng.poisson(rate))


def student_model(X: Any, y: Any = None) -> None:
    b = numpyro.sample("b", dist.Normal(0, 5).expand([X.shape[1]]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfCauchy(2.0))
    df = numpyro.sample("df", dist.Gamma(2.0, 0.1))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.StudentT(df, X @ b, sigma), obs=y)


def make_student(rng: np.random.Generator) -> tuple[Any, ...]:
    X = np.hstack([np.ones((4000, 1)), rng.normal(size=(4000, 3))])
    return X, X @ np.array([3.0, 1.0, -0.5, 0.2]) + 0.8 * rng.standard_t(4, size=4000)


def ordinal_model(X: Any, y: Any = None) -> None:
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    cuts = numpyro.sample(
        "cuts",
        dist.TransformedDistribution(
            dist.Normal(0, 3).expand([3]).to_event(1),
            dist.transforms.OrderedTransform(),
        ),
    )
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.OrderedLogistic(X @ w, cuts), obs=y)


def make_ordinal(rng: np.random.Generator) -> tuple[Any, ...]:
    X = rng.normal(size=(3000, 3))
    eta = X @ np.array([1.2, -0.7, 0.3]) + rng.logistic(size=3000)
    return X, np.digitize(eta, [-1.5, 0.2, 1.8])


def censored_model(X: Any, time: Any, observed: Any) -> None:
    """Weibull survival with right-censored times."""
    b = numpyro.sample("b", dist.Normal(0, 2).expand([X.shape[1]]).to_event(1))
    shape = numpyro.sample("shape", dist.LogNormal(0, 1))
    weibull = dist.Weibull(jnp.exp(X @ b), shape)
    log_survival = -((time / jnp.exp(X @ b)) ** shape)
    with numpyro.plate("records", X.shape[0]):
        numpyro.factor("log_likelihood", jnp.where(observed, weibull.log_prob(time), log_survival))


def make_censored(rng: np.random.Generator) -> tuple[Any, ...]:
    X = np.hstack([np.ones((4000, 1)), rng.normal(size=(4000, 3))])
    time = np.exp(X @ np.array([1.0, 0.4, -0.3, 0.0])) * rng.weibull(1.4, 4000)
    end = rng.uniform(1, 6, 4000)
    return X, np.minimum(time, end), (time <= end)


def horseshoe_model(X: Any, y: Any = None) -> None:
    d = X.shape[1]
    tau = numpyro.sample("tau", dist.HalfCauchy(1.0))
    lam = numpyro.sample("lam", dist.HalfCauchy(1.0).expand([d]).to_event(1))
    z = numpyro.sample("z", dist.Normal(0, 1).expand([d]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ (tau * lam * z), sigma), obs=y)


def make_horseshoe(rng: np.random.Generator) -> tuple[Any, ...]:
    X = rng.normal(size=(4000, 16))
    b = np.zeros(16)
    b[:3] = [1.0, -0.7, 0.4]
    return X, X @ b + 0.7 * rng.normal(size=4000)


# -- groups, means, mixtures -------------------------------------------------------------------


def two_means_model(x: Any, y: Any = None) -> None:
    """Two groups with means and spreads of their own."""
    mu = numpyro.sample("mu", dist.Normal(0, 10).expand([2]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(10).expand([2]).to_event(1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal(mu[x], sigma[x]), obs=y)


def make_two_means(rng: np.random.Generator) -> tuple[Any, ...]:
    x = (rng.random(2000) < 0.4).astype(int)
    return x, np.array([5.0, 7.0])[x] + np.array([1.0, 2.0])[x] * rng.normal(size=2000)


def partial_pooling_model(group: Any, x: Any, y: Any = None) -> None:
    """Intercepts of twelve groups around a common mean."""
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfNormal(2.0))
    b = numpyro.sample("b", dist.Normal(0, 2))
    sigma = numpyro.sample("sigma", dist.HalfNormal(2.0))
    with numpyro.plate("groups", 12):
        a = numpyro.sample("a", dist.Normal(mu, tau))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal(a[group] + b * x, sigma), obs=y)


def make_partial_pooling(rng: np.random.Generator) -> tuple[Any, ...]:
    n = 6000
    group = rng.choice(12, size=n, p=np.arange(1, 13) / 78)
    a, x = 1.5 + 0.8 * rng.normal(size=12), rng.normal(size=n)
    return group, x, a[group] - 0.6 * x + 0.7 * rng.normal(size=n)


def salaries_model(group: Any, years: Any, pay: Any = None) -> None:
    """A hierarchical regression on the scale of its data."""
    mu = numpyro.sample("mu", dist.Normal(0, 5000))
    tau = numpyro.sample("tau", dist.HalfNormal(500))
    slope = numpyro.sample("slope", dist.Normal(0, 500))
    sigma = numpyro.sample("sigma", dist.HalfNormal(500))
    with numpyro.plate("groups", 8):
        a = numpyro.sample("a", dist.Normal(mu, tau))
    with numpyro.plate("records", years.shape[0]):
        numpyro.sample("pay", dist.Normal(a[group] + slope * years, sigma), obs=pay)


def make_salaries(rng: np.random.Generator) -> tuple[Any, ...]:
    n = 5000
    group, years = rng.integers(0, 8, n), rng.uniform(0, 40, n)
    a = 2400 + 250 * rng.normal(size=8)
    return group, years, a[group] + 45 * years + rng.normal(0, 200, n)


def mixture_model(x: Any) -> None:
    """Two normals with an order."""
    share = numpyro.sample("share", dist.Beta(2, 2))
    mu = numpyro.sample(
        "mu",
        dist.TransformedDistribution(
            dist.Normal(0, 3).expand([2]).to_event(1), dist.transforms.OrderedTransform()
        ),
    )
    sigma = numpyro.sample("sigma", dist.HalfNormal(2).expand([2]).to_event(1))
    mixture = dist.MixtureSameFamily(
        dist.Categorical(probs=jnp.stack([share, 1 - share])), dist.Normal(mu, sigma)
    )
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("x", mixture, obs=x)


def make_mixture(rng: np.random.Generator) -> tuple[Any, ...]:
    first = rng.random(5000) < 0.35
    return (np.where(first, rng.normal(-1, 0.7, 5000), rng.normal(2, 1.0, 5000)),)


def network_model(X: Any, y: Any = None) -> None:
    """One hidden layer of four units: signs and order of the units are not identified."""
    w1 = numpyro.sample("w1", dist.Normal(0, 1).expand([X.shape[1], 4]).to_event(2))
    b1 = numpyro.sample("b1", dist.Normal(0, 1).expand([4]).to_event(1))
    w2 = numpyro.sample("w2", dist.Normal(0, 1).expand([4]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Normal(jnp.tanh(X @ w1 + b1) @ w2, sigma), obs=y)


def make_network(rng: np.random.Generator) -> tuple[Any, ...]:
    X = rng.uniform(-2, 2, size=(3000, 2))
    return X, np.sin(1.5 * X[:, 0]) + 0.5 * X[:, 1] + 0.3 * rng.normal(size=3000)


CASES = {
    "logistic": Case(logistic_model, make_logistic),
    "covertype": Case(covertype_model, make_covertype),
    "linear": Case(linear_model, make_linear),
    "units": Case(units_model, make_units),
    "poisson": Case(poisson_model, make_poisson),
    "negative_binomial": Case(negative_binomial_model, make_negative_binomial),
    "zero_inflated": Case(zero_inflated_model, make_zero_inflated),
    "student": Case(student_model, make_student),
    "ordinal": Case(ordinal_model, make_ordinal),
    "censored": Case(censored_model, make_censored),
    "horseshoe": Case(horseshoe_model, make_horseshoe),
    "two_means": Case(two_means_model, make_two_means),
    "partial_pooling": Case(partial_pooling_model, make_partial_pooling),
    "salaries": Case(salaries_model, make_salaries),
    "mixture": Case(mixture_model, make_mixture),
    "network": Case(network_model, make_network),
}
