"""Kills fits with a checkpoint at random moments (kill -9), and compares what they end with.

    python benchmarks/checkpoint_kills.py --kills 500 [--kind steered] [--seed 0]

A fit runs in a process of its own (forked before JAX starts any thread), keeps its progress after
every chunk, and is killed at a random moment; the same call is made again until it ends, then a new
fit begins. Every fit must end with the bits (trace, releases, posterior) and the price of the same
fit that nobody killed, and leave no secret behind. Prints one line of json; the exit code is 1 if
any differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd

import dpvim
import dpvim.synthesis.fitting
from dpvim import checkpoints

KINDS = ("steered", "aligned", "persons", "counts", "counts of persons")


def digest_of_fit(kind: str, folder: Path, number: int) -> str:
    """One call of a fit; a digest of all that it ends with."""
    # Runs can only be compared if their noise is the same: the secret is a number's here.
    secret = hashlib.sha256(str(number).encode()).digest()
    checkpoints.fresh_secret = lambda: secret
    checkpoints.SECONDS_BETWEEN, checkpoints.MOST_OVERHEAD = 0.0, float("inf")
    warnings.simplefilter("ignore")
    found: Any
    if kind.startswith("counts"):
        table, schema = _table()
        by_person: dict[str, Any] = {}
        if "persons" in kind:
            table, by_person = table.assign(who=np.arange(len(table)) // 3), {"group_by": "who"}
        twin = dpvim.synthesize(table, schema, epsilon=1.0, checkpoint=folder, **by_person)
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
        options: dict[str, Any] = {"num_steps": 3200}
        if kind == "aligned":
            options |= {"learning_rate": 0.01, "sampling_prob": 0.1}
        if kind == "persons":
            options |= {"group_by": np.arange(len(X)) // 3, "max_rows_per_person": 2}
        fit = dpvim.fit(_model, X, y, epsilon=1.0, delta=1e-5, checkpoint=folder, **options)
        found = (fit.trace.params, fit.releases, fit.posterior.loc, fit.posterior.scale)
        price = fit.privacy.to_dict()
    digest = hashlib.sha256(json.dumps(price, default=str).encode())
    for leaf in jax.tree.leaves(found):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


def _model(X: Any, y: Any) -> None:
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, 1.0), obs=y)


def _table() -> Any:
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


class Process:
    """A process of its own, that makes one call of a fit."""

    def __init__(self, kind: str, folder: Path, number: int) -> None:
        self._pipe, to_parent = os.pipe()
        self.began = time.monotonic()
        self._number = os.fork()
        if self._number:
            os.close(to_parent)
            return
        try:
            os.write(to_parent, digest_of_fit(kind, folder, number).encode())
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)

    def wait(self, seconds: float | None) -> str | None:
        """The digest; None if it did not come in time, and the process was killed."""
        in_time, _, _ = select.select([self._pipe], [], [], seconds)
        if not in_time:
            os.kill(self._number, signal.SIGKILL)
        digest = os.read(self._pipe, 1000).decode() if in_time else None
        os.close(self._pipe)
        _, code = os.waitpid(self._number, 0)
        if in_time and (code or not digest):
            raise RuntimeError("a fit ended with an error")
        return digest


def kill_often(kind: str, kills: int, seed: int) -> dict[str, Any]:
    rng, done, fits, differing = random.Random(seed), 0, 0, 0
    with_progress = 0
    with tempfile.TemporaryDirectory() as place:
        cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", f"{place}/programs")
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        Process(kind, Path(place) / "first", seed).wait(None)  # compiles
        whole = Process(kind, Path(place) / "whole", seed)
        wanted = whole.wait(None)
        usual = time.monotonic() - whole.began
        while done < kills:
            folder, fits, digest = Path(place) / str(fits), fits + 1, None
            while digest is None:
                limit = rng.uniform(0, 1.1 * usual) if done < kills else None
                digest = Process(kind, folder, seed).wait(limit)
                if digest is None:
                    done += 1
                    with_progress += (folder / "state.npz").exists()
            differing += digest != wanted
            differing += os.listdir(folder) != ["result.npz"]
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
    args = parser.parse_args()
    found = kill_often(args.kind, args.kills, args.seed)
    print(json.dumps(found))
    sys.exit(found["differing"] > 0)


if __name__ == "__main__":
    main()
