"""The published code and ours in turn, in the same minutes: CPU time of a step of whole runs.

    python benchmarks/published_speed.py PUBLISHED PYTHON [--works 0 1 4 5 7 8] [--rounds 7]

PUBLISHED is a checkout of the paper's code (github.com/DPBayes/dpvim-experiments), PYTHON that of
an environment where it runs: d3p 0.2.0, jax and jaxlib 0.4.13, numpyro 0.11.0, numpy 1.25,
scikit-learn, statsmodels, and for mixture and full rank twinify as it was in October 2022 (commit
e761200). Nothing of it is here. Works are those of `benchmarks/speed.py`, by number.

Both have a process of their own with one thread (`NPROC=1`), and take their steps one after the
other, round after round, so that what others do on the machine meets both. Theirs are the loops of
their scripts as they are, an epoch of 100 steps at a time, with batches, noise and the parameters
of every epoch. The loop for Adult works out the gradients a second time, for another figure: that
is left out. Ours are `DPSVI.run`, with all that a run does: batches, noise, trace, sums of the
releases. Data are made up, of the same shape; compilation is not counted. `times` is the median of
the ratios within a round, `steps_a_second` are medians by themselves.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results" / "published_speed.csv"
ONE_THREAD = {"NPROC": "1", "OMP_NUM_THREADS": "1"}
STEPS_AN_EPOCH = 100


def theirs(name: str) -> Any:
    """A module of their environment."""
    return importlib.import_module(name)


class Stopwatch:
    """Measures a run of epochs for every line of input, which has their number."""

    def __init__(self, out: Any) -> None:
        self._out, self._left, self._epochs = out, 0, 0
        self._began = 0.0

    def at_the_end_of_an_epoch(self) -> None:
        """To be called by the loop, with nothing under way."""
        self._left -= 1
        if self._left > 0:
            return
        took = time.process_time() - self._began
        if self._epochs:
            us = 1e6 * took / (STEPS_AN_EPOCH * self._epochs)
            print(json.dumps({"us": us}), file=self._out, flush=True)
        line = sys.stdin.readline()
        if not line:
            sys.exit(0)
        self._left = self._epochs = int(line)
        self._began = time.process_time()


def watched(svi: Any, watch: Stopwatch) -> Any:
    """Their loops ask for the parameters after every epoch."""
    import jax

    get_params = svi.get_params

    def get_params_and_wait(state: Any) -> Any:
        jax.block_until_ready(state)
        watch.at_the_end_of_an_epoch()
        return get_params(state)

    svi.get_params = get_params_and_wait
    return svi


def serve_theirs(published: Path, kind: str, variant: str, data: Path, watch: Stopwatch) -> None:
    """In a process of their environment."""
    # They import a name that they do not use, and that later versions of d3p do not have.
    theirs("d3p.svi").get_gradients_clipping_function = None
    folder = {"logistic": "adult", "mixture": "ukb", "linear": "linear_regression"}[kind]
    sys.path[:0] = [str(published / folder), str(published / "ukb")]
    arrays = dict(np.load(data))
    run = {"logistic": run_logistic, "mixture": run_mixture, "linear": run_linear}[kind]
    run(variant, arrays, watch)


def run_logistic(variant: str, arrays: dict[str, np.ndarray], watch: Stopwatch) -> None:
    import jax.numpy as jnp
    from numpyro.infer.autoguide import AutoDiagonalNormal
    from numpyro.optim import Adam

    model, rows = theirs("main_adult").model, len(arrays["X"])
    guide = AutoDiagonalNormal(model, init_scale=0.1)
    svi = by_name(variant)(model, guide, Adam(1e-3), 3.0, 10.0, N=rows)
    data = jnp.array(arrays["X"]), jnp.array(arrays["y"])
    # In place of the second gradients: a number.
    infer = theirs("utils").infer
    infer(watched(svi, watch), lambda state, batch: 0.0, data, int(0.01 * rows), 10**9, 1)


def run_mixture(variant: str, arrays: dict[str, np.ndarray], watch: Stopwatch) -> None:
    import pandas as pd
    from numpyro.distributions import Distribution
    from numpyro.optim import Adam

    # Their mixture gives by position what later versions of NumPyro take by name.
    init: Any = Distribution.__init__

    def init_by_name(self: Any, *shapes: Any, validate_args: Any = None, **more: Any) -> None:
        init(self, *shapes[:2], validate_args=validate_args, **more)

    Distribution.__init__ = init_by_name
    # Levels of their names: the one that the regression leaves out, and others.
    model, frame = theirs("model"), pd.DataFrame()
    for i, (name, reference) in enumerate(model.reference_groups.items()):
        codes = arrays[f"x{i}"]
        levels = [reference, *(f"level {j}" for j in range(1, codes.max() + 1))]
        frame[name] = pd.Categorical.from_codes(codes, levels)
    frame["covid_test_result"] = arrays["y"]
    mixture, guide = model.model_factory(SimpleNamespace(k=16), [], frame)
    data, rows = model.preprocess(frame)
    svi = by_name(variant)(mixture, guide, Adam(1e-3), 2.0, 10.0, num_obs_total=rows)
    batch = theirs("d3p.minibatch").q_to_batch_size(0.01, rows)
    key = theirs("d3p.random").PRNGKey(1)
    theirs("infer")._train_model(key, watched(svi, watch), data, batch, rows, 10**6)


def run_linear(variant: str, arrays: dict[str, np.ndarray], watch: Stopwatch) -> None:
    dim = arrays["X"].shape[1]
    sys.argv[1:] = ["--num_dims", str(dim)]  # read when it is imported
    import numpyro

    script, random = theirs("linear_regression_infer"), theirs("d3p.random")
    kind = {"aligned": "AlignedGradientFullRankDPSVI", "vanilla": "VanillaFullRankDPSVI"}[variant]
    optimizer = numpyro.optim.Adam(1e-3)
    data, rows = (script.X_train, script.y_train), script.n_train
    svi = getattr(theirs("fullrank_dpsvi"), kind)(
        script.model, script.guide, optimizer, 2.0, 10.0, num_obs_total=rows
    )
    script._train_model(
        random.PRNGKey(1), random, watched(svi, watch), data, rows // 100, rows, 10**5
    )


def by_name(variant: str) -> Any:
    name = {"aligned": "AlignedGradientDPSVI", "vanilla": "VanillaDPSVI"}[variant]
    return getattr(theirs("dpsvi"), name)


def serve_ours(number: int, watch: Stopwatch) -> None:
    """In a process of ours: whole runs of as many steps as asked for."""
    import jax
    import optax
    import speed

    from dpvim.svi import DPSVI

    warnings.simplefilter("ignore")
    work = speed.WORKS[number]
    model, data = work.make()
    plan = speed.plan_for(len(jax.tree.leaves(data)[0])).with_steps(10**8)
    svi = DPSVI(model, work.family, optax.adam(1e-3), plan, variant=work.variant, seed=0)
    for line in sys.stdin:
        steps = int(line) * STEPS_AN_EPOCH
        began = time.process_time()
        svi.run(jax.random.key(0), steps, *data, progress_bar=False)
        us = 1e6 * (time.process_time() - began) / steps
        print(json.dumps({"us": us}), file=watch._out, flush=True)


class Side:
    """A process that takes as many epochs as it is told."""

    def __init__(
        self, python: str, environment: dict[str, str], *arguments: str, errors: bool
    ) -> None:
        self._process = subprocess.Popen(
            [python, __file__, *arguments],
            env=environment | ONE_THREAD,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if errors else subprocess.DEVNULL,
            text=True,
        )

    def us(self, epochs: int) -> float:
        """Microseconds of CPU time a step."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{epochs}\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())["us"]

    def epochs_in(self, seconds: float) -> int:
        """How many take about so much CPU time, once everything is compiled."""
        count = 1
        while True:
            self.us(count)  # a run of another length may be compiled anew
            wanted = max(1, round(seconds * 1e6 / (STEPS_AN_EPOCH * self.us(count))))
            if wanted < 2 * count:
                return wanted
            count = min(wanted, 16 * count)  # short runs take longer by the step

    def end(self) -> None:
        self._process.communicate()


