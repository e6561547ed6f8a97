"""Kills fits with a checkpoint at random moments (kill -9), and compares what they end with.

    python benchmarks/checkpoint_kills.py --kills 500 [--kind steered] [--seed 0]

A fit runs in a process of its own, keeps its progress after every chunk, and is killed at a random
moment; the same call is made again until it ends, then a new fit begins. Every fit must end with
the bits (trace, releases, posterior) and the price of the same fit that nobody killed, and leave
no secret behind. Prints one line of json; the exit code is 1 if any differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

KINDS = ("steered", "aligned", "counts")
_READY = "ready"


def child(kind: str, folder: str, number: int) -> None:
    """One call of a fit; prints a digest of all that it ends with."""
    import jax
    import numpy as np

    import dpvim
    from dpvim import checkpoints

    # Runs can only be compared if their noise is the same: the secret is a number's here.
    secret = hashlib.sha256(str(number).encode()).digest()
    checkpoints.fresh_secret = lambda: secret
    checkpoints.SECONDS_BETWEEN, checkpoints.MOST_OVERHEAD = 0.0, float("inf")
    warnings.simplefilter("ignore")
    print(_READY, flush=True)
    found: Any
    if kind == "counts":
        twin = dpvim.synthesize(*_table(), epsilon=1.0, checkpoint=folder)
        fitted: Any = twin.fit
        found = (
            fitted.traits.best,
            fitted.traits.wide,
            [each.counts for each in fitted.releases.noisy],
        )
        price = twin.privacy.to_dict()
    else:
        rng = np.random.default_rng(0)
        X = rng.normal(size=(2000, 3))
        y = X @ np.array([1.0, -0.5, 0.2]) + rng.normal(size=2000)
        options: dict[str, Any] = {"num_steps": 6400}
        if kind == "aligned":
            options |= {"learning_rate": 0.01, "sampling_prob": 0.1}
        fit = dpvim.fit(_model, X, y, epsilon=1.0, delta=1e-5, checkpoint=folder, **options)
        found = (fit.trace.params, fit.releases, fit.posterior.loc, fit.posterior.scale)
        price = fit.privacy.to_dict()
    digest = hashlib.sha256(json.dumps(price, default=str).encode())
    for leaf in jax.tree.leaves(found):
        digest.update(np.asarray(leaf).tobytes())
    print(digest.hexdigest(), flush=True)


def _model(X: Any, y: Any) -> None:
    import numpyro
    import numpyro.distributions as dist

    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, 1.0), obs=y)


def _table() -> Any:
    import numpy as np
    import pandas as pd

    import dpvim

    kinds = [
        ("age", 'kind = "integer"\nlower = 0\nupper = 99'),
        ("visits", 'kind = "count"\nupper = 30'),
    ]
    kinds += [(f"c{i}", 'kind = "categorical"\nlevels = ["a", "b", "c"]') for i in range(4)]
    text = "dpvim_schema = 1\n" + "".join(
        f'[[columns]]\nname = "{name}"\n{rest}\nreviewed = true\n' for name, rest in kinds
    )
    rng = np.random.default_rng(0)
    columns: dict[str, Any] = {"age": rng.integers(0, 100, 5000), "visits": rng.poisson(3, 5000)}
    columns |= {f"c{i}": rng.choice(["a", "b", "c"], 5000) for i in range(4)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "schema.toml"
        path.write_text(text)
        return pd.DataFrame(columns), dpvim.Schema.load(path)


def start(kind: str, folder: Path, number: int) -> tuple[subprocess.Popen[str], float]:
    """A process that is about to fit, and when it was."""
    command = [sys.executable, __file__, "--child", kind, str(folder), str(number)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    if process.stdout.readline().strip() != _READY:
        raise RuntimeError("a fit could not be started")
    return process, time.monotonic()


def ended(process: subprocess.Popen[str]) -> str:
    digest = process.communicate()[0].strip()
    if process.returncode or not digest:
        raise RuntimeError(f"a fit ended with code {process.returncode}")
    return digest


def kill_often(kind: str, kills: int, seed: int) -> dict[str, Any]:
    rng, done, fits, differing = random.Random(seed), 0, 0, 0
    with_progress = 0
    with tempfile.TemporaryDirectory() as place:
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{place}/programs")
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        ended(start(kind, Path(place) / "first", seed)[0])  # compiles
        process, began = start(kind, Path(place) / "whole", seed)
        wanted = ended(process)
        usual = time.monotonic() - began
        while done < kills:
            folder, fits = Path(place) / str(fits), fits + 1
            while True:
                process, _ = start(kind, folder, seed)
                try:
                    process.wait(rng.uniform(0, 1.1 * usual) if done < kills else None)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.communicate()
                    done += 1
                    with_progress += (folder / "state.npz").exists()
                    continue
                differing += ended(process) != wanted
                differing += os.listdir(folder) != ["result.npz"]
                break
    return {
        "kind": kind,
        "kills": done,
        "kills_with_progress": with_progress,
        "fits": fits,
        "differing": differing,
        "seconds_of_a_fit": round(usual, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--kind", choices=KINDS, default="steered")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", nargs=3)
    args = parser.parse_args()
    if args.child:
        kind, folder, number = args.child
        child(kind, folder, int(number))
        return
    found = kill_often(args.kind, args.kills, args.seed)
    print(json.dumps(found))
    sys.exit(found["differing"] > 0)


if __name__ == "__main__":
    main()
