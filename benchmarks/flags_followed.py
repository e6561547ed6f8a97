"""Does it help to do what a doubt says? Two models that are doubted, and what the doubt asks for.

    python benchmarks/flags_followed.py

Prints, for five data sets each (epsilon 1): how many fits are doubted, how many 90 % intervals hold
the mean of NUTS, and the largest error in standard deviations, before and after.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import default_models as models
import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, init_to_median

import dpvim

SEEDS = range(20, 25)


def salaries_by_year(group: Any, years: Any, pay: Any = None) -> None:
    """The model of salaries with priors from what is publicly known: pay is a few thousand."""
    slope = numpyro.sample("slope", dist.Normal(50, 50))
    sigma = numpyro.sample("sigma", dist.HalfNormal(500))
    with numpyro.plate("groups", 8):
        a = numpyro.sample("a", dist.Normal(2500, 500))
    with numpyro.plate("records", years.shape[0]):
        numpyro.sample("pay", dist.Normal(a[group] + slope * years, sigma), obs=pay)


def product(x: Any, y: Any = None) -> None:
    """Two factors of which only the product is identified."""
    a = numpyro.sample("a", dist.Normal(0, 3))
    b = numpyro.sample("b", dist.Normal(0, 3))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal(a * b * x, 0.3), obs=y)


def coefficient(x: Any, y: Any = None) -> None:
    """The product as one parameter."""
    c = numpyro.sample("c", dist.Normal(0, 9))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal(c * x, 0.3), obs=y)


def product_data(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    x = rng.normal(size=3000)
    return x, 2 * x + 0.3 * rng.normal(size=3000)


PAIRS: list[tuple[str, Callable[..., None], Callable[..., None], Callable[..., Any]]] = [
    ("priors closer to the answer", models.salaries_model, salaries_by_year, models.make_salaries),
    ("other parameters", product, coefficient, product_data),
]


def nuts_means(model: Callable[..., None], args: tuple[Any, ...]) -> dict[str, np.ndarray]:
    kernel = NUTS(model, init_strategy=init_to_median(num_samples=50))
    chain = MCMC(kernel, num_warmup=400, num_samples=500, progress_bar=False)
    single = [np.asarray(a, np.float32) if np.asarray(a).dtype == float else a for a in args]
    chain.run(jax.random.key(0), *single)
    return {name: np.asarray(draws).mean(axis=0) for name, draws in chain.get_samples().items()}


def measure(model: Callable[..., None], make: Callable[..., Any]) -> str:
    doubted, held, off = 0, [], 0.0
    for seed in SEEDS:
        args = make(np.random.default_rng(seed))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            posterior = dpvim.fit(model, *args, epsilon=1.0, delta=1e-5, seed=seed).posterior
        doubted += bool(posterior.doubts)
        for name, mean in nuts_means(model, args).items():
            ends = posterior.interval(0.9)[name]
            held.append(np.ravel((ends[..., 0] < mean) & (mean < ends[..., 1])))
            error = np.abs(posterior.mean[name] - mean) / posterior.std[name]
            off = max(off, float(np.max(error)))
    share = np.mean(np.concatenate(held))
    return f"{doubted} of {len(SEEDS)} doubted, hold {share:.2f}, off {off:.1f}"


def main() -> None:
    for advice, before, after, make in PAIRS:
        print(f"{advice}: {measure(before, make)} -> {measure(after, make)}", flush=True)


if __name__ == "__main__":
    main()