def compare(number: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    import speed

    work = speed.WORKS[number]
    _, data = work.make()
    arrays = data[0] if isinstance(data[0], dict) else {"X": data[0], "y": data[1]}
    path = folder / "data.npz"
    np.savez(path, **arrays)
    kind = work.name.split(",")[0].split()[-1]
    free = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    given = "--theirs", str(options.published), kind, work.variant, str(path)
    other = Side(options.python, free, *given, errors=options.errors)
    ours = Side(sys.executable, dict(os.environ), "--ours", str(number), errors=True)
    sides = other, ours
    epochs = [side.epochs_in(options.seconds) for side in sides]
    rounds = [
        [side.us(count) for side, count in zip(sides, epochs, strict=True)]
        for _ in range(options.rounds)
    ]
    for side in sides:
        side.end()
    times = np.array(rounds)
    ratios = times[:, 0] / times[:, 1]
    their_us, our_us = np.median(times, axis=0)
    return {
        "work": work.name,
        "variant": work.variant,
        "published_us": round(their_us, 1),
        "ours_us": round(our_us, 1),
        "published_steps_a_second": round(1e6 / their_us),
        "steps_a_second": round(1e6 / our_us),
        "times": round(float(np.median(ratios)), 1),
        "least_times": round(float(ratios.min()), 1),
        "most_times": round(float(ratios.max()), 1),
        "steps_a_run": epochs[1] * STEPS_AN_EPOCH,
    }


def main() -> None:
    if sys.argv[1:2] in (["--theirs"], ["--ours"]):
        watch = Stopwatch(sys.stdout)
        side, *rest = sys.argv[1:]
        with contextlib.redirect_stdout(sys.stderr):
            if side == "--ours":
                serve_ours(int(rest[0]), watch)
            else:
                serve_theirs(Path(rest[0]), rest[1], rest[2], Path(rest[3]), watch)
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("published", type=Path)
    parser.add_argument("python", help="of an environment where it runs")
    parser.add_argument("--works", type=int, nargs="*", default=[0, 1, 4, 5, 7, 8])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0, help="CPU time a measurement")
    parser.add_argument("--errors", action="store_true", help="show what their code prints")
    options = parser.parse_args()
    options.published = options.published.resolve()
    import pandas as pd

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for number in options.works:
            rows.append(compare(number, options, Path(folder)))
            print(pd.DataFrame(rows[-1:]).to_string(index=False), flush=True)
            pd.DataFrame(rows).to_csv(RESULTS, index=False)


if __name__ == "__main__":
    main()
