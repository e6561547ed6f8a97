"""Steps a CPU second, where a step's time goes, and how far from the machine's limit it is.

    python benchmarks/speed.py [--rounds 5]     # benchmarks/results/speed.csv, speed.png

The work is that of the paper's experiments on made-up data of the same shape: rows, columns, batch,
dimension, variant. On one thread, CPU time, the fastest of several rounds, ours and the plain
one in turn. (With a second thread of XLA's, steps as small as these are slower, on the clock too.)
`both_cores_clock_us` and `both_cores_cpu_us` are a step of a whole run (`DPSVI.run`: numbers drawn
in the background, trace and sums of releases kept) with as many threads as the machine has cores,
in a process of its own.

`plain` is the algorithm as one would write it down: a gradient for each record by autodiff through
the constraints, in the space that is released (with respect to the variational parameters for
vanilla), clipped and summed in single precision, floating-point noise. Batches and noise come
ready-made for both, and so do the draws eta; what drawing them takes is in `sampling_us`,
`noise_us` and `eta_us`, and is part of `steps_a_second`.

The pieces of a step: `gather_us` (the batch is read), `sum_us` (gradients, clip, sum, release),
`rest_us` (the way back to the variational parameters, prior, entropy, optimiser). Each is the
difference of two loops that differ by it; the compiler may fuse across them, so small ones are
rough.

`limit_us` is a roofline for the step without its random numbers: the bytes that have to move over
the bandwidth that a copy in memory reaches here, or the operations that have to be done over what a
matrix product reaches here, whichever is more. `share` is that over `step_us`.

The paper's code runs beside ours in `benchmarks/published_speed.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax

from dpvim.bridge.data import prepare
from dpvim.bridge.model import bridge
from dpvim.inference.engine import Engine, eta_for, make_engine
from dpvim.inference.families import FAMILIES
from dpvim.inference.gradient import Problem, make_private_gradient
from dpvim.inference.variants import make_variant
from dpvim.models.columns import CategoricalColumn, Response
from dpvim.models.mixture import Mixture
from dpvim.models.regression import Regression
from dpvim.privacy.batches import microbatch_size, select
from dpvim.privacy.noise import RoundedGaussianNoise
from dpvim.privacy.plan import PrivacyPlan
from dpvim.privacy.randomness import SecretStreams
from dpvim.privacy.sampling import PoissonSampler
from dpvim.svi import DPSVI

if TYPE_CHECKING:
    import pandas as pd

RESULTS = Path(__file__).parent / "results" / "speed.csv"
LEVELS = (8, 2, 5, 5, 7, 22)
COMPONENTS = 16
STEPS_AT_A_TIME = 32


class Work(NamedTuple):
    """A model with data, and how it is fitted.

    `must` tells what a step cannot do without: ``(batch, d) -> (bytes, operations)``.
    """

    name: str
    make: Callable[[], tuple[Any, tuple[Any, ...]]]
    family: str
    variant: str
    must: Callable[[float, int], tuple[float, float]]


def must_for_rows(batch: float, dim: int) -> tuple[float, float]:
    """Every entry of the batch is read once and enters two products; Adam's state is kept."""
    return 4 * batch * dim + 4 * 2 * dim * 6, 4 * batch * dim + 2 * dim * 15


def must_for_levels(batch: float, dim: int) -> tuple[float, float]:
    """A code for each column; for each column and component a log-probability, a norm and a sum;
    for each component the exponential function."""
    columns = len(LEVELS)
    operations = 3 * batch * columns * COMPONENTS + 20 * batch * COMPONENTS
    return 4 * batch * (columns + 1) + 4 * 2 * dim * 6, operations + 2 * dim * 15


def must_for_full_rank(batch: float, dim: int) -> tuple[float, float]:
    """As for rows, with the parameters of a triangle."""
    triangle = dim * (dim + 1) / 2
    return 4 * batch * dim + 4 * triangle * 6, 4 * batch * dim + triangle * 19


def logistic() -> tuple[Any, tuple[Any, ...]]:
    rng = np.random.default_rng(0)
    X = (rng.random((30_162, 96)) < 0.15).astype(np.float32)

    def model(X: Any, y: Any) -> None:
        w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
        with numpyro.plate("records", X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)

    return model, (X, (rng.random(30_162) < 0.25).astype(np.int32))


