"""More models as users write them, from NumPyro's tutorials and textbooks.

Steering and posterior were done when these were written. `offset` and `curve` showed that flat
directions were taken for known; `effects` and `classes` were added because of it. The others
changed neither (docs/defaults.md).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from default_models import Case


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def gamma_model(X: Any, y: Any = None) -> None:
    """Costs: a gamma regression with a logarithmic link."""
    b = numpyro.sample("b", dist.Normal(0, 3).expand([X.shape[1]]).to_event(1))
    shape = numpyro.sample("shape", dist.Exponential(0.5))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Gamma(shape, shape / jnp.exp(X @ b)), obs=y)


def make_gamma(rng: np.random.Generator) -> tuple[Any, ...]:
    X = np.hstack([np.ones((6000, 1)), rng.normal(size=(6000, 4))])
    mean = np.exp(X @ np.array([3.0, 0.5, -0.3, 0.1, 0.0]))
    return X, rng.gamma(2.5, mean / 2.5)


def beta_model(X: Any, y: Any = None) -> None:
    """Shares: a beta regression."""
    b = numpyro.sample("b", dist.Normal(0, 2).expand([X.shape[1]]).to_event(1))
    phi = numpyro.sample("phi", dist.Gamma(2.0, 0.1))
    mean = jax.nn.sigmoid(X @ b)
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Beta(mean * phi, (1 - mean) * phi), obs=y)


def make_beta(rng: np.random.Generator) -> tuple[Any, ...]:
    X = np.hstack([np.ones((4000, 1)), rng.normal(size=(4000, 3))])
    mean = _sigmoid(X @ np.array([-0.5, 0.6, -0.4, 0.2]))
    return X, np.clip(rng.beta(12 * mean, 12 * (1 - mean)), 1e-4, 1 - 1e-4)


def softmax_model(X: Any, y: Any = None) -> None:
    """Three classes; the first has logit zero."""
    w = numpyro.sample("w", dist.Normal(0, 2).expand([X.shape[1], 2]).to_event(2))
    logits = jnp.concatenate([jnp.zeros((X.shape[0], 1)), X @ w], axis=1)
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Categorical(logits=logits), obs=y)


def make_softmax(rng: np.random.Generator) -> tuple[Any, ...]:
    X = np.hstack([np.ones((6000, 1)), rng.normal(size=(6000, 4))])
    w = np.array([[0.5, -0.5], [1.0, 0.0], [-0.5, 0.8], [0.0, 0.4], [0.3, -0.3]])
    logits = np.hstack([np.zeros((6000, 1)), X @ w]) + rng.gumbel(size=(6000, 3))
    return X, logits.argmax(axis=1)


def spread_model(X: Any, y: Any = None) -> None:
    """A mean and a spread that both depend on the columns."""
    b = numpyro.sample("b", dist.Normal(0, 5).expand([X.shape[1]]).to_event(1))
    g = numpyro.sample("g", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ b, jnp.exp(X @ g)), obs=y)


def make_spread(rng: np.random.Generator) -> tuple[Any, ...]:
    X = np.hstack([np.ones((5000, 1)), rng.normal(size=(5000, 3))])
    mean, log_scale = X @ np.array([2.0, 1.0, -0.5, 0.0]), X @ np.array([-0.3, 0.4, 0.0, 0.2])
    return X, mean + np.exp(log_scale) * rng.normal(size=5000)


def slopes_model(group: Any, x: Any, y: Any = None) -> None:
    """Intercepts and slopes of ten groups, non-centred, for a binary outcome."""
    a0 = numpyro.sample("a0", dist.Normal(0, 2))
    b0 = numpyro.sample("b0", dist.Normal(0, 2))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0).expand([2]).to_event(1))
    with numpyro.plate("groups", 10):
        a = numpyro.sample("a", dist.Normal(0, 1))
        b = numpyro.sample("b", dist.Normal(0, 1))
    logits = a0 + scale[0] * a[group] + (b0 + scale[1] * b[group]) * x
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y)


def make_slopes(rng: np.random.Generator) -> tuple[Any, ...]:
    n = 10_000
    group, x = rng.integers(0, 10, n), rng.normal(size=n)
    a, b = -0.5 + 0.7 * rng.normal(size=10), 0.8 + 0.4 * rng.normal(size=10)
    return group, x, (rng.random(n) < _sigmoid(a[group] + b[group] * x)).astype(int)


def covariance_model(Y: Any) -> None:
    """Means, scales and correlations of three columns."""
    mu = numpyro.sample("mu", dist.Normal(0, 10).expand([3]).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(5).expand([3]).to_event(1))
    chol = numpyro.sample("chol", dist.LKJCholesky(3, 2.0))
    with numpyro.plate("records", Y.shape[0]):
        numpyro.sample("Y", dist.MultivariateNormal(mu, scale_tril=scale[:, None] * chol), obs=Y)


def make_covariance(rng: np.random.Generator) -> tuple[Any, ...]:
    chol = np.linalg.cholesky(np.array([[1.0, 0.6, 0.2], [0.6, 1.0, -0.3], [0.2, -0.3, 1.0]]))
    return (np.array([1.0, 5.0, -3.0]) + rng.normal(size=(4000, 3)) @ (chol.T * [1.0, 2.0, 0.5]),)


def shares_model(level: Any) -> None:
    """Shares of five levels."""
    shares = numpyro.sample("shares", dist.Dirichlet(jnp.ones(5)))
    with numpyro.plate("records", level.shape[0]):
        numpyro.sample("level", dist.Categorical(probs=shares), obs=level)


def make_shares(rng: np.random.Generator) -> tuple[Any, ...]:
    return (rng.choice(5, size=3000, p=[0.45, 0.3, 0.15, 0.08, 0.02]),)


def effects_model(age: Any, region: Any, y: Any = None) -> None:
    """An intercept and an effect for each level of two columns: the data know the sums alone."""
    base = numpyro.sample("base", dist.Normal(0, 10))
    by_age = numpyro.sample("by_age", dist.Normal(0, 5).expand([4]).to_event(1))
    by_region = numpyro.sample("by_region", dist.Normal(0, 5).expand([7]).to_event(1))
    sigma = numpyro.sample("sigma", dist.Exponential(1.0))
    with numpyro.plate("records", age.shape[0]):
        numpyro.sample("y", dist.Normal(base + by_age[age] + by_region[region], sigma), obs=y)


def make_effects(rng: np.random.Generator) -> tuple[Any, ...]:
    n = 6000
    age, region = rng.integers(0, 4, n), rng.choice(7, n, p=np.arange(1, 8) / 28)
    mean = 3 + np.array([1.0, 0.0, -1.0, 0.5])[age]
    mean = mean + np.array([0.3, -0.4, 0.0, 1.0, 0.2, -0.6, 0.1])[region]
    return age, region, mean + 0.8 * rng.normal(size=n)


def classes_model(X: Any, y: Any = None) -> None:
    """Scores of all three classes, of which the data know the differences."""
    w = numpyro.sample("w", dist.Normal(0, 2).expand([X.shape[1], 3]).to_event(2))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Categorical(logits=X @ w), obs=y)


def offset_model(exposure: Any, age: Any, region: Any, y: Any = None) -> None:
    """Rates of events by age group and region, with a time at risk."""
    base = numpyro.sample("base", dist.Normal(0, 3))
    by_age = numpyro.sample("by_age", dist.Normal(0, 1).expand([5]).to_event(1))
    by_region = numpyro.sample("by_region", dist.Normal(0, 1).expand([6]).to_event(1))
    rate = exposure * jnp.exp(base + by_age[age] + by_region[region])
    with numpyro.plate("records", age.shape[0]):
        numpyro.sample("y", dist.Poisson(rate), obs=y)


def make_offset(rng: np.random.Generator) -> tuple[Any, ...]:
    n = 8000
    exposure, age, region = rng.uniform(0.2, 2.0, n), rng.integers(0, 5, n), rng.integers(0, 6, n)
    log_rate = -1.0 + np.array([-0.6, -0.2, 0.0, 0.3, 0.7])[age]
    log_rate = log_rate + np.array([0.2, 0.0, -0.3, 0.1, 0.4, 0.0])[region]
    return exposure, age, region, rng.poisson(exposure * np.exp(log_rate))


def laplace_model(X: Any, y: Any = None) -> None:
    """A regression to the median."""
    b = numpyro.sample("b", dist.Normal(0, 5).expand([X.shape[1]]).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(3.0))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Laplace(X @ b, scale), obs=y)


def make_laplace(rng: np.random.Generator) -> tuple[Any, ...]:
    X = np.hstack([np.ones((4000, 1)), rng.normal(size=(4000, 4))])
    return X, X @ np.array([1.0, 2.0, -1.0, 0.3, 0.0]) + rng.laplace(0, 1.2, 4000)


def rare_model(X: Any, y: Any = None) -> None:
    """A logistic regression of an outcome that three of a hundred have."""
    intercept = numpyro.sample("intercept", dist.Normal(0, 5))
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=intercept + X @ w), obs=y)


def make_rare(rng: np.random.Generator) -> tuple[Any, ...]:
    X = rng.normal(size=(20_000, 5))
    w = np.array([0.8, -0.5, 0.3, 0.0, 0.2])
    return X, (rng.random(20_000) < _sigmoid(X @ w - 4.0)).astype(int)


def raw_model(age: Any, income: Any, bmi: Any, smokes: Any, y: Any = None) -> None:
    """A logistic regression on columns in their own units, with one prior for all."""
    b = numpyro.sample("b", dist.Normal(0, 10).expand([5]).to_event(1))
    logits = b[0] + b[1] * age + b[2] * income + b[3] * bmi + b[4] * smokes
    with numpyro.plate("records", age.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y)


def make_raw(rng: np.random.Generator) -> tuple[Any, ...]:
    n = 8000
    age, income = rng.uniform(18, 80, n), rng.lognormal(10.3, 0.5, n)
    bmi, smokes = rng.normal(26, 4, n), (rng.random(n) < 0.25).astype(float)
    logits = -6 + 0.05 * age - 1e-5 * income + 0.1 * bmi + 0.7 * smokes
    return age, income, bmi, smokes, (rng.random(n) < _sigmoid(logits)).astype(int)


def draws_of_raw(*args: np.ndarray) -> np.ndarray:
    """From a Gaussian around the mode, which these many records make of it; NUTS gets stuck."""
    units = np.array([1.0, 50.0, 3e4, 25.0, 1.0])
    X, y = np.column_stack([np.ones(len(args[0])), *args[:4]]) / units, args[4]
    b, precision = np.zeros(5), (10 * units) ** -2.0
    for _ in range(50):
        p = _sigmoid(X @ b)
        information = (X * (p * (1 - p))[:, None]).T @ X + np.diag(precision)
        b = b + np.linalg.solve(information, X.T @ (y - p) - precision * b)
    root = np.linalg.cholesky(np.linalg.inv(information))
    return (b + np.random.default_rng(0).normal(size=(20_000, 5)) @ root.T) / units


def wide_model(X: Any, y: Any = None) -> None:
    """Forty columns."""
    intercept = numpyro.sample("intercept", dist.Normal(0, 3))
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=intercept + X @ w), obs=y)


def make_wide(rng: np.random.Generator) -> tuple[Any, ...]:
    mixed = rng.normal(size=(20_000, 8)) @ rng.normal(size=(8, 40)) / np.sqrt(8)
    X = 0.6 * mixed + 0.8 * rng.normal(size=(20_000, 40))
    w = 0.3 * rng.normal(size=40)
    return X, (rng.random(20_000) < _sigmoid(X @ w - 0.3)).astype(int)


def curve_model(x: Any, y: Any = None) -> None:
    """A smooth curve: ten steps of a random walk, joined by lines."""
    walk = numpyro.sample("walk", dist.GaussianRandomWalk(scale=1.0, num_steps=10))
    start = numpyro.sample("start", dist.Normal(0, 5))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    mean = start + jnp.interp(x, jnp.linspace(0, 1, 10), walk)
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal(mean, sigma), obs=y)


def make_curve(rng: np.random.Generator) -> tuple[Any, ...]:
    x = rng.random(4000)
    return x, 2 + np.sin(5 * x) + 0.4 * rng.normal(size=4000)


def hurdle_model(X: Any, y: Any = None) -> None:
    """Whether there were costs, and how high they were."""
    w = numpyro.sample("w", dist.Normal(0, 2).expand([X.shape[1]]).to_event(1))
    b = numpyro.sample("b", dist.Normal(0, 3).expand([X.shape[1]]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(2.0))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("any", dist.Bernoulli(logits=X @ w), obs=y > 0)
        with numpyro.handlers.mask(mask=y > 0):
            safe = jnp.where(y > 0, y, 1.0)
            numpyro.sample("cost", dist.LogNormal(X @ b, sigma), obs=safe)


def make_hurdle(rng: np.random.Generator) -> tuple[Any, ...]:
    X = np.hstack([np.ones((6000, 1)), rng.normal(size=(6000, 3))])
    has = rng.random(6000) < _sigmoid(X @ np.array([0.3, 0.5, -0.4, 0.0]))
    cost = np.exp(X @ np.array([4.0, 0.3, 0.0, -0.2]) + 0.8 * rng.normal(size=6000))
    return X, np.where(has, cost, 0.0)


def few_model(X: Any, y: Any = None) -> None:
    """A pilot: five hundred records, four coefficients and a spread."""
    b = numpyro.sample("b", dist.Normal(0, 5).expand([X.shape[1]]).to_event(1))
    sigma = numpyro.sample("sigma", dist.Exponential(0.5))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ b, sigma), obs=y)


def make_few(rng: np.random.Generator) -> tuple[Any, ...]:
    X = np.hstack([np.ones((500, 1)), rng.normal(size=(500, 3))])
    return X, X @ np.array([2.0, 0.7, -0.3, 0.0]) + rng.normal(size=500)


OTHER_CASES = {
    "gamma": Case(gamma_model, make_gamma),
    "beta": Case(beta_model, make_beta),
    "softmax": Case(softmax_model, make_softmax),
    "spread": Case(spread_model, make_spread),
    "slopes": Case(slopes_model, make_slopes),
    "covariance": Case(covariance_model, make_covariance),
    "shares": Case(shares_model, make_shares),
    "effects": Case(effects_model, make_effects),
    "classes": Case(classes_model, make_softmax),
    "offset": Case(offset_model, make_offset),
    "laplace": Case(laplace_model, make_laplace),
    "rare": Case(rare_model, make_rare),
    "raw": Case(raw_model, make_raw, draws_of_raw),
    "wide": Case(wide_model, make_wide),
    "curve": Case(curve_model, make_curve),
    "hurdle": Case(hurdle_model, make_hurdle),
    "few": Case(few_model, make_few),
}
