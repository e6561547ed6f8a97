"""Fits over several processes: the same bits as one, and an error in all when one is lost."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jobs import PROGRAMS, run_job
from machines import two_machines
from shared_fits import CASES, LONG_CASES, bits_of, mean_model

import dpvim
from dpvim.channel import Channel, accept, connect, listening
from dpvim.inference.sharing import Sharing
from dpvim.privacy.plan import PrivacyPlan
from dpvim.privacy.randomness import SecretStreams
from dpvim.privacy.sampling import EMPTY
from dpvim.privacy.shards import Shard, ShardStreams
from dpvim.privacy.source import BatchNoiseSource
from dpvim.types import LostProcessError

BITS = """
from shared_fits import bits_of, own_rows
for case in {cases!r}:
    print(json.dumps({{case: bits_of(case, own_rows(case, number, count))}}))
"""
SMALL = """
from shared_fits import logistic_model
rng = np.random.default_rng(number)
x, y = rng.normal(size=(500, 3)), rng.integers(0, 2, 500)
settings = dict(epsilon=1.0, delta=1e-5, clip_norm=1.0, num_steps=400, sampling_prob=0.1)
def attempt(name, call):
    try:
        call()
        print(json.dumps({name: "done"}))
    except Exception as error:
        print(json.dumps({name: f"{type(error).__name__}: {error}"}))
"""


# -- the same bits --------------------------------------------------------------------------------


def assert_same_bits(cases, count, **where):
    found = run_job(BITS.format(cases=list(cases)), count, **where)
    assert [code for code, _, _ in found] == [0] * count, found
    wanted = [{case: bits_of(case)} for case in cases]
    for _, lines, _ in found:  # all processes have the whole result
        assert lines == wanted


def test_two_processes_give_the_bits_of_one():
    assert_same_bits(CASES, 2)


@pytest.mark.long
def test_four_processes_of_which_one_has_no_records_give_the_bits_of_one():
    assert_same_bits(CASES, 4)


@pytest.mark.long
def test_every_variant_gives_the_bits_of_one_process():
    assert_same_bits(LONG_CASES, 2)


# -- what ends a run ------------------------------------------------------------------------------

LOST = (
    SMALL
    + """
from dpvim.inference.sharing import Sharing
ledger = None
if number == 0:
    ledger = dpvim.Ledger.create("ledger.jsonl", name="x", epsilon=2.0, delta=1e-5)
meet, met = Sharing._meet, []
def dies(self, *given):
    met.append(1)
    if number == 1 and len(met) == 50:
        os.kill(os.getpid(), 9)
    return meet(self, *given)
Sharing._meet = dies
attempt("fit", lambda: dpvim.fit(logistic_model, x, y, ledger=ledger, **settings))
print(json.dumps({"met": len(met)}))
"""
)


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.long)])
def test_a_process_that_is_killed_ends_the_run_in_all(count, tmp_path):
    found = run_job("os.chdir(" + repr(str(tmp_path)) + ")\n" + LOST, count, seconds=120)
    assert found[1][0] == -9
    for number in {*range(count)} - {1}:
        code, lines, err = found[number]
        assert code == 0, err
        assert lines[0]["fit"].startswith("LostProcessError: process 1 ended"), lines
        # The chunk goes on without meeting anybody, and nothing of it is given out.
        assert lines[1]["met"] >= 50
    entries = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    settled = [entry for entry in entries if entry["entry"] == "settled"]
    assert len(settled) == 1  # booked once, by process 0, and paid for as far as it came
    assert 50 <= settled[0]["steps"] < 400


REFUSED = (
    SMALL
    + """
fit = dpvim.fit
attempt("bad data", lambda: fit(logistic_model, x if number else x * np.nan, y, **settings))
attempt("same records", lambda: fit(logistic_model, np.ones((500, 3)), np.ones(500), **settings))
attempt("other plan", lambda: fit(logistic_model, x, y, **settings | {"epsilon": 1.0 + number}))
scale = 1.0 + number
def other(X, y):
    logistic_model(scale * X, y)
