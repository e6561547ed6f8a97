"""Jobs of several processes for tests: scripts that run in all of them, on loopback."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent
# Compiled programs, which tests share.
PROGRAMS = str(ROOT.parent / ".pytest_cache" / "programs")
_BEGIN = """
import json, os, sys, warnings
import jax
number, count, address = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
jax.distributed.initialize(
    address, count, number, coordinator_bind_address=address, heartbeat_timeout_seconds=20)
jax.config.update("jax_compilation_cache_dir", sys.argv[4])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
warnings.simplefilter("ignore")
import numpy as np
import dpvim
"""
# At the end JAX would wait for processes that are gone.
_END = """
sys.stdout.flush()
if number == 0:
    import time
    time.sleep(1)  # the others have done all that they do
os._exit(0)
"""


def run_job(
    script: str,
    count: int,
    *,
    host: str = "127.0.0.1",
    inside: Sequence[Sequence[str]] = (),
    seconds: float = 900,
) -> list[tuple[int, list[Any], str]]:
    """Exit code, lines of json and standard error of each process of a job.

    Args:
        script: Python, with `number`, `count`, `np`, `jax` and `dpvim`.
        count: Number of processes.
        host: Address of process 0.
        inside: Commands to put before that of each process.
        seconds: After which all are ended.
    """
    command = [sys.executable, "-P", "-c", _BEGIN + script + _END]
    path = os.pathsep.join([str(ROOT), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "JAX_ENABLE_X64": "0"}
    facts = [str(count), f"{host}:{free_port()}", PROGRAMS]
    started = [
        subprocess.Popen(
            [*(inside[number] if inside else ()), *command, str(number), *facts],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for number in range(count)
    ]
    found = []
    try:
        for process in started:
            out, err = process.communicate(timeout=seconds)
            lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
            found.append((process.returncode, lines, err))
    finally:
        for process in started:
            process.kill()
            process.wait()
    return found


def free_port() -> int:
    """A port that nobody uses."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
