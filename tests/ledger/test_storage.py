"""The file of a ledger: crashes, locks, and media that cannot be written to."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest
from ledgers import lines_of, make_ledger, plan_of, some_entries

from dpvim.ledger import storage
from dpvim.ledger.book import Ledger
from dpvim.ledger.entries import Repaired
from dpvim.types import BudgetExceededError


def crash_in(monkeypatch, name, **changes):
    """Let an operation of the system fail as if the process had been killed there."""

    def crash(*arguments):
        if name == "write" and changes:
            changes["really"](arguments[0], arguments[1][: changes["bytes"]])
        raise KeyboardInterrupt

    monkeypatch.setattr(storage.os, name, crash)


@pytest.mark.parametrize("kept", [1, 30, 300])
def test_a_line_that_a_crash_cut_short_counts_for_nothing_and_stays(tmp_path, monkeypatch, kept):
    ledger = some_entries(tmp_path)
    before, spent = ledger.path.read_bytes(), ledger.spent()
    with monkeypatch.context() as patch:
        crash_in(patch, "write", really=os.write, bytes=kept)
        with pytest.raises(KeyboardInterrupt):
            ledger.book(plan_of(), purpose="never made")
    assert len(ledger.path.read_bytes()) == len(before) + kept
    assert ledger.check() == []
    assert ledger.spent() == spent
    ledger.book(plan_of(), purpose="the next one")
    lines = lines_of(ledger)
    assert b"".join(lines).startswith(before)  # nothing was changed, nothing removed
    assert len(lines[5]) == kept + 1
    assert isinstance(ledger.entries[5], Repaired)
    assert "cut short by a crash" in ledger.entries[5].note
    assert [each.booked.purpose for each in ledger.releases][-1] == "the next one"
    assert ledger.check() == []
    # The note is about that very line.
    lines[5] = b"{" + lines[5][1:-1] + b" \n"
    ledger.path.write_bytes(b"".join(lines))
    assert ledger.check()[0].line == 6


@pytest.mark.parametrize("operation", ["fsync", "replace"])
def test_a_booking_that_was_written_but_did_not_return_is_counted(tmp_path, monkeypatch, operation):
    ledger = some_entries(tmp_path)
    with monkeypatch.context() as patch:
        crash_in(patch, operation)
        with pytest.raises(KeyboardInterrupt):
            ledger.book(plan_of(), purpose="on the disk")
    assert ledger.check() == []
    assert ledger.releases[-1].booked.purpose == "on the disk"
    ledger.book(plan_of(), purpose="the next one")
    assert ledger.check() == []
    assert len(ledger.releases) == 5


def test_the_line_is_on_the_disk_before_the_booking_returns(tmp_path, monkeypatch):
    ledger = make_ledger(tmp_path)
    head = storage.head_path(ledger.path)
    length, inode = len(lines_of(ledger)), ledger.path.stat().st_ino
    synced = []

    def sync(handle):
        known = json.loads(head.read_text())["entries"]
        synced.append((os.fstat(handle).st_ino == inode, len(lines_of(ledger)), known))

    monkeypatch.setattr(storage.os, "fsync", sync)
    ledger.book(plan_of(), purpose="a look")
    # First the ledger with its new line; the head and its folder come after it.
    assert synced[0] == (True, length + 1, length)
    assert len(synced) == 3
    assert synced[-1] == (False, length + 1, length + 1)


def test_a_ledger_that_is_not_there_and_a_name_that_is_taken(tmp_path):
    with pytest.raises(FileNotFoundError, match="dpvim ledger init"):
        Ledger(tmp_path / "none.ledger")
    make_ledger(tmp_path)
    with pytest.raises(FileExistsError, match="exists already"):
        make_ledger(tmp_path)
    with pytest.raises(FileNotFoundError, match="expected a folder"):
        Ledger.create(tmp_path / "gone" / "a.ledger", name="x", epsilon=1, delta=1e-5)


def test_a_ledger_that_cannot_be_written_to_books_nothing(tmp_path, monkeypatch):
    ledger = some_entries(tmp_path)
    really = os.open

    def read_only(path, flags, *mode):
        if flags & os.O_RDWR:
            raise OSError(30, "Read-only file system", str(path))
        return really(path, flags, *mode)

    monkeypatch.setattr(storage.os, "open", read_only)
    with pytest.raises(OSError, match=r"Read-only file system.*Nothing was released"):
        ledger.book(plan_of(), purpose="a look")
    assert len(ledger.releases) == 3  # it can be read


# -- processes ------------------------------------------------------------------------------------


def book_until_refused(path, start, results):
    """Wait for the others, then book as often as the budget allows."""
    ledger = Ledger(path)
    start.wait()
    booked = 0
    try:
        while True:
            ledger.book(plan_of(), purpose=f"of {os.getpid()}")
            booked += 1
    except BudgetExceededError:
        results.put(booked)


def test_processes_cannot_spend_the_same_budget(tmp_path, monkeypatch):
    """Three of them race for five releases; exactly five are granted, and the chain is whole."""
    most = 5
    plan = plan_of(num_steps=most)
    epsilon = plan.epsilon(1e-5) * 1.001
    ledger = make_ledger(tmp_path, epsilon=epsilon)
    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(3), context.Queue()
    workers = [
        context.Process(target=book_until_refused, args=(ledger.path, start, results))
        for _ in range(3)
    ]
    for worker in workers:
        worker.start()
    granted = [results.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join(timeout=30)
    assert sum(granted) == most
    assert len(ledger.releases) == most
    assert ledger.check() == []
    assert ledger.spent() <= epsilon


_BOOKING_FOR_EVER = """
import sys
sys.path.insert(0, sys.argv[2])
from ledgers import plan_of
from dpvim.ledger.book import Ledger
ledger = Ledger(sys.argv[1])
print("ready", flush=True)
while True:
    booking = ledger.book(plan_of(noise=1e4), purpose="again")
    print(booking.id, flush=True)
"""


def test_a_process_that_is_killed_loses_no_booking_that_returned(tmp_path, request):
    ledger = make_ledger(tmp_path)
    told = []
    tests = str(request.config.rootpath / "tests" / "ledger")
    for pause in (0.15, 0.4):
        command = [sys.executable, "-c", _BOOKING_FOR_EVER, str(ledger.path), tests]
        worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
        told.append(worker.stdout.readline().strip())  # at least one
        time.sleep(pause)
        worker.send_signal(signal.SIGKILL)
        told += [line.strip() for line in worker.stdout.read().splitlines()]
        worker.wait()
        worker.stdout.close()
        assert ledger.check() == []
    booked = [release.booked.id for release in ledger.releases]
    # A last line of output that was cut short by the kill is no booking that returned.
    told = [id for id in told if len(id) == 16]
    assert len(told) >= 2
    assert set(told) <= set(booked)
    assert all(release.state == "open" for release in ledger.releases)
    ledger.book(plan_of(noise=1e4), purpose="after it all")
    assert ledger.check() == []


def test_the_head_says_how_long_the_ledger_is(tmp_path):
    ledger = some_entries(tmp_path)
    head = json.loads(storage.head_path(ledger.path).read_text())
    assert head == {"entries": 5, "hash": json.loads(lines_of(ledger)[-1])["hash"]}
