"""From starting Python to printed intervals: README's example, beside NumPyro's SVI and NUTS.

    python benchmarks/time_to_answer.py [--rounds 3]

Each is a process of its own, one after the other in the same minute: import, compilation, the run
and the intervals. Seconds on the clock and of the processor; the least of the rounds. Prints, and
writes time_to_answer.csv.
"""

from __future__ import annotations

import argparse
import csv
import resource
import subprocess
import sys
import time
from pathlib import Path

RESULTS = Path(__file__).parent / "results"

DATA_AND_MODEL = """
import numpy as np, jax, numpyro, numpyro.distributions as dist
rng = np.random.default_rng(0)
X = rng.normal(size=(5000, 5)).astype(np.float32)
y = (rng.random(5000) < 1 / (1 + np.exp(-X @ rng.normal(size=5)))).astype(np.int32)
def model(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)
"""
PROGRAMS = {
    "dpvim, epsilon 1": """
import dpvim
print(dpvim.fit(model, X, y, epsilon=1.0, delta=1e-5).posterior.interval(0.9)["w"])
""",
    "NumPyro SVI, not private": """
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDiagonalNormal
guide = AutoDiagonalNormal(model)
svi = SVI(model, guide, numpyro.optim.Adam(1e-2), Trace_ELBO())
found = svi.run(jax.random.key(0), 4096, X, y, progress_bar=False)
print(guide.quantiles(found.params, [0.05, 0.95])["w"])
""",
    "NumPyro NUTS, not private": """
from numpyro.infer import MCMC, NUTS
chain = MCMC(NUTS(model), num_warmup=500, num_samples=1000, progress_bar=False)
chain.run(jax.random.key(0), X, y)
print(np.quantile(chain.get_samples()["w"], [0.05, 0.95], axis=0))
""",
}


def processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    best: dict[str, tuple[float, float]] = {}
    for _ in range(rounds):
        for name, program in PROGRAMS.items():
            clock, processor = time.perf_counter(), processor_seconds()
            command = [sys.executable, "-c", DATA_AND_MODEL + program]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            took = (time.perf_counter() - clock, processor_seconds() - processor)
            best[name] = min(best.get(name, took), took)
    with (RESULTS / "time_to_answer.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["program", "seconds", "processor_seconds"])
        for name, (clock, processor) in best.items():
            writer.writerow([name, f"{clock:.2f}", f"{processor:.2f}"])
            print(f"{name:28s} {clock:6.2f} s, {processor:6.2f} s of the processor")


if __name__ == "__main__":
    main()
