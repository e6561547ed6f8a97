"""Measure what a step costs over several processes: clock and processor time.

    python benchmarks/processes.py [--processes 1 2 4] [-o benchmarks/results/processes.csv]
    python benchmarks/processes.py collectives

Two logistic regressions: `small`, whose steps take microseconds, so that what is measured is the
meeting of the processes, and `large`, whose steps are worth dividing. Each process keeps to its
part of the cores. Measured is what a fit took from the end of its first chunks on: start and
compilation are not in it. `cpu` is that of all processes together.

`collectives` compares ways to add up one vector of 50 numbers in two processes: XLA's psum (gloo),
the key-value store of JAX's coordination service, and the connections that fits use.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

SIZES: dict[str, dict[str, Any]] = {
    "small": {"rows": 4000, "dim": 5, "sampling_prob": 0.05, "steps": 6000},
    "large": {"rows": 200_000, "dim": 50, "sampling_prob": 1.0, "steps": 60},
}
# Steps of the first chunks, which wait for the compiler.
FIRST = 20


def measure(case: str, number: int, count: int) -> None:
    """Print clock and processor time a step of this process, as json."""
    import numpyro
    import numpyro.distributions as dist

    import dpvim
    from dpvim._progress import listening

    def model(X: Any, y: Any) -> None:
        w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
        with numpyro.plate("records", X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)

    facts = SIZES[case]
    rng = np.random.default_rng(number)
    rows, steps = facts["rows"] // count, max(60, facts["steps"] // count**2)
    x = rng.normal(size=(rows, facts["dim"])).astype(np.float32)
    y = rng.integers(0, 2, rows).astype(np.int32)

    marks: list[tuple[int, float, float]] = []

    def listen(label: str, done: int, total: int) -> None:
        if done >= FIRST:
            marks.append((done, time.perf_counter(), time.process_time()))

    with listening(listen):
        dpvim.fit(
            model,
            x,
            y,
            noise_multiplier=100.0,
            delta=1e-6,
            clip_norm=1.0,
            learning_rate=1e-3,
            probe_width=1.0,
            sampling_prob=facts["sampling_prob"],
            num_steps=steps,
            trace_every=steps,
        )
    measured, *took = (last - first for first, last in zip(marks[0], marks[-1], strict=True))
    print(
        json.dumps(
            {"us": 1e6 * took[0] / measured, "cpu": 1e6 * took[1] / measured, "steps": measured}
        ),
        flush=True,
    )


def compare(number: int) -> None:
    """Print how long ways to add up a vector in two processes take, as json."""
    from dpvim import rendezvous

    message, client = np.arange(50.0).tobytes(), rendezvous._coordination()[0]

    def store(step: int) -> None:
        if number:
            client.key_value_set_bytes(f"share/{step}", message)
            client.blocking_key_value_get_bytes(f"total/{step}", 60_000)
        else:
            client.blocking_key_value_get_bytes(f"share/{step}", 60_000)
            client.key_value_set_bytes(f"total/{step}", message)

    mesh = jax.sharding.Mesh(np.array(jax.devices()), "processes")
    spread, whole = (
        jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
        for axes in (("processes",), ())
    )
    total = jax.jit(lambda shares: shares.sum(0), out_shardings=whole)

    def psum(step: int) -> None:
        own = jax.device_put(np.ones((1, 50), np.float32), jax.local_devices()[0])
        shares = jax.make_array_from_single_device_arrays((2, 50), spread, [own])
        np.asarray(total(shares).addressable_data(0))

    with rendezvous.meet() as channel:

        def connections(step: int) -> None:
            channel.gather(message)
            channel.share(message)

        ways: dict[str, Callable[[int], None]] = {
            "psum": psum,
            "key-value store": store,
            "connections": connections,
        }
        for name, way in ways.items():
            for step in range(1000):
                if step == 100:
                    began = time.perf_counter()
                way(step)
            if number == 0:
                print(json.dumps({"way": name, "us": 1e6 * (time.perf_counter() - began) / 900}))


def start(count: int, *words: str) -> list[list[dict[str, Any]]]:
    """What this file prints in each of so many processes that meet."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    started = [
        subprocess.Popen(
            [sys.executable, __file__, "work", str(number), str(count), address, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for number in range(count)
    ]
    out = [process.communicate()[0] for process in started]
    return [[json.loads(line) for line in each.splitlines() if line[:1] == "{"] for each in out]


def work(number: int, count: int, address: str, what: str) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, set(cores[number::count]) or {cores[number % len(cores)]})
    if count > 1:
        jax.distributed.initialize(address, count, number, coordinator_bind_address=address)
    compare(number) if what == "collectives" else measure(what, number, count)


def main() -> None:
    if sys.argv[1:2] == ["work"]:
        return work(int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:6])
    if sys.argv[1:2] == ["collectives"]:
        return print(*start(2, "collectives")[0], sep="\n")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("-o", "--output")
    args = parser.parse_args()
    found = []
    for case in SIZES:
        for count in args.processes:
            rounds = start(count, case)
            clock = rounds[0][0]["us"]
            cpu = sum(one[0]["cpu"] for one in rounds)
            found.append({"case": case, "processes": count} | SIZES[case] | {"us": round(clock)})
            found[-1]["steps"] = rounds[0][0]["steps"]
            found[-1] |= {"cpu_us": round(cpu), "load": round(os.getloadavg()[0], 1)}
            print(found[-1], flush=True)
    if args.output:
        with open(args.output, "w", newline="") as file:
            writer = csv.DictWriter(file, found[0])
            writer.writeheader()
            writer.writerows(found)
    return None


if __name__ == "__main__":
    main()