attempt("other model", lambda: fit(other, x, y, **settings))
attempt("checkpoint", lambda: fit(logistic_model, x, y, checkpoint="run", **settings))
attempt("persons", lambda: fit(logistic_model, x, y, group_by=y, max_rows_per_person=2, **settings))
attempt("add_or_remove", lambda: fit(
    logistic_model, x, y, num_examples=2000, relation="add_or_remove", **settings))
attempt("fit_many", lambda: dpvim.fit_many(
    logistic_model, x, y, each=[{"epsilon": 1.0}], delta=1e-5))
attempt("fit_nonprivate", lambda: dpvim.fit_nonprivate(logistic_model, x, y, num_steps=10))
import optax
plan = dpvim.PrivacyPlan(num_examples=500, sampling_prob=0.1, num_steps=9, clip_norm=1.0,
                         noise_multiplier=1.0)
attempt("DPSVI", lambda: dpvim.DPSVI(logistic_model, "mean_field", optax.sgd(0.1), plan).run(
    jax.random.key(0), 9, x, y, progress_bar=False))
attempt("after all that", lambda: fit(logistic_model, x, y, **settings))
"""
)


def test_what_cannot_be_shared_is_refused_in_all_processes():
    found = run_job(REFUSED, 2)
    said = [dict(pair for line in lines for pair in line.items()) for _, lines, _ in found]
    assert "expected finite numbers" in said[0]["bad data"]
    assert said[1]["bad data"].startswith("LostProcessError: process 0 ended with ValueError: ")
    for each in said:
        assert "every record would count twice" in each["same records"]
        assert "another plan in process 1" in each["other plan"]
        assert "another model or optimiser in process 1" in each["other model"]
        for name in ("checkpoint", "persons", "add_or_remove"):
            assert "over several processes" in each[name], each[name]
        for name in ("fit_many", "fit_nonprivate", "DPSVI"):
            assert "expected one process" in each[name], each[name]
        assert each["after all that"] == "done"


def test_a_run_of_several_processes_is_not_resumed(monkeypatch):
    x = np.random.default_rng(0).normal(size=(60, 3))
    settings = {"clip_norm": 1.0, "num_steps": 5, "epsilon": 1.0, "delta": 1e-5}
    fit = dpvim.fit(mean_model, x, seed=0, progress=False, **settings)
    prepared = fit.session.prepared
    monkeypatch.setattr(prepared, "engine", prepared.engine._replace(sharing=object()))
    monkeypatch.setattr(dpvim.Fit, "interrupted", True)
    with pytest.raises(ValueError, match="expected a run of one process"):
        fit.resume(x)


# -- network namespaces ---------------------------------------------------------------------------


@pytest.mark.long
def test_two_machines_give_the_bits_of_one():
    with two_machines() as (inside, _):
        assert_same_bits(["small batches"], 2, host="10.213.7.1", inside=inside)


@pytest.mark.long
def test_a_machine_that_vanishes_ends_the_run(tmp_path):
    """No word and no end of a connection: the cable is cut."""
    mark = tmp_path / "began"
    script = (
        SMALL
        + f"""
from dpvim.inference.sharing import Sharing
meet, met = Sharing._meet, []
def slow(self, *given):
    met.append(1)
    if len(met) == 50:
        open({str(mark)!r}, "w").close()
        import time
        time.sleep(3)
    return meet(self, *given)