def ready_made_logistic() -> tuple[Any, tuple[Any, ...]]:
    _, data = logistic()
    return Regression("logistic", intercept=False), data


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


ADULT, MIXTURE = "Adult logistic, d 96, batch 301", "mixture, d 747, batch 583"
RANK_100, RANK_200 = "full-rank linear, d 102, batch 100", "full-rank linear, d 202, batch 100"
BY_HAND = ", a model by hand"
WORKS = [
    Work(ADULT, ready_made_logistic, "mean_field", "aligned", must_for_rows),
    Work(ADULT, ready_made_logistic, "mean_field", "vanilla", must_for_rows),
    Work(ADULT + BY_HAND, logistic, "mean_field", "aligned", must_for_rows),
    Work(ADULT + BY_HAND, logistic, "mean_field", "vanilla", must_for_rows),
    Work(MIXTURE, mixture, "mean_field", "aligned", must_for_levels),
    Work(MIXTURE, mixture, "mean_field", "vanilla", must_for_levels),
    Work(MIXTURE + BY_HAND, mixture_by_hand, "mean_field", "aligned", must_for_levels),
    Work(RANK_100, linear(100), "full_rank", "aligned", must_for_full_rank),
    Work(RANK_100, linear(100), "full_rank", "vanilla", must_for_full_rank),
    Work(RANK_200, linear(200), "full_rank", "aligned", must_for_full_rank),
    Work(RANK_200, linear(200), "full_rank", "vanilla", must_for_full_rank),
]


class Ready(NamedTuple):
    """Loops with everything drawn: each takes a number of times to do its thing."""

    step: Callable[[int], Any]
    eta: Callable[[int], Any]
    gather: Callable[[int], Any]
    release: Callable[[int], Any]


def plan_for(num_rows: int) -> PrivacyPlan:
    return PrivacyPlan(
        num_examples=num_rows,
        sampling_prob=0.01,
        num_steps=10**6,
        clip_norm=2.0,
        noise_multiplier=10.0,
    )


def prepared(work: Work, *, plain: bool, steps: int = 256) -> tuple[Ready, Engine]:
    """The loops and the engine."""
    from dpvim._compile import jit_widely  # `whole_runs.py` reads this file with older checkouts

    model, data = work.make()
    inputs = prepare(data, {})
    bridged = bridge(model, inputs)
    problem = bridged.problem
    records = inputs.records if plain else problem.arrange(inputs.records)
    plan = plan_for(inputs.num_rows)
    family = FAMILIES[work.family](problem.dim)
    variant = make_variant(work.variant, family)
    engine = make_engine(problem, family, variant, optax.adam(1e-3), plan)
    step = plain_step(problem, engine) if plain else engine.step
    release = make_private_gradient(problem, family, variant, plan).release
    source = engine.source(inputs.num_rows, SecretStreams(0))
    rows, noise = map(jnp.asarray, source.draw(steps, steps))
    start = engine.init(jax.random.key(0), jnp.zeros(problem.dim), 0.1)
    piece = microbatch_size(plan, problem.dim)

    @jax.jit
    def draw_etas(first: Any) -> Any:
        numbers = first + jnp.arange(steps)
        return jax.vmap(lambda number: eta_for(family, start.key, number))(numbers)

    def draw_many_etas(count: int) -> None:
        for first in range(0, count, steps):
            jax.block_until_ready(draw_etas(first))

    etas = draw_etas(0)

    def one_step(state: Any, records: Any, eta: Any, rows: Any, noise: Any) -> Any:
        return step(state, eta, records, rows, noise)[0]

    def one_gather(batch: Any, records: Any, eta: Any, rows: Any, noise: Any) -> Any:
        return select(records, rows[:piece])[0]

    def one_release(last: Any, records: Any, eta: Any, rows: Any, noise: Any) -> Any:
        # The last release enters as nothing, so that no step can be left out.
        params = start.params._replace(loc=start.params.loc + 1e-30 * last[: problem.dim])
        return release(params, eta, records, rows, noise)

    def looped(one: Callable[..., Any], start: Any) -> Callable[[int], Any]:
        # What a loop carries is computed in full, every time.
        def loop(count: Any, start: Any, records: Any, *drawn: Any) -> Any:
            def body(i: Any, carried: Any) -> Any:
                return one(carried, records, *(each[i % steps] for each in drawn))

            return jax.lax.fori_loop(0, count, body, start)

        drawn = (etas, rows, noise)
        compiled = jax.jit(loop) if plain else jit_widely(loop)
        return lambda count: jax.block_until_ready(compiled(count, start, records, *drawn))

    ready = Ready(
        looped(one_step, start),
        draw_many_etas,
        looped(one_gather, one_gather(None, records, etas[0], rows[0], noise[0])),
        looped(one_release, jnp.zeros(variant.num_released)),
    )
    return ready, engine


