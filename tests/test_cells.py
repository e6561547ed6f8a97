"""Sweeps on Ray: the bits of threads, booked before anything starts, called once."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
from matplotlib.figure import Figure

import dpvim
from dpvim import cells
from dpvim._extras import MissingExtraError
from dpvim.experiments.experiment import CellResult, Experiment, Scope, mean_and_error
from dpvim.experiments.running import reproduce

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
DELTA = 1e-5
RNG = np.random.default_rng(0)
X = RNG.normal(size=(300, 3)).astype(np.float32)
Y = (X @ np.array([1.0, -0.5, 0.2]) + RNG.normal(size=300)).astype(np.float32)
QUICK = {"delta": DELTA, "num_steps": 40, "clip_norm": 1.0, "learning_rate": 0.01}


def linear(X, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, 1.0), obs=y)


def heavy_tailed(X, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.StudentT(3, X @ w, 1.0), obs=y)


def dies(X, y):
    """A model that a worker does not survive, and the driver does."""
    if os.environ.get("RAY_JOB_ID") or "ray" in sys.argv[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    linear(X, y)


def make_ledger(folder: Path) -> dpvim.Ledger:
    return dpvim.Ledger.create(folder / "a.ledger", name="people", epsilon=9.0, delta=DELTA)


def test_a_place_that_there_is_not_is_named(tmp_path):
    ledger = make_ledger(tmp_path)
    with pytest.raises(ValueError, match="on: expected one of 'threads', 'ray', got 'rya'"):
        dpvim.fit_many(linear, X, Y, each=[{"epsilon": 1.0}], on="rya", ledger=ledger, **QUICK)
    assert not ledger.releases


def test_without_ray_nothing_is_booked(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    ledger = make_ledger(tmp_path)
    with pytest.raises(MissingExtraError, match=r"dpvim\[ray\]"):
        dpvim.fit_many(linear, X, Y, each=[{"epsilon": 1.0}], on="ray", ledger=ledger, **QUICK)
    assert not ledger.releases


def square(shared: int, cell: int) -> int:
    return shared * cell**2


def fail(shared: Path, cell: int) -> None:
    with open(shared, "a") as file:
        file.write("called\n")
    raise ValueError(f"cell: {cell}")


def die(shared: Path, cell: int) -> None:
    with open(shared, "a") as file:
        file.write("called\n")
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def ray():
    """One local cluster for all tests here: it takes seconds to start."""
    pytest.importorskip("ray", reason="ray is not installed: pip install 'dpvim[ray]'")
    with cells.opened("ray") as found:
        yield found


@pytest.mark.long
class TestOnRay:
    def test_a_local_cluster_listens_on_the_loopback_alone(self, ray):
        (node,) = ray._ray.nodes()
        assert node["NodeManagerAddress"] == "127.0.0.1"
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # sends nothing; tells this machine's own address
            outside = probe.getsockname()[0]
        gcs = int(ray._ray.get_runtime_context().gcs_address.rpartition(":")[2])
        for port in (gcs, node["NodeManagerPort"], node["ObjectManagerPort"]):
            socket.create_connection(("127.0.0.1", port), 2).close()
            if not outside.startswith("127."):
                with pytest.raises(OSError):  # noqa: PT011 - refused or timed out
                    socket.create_connection((outside, port), 2)

    def test_every_cell_is_called_and_knows_its_number(self, ray):
        assert dict(ray.sweep(square, 2, range(7)).results()) == {i: 2 * i**2 for i in range(7)}

    def test_an_error_of_a_cell_is_its_own(self, ray, tmp_path):
        with pytest.raises(ValueError, match=r"^cell: 3$"):
            list(ray.sweep(fail, tmp_path / "log", [3]).results())

    def test_a_cell_whose_worker_died_is_not_called_again(self, ray, tmp_path):
        with pytest.raises(RuntimeError, match="a worker died"):
            list(ray.sweep(die, tmp_path / "log", [0]).results())
        assert (tmp_path / "log").read_text() == "called\n"

    def test_what_is_stopped_is_given_up(self, ray):
        with pytest.raises(KeyboardInterrupt):
            list(ray.sweep(square, 2, range(3)).results(lambda: True))

    def test_fits_have_the_bits_of_threads_and_are_booked_at_once(self, ray, tmp_path):
        seeds = [{"epsilon": e, "seed": s} for e in (1.0, 4.0) for s in range(3)]
        here = dpvim.fit_many(linear, X, Y, each=seeds, **QUICK)
        there = dpvim.fit_many(linear, X, Y, each=seeds, on="ray", **QUICK)
        for one, other in zip(here, there, strict=True):
            assert bits_of(one) == bits_of(other)
            assert one.privacy == other.privacy
        ledger = make_ledger(tmp_path)
        two = [{"epsilon": 1.0}, {"epsilon": 2.0}]
        made = dpvim.fit_many(linear, X, Y, each=two, on="ray", ledger=ledger, **QUICK)
        assert [each.state for each in ledger.releases] == ["done", "done"]
        assert all(each.privacy.private for each in made)
        made[0].resume(X, Y, num_steps=10)  # a fit from a worker is one like any other

    def test_noise_is_drawn_by_the_worker(self, ray):
        one, other = dpvim.fit_many(linear, X, Y, each=[{"epsilon": 1.0}] * 2, on="ray", **QUICK)
        assert bits_of(one) != bits_of(other)

    def test_a_worker_that_dies_is_paid_for(self, ray, tmp_path):
        ledger = make_ledger(tmp_path)
        with pytest.raises(RuntimeError, match="a worker died"):
            dpvim.fit_many(dies, X, Y, each=[{"epsilon": 1.0}], on="ray", ledger=ledger, **QUICK)
        (release,) = ledger.releases
        assert release.steps == QUICK["num_steps"]

    def test_a_choice_is_that_of_threads_and_names_stay_here(self, ray):
        marked = "a-name-that-no-log-may-have"
        candidates = {marked: linear, "other": heavy_tailed}
        for method in ("split", "repeat"):
            settings = {"epsilon": 8.0, "delta": DELTA, "method": method, "seed": 3}
            settings |= {"num_steps": 40, "learning_rate": 0.05, "progress": False}
            here = dpvim.tune(candidates, X, Y, **settings)
            there = dpvim.tune(candidates, X, Y, **settings, on="ray")
            assert (here.name, here.score, here.scores) == (there.name, there.score, there.scores)
            assert bits_of(here.fit) == bits_of(there.fit)
        session = Path(ray._ray._private.worker._global_node.get_session_dir_path())
        for log in session.rglob("*"):
            if log.is_file():
                assert marked.encode() not in log.read_bytes()

    def test_cells_of_an_experiment_are_resumed(self, ray, tmp_path):
        counting = experiment(tmp_path / "log")
        reproduce(counting, Scope(repeats=2), tmp_path, on="ray", progress=False)
        found = reproduce(counting, Scope(repeats=3), tmp_path, on="ray", progress=False)
        assert (found.done, found.wanted) == (3, 3)
        assert sorted((tmp_path / "log").read_text().split()) == ["0", "1", "2"]
        with pytest.raises(ValueError, match="on: expected 'threads' with a ledger"):
            reproduce(counting, Scope(), tmp_path, on="ray", ledger=make_ledger(tmp_path))

    def test_a_model_that_cannot_be_sent_is_refused_before_it_is_booked(self, ray, tmp_path):
        lock, ledger = threading.Lock(), make_ledger(tmp_path)

        def model(X, y):
            with lock:
                linear(X, y)

        with pytest.raises(TypeError, match="on: expected a model and options that can be pickled"):
            dpvim.fit_many(model, X, Y, each=[{"epsilon": 1.0}], on="ray", ledger=ledger, **QUICK)
        assert not ledger.releases


def bits_of(fit):
    leaves = jax.tree.leaves((fit.trace.params, fit.releases, fit.posterior.loc))
    return [np.asarray(leaf).tobytes() for leaf in leaves]


def experiment(log: Path) -> Experiment:
    def run(cells):
        with open(log, "a") as file:
            file.writelines(f"{cell['seed']}\n" for cell in cells)
        return [CellResult([{"error": 1.0 + cell["seed"]}]) for cell in cells]

    def all_cells(scope):
        return [{"seed": seed} for seed in scope.seeds(quick=2, full=3)]

    def summarise(frame: pd.DataFrame) -> pd.DataFrame:
        return mean_and_error(frame.assign(kind="a"), ["kind"], ["error"])

    return Experiment(
        name="counting",
        title="",
        paper="nowhere",
        repeats=5,
        cells=all_cells,
        run=run,
        summarise=summarise,
        draw=lambda frame: Figure(),
        judge=lambda frame: [],
    )