Sharing._meet = slow
import time
attempt("fit", lambda: dpvim.fit(logistic_model, x, y, **settings))
"""
    )
    with two_machines() as (inside, cut), ThreadPoolExecutor(1) as thread:
        script = script.replace("heartbeat_timeout_seconds=20", "heartbeat_timeout_seconds=100")
        job = thread.submit(run_job, script, 2, host="10.213.7.1", inside=inside, seconds=150)
        while not mark.exists() and not job.done():
            threading.Event().wait(0.1)
        cut()
        found = job.result()
    for code, lines, err in found:
        ended_by_us = bool(lines) and "process" in lines[0]["fit"]
        assert ended_by_us or code != 0, err
        assert not (lines and lines[0]["fit"] == "done")


# -- the command line -----------------------------------------------------------------------------


@pytest.fixture
def small_table(tmp_path):
    rng = np.random.default_rng(0)
    lines = [f"{a:.2f},{'mf'[int(a > rng.random())]}" for a in rng.random(203)]
    (tmp_path / "t.csv").write_text("a,s\n" + "\n".join(lines) + "\n")
    (tmp_path / "t.toml").write_text(
        "dpvim_schema = 1\n"
        '[[columns]]\nname = "a"\nkind = "real"\nlower = 0.0\nupper = 1.0\ndecimals = 2\n'
        'reviewed = true\n[[columns]]\nname = "s"\nkind = "binary"\nlevels = ["f", "m"]\n'
        "reviewed = true\n"
    )
    return tmp_path


def dpvim_fit(folder, *words):
    command = [sys.executable, "-m", "dpvim", "fit", "t.csv", "--schema", "t.toml"]
    command += ["--model", "logistic", "--target", "s", "--epsilon", "1", "--delta", "1e-5"]
    command += ["--clip-norm", "1", "--learning-rate", "0.01", "--steps", "50", "--seed", "1"]
    path = os.pathsep.join([*sys.path])
    return subprocess.run(
        [*command, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "JAX_COMPILATION_CACHE_DIR": PROGRAMS},
        timeout=240,
        check=False,
    )


def test_the_command_writes_the_same_files(small_table):
    for count in ("1", "2"):
        done = dpvim_fit(small_table, "--processes", count, "-o", f"out{count}")
        assert done.returncode == 0, done.stderr
    for name in ("posterior.npz", "summary.csv", "privacy.json"):
        one, two = (small_table / f"out{count}" / name for count in ("1", "2"))
        assert one.read_bytes() == two.read_bytes(), name
    again = dpvim_fit(small_table, "--processes", "2", "-o", "out1")
    assert again.returncode == 2
    assert again.stderr.count("Error: ") == 1
    assert "out1: exists already" in again.stderr


# -- parts ----------------------------------------------------------------------------------------


def test_shards_have_every_row_of_a_batch_once():
    rng = np.random.default_rng(0)
    rows = np.array([rng.permutation(50)[:20] for _ in range(30)], np.int32)
    rows[:, 17:] = EMPTY
    ends = [0, 13, 13, 14, 50]
    shards = [Shard(a, b - a, 50, False) for a, b in itertools.pairwise(ends)]
    for size in (16, 32):
        parts = [shard.rows_of(rows, size) for shard in shards]
        for step in range(30):
            found = [
                part[step][part[step] != EMPTY] + shard.first
                for part, shard in zip(parts, shards, strict=True)
            ]
            assert sorted(np.concatenate(found)) == sorted(rows[step, :17])


def test_noise_is_never_drawn_from_what_processes_have_in_common():
    common = SecretStreams(secret=bytes(32))
    one, two = (ShardStreams(common, SecretStreams()) for _ in range(2))
    for purpose in ("membership", "truncation"):
        assert one.generator(purpose).random() == two.generator(purpose).random()
    for purpose in ("noise", "places", "rows of persons", "anything"):
        assert one.generator(purpose).random() != two.generator(purpose).random()


def test_one_process_draws_noise():
    plan = PrivacyPlan(
        num_examples=50, sampling_prob=0.2, num_steps=9, clip_norm=1.0, noise_multiplier=1.0
    )
    drawn = [
        BatchNoiseSource(
            plan, SecretStreams(), num_rows=50, num_released=3, shard=Shard(0, 25, 50, adds)
        ).draw(9, 9)[1]
        for adds in (True, False)
    ]
    assert (drawn[0] != 0).any()
    assert (drawn[1] == 0).all()


def together(function, channels):
    def one(channel):
        with channel:
            return function(channel)

    with ThreadPoolExecutor(len(channels)) as threads:
        return [thread.result() for thread in [threads.submit(one, each) for each in channels]]


def pair():
    first, second = multiprocessing.Pipe()
    return [Channel(0, [first]), Channel(1, [second])]


def test_sums_meet_in_double_precision():
    """In single precision the ones, or the last bit, would be lost."""

    def total(channel):
        sharing = Sharing(Shard(channel.number, 1, 2, channel.leads), channel)

        def many(state, noise, bounds, data):
            with jax.enable_x64(True):
                return sharing.meet(state, data)

        share = np.array([2.0**40 + 1, 1 + 2.0**-40]) if channel.leads else np.array([1.0, 0.0])
        chunk = sharing.chunk(jax.jit(many))
        with jax.enable_x64(True):
            share = jnp.asarray(share)
        noise, bounds = np.zeros((1, 2), np.int32), np.array([0, 1])
        return np.asarray(chunk(jnp.zeros(2), noise=noise, bounds=bounds, data=share))

    for found in together(total, pair()):
        assert found.tolist() == [2.0**40 + 2, 1 + 2.0**-40]


def test_sums_of_different_points_do_not_meet():
    def total(channel):
        sharing = Sharing(Shard(channel.number, 1, 2, channel.leads), channel)
        point = np.full(2, 1 + channel.number * 2.0**-23, np.float32)
        found = sharing._meet(point, np.zeros((2, 2), np.uint32))
        assert (found == 0).all()
        return str(sharing._error)

    said = together(total, pair())
    assert "different numbers from the same releases" in said[0]


def test_a_channel_says_why_it_ended():
    def ends(channel):
        if channel.number == 1:
            raise ValueError("bad column")
        with pytest.raises(LostProcessError, match="process 1 ended with ValueError: bad column"):
            channel.gather(b"")
        return True

    channels = pair()
    with pytest.raises(ValueError, match="bad column"):
        together(ends, channels)


def test_strangers_do_not_come_in():
    def stranger(port):
        with pytest.raises(LostProcessError, match="cannot be reached"):
            connect("127.0.0.1", port, b"another key", 1, 10)
        with socket.create_connection(("127.0.0.1", port)) as talks_nonsense:
            talks_nonsense.sendall(b"GET / HTTP/1.1\r\n\r\n")
        return connect("127.0.0.1", port, b"the key", 1, 10)

    with listening("127.0.0.1") as server, ThreadPoolExecutor(1) as thread:
        friend = thread.submit(stranger, server.getsockname()[1])
        (first,) = accept(server, b"the key", 1, 60)
        with Channel(0, [first]) as here, Channel(1, [friend.result()]) as there:
            there.gather(b"hello")
            assert here.gather(b"") == [b"", b"hello"]


@pytest.mark.parametrize(
    ("name", "here", "listens_on"),
    [
        ("127.0.0.1", "127.0.0.1", {"127.0.0.1"}),
        ("localhost", "127.0.0.1", {"127.0.0.1"}),
        ("node1", "127.0.1.1", {"::", "0.0.0.0"}),  # to others node1 is another address
        ("node1", "203.0.113.1", {"::", "0.0.0.0"}),  # not one of this machine's
    ],
)
def test_where_process_0_listens(monkeypatch, name, here, listens_on):
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (here, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *given, **more: found)
    with listening(name) as server:
        assert server.getsockname()[0] in listens_on


def test_who_does_not_come_is_named():
    with (
        listening("127.0.0.1") as server,
        pytest.raises(LostProcessError, match=r"\[1, 2\] did not come within"),
    ):
        accept(server, b"the key", 2, 0.2)