def plain_step(problem: Problem, engine: Engine) -> Callable[..., Any]:
    """Per-example gradients in the released space, clip, sum, noise, Adam."""
    plan, family = engine.plan, engine.family
    assert isinstance(plan, PrivacyPlan)
    direction = make_private_gradient(problem, family, engine.variant, plan).direction
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
        return state._replace(params=params, opt_state=opt_state, step=state.step + 1), None

    return step


def microseconds(run: Callable[[int], Any], seconds: float) -> Callable[[], float]:
    """A measurement that takes about `seconds`; its length is found by trying."""
    run(1)  # compiled
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


def in_parts(draw: Callable[[int], Any]) -> Callable[[int], None]:
    """As runs draw: not so many steps at a time that memory is asked of the system anew."""

    def draw_in_parts(count: int) -> None:
        for first in range(0, count, STEPS_AT_A_TIME):
            draw(min(STEPS_AT_A_TIME, count - first))

    return draw_in_parts


def machine() -> tuple[float, float]:
    """Bytes a second of a copy in memory, and operations a second of a matrix product."""
    source = np.ones(2**24, np.float32)  # 64 MB, twice the largest cache here
    target = np.empty_like(source)
    copies, products = [], []
    matrix = jnp.ones((2048, 2048))
    multiply = jax.jit(lambda a: a @ a)
    multiply(matrix).block_until_ready()
    for _ in range(5):
        began = time.process_time()
        np.copyto(target, source)
        copies.append(time.process_time() - began)
        began = time.process_time()
        multiply(matrix).block_until_ready()
        products.append(time.process_time() - began)
    return 2 * source.nbytes / min(copies), 2 * 2048**3 / min(products)


def measured(work: Work, rounds: int, seconds: float, limits: tuple[float, float]) -> dict:
    """One line of the table."""
    ours, engine = prepared(work, plain=False)
    plain, _ = prepared(work, plain=True)
    plan, streams = engine.plan, SecretStreams(0)
    assert isinstance(plan, PrivacyPlan)
    sampler = PoissonSampler(
        streams,
        num_rows=plan.num_examples,
        sampling_prob=plan.sampling_prob,
        max_batch_size=plan.max_batch_size,
    )
    noise = RoundedGaussianNoise(
        streams,
        stddev=plan.noise_stddev,
        grid=plan.noise_grid,
        size=engine.variant.num_released,
    )
    timers = {
        "step_us": microseconds(ours.step, seconds),
        "plain_us": microseconds(plain.step, seconds),
        "eta_us": microseconds(ours.eta, seconds / 4),
        "gather_us": microseconds(ours.gather, seconds / 4),
        "release_us": microseconds(ours.release, seconds / 2),
        "sampling_us": microseconds(sampler.draw, seconds / 4),
        "noise_us": microseconds(in_parts(noise.draw), seconds / 4),
    }
    rows = [{name: timer() for name, timer in timers.items()} for _ in range(rounds)]
    best = {name: min(row[name] for row in rows) for name in timers}
    whole = sum(best[name] for name in ("step_us", "sampling_us", "noise_us", "eta_us"))
    needs = work.must(plan.expected_batch_size, engine.family.dim)
    limit = 1e6 * max(need / rate for need, rate in zip(needs, limits, strict=True))
    return {
        "work": work.name,
        "variant": work.variant,
        "steps_a_second": round(1e6 / whole),
        "step_us": round(best["step_us"], 1),
        "sampling_us": round(best["sampling_us"], 1),
        "noise_us": round(best["noise_us"], 1),
        "eta_us": round(best["eta_us"], 1),
        "gather_us": round(best["gather_us"], 1),
        "sum_us": round(max(0.0, best["release_us"] - best["gather_us"]), 1),
        "rest_us": round(max(0.0, best["step_us"] - best["release_us"]), 1),
        "plain_us": round(best["plain_us"], 1),
        "plain_ratio": round(best["plain_us"] / best["step_us"], 1),
        "limit_us": round(limit, 1),
        "share": round(limit / best["step_us"], 2),
    }


