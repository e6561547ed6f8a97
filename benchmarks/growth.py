"""How time and memory of a step grow with the rows, the batch and the dimension.

    python benchmarks/growth.py     # benchmarks/results/growth.csv, growth.png; about 15 minutes

Logistic regression by the general path (a gradient for each record), aligned. Every point is
measured in a process of its own, on one thread: CPU time and time on the clock of a step with its
sampling and noise, the peak of the process's memory, and how much of it the run added to what
making the data took. Rows on the disk are in a file of 20 GB (`--folder`, default: the current one)
that is made first, and removed at the end.
"""

from __future__ import annotations

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
POINTS: list[dict[str, Any]] = [
    *({"against": "rows", "rows": n, "batch": 300, "dim": 10} for n in ROWS),
    *({"against": "rows on disk", "rows": n, "batch": 300, "dim": COLUMNS_ON_DISK} for n in ROWS),
    *({"against": "batch", "rows": 100_000, "batch": n, "dim": 50} for n in BATCHES),
    *({"against": "dimension", "rows": 20_000, "batch": 300, "dim": n} for n in DIMS),
    *({"against": "dimension, full rank", "rows": 20_000, "batch": 300, "dim": n} for n in RANKS),
]
SECONDS = 2.0


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(point: dict[str, Any]) -> dict[str, Any]:
    """Time and memory of one point, in this process."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    from dpvim.inference import loop
    from dpvim.inference.engine import make_engine
    from dpvim.inference.families import FAMILIES
    from dpvim.inference.gradient import Problem
    from dpvim.inference.variants import make_variant
    from dpvim.mapped import MappedArray
    from dpvim.privacy.clipping import Likelihood
    from dpvim.privacy.plan import PrivacyPlan
    from dpvim.privacy.randomness import SecretStreams

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

    plan = PrivacyPlan(
        num_examples=rows,
        sampling_prob=point["batch"] / rows,
        num_steps=10**6,
        clip_norm=1.0,
        noise_multiplier=10.0,
    )
    family = FAMILIES["full_rank" if "full" in point["against"] else "mean_field"](dim)
    problem = Problem(
        dim, Likelihood.from_log_prob(log_likelihood), lambda t: -0.5 * jnp.sum(t * t)
    )
    engine = make_engine(problem, family, make_variant("aligned", family), optax.adam(1e-3), plan)
    state = engine.init(jax.random.key(0), jnp.zeros(dim), 0.1)
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


def draw_picture(table: Any) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    column = {"rows": "rows", "rows on disk": "rows", "batch": "batch"}
    groups = list(dict.fromkeys(table["against"]))
    figure, axes = plt.subplots(2, len(groups), figsize=(16, 6), layout="constrained")
    for place, group in enumerate(groups):
        part = table[table["against"] == group]
        x = part[column.get(group, "dim")]
        for ax, values, unit in (
            (axes[0, place], part["step_us"], "microseconds a step"),
            (axes[1, place], part["peak_mb"], "peak memory, MB"),
        ):
            ax.plot(x, values, marker="o")
            ax.set(xscale="log", xlabel=group)
            ax.xaxis.set_minor_formatter("")
            if unit.startswith("micro") and not group.startswith("rows"):
                ax.set(yscale="log")
            else:
                ax.set_ylim(0, None)
            if place == 0:
                ax.set_ylabel(unit)
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


def main(folder: Path) -> None:
    import pandas as pd

    one_thread = {"NPROC": "1", "OMP_NUM_THREADS": "1"}  # of XLA's pool, and of NumPy's library
    found = []
    path = folder / "growth.rows"
    try:
        for point in POINTS:
            if "disk" in point["against"]:
                if not path.exists():
                    write_rows(path)
                point = point | {"file": str(path)}
            command = [sys.executable, __file__, json.dumps(point)]
            output = subprocess.run(
                command, env=os.environ | one_thread, check=True, capture_output=True
            ).stdout
            found.append(json.loads(output))
            print(found[-1], flush=True)
            pd.DataFrame(found).to_csv(RESULTS / "growth.csv", index=False)
    finally:
        path.unlink(missing_ok=True)
    draw_picture(pd.DataFrame(found))


if __name__ == "__main__":
    if sys.argv[1:] == ["--picture"]:  # of the table as it is
        import pandas

        draw_picture(pandas.read_csv(RESULTS / "growth.csv"))
    elif sys.argv[1:2] == ["--folder"]:
        main(Path(sys.argv[2]))
    elif len(sys.argv) > 1:
        print(json.dumps(measure(json.loads(sys.argv[1]))))
    else:
        main(Path())
