"""What the lattice costs: a step with exact integer sums and integer noise against plain floats.

    python benchmarks/lattice.py     # benchmarks/results/lattice_cost.csv, 5 minutes

Both run in one process, in turn, single-threaded, in CPU time: the fastest of several rounds, and
the median ratio of runs next to each other. The
plain step sums with a single-precision matrix product and adds floating-point noise: what there
would be without a lattice, and is not private to the last bit.
"""

from __future__ import annotations

import csv
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpvim.inference import gradient
from dpvim.inference.engine import make_engine
from dpvim.inference.families import FAMILIES
from dpvim.inference.gradient import Problem
from dpvim.inference.variants import make_variant
from dpvim.privacy import clipping
from dpvim.privacy.clipping import Likelihood
from dpvim.privacy.plan import PrivacyPlan
from dpvim.privacy.randomness import SecretStreams

OUTPUT = Path(__file__).parent / "results" / "lattice_cost.csv"
ROUNDS = 21
# name: rows, d, sampling probability, steps, family, variant
WORK = {
    "logistic d 96, batch 301, aligned": (30_162, 96, 0.01, 4000, "mean_field", "aligned"),
    "logistic d 96, batch 301, vanilla": (30_162, 96, 0.01, 4000, "mean_field", "vanilla"),
    "logistic d 96, batch 5429, aligned": (30_162, 96, 0.18, 400, "mean_field", "aligned"),
    "logistic d 700, batch 600, aligned": (20_000, 700, 0.03, 600, "mean_field", "aligned"),
    "logistic d 100, batch 100, full rank": (10_000, 100, 0.01, 2000, "full_rank", "aligned"),
}


@contextmanager
def plain_floats() -> Iterator[None]:
    """The step without a lattice."""

    def float_sum(factors: Any, rows: Any, bound: float) -> Any:
        return jnp.matmul(factors, rows, precision=jax.lax.Precision.HIGHEST)

    def float_noise(encoded: Any, noise: Any, grid: float) -> Any:
        return encoded.astype(jnp.float32) + noise.astype(jnp.float32) * grid

    with (
        mock.patch.object(clipping, "exact_sum", float_sum),
        mock.patch.object(gradient, "add_noise", float_noise),
    ):
        yield


def log_likelihood(latent: Any, record: Any) -> Any:
    logit = record["x"] @ latent
    return record["y"] * logit - jnp.logaddexp(0.0, logit)


def compiled_chunk(work: tuple[Any, ...], setting: Any) -> Any:
    """A function that takes all steps of the work in one compiled chunk."""
    rows, dim, prob, steps, family_name, variant_name = work
    rng = np.random.default_rng(0)
    data = {
        "x": jnp.asarray(rng.normal(size=(rows, dim)), jnp.float32),
        "y": jnp.asarray(rng.random(rows) < 0.5, jnp.float32),
    }
    plan = PrivacyPlan(
        num_examples=rows, sampling_prob=prob, num_steps=steps, clip_norm=1.0, noise_multiplier=5.0
    )
    family = FAMILIES[family_name](dim)
    problem = Problem(
        dim, Likelihood.from_log_prob(log_likelihood), lambda t: -0.5 * jnp.sum(t * t)
    )
    with setting():
        engine = make_engine(
            problem, family, make_variant(variant_name, family), optax.adam(1e-3), plan
        )
        state = engine.init(jax.random.key(0), jnp.zeros(dim), 0.1)
        source = engine.source(rows, SecretStreams(1))
        batches, noise = jax.tree.map(jnp.asarray, source.draw(steps, steps))
        bounds = jnp.array([0, steps], jnp.int32)
        chunk = jax.jit(lambda s, d, b, n: engine.run_chunk(s, d, b, n, bounds))
        run = chunk.lower(state, data, batches, noise).compile()
    return lambda: jax.block_until_ready(run(state, data, batches, noise))


def cpu_seconds(call: Any) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def main() -> None:
    with OUTPUT.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["work", "lattice_us_a_step", "floats_us_a_step", "ratio"])
        for name, work in WORK.items():
            lattice = compiled_chunk(work, nullcontext)
            floats = compiled_chunk(work, plain_floats)
            seconds = [(cpu_seconds(lattice), cpu_seconds(floats)) for _ in range(ROUNDS)]
            ours, theirs = (min(each) / work[3] * 1e6 for each in zip(*seconds, strict=True))
            # Of runs next to each other in time: the machine's pace changes as others use it.
            ratio = statistics.median(one / other for one, other in seconds)
            row = [name, f"{ours:.1f}", f"{theirs:.1f}", f"{ratio:.3f}"]
            writer.writerow(row)
            file.flush()
            print(*row, flush=True)


if __name__ == "__main__":
    main()
