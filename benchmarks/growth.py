"""How time and memory grow with rows, batch, dimension, components, columns and processes.

    python benchmarks/growth.py     # benchmarks/results/growth.csv, growth.png; about 15 minutes
    python benchmarks/growth.py --only components columns    # in place of those rows of the table
    python benchmarks/growth.py --only    # the picture alone

Logistic regression by the general path (a gradient for each record), aligned; for `components` the
ready-made mixture on the columns of `benchmarks/speed.py`, aligned. Every point is measured in a
process of its own, on one thread: CPU time and time on the clock of a step with its sampling and
noise, the peak of the process's memory, and how much of it the run added to what making the data
took. Rows on the disk are in a file of 20 GB (`--folder`, default: the current one) that is made
first, and removed at the end.

`columns` is a whole twin from counts (`dpvim.synthesize`, epsilon 1) of a made-up table, every
other column a number, in seconds. `processes` is the case `large` of `benchmarks/processes.py`,
each process with its part of the cores; `step_us` is the CPU time of all of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
ROWS = [10**4, 10**5, 10**6, 10**7, 10**8]
COLUMNS_ON_DISK = 50
BATCHES = [100, 300, 1000, 3000, 10_000, 30_000, 100_000]
DIMS = [10, 30, 100, 300, 1000, 3000]
RANKS = [25, 50, 100, 200, 400]
COMPONENTS = [4, 8, 16, 32, 64, 128]
COLUMNS = [5, 10, 20, 40]
PROCESSES = [1, 2]
POINTS: list[dict[str, Any]] = [
    *({"against": "rows", "rows": n, "batch": 300, "dim": 10} for n in ROWS),
    *({"against": "rows on disk", "rows": n, "batch": 300, "dim": COLUMNS_ON_DISK} for n in ROWS),
    *({"against": "batch", "rows": 100_000, "batch": n, "dim": 50} for n in BATCHES),
    *({"against": "dimension", "rows": 20_000, "batch": 300, "dim": n} for n in DIMS),
    *({"against": "dimension, full rank", "rows": 20_000, "batch": 300, "dim": n} for n in RANKS),
    *({"against": "components", "rows": 58_261, "batch": 583, "components": n} for n in COMPONENTS),
    *({"against": "columns", "rows": 20_000, "columns": n} for n in COLUMNS),
    *({"against": "processes", "processes": n} for n in PROCESSES),
]
WHOLE = ["rows", "batch", "dim", "components", "columns", "processes", "more_mb", "peak_mb"]
SECONDS = 2.0


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(point: dict[str, Any]) -> dict[str, Any]:
    """Time and memory of one point, in this process."""
    if point["against"] == "columns":
        return measure_twin(point)
    return measure_processes(point) if point["against"] == "processes" else measure_steps(point)


def regression(point: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A logistic regression by the general path, and made-up data."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from dpvim.inference.gradient import Problem
    from dpvim.mapped import MappedArray
    from dpvim.privacy.clipping import Likelihood

    rows, dim = point["rows"], point["dim"]
    data: dict[str, Any]
    if "file" in point:
        every = np.memmap(point.pop("file"), np.float32, mode="r").reshape(-1, dim + 1)[:rows]
        data = {"x": MappedArray(every[:, :-1]), "y": MappedArray(every[:, -1])}
    else:
        rng = np.random.default_rng(0)
        data = {
            "x": jax.device_put(rng.standard_normal((rows, dim), np.float32)),
            "y": jax.device_put((rng.random(rows) < 0.5).astype(np.float32)),
        }
        jax.block_until_ready(data)

    def log_likelihood(latent: Any, record: Any) -> Any:
        logit = record["x"] @ latent
        return record["y"] * logit - jnp.logaddexp(0.0, logit)

    likelihood = Likelihood.from_log_prob(log_likelihood)
    return Problem(dim, likelihood, lambda t: -0.5 * jnp.sum(t * t)), data


def mixture(point: dict[str, Any]) -> tuple[Any, Any]:
    """The ready-made mixture, and made-up data."""
    import speed

    from dpvim.bridge.data import prepare
    from dpvim.bridge.model import bridge

    model, data = speed.mixture()
    inputs = prepare(data, {})
    problem = bridge(dataclasses.replace(model, num_components=point["components"]), inputs).problem
    point["dim"] = problem.dim
    return problem, inputs.records


def measure_steps(point: dict[str, Any]) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    import optax

    from dpvim.inference import loop
    from dpvim.inference.engine import make_engine
    from dpvim.inference.families import FAMILIES
    from dpvim.inference.variants import make_variant
    from dpvim.privacy.plan import PrivacyPlan
    from dpvim.privacy.randomness import SecretStreams

    problem, data = (mixture if "components" in point else regression)(point)
    plan = PrivacyPlan(
        num_examples=point["rows"],
        sampling_prob=point["batch"] / point["rows"],
        num_steps=10**6,
        clip_norm=1.0,
        noise_multiplier=10.0,
    )
    family = FAMILIES["full_rank" if "full" in point["against"] else "mean_field"](problem.dim)
    engine = make_engine(problem, family, make_variant("aligned", family), optax.adam(1e-3), plan)
    state = engine.init(jax.random.key(0), jnp.zeros(problem.dim), 0.1)
    before = peak_mb()
    streams = SecretStreams(0)

    def seconds(steps: int) -> tuple[float, float]:
        began = time.process_time(), time.perf_counter()
        loop.run(engine, state, data, num_steps=steps, streams=streams, trace_every=10**6)
        return time.process_time() - began[0], time.perf_counter() - began[1]

    # The same shapes are compiled once, so the second run of a length is without the compiler.
    steps = 16
    seconds(steps)
    while (took := seconds(steps))[0] < SECONDS / 4 and steps < 2**16:
        steps *= 4
        seconds(steps)
    cpu, clock = min(took, *(seconds(steps) for _ in range(2)))
    return {
        **point,
        "step_us": round(cpu / steps * 1e6, 1),
        "clock_us": round(clock / steps * 1e6, 1),
        "row_ns": round(cpu / steps / point["batch"] * 1e9, 1),
        "more_mb": round(peak_mb() - before),
        "peak_mb": round(peak_mb()),
    }


def measure_twin(point: dict[str, Any]) -> dict[str, Any]:
    import numpy as np
    import pandas as pd

    from dpvim.synthesis.fitting import synthesize
    from dpvim.synthesis.schema import Categorical, Real, Schema

    rng = np.random.default_rng(0)
    rows, count = point["rows"], point["columns"]
    hidden = rng.normal(size=rows)
    values = 0.5 * hidden[:, None] + rng.normal(size=(rows, count))
    frame = pd.DataFrame(values, columns=[f"x{i}" for i in range(count)]).clip(-3, 3)
    schema: list[Any] = []
    for i, name in enumerate(frame):
        if i % 2:
            schema.append(Real(name=str(name), lower=-3, upper=3, reviewed=True))
        else:
            levels = list("abcd")
            schema.append(Categorical(name=str(name), levels=tuple(levels), reviewed=True))
            frame[name] = pd.cut(frame[name], 4, labels=levels).astype(str)
    before, began = peak_mb(), (time.process_time(), time.perf_counter())
    synthesize(frame, Schema(tuple(schema)), epsilon=1.0, seed=0, progress=False)
    return {
        **point,
        "twin_s": round(time.process_time() - began[0], 1),
        "twin_clock_s": round(time.perf_counter() - began[1], 1),
        "more_mb": round(peak_mb() - before),
        "peak_mb": round(peak_mb()),
    }


def measure_processes(point: dict[str, Any]) -> dict[str, Any]:
    import processes

    size = processes.SIZES["large"]
    rounds = [processes.start(point["processes"], "large") for _ in range(3)]
    cpu, clock = (
        min(combine(one[0][name] for one in found) for found in rounds)
        for name, combine in (("cpu", sum), ("us", max))
    )
    return {
        **point,
        "rows": size["rows"],
        "batch": size["rows"],
        "dim": size["dim"],
        "step_us": round(cpu),
        "clock_us": round(clock),
        "row_ns": round(1e3 * cpu / size["rows"], 1),
    }


def draw_picture(table: Any) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    column = {"rows on disk": "rows", "dimension": "dim", "dimension, full rank": "dim"}
    times = {"columns": "twin_s", "processes": "clock_us"}  # processes are for the clock
    groups = list(dict.fromkeys(table["against"]))
    figure, axes = plt.subplots(2, len(groups), figsize=(22, 6), layout="constrained")
    for place, group in enumerate(groups):
        part = table[table["against"] == group]
        x = part[column.get(group, group)].astype(float)
        for ax, name in zip(axes[:, place], (times.get(group, "step_us"), "peak_mb"), strict=True):
            values = part[name].astype(float)
            if values.isna().all():
                ax.axis("off")
                continue
            ax.plot(x, values, marker="o")
            ax.set(xscale="log", xlabel=group)
            ax.xaxis.set_minor_formatter("")
            if name == "peak_mb" or group.startswith(("rows", "processes")):
                ax.set_ylim(0, None)
            else:
                ax.set(yscale="log")
                ax.yaxis.set_minor_formatter("")
            if place == 0:
                ax.set_ylabel("microseconds a step" if name == "step_us" else "peak memory, MB")
            elif name in times.values():
                ax.set_title("seconds a twin" if name == "twin_s" else "on the clock", fontsize=9)
            if group == "processes":
                ax.set(xscale="linear", xticks=x)
    figure.savefig(RESULTS / "growth.png", dpi=120)
    plt.close(figure)


def write_rows(path: Path) -> None:
    """A file of the largest number of rows: columns and an outcome, block after block."""
    import numpy as np

    rng = np.random.default_rng(0)
    block = rng.standard_normal((10**6, COLUMNS_ON_DISK + 1), np.float32)
    block[:, -1] = block[:, -1] > 0
    with path.open("wb") as file:
        for _ in range(ROWS[-1] // len(block)):
            block.tofile(file)


def measured(point: dict[str, Any], path: Path) -> dict[str, Any]:
    """`measure` in a process of its own."""
    if "disk" in point["against"]:
        if not path.exists():
            write_rows(path)
        point = point | {"file": str(path)}
    # Of XLA's pool, and of NumPy's library.
    one_thread = {"NPROC": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--point", json.dumps(point)]
    free = point["against"] == "processes"
    environment = dict(os.environ) if free else os.environ | one_thread
    output = subprocess.run(command, env=environment, check=True, capture_output=True).stdout
    return json.loads(output.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    groups = list(dict.fromkeys(point["against"] for point in POINTS))
    parser.add_argument("--only", nargs="*", choices=groups, default=groups)
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--point", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.point:
        print(json.dumps(measure(options.point)))
        return
    import pandas as pd

    path, results = options.folder / "growth.rows", RESULTS / "growth.csv"
    table = pd.read_csv(results)
    try:
        for group in options.only:
            found = []
            for point in (point for point in POINTS if point["against"] == group):
                found.append(measured(point, path))
                print(found[-1], flush=True)
            others = table[table["against"] != group]
            table = pd.concat([others, pd.DataFrame(found)], ignore_index=True)
            table = table.sort_values("against", key=lambda g: g.map(groups.index), kind="stable")
            # Whole numbers stay whole where others are missing.
            whole = {name: "Int64" for name in WHOLE if name in table}
            table = table.astype(whole)
            table.to_csv(results, index=False)
    finally:
        path.unlink(missing_ok=True)
    draw_picture(table)


if __name__ == "__main__":
    main()
