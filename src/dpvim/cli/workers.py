"""A command in several processes on this machine, which meet as a `jax.distributed` job."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import typer

from dpvim.types import LostProcessError

_LOOPBACK = "127.0.0.1"
# JAX ends all processes when one of them was silent for so long.
_HEARTBEAT_SECONDS = 30
# So long the others have to end by themselves when one has failed: to settle what was booked.
_GRACE_SECONDS = 15


def in_processes(count: int, command: Callable[..., None], asked: dict[str, Any]) -> None:
    """Run a command in so many new processes of one job, and wait for all of them.

    What process 0 shows is shown. Others are heard if they failed and process 0 did not.

    Args:
        count: How many; each gets its part of the cores.
        command: Found by its name in the new processes.
        asked: Its arguments.

    Raises:
        typer.Exit: The command failed, and said why.
        LostProcessError: A process ended without a word.
    """
    new = multiprocessing.get_context("spawn")
    address = f"{_LOOPBACK}:{_free_port()}"
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder, str(number)) for number in range(count)]
        processes = [
            new.Process(target=_work, args=(address, number, count, command, asked, said[number]))
            for number in range(count)
        ]
        with _ctrl_c_is_for_others():
            try:
                for process in processes:
                    process.start()
                _wait_for(processes)
            finally:
                for process in processes:
                    if process.is_alive():
                        process.kill()
                    process.join()
        # Process 0 ends last, with all that was asked for; whoever is told by JAX that it is gone
        # ends with an error that means nothing.
        failed = [] if processes[0].exitcode == 0 else list(zip(processes, said, strict=True))
        for process, words in failed:
            if process.exitcode and words.exists():
                typer.echo(words.read_text(errors="replace"), err=True, nl=False)
            if process.exitcode and process.exitcode > 0:
                raise typer.Exit(process.exitcode)
    for number, (process, _) in enumerate(failed):
        if process.exitcode:
            raise LostProcessError(
                f"process {number} was ended by {signal.Signals(-process.exitcode).name} (was "
                "there too little memory?). What was booked for it stays booked."
            )


def _wait_for(processes: list[Any]) -> None:
    """Wait until all have ended, for a while only when one has failed."""
    left, deadline = {process.sentinel: process for process in processes}, None
    while left:
        patience = None if deadline is None else max(0.0, deadline - time.monotonic())
        ended = wait(list(left), patience)
        if not ended:
            return
        for sentinel in ended:
            process = left.pop(sentinel)
            process.join()
            if process.exitcode and deadline is None:
                deadline = time.monotonic() + _GRACE_SECONDS


def _work(
    address: str,
    number: int,
    count: int,
    command: Callable[..., None],
    asked: dict[str, Any],
    said: Path,
) -> None:
    """One of the processes."""
    _end_with_the_parent()
    _keep_to_own_cores(number, count)
    if number > 0:
        with open(said, "wb") as file:
            os.dup2(file.fileno(), sys.stderr.fileno())
    import jax

    code = 0
    try:
        jax.distributed.initialize(
            address,
            count,
            number,
            coordinator_bind_address=address,  # for nobody outside of this machine
            heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
        )
        command(**asked)
    except typer.Exit as ended:
        code = ended.exit_code
    except BaseException:
        traceback.print_exc()
        code = 1
    # Not by sys.exit: JAX would wait for processes that may be gone. Process 0 is where it keeps
    # the list of all, whose end would end the others, too.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end_with_the_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _keep_to_own_cores(number: int, count: int) -> None:
    """Processes that all use all cores would wait for each other's threads."""
    if hasattr(os, "sched_setaffinity"):  # not on every system
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, set(cores[number::count]) or {cores[number % len(cores)]})


def _free_port() -> int:
    with socket.create_server((_LOOPBACK, 0)) as server:
        port: int = server.getsockname()[1]
        return port


@contextlib.contextmanager
def _ctrl_c_is_for_others() -> Iterator[None]:
    """The first Ctrl-C is for the processes, which stop between two chunks of steps."""
    previous = signal.getsignal(signal.SIGINT)

    def once(signum: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, previous)

    signal.signal(signal.SIGINT, once)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