def on_both_cores(work: Work, rounds: int) -> dict[str, float]:
    """A step of a whole run, on the clock and in CPU time: what a run of three times as many steps
    takes longer, by the step, the fastest of several runs of each length."""
    model, data = work.make()
    plan = plan_for(len(jax.tree.leaves(data)[0]))
    svi = DPSVI(model, work.family, optax.adam(1e-3), plan, variant=work.variant, seed=0)

    def run(steps: int) -> np.ndarray:
        began = np.array([time.perf_counter(), time.process_time()])
        svi.run(jax.random.key(0), steps, *data, progress_bar=False)
        return np.array([time.perf_counter(), time.process_time()]) - began

    short = 2048
    run(short)  # compiled
    run(3 * short)
    times = [(run(short), run(3 * short)) for _ in range(rounds)]
    few, many = (np.min(each, axis=0) for each in zip(*times, strict=True))
    clock, cpu = 1e6 * (many - few) / (2 * short)
    return {"both_cores_clock_us": round(clock, 1), "both_cores_cpu_us": round(cpu, 1)}


def in_a_process_of_its_own(number: int, options: argparse.Namespace) -> dict[str, float]:
    """`on_both_cores`, where XLA has not been told to use one thread."""
    rounds = ("--rounds", str(options.rounds))
    command = [sys.executable, __file__, "--both-cores-of", str(number), *rounds]
    free = {name: value for name, value in os.environ.items() if name not in ("NPROC", "XLA_FLAGS")}
    done = subprocess.run(command, env=free, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def draw_picture(table: pd.DataFrame) -> None:
    """Where the time of a step goes."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    pieces = {
        "sampling_us": "sampling",
        "noise_us": "noise",
        "eta_us": "draws of the latent",
        "gather_us": "gather",
        "sum_us": "gradients, clip, sum",
        "rest_us": "optimiser and the rest",
    }
    names = table["work"] + ", " + table["variant"]
    figure, ax = plt.subplots(figsize=(10, 5), layout="constrained")
    left = np.zeros(len(table))
    whole = table[list(pieces)].sum(axis=1)
    for column, label in pieces.items():
        share = table[column] / whole
        ax.barh(names, share, left=left, label=label)
        left += share
    for place, (_, row) in enumerate(table.iterrows()):
        text = f"{row['steps_a_second']:,} steps/s"
        ax.text(1.01, place, text, va="center", fontsize=9)
    ax.set(xlim=(0, 1), xlabel="share of a step's CPU time")
    ax.invert_yaxis()
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(RESULTS.with_suffix(".png"), dpi=130)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="CPU time a measurement")
    parser.add_argument("--only", default="", help="part of a name")
    parser.add_argument("--both-cores-of", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.both_cores_of is not None:
        work = WORKS[options.both_cores_of]
        print(json.dumps(on_both_cores(work, options.rounds)))
        return
    os.environ["NPROC"] = "1"  # threads of XLA, which has not started yet
    import pandas as pd

    limits = machine()
    print(f"memory {limits[0] / 1e9:.1f} GB/s, products {limits[1] / 1e9:.1f} Gop/s", flush=True)
    rows = []
    for number, work in enumerate(WORKS):
        if options.only in work.name:
            alone = measured(work, options.rounds, options.seconds, limits)
            rows.append(alone | in_a_process_of_its_own(number, options))
            print(pd.DataFrame(rows[-1:]).to_string(index=False), flush=True)
    if not options.only:
        RESULTS.parent.mkdir(exist_ok=True)
        table = pd.DataFrame(rows)
        table.to_csv(RESULTS, index=False)
        draw_picture(table)


if __name__ == "__main__":
    main()
