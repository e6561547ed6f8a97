"""Fits that go on after a crash: the same bits, the same price, the same run or none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from conftest import linear_model
from crashing_disk import Killed, install

import dpvim
from dpvim import checkpoints, files
from dpvim.bridge.data import prepare
from dpvim.bridge.model import bridge
from dpvim.checkpoints import BEGIN, RESULT, STATE
from dpvim.inference import loop
from dpvim.inference.monitor import UNMONITORED, RunMonitor
from dpvim.options import Budget, FitOptions
from dpvim.prepared import PreparedFit
from dpvim.privacy.randomness import SecretStreams
from dpvim.resumable import CheckpointKeeper, program_digest
from dpvim.strategy import Request, choose
from dpvim.types import Origin

RNG = np.random.default_rng(0)
X = RNG.normal(size=(300, 3))
Y = X @ np.array([1.0, -0.5, 0.2]) + RNG.normal(size=300)
SECRET = bytes(range(32))
# What each leaves in a checkpoint: sums of releases, windows, nothing; streams of three kinds.
CASES = {
    "aligned": ({"sampling_prob": 0.2, "num_steps": 300}, {"variant": "aligned"}),
    "steered": ({"num_steps": 768, "sampling_prob": 0.3}, {}),
    "vanilla": ({"num_steps": 300}, {"variant": "vanilla"}),
    "shuffled": (
        {"sampling_prob": 0.2, "num_steps": 300, "relation": "add_or_remove", "num_examples": 330},
        {"variant": "aligned", "family": "full_rank"},
    ),
}


@pytest.fixture(autouse=True)
def known_secrets_and_all_progress_kept(monkeypatch):
    """So that two runs can be compared, and every chunk is kept."""
    monkeypatch.setattr(checkpoints, "fresh_secret", lambda: SECRET)
    monkeypatch.setattr(checkpoints, "SECONDS_BETWEEN", 0.0)
    monkeypatch.setattr(checkpoints, "MOST_OVERHEAD", np.inf)


def cut_into(monkeypatch, steps):
    """Chunks of so many steps; the compiled program stays the same."""
    monkeypatch.setattr(loop._Pace, "next_length", lambda pace: min(steps, pace._capacity))


class Case:
    """A model that is compiled once, and runs with a checkpoint."""

    def __init__(self, name):
        length, options = CASES[name]
        budget = Budget(epsilon=2.0, delta=1e-4, **length)
        self.inputs = prepare((X, Y), {})
        bridged = bridge(linear_model, self.inputs)
        request = Request(budget, FitOptions(trace_every=7, **options))
        (strategy,) = choose([request], bridged, len(X))
        assert strategy.options.is_steered == (name == "steered")
        self.prepared = PreparedFit(
            linear_model, strategy.plan, strategy.options, self.inputs, bridged, strategy.prior
        )

    def run(self, folder, monitor=UNMONITORED):
        prepared, num_steps = self.prepared, self.prepared.plan.num_steps
        with checkpoints.opened(folder, {}, b"") as checkpoint:
            keeper = CheckpointKeeper(checkpoint, None, num_steps)
            (result,) = prepared.run(
                [prepared.init(keeper.start, Origin.PRIVATE)],
                self.inputs.records,
                streams=[keeper.streams],
                num_steps=num_steps,
                trace_every=7,
                monitor=monitor,
                steerings=[prepared.steering()],
                keeper=keeper,
            )
        return bits(result)


def bits(result):
    """Everything that a run leaves, to the last bit."""
    state = result.state._replace(key=jax.random.key_data(result.state.key))
    leaves = jax.tree.leaves((state, result.trace.params, result.releases))
    return [np.asarray(leaf).tobytes() for leaf in [*leaves, result.trace.steps]]


@pytest.fixture(scope="module", params=CASES)
def case(request):
    return Case(request.param)


@pytest.mark.parametrize("often", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_crash_at_a_file_operation_changes_no_bit(case, tmp_path, monkeypatch, often):
    """At some of them, from first to last; test_checkpoints.py takes all of a short run."""
    cut_into(monkeypatch, 120)
    wanted = case.run(tmp_path / "whole")
    disk = install(monkeypatch)
    assert case.run(tmp_path / "counted") == wanted
    monkeypatch.setattr(files, "os", os)
    assert disk.log.count("replace") >= 3  # the beginning, some progress, the result
    points = range(disk.done)
    if often:
        points = points[:: max(1, disk.done // 30)]
    else:
        others = [i for i in points if disk.log[i] != "write"]
        points = [*others[2 :: max(1, len(others) // 8)], others[-2]]
    for crash_at in points:
        folder = tmp_path / str(crash_at)
        install(monkeypatch, crash_at)
        with pytest.raises(Killed):
            case.run(folder)
        monkeypatch.setattr(files, "os", os)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*ended before")
            assert case.run(folder) == wanted, (crash_at, disk.log[crash_at])
        assert sorted(os.listdir(folder)) == [RESULT]


def test_a_run_does_not_depend_on_where_it_was_stopped(case, tmp_path, monkeypatch):
    """Stopped as Ctrl-C does, after every chunk, the chunks of each part cut differently."""
    wanted = case.run(tmp_path / "whole")
    cut_into(monkeypatch, 97)
    folder, parts = tmp_path / "parts", 0
    while not (folder / RESULT).exists():
        advanced = []
        # What was done before is reported first.
        left = 2 if parts else 1
        monitor = RunMonitor(advanced.append, lambda: len(advanced) >= left)  # noqa: B023
        found, parts = case.run(folder, monitor), parts + 1
        cut_into(monkeypatch, 60 + 37 * parts)
    assert parts > 1
    assert found == wanted


def test_older_progress_put_back_releases_the_same(case, tmp_path, monkeypatch):
    """It is harmless on the same data, and no other data are accepted: see below."""
    wanted = case.run(tmp_path / "whole")
    cut_into(monkeypatch, 50)
    folder, older = tmp_path / "run", []

    def advance(steps):
        if (folder / STATE).exists():
            older.append((folder / STATE).read_bytes())

    case.run(folder, RunMonitor(advance, lambda: len(older) >= 2))
    assert older[0] != (folder / STATE).read_bytes()
    (folder / STATE).write_bytes(older[0])
    assert case.run(folder) == wanted


def test_no_secret_is_in_the_result(case, tmp_path):
    case.run(tmp_path)
    with (
        pytest.warns(UserWarning, match="ended before"),
        checkpoints.opened(tmp_path, {}, b"") as c,
    ):
        assert not [name for name in c.load() if name.startswith("position")]
    assert SECRET not in (tmp_path / RESULT).read_bytes()


def test_a_generator_goes_on_without_its_key_in_the_checkpoint(case):
    source = case.prepared.engine.source(len(X), SecretStreams(secret=SECRET))
    source.draw(13, 13)
    position = source.position()
    wanted = source.draw(20, 20)
    other = case.prepared.engine.source(len(X), SecretStreams(secret=SECRET))
    other.move_to(position)
    for a, b in zip(wanted, other.draw(20, 20), strict=True):
        np.testing.assert_array_equal(a, b)
    keyed = case.prepared.engine.source(len(X), SecretStreams(secret=SECRET[::-1]))
    keyed.move_to(position)
    assert (keyed.draw(20, 20)[1] != wanted[1]).mean() > 0.9


# -- as a user meets it ------------------------------------------------------------------------

QUICK = {"epsilon": 2.0, "delta": 1e-4, "num_steps": 60, "progress": False, "learning_rate": 0.01}


def model_with(scale, X, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ (w * scale), 1.0), obs=y)


def quick(folder, *, data=(X, Y), model=linear_model, **changes):
    return dpvim.fit(model, *data, checkpoint=folder, **(QUICK | changes))


def crash(folder, monkeypatch, **changes):
    """A fit that was killed when it had kept its progress once."""
    cut_into(monkeypatch, 20)
    disk = install(monkeypatch)
    kept = []
    original = checkpoints.Checkpoint.save

    def save(checkpoint, arrays):
        if kept:
            disk.crash_at = 0
        kept.append(1)
        original(checkpoint, arrays)

    monkeypatch.setattr(checkpoints.Checkpoint, "save", save)
    with pytest.raises(Killed):
        quick(folder, **changes)
    monkeypatch.setattr(checkpoints.Checkpoint, "save", original)
    monkeypatch.setattr(files, "os", os)


def test_a_fit_goes_on_and_is_paid_for_once(tmp_path, monkeypatch):
    whole = quick(tmp_path / "whole")
    crash(tmp_path / "run", monkeypatch)
    assert sorted(os.listdir(tmp_path / "run")) == [BEGIN, STATE]
    fit = quick(str(tmp_path / "run"))
    with pytest.warns(UserWarning, match="ended before.*nothing is spent"):
        again = quick(tmp_path / "run")
    for other in (fit, again):
        assert bits_of_fit(other) == bits_of_fit(whole)
        assert other.privacy == whole.privacy
        assert not other.interrupted
    assert whole.privacy.private
    assert whole.privacy.steps_done == whole.plan.num_steps == 60
    again.save(tmp_path / "saved.npz")


def bits_of_fit(fit):
    leaves = jax.tree.leaves(
        (fit.trace.params, fit.releases, fit.posterior.loc, fit.posterior.scale)
    )
    return [np.asarray(leaf).tobytes() for leaf in leaves]


PERSONS = np.arange(300) // 3  # three rows each, of which two are used
BY_PERSON = {"group_by": PERSONS, "max_rows_per_person": 2}


def test_a_fit_by_persons_goes_on_with_the_same_rows_of_each(tmp_path, monkeypatch):
    """With the same noise and other rows, the difference of two releases would have no noise."""
    whole = quick(tmp_path / "whole", **BY_PERSON)
    crash(tmp_path / "run", monkeypatch, **BY_PERSON)
    for name, value in {
        "data": PERSONS[::-1] // 2 * 2,
        "plan": None,
    }.items():
        changes = {"group_by": value} if name == "data" else {"max_rows_per_person": 3}
        with pytest.raises(dpvim.FileError, match=f"run with other .*{name}.*not be used"):
            quick(tmp_path / "run", **(BY_PERSON | changes))
    assert bits_of_fit(quick(tmp_path / "run", **BY_PERSON)) == bits_of_fit(whole)
    monkeypatch.setattr(checkpoints, "fresh_secret", lambda: SECRET[::-1])
    assert bits_of_fit(quick(tmp_path / "other", **BY_PERSON)) != bits_of_fit(whole)


def other_rows():
    changed = X.copy()
    changed[17, 1] += 1e-3
    return changed, Y


CHANGES = {
    "data": {"data": other_rows()},
    "plan": {"epsilon": 2.1},
    "plan ": {"delta": 2e-4},
    "options": {"trace_every": 3},
    "options ": {"init_params": {"w": np.ones(3)}},
    "options  ": {"seed": 1},
    "model or optimiser": {"model": lambda X, y: model_with(np.float32(1.001), X, y)},
    "model or optimiser ": {"learning_rate": 0.011},
    "model or optimiser  ": {"optimizer": optax.sgd(0.01), "learning_rate": None},
}


def test_another_fit_is_refused_and_the_first_one_goes_on(tmp_path, monkeypatch):
    same = {"model": lambda X, y: model_with(np.float32(1.0), X, y)}
    crash(tmp_path / "run", monkeypatch, **same)
    for what, changes in CHANGES.items():
        with pytest.raises(dpvim.FileError, match=f"run with other {what.strip()}.*not be used"):
            quick(tmp_path / "run", **(same | changes))
    # Another function with the same program is the same model.
    again = {"model": lambda X, y: model_with(np.float32(1.0), X, y)}
    assert bits_of_fit(quick(tmp_path / "run", **again)) == bits_of_fit(
        quick(tmp_path / "whole", **same)
    )


def test_a_constant_array_of_a_model_is_part_of_it():
    def digest(constant):
        inputs = prepare((X, Y), {})
        bridged = bridge(lambda X, y: model_with(constant, X, y), inputs)
        request = Request(Budget(epsilon=1.0, delta=1e-4, num_steps=50), FitOptions())
        (strategy,) = choose([request], bridged, len(X))
        prepared = PreparedFit(linear_model, strategy.plan, strategy.options, inputs, bridged)
        return program_digest(prepared, inputs)

    first = digest(np.arange(3.0))
    assert digest(np.arange(3.0)) == first
    assert digest(np.array([0.0, 1.0, 2.0 + 1e-6])) != first


def test_a_run_whose_bits_may_differ_has_no_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(ValueError, match="checkpoint: expected a run on the CPU, got one on 'gpu'"):
        quick(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_ctrl_c_keeps_the_progress_and_resume_is_sent_to_the_checkpoint(
    tmp_path, monkeypatch, ctrl_c
):
    whole = quick(tmp_path / "whole")
    cut_into(monkeypatch, 20)
    monkeypatch.setattr(checkpoints, "SECONDS_BETWEEN", 1e6)
    with monkeypatch.context() as patch:
        ctrl_c(2)
        fit = quick(tmp_path / "run")
        patch.undo()
    assert fit.interrupted
    assert fit.privacy.steps_done < 60
    with pytest.raises(ValueError, match=r"Call dpvim\.fit as before, with checkpoint="):
        fit.resume(X, Y)
    monkeypatch.setattr("dpvim._progress.ProgressBar.advance", lambda bar, steps: None)
    assert bits_of_fit(quick(tmp_path / "run")) == bits_of_fit(whole)


def test_many_fits_and_those_without_privacy_have_no_checkpoint(tmp_path):
    with pytest.raises(
        ValueError, match=r"checkpoint: expected with dpvim\.fit, got it with fit_many"
    ):
        dpvim.fit_many(linear_model, X, Y, each=[{"epsilon": 1}], delta=1e-4, checkpoint=tmp_path)
    with pytest.raises(ValueError, match="got it with fit_nonprivate"):
        dpvim.fit_nonprivate(linear_model, X, Y, checkpoint=tmp_path)
    with pytest.raises(TypeError, match="expected the name of a folder, got bool"):
        dpvim.fit(linear_model, X, Y, epsilon=1.0, delta=1e-4, checkpoint=True)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("kind", "kills"),
    [
        ("steered", 1),
        *(
            pytest.param(
                kind, kills, marks=pytest.mark.long
            )  # over fifty in all; more in a command
            for kind, kills in (
                *(("steered", 20), ("aligned", 15), ("persons", 10)),
                *(("counts", 15), ("counts of persons", 5)),
            )
        ),
    ],
)
def test_kill_9_at_random_moments(kind, kills):
    command = Path(__file__).parents[1] / "benchmarks" / "checkpoint_kills.py"
    arguments = ["--kind", kind, "--kills", str(kills), "--seed", "1"]
    found = subprocess.run(
        [sys.executable, command, *arguments], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr
    facts = json.loads(found.stdout)
    assert facts["kills"] == kills
    assert facts["differing"] == 0
