"""Steps a CPU second, against a plain implementation of the same algorithm and the published code.

    python benchmarks/speed.py [--rounds 5]     # benchmarks/results/speed.csv

The work is that of the paper's experiments on made-up data of the same shape: rows, columns, batch,
dimension, variant. All on one thread, CPU time, the fastest of several rounds, ours and the plain
one in turn.

`plain` is the algorithm as one would write it down: a gradient for each record by autodiff through
the constraints, in the space that is released (with respect to the variational parameters for
vanilla), clipped and summed in single precision, floating-point noise. Batches and noise come
ready-made for both; what drawing them takes is in `supply_us`, and is part of `steps_a_second`.

`published` is what the paper's code measured on a machine like the one that the first results came
from, in steps a CPU second (a range); `times` is ours over the upper end of it.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault(
    "XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
)

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pandas as pd

from dpvim import infer
from dpvim.batches import select
from dpvim.estimator import Problem, make_estimator
from dpvim.family import FAMILIES
from dpvim.models.bridge import bridge
from dpvim.models.columns import CategoricalColumn, Response
from dpvim.models.data import prepare
from dpvim.models.mixture import Mixture
from dpvim.plan import PrivacyPlan
from dpvim.randomness import SecretStreams
from dpvim.variants import make_variant

RESULTS = Path(__file__).parent / "results" / "speed.csv"
LEVELS = (8, 2, 5, 5, 7, 22)


class Work(NamedTuple):
    """A model with data, and how it is fitted."""

    name: str
    make: Callable[[], tuple[Any, tuple[Any, ...]]]
    family: str
    variant: str
    published: tuple[float, float]


def logistic() -> tuple[Any, tuple[Any, ...]]:
    rng = np.random.default_rng(0)
    X = (rng.random((30_162, 96)) < 0.15).astype(np.float32)

    def model(X: Any, y: Any) -> None:
        w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
        with numpyro.plate("records", X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)

    return model, (X, (rng.random(30_162) < 0.25).astype(np.int32))


def mixture() -> tuple[Any, tuple[Any, ...]]:
    rng = np.random.default_rng(0)
    columns = [CategoricalColumn(f"x{i}", levels) for i, levels in enumerate(LEVELS)]
    values = {c.name: rng.integers(0, c.num_levels, 58_261).astype(np.int32) for c in columns}
    values["y"] = (rng.random(58_261) < 0.05).astype(np.int32)
    model = Mixture([*columns, CategoricalColumn("y", 2)], 16, Response("y", "poisson"))
    return model, (values,)


def mixture_by_hand() -> tuple[Any, tuple[Any, ...]]:
    """The same model as a user would write it."""
    _, (values,) = mixture()
    data = np.stack([values[f"x{i}"] for i in range(len(LEVELS))], axis=1)

    def model(x: Any, y: Any) -> None:
        weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(16)))
        tables = [
            numpyro.sample(f"probs{i}", dist.Dirichlet(jnp.ones(n)).expand([16]).to_event(1))
            for i, n in enumerate(LEVELS)
        ]
        beta = numpyro.sample("beta", dist.Normal(0, 1).expand([44]).to_event(1))
        logits = jnp.log(weights) + sum(jnp.log(table).T[x[:, i]] for i, table in enumerate(tables))
        one_hot = [jax.nn.one_hot(x[:, i], n)[:, 1:] for i, n in enumerate(LEVELS)]
        features = jnp.concatenate([jnp.ones((x.shape[0], 1)), *one_hot], axis=1)
        with numpyro.plate("records", x.shape[0]):
            numpyro.factor("rows", jax.nn.logsumexp(logits, axis=1))
            numpyro.sample("y", dist.Poisson(jnp.exp(features @ beta)), obs=y)

    return model, (data, values["y"])


def linear(dim: int) -> Callable[[], tuple[Any, tuple[Any, ...]]]:
    def make() -> tuple[Any, tuple[Any, ...]]:
        rng = np.random.default_rng(0)
        X = rng.normal(size=(10_000, dim)).astype(np.float32)

        def model(X: Any, y: Any) -> None:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
            b = numpyro.sample("b", dist.Normal(0, 1))
            s = numpyro.sample("s", dist.Gamma(0.1, 0.1))
            with numpyro.plate("records", X.shape[0]):
                numpyro.sample("y", dist.Normal(X @ w + b, s), obs=y)

        return model, (X, rng.normal(size=10_000).astype(np.float32))

    return make


WORKS = [
    Work("Adult logistic, d 96, batch 301", logistic, "mean_field", "aligned", (6200, 7300)),
    Work("Adult logistic, d 96, batch 301", logistic, "mean_field", "vanilla", (1230, 1600)),
    Work("mixture, d 747, batch 583", mixture, "mean_field", "aligned", (61, 79)),
    Work("mixture, d 747, batch 583", mixture, "mean_field", "vanilla", (47, 47)),
    Work("mixture as a plain model", mixture_by_hand, "mean_field", "aligned", (61, 79)),
    Work("full-rank linear, d 102, batch 100", linear(100), "full_rank", "aligned", (1640, 2020)),
    Work("full-rank linear, d 102, batch 100", linear(100), "full_rank", "vanilla", (50, 91)),
    Work("full-rank linear, d 202, batch 100", linear(200), "full_rank", "aligned", (590, 600)),
    Work("full-rank linear, d 202, batch 100", linear(200), "full_rank", "vanilla", (12, 15)),
]


class Ready(NamedTuple):
    """A loop of steps with everything drawn; ``loop(count)`` takes so many of them."""

    loop: Callable[[int], Any]
    batch: int


def plan_for(num_rows: int) -> PrivacyPlan:
    return PrivacyPlan(
        num_examples=num_rows,
        sampling_prob=0.01,
        num_steps=10**6,
        clip_norm=2.0,
        noise_multiplier=10.0,
    )


def prepared(work: Work, *, plain: bool, steps: int = 64) -> tuple[Ready, infer.Supply, float]:
    """The loop, what draws batches and noise, and the seconds until the first step is done."""
    began = time.perf_counter()
    model, data = work.make()
    inputs = prepare(data, {})
    bridged = bridge(model, inputs)
    problem = bridged.problem
    records = inputs.records if plain else bridged.arrange(inputs.records)
    plan = plan_for(inputs.num_rows)
    family = FAMILIES[work.family](problem.dim)
    variant = make_variant(work.variant, family)
    engine = infer.make_engine(problem, family, variant, optax.adam(1e-3), plan)
    step = plain_step(problem, engine) if plain else engine.step
    supply = infer.Supply(engine, inputs.num_rows, SecretStreams(0))
    rows, noise = map(jnp.asarray, supply.draw(steps, steps))
    state = engine.init(jax.random.key(0), jnp.zeros(problem.dim), 0.1)

    @jax.jit
    def loop(count: Any, state: Any, records: Any, rows: Any, noise: Any) -> Any:
        def one(i: Any, state: Any) -> Any:
            eta = infer.eta_for(family, state.key, state.step)
            return step(state, eta, records, rows[i % steps], noise[i % steps])[0]

        return jax.lax.fori_loop(0, count, one, state).params

    def run(count: int) -> Any:
        return jax.block_until_ready(loop(count, state, records, rows, noise))

    run(1)
    return Ready(run, supply.batch_size), supply, time.perf_counter() - began


def plain_step(problem: Problem, engine: infer.Engine) -> Callable[..., Any]:
    """Per-example gradients in the released space, clip, sum, noise, Adam."""
    plan, family = engine.plan, engine.family
    assert isinstance(plan, PrivacyPlan)
    direction = make_estimator(problem, family, engine.variant, plan).direction
    log_prob, optimizer = problem.likelihood.log_prob, optax.adam(1e-3)
    released_is_latent = engine.variant.num_released == family.dim

    def gradients(params: Any, eta: Any, batch: Any) -> Any:
        if released_is_latent:
            latent = family.reparametrise(params, eta)
            return jax.vmap(jax.grad(log_prob), (None, 0))(latent, batch)
        flat, unravel = jax.flatten_util.ravel_pytree(params)

        def one(flat: Any, record: Any) -> Any:
            return log_prob(family.reparametrise(unravel(flat), eta), record)

        return jax.vmap(jax.grad(one), (None, 0))(flat, batch)

    def step(state: Any, eta: Any, records: Any, numbers: Any, noise: Any) -> Any:
        batch, is_padding = select(records, numbers)
        rows = jnp.where(is_padding[:, None], 0.0, gradients(state.params, eta, batch))
        norms = jnp.sqrt(jnp.sum(rows**2, axis=1))
        factors = jnp.minimum(1.0, plan.clip_norm / jnp.maximum(norms, 1e-12))
        total = jnp.sum(rows * factors[:, None], axis=0)
        release = total[: noise.size] + noise * plan.noise_grid
        ascent = direction(state.params, eta, release)
        descent = jax.tree.map(jnp.negative, ascent)
        updates, opt_state = optimizer.update(descent, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return infer.State(params, opt_state, state.key, state.step + 1), None

    return step


def microseconds(run: Callable[[int], Any], seconds: float) -> Callable[[], float]:
    """A measurement that takes about `seconds`; its length is found by trying."""
    count = 4
    while True:
        began = time.process_time()
        run(count)
        took = time.process_time() - began
        if took > seconds / 4 or count > 10**6:
            break
        count *= 4

    def measure() -> float:
        began = time.process_time()
        run(count)
        return (time.process_time() - began) / count * 1e6

    return measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="CPU time a measurement")
    parser.add_argument("--only", default="", help="part of a name")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for work in WORKS:
        if options.only not in work.name:
            continue
        ours, supply, first = prepared(work, plain=False)
        plain, _, _ = prepared(work, plain=True)
        timers = [microseconds(ready.loop, options.seconds) for ready in (ours, plain)]
        drawing = microseconds(lambda n: supply.draw(n, n), options.seconds / 4)  # noqa: B023
        best = np.min(
            [[t(), p(), d()] for t, p, d in [(*timers, drawing)] * options.rounds], axis=0
        )
        step, plain_us, supply_us = best
        a_second = 1e6 / (step + supply_us)
        rows.append(
            {
                "work": work.name,
                "variant": work.variant,
                "first_step_s": round(first, 1),
                "step_us": round(step, 1),
                "supply_us": round(supply_us, 1),
                "steps_a_second": round(a_second),
                "plain_us": round(plain_us, 1),
                "plain_ratio": round(plain_us / step, 1),
                "published": f"{work.published[0]:g}-{work.published[1]:g}",
                "times": round(a_second / work.published[1], 1),
            }
        )
        print(pd.DataFrame(rows[-1:]).to_string(index=False), flush=True)
    if not options.only:
        RESULTS.parent.mkdir(exist_ok=True)
        pd.DataFrame(rows).to_csv(RESULTS, index=False)


if __name__ == "__main__":
    main()
