"""Fits that Slurm starts as the documentation says: the bits of one process."""

from __future__ import annotations

import json
import os
import sys

import pytest
import slurm_cluster
from jobs import PROGRAMS, ROOT
from shared_fits import bits_of

pytestmark = pytest.mark.long

PAGE = ROOT.parent / "docs" / "processes.md"
CASES = ("small batches", "few records")
BEGIN = f"""
import json, os, signal, warnings
import jax
jax.distributed.initialize()
jax.config.update("jax_compilation_cache_dir", {PROGRAMS!r})
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
warnings.simplefilter("ignore")
import numpy as np
import dpvim
number, count = jax.process_index(), jax.process_count()
def tell(**facts):
    with open(f"told.{{number}}", "w") as file:
        json.dump({{"count": count, "machine": os.uname().nodename}} | facts, file)
"""
BITS = f"""
from shared_fits import bits_of, own_rows
tell(bits=[bits_of(case, own_rows(case, number, count)) for case in {CASES!r}])
"""
LOST = """
from shared_fits import logistic_model
from dpvim.inference.sharing import Sharing
from dpvim.types import LostProcessError
rng = np.random.default_rng(number)
x, y = rng.normal(size=(500, 3)), rng.integers(0, 2, 500)
ledger = None
if number == 0:
    ledger = dpvim.Ledger.create("ledger.jsonl", name="x", epsilon=2.0, delta=1e-5)
meet, met = Sharing._meet, []
def interrupted(self, *given):
    met.append(1)
    if len(met) == 50:
        hit()
    return meet(self, *given)
Sharing._meet = interrupted
settings = dict(epsilon=1.0, delta=1e-5, clip_norm=1.0, num_steps=400, sampling_prob=0.1)
try:
    fit = dpvim.fit(logistic_model, x, y, ledger=ledger, progress=False, **settings)
    tell(interrupted=bool(fit.interrupted), steps=int(fit.trace.steps[-1]))
except LostProcessError as error:
    tell(error=str(error))
    raise
"""


@pytest.fixture
def cluster(request):
    """A cluster of so many machines as the parameter says."""
    if reason := slurm_cluster.why_not():
        pytest.skip(reason)
    kinds = {1: slurm_cluster.one_machine, 2: slurm_cluster.two_machines}
    with kinds[request.param]() as cluster:
        yield cluster


def on_machines(*numbers):
    names = [f"machines-{number}" for number in numbers]
    return pytest.mark.parametrize("cluster", numbers, indirect=True, ids=names)


def run(cluster, *command, program, seconds=150):
    """The process of a command that has ended, and what the tasks told."""
    (cluster.folder / "program.py").write_text(program)
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    done = cluster.run(*command, seconds=seconds, PYTHONPATH=path, JAX_ENABLE_X64="0")
    told = {path.name: json.loads(path.read_text()) for path in cluster.folder.glob("told.*")}
    return done, [told[name] for name in sorted(told)]


def assert_bits(cluster, done, told, count):
    logs = [path.read_text() for path in cluster.folder.glob("slurm-*.out")]
    assert done.returncode == 0, (done.stderr, logs)
    assert [each["count"] for each in told] == [count] * count
    assert len({each["machine"] for each in told}) == cluster.num_machines
    assert {tuple(each["bits"]) for each in told} == {tuple(map(bits_of, CASES))}


@on_machines(1, 2)
def test_srun_gives_the_bits_of_one_process(cluster):
    words = ["--ntasks=2", "--cpus-per-task=1", f"--nodes={cluster.num_machines}"]
    words += [sys.executable, "program.py"]
    assert_bits(cluster, *run(cluster, "srun", *words, program=BEGIN + BITS), 2)


@on_machines(2)
def test_the_script_of_the_page_gives_the_bits_of_one_process(cluster):
    script = PAGE.read_text().partition("```bash\n#!/bin/bash")[2].partition("```")[0]
    assert "--cpus-per-task=8" in script
    assert "python program.py" in script
    script = script.replace("--cpus-per-task=8", "--cpus-per-task=1")
    script = script.replace("python program.py", f"{sys.executable} program.py")
    (cluster.folder / "job.sh").write_text("#!/bin/bash" + script)
    words = ["--wait", "--nodes=2", "job.sh"]
    assert_bits(cluster, *run(cluster, "sbatch", *words, program=BEGIN + BITS), 4)


@on_machines(1)
def test_a_task_that_is_killed_ends_the_job(cluster):
    dies = "hit = lambda: os.kill(os.getpid(), signal.SIGKILL) if number == 1 else None"
    words = ["--ntasks=3", "--wait=10", sys.executable, "program.py"]
    done, told = run(cluster, "srun", *words, program=BEGIN + dies + LOST)
    assert done.returncode != 0
    assert len(told) == 2, done.stderr
    for each in told:
        assert each["error"].startswith("process 1 ended")
    lines = (cluster.folder / "ledger.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    (settled,) = [entry for entry in entries if entry["entry"] == "settled"]
    assert 50 <= settled["steps"] < 400


@on_machines(2)
def test_the_signal_of_ctrl_c_stops_the_run_in_all_tasks(cluster):
    """As `--signal=INT@120` sends it: to all tasks."""
    stops = """
def hit():
    import subprocess, time
    if number == 0:
        job = os.environ["SLURM_JOB_ID"] + "." + os.environ["SLURM_STEP_ID"]
        subprocess.run(["scancel", "--signal=INT", job])  # which is hit, too
        time.sleep(2)
"""
    words = ["--ntasks=2", "--nodes=2", sys.executable, "program.py"]
    done, told = run(cluster, "srun", *words, program=BEGIN + stops + LOST)
    assert done.returncode == 0, done.stderr
    assert [each["interrupted"] for each in told] == [True, True]
    assert len({each["steps"] for each in told}) == 1
