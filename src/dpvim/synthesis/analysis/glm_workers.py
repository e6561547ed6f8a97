"""Fits of many tables side by side, in processes of their own.

Threads would wait for each other (much of a fit is Python), and each of them would start as many
threads for linear algebra as there are cores. A pool from the standard library would import the
caller's script once more in every process: with a private fit in it, that is no small thing.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pandas as pd

from dpvim._extras import LazyModule

if TYPE_CHECKING:
    from dpvim.synthesis.analysis import glm
else:
    glm = LazyModule("dpvim.synthesis.analysis.glm", extra="analysis")

_ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"), "1"
)


def fit_tables(
    tables: Sequence[pd.DataFrame | str],
    formula: str,
    family: str,
    layout: glm.Layout,
    *,
    workers: int,
    done: Callable[[], None],
) -> list[glm.TableFit]:
    """Fit every table and return the results in their order; `done` is called after each one.

    One worker is this process itself. Whatever the number, estimates agree but for rounding.
    """
    if workers == 1:
        fits = []
        for table in tables:
            fits.append(glm.fit_table(table, formula, family, layout))
            done()
        return fits

    by_index: dict[int, glm.TableFit] = {}
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in range(len(tables)):
        waiting.put(index)

    def work(worker: _Worker) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                index = waiting.get_nowait()
                by_index[index] = worker.fit(tables[index])
                done()

    processes = [_Worker((formula, family, layout)) for _ in range(min(workers, len(tables)))]
    with ThreadPoolExecutor(len(processes)) as threads:
        try:
            list(threads.map(work, processes))
        finally:
            # After Ctrl-C, threads must find nothing more to do, and nobody to wait for.
            with contextlib.suppress(queue.Empty):
                while True:
                    waiting.get_nowait()
            for worker in processes:
                worker.stop()
    return [by_index[index] for index in range(len(tables))]


class _Worker:
    """A process that fits tables, started when the first one comes."""

    def __init__(self, model: tuple[str, str, glm.Layout]) -> None:
        self._model = model
        self._process: subprocess.Popen[bytes] | None = None

    def fit(self, table: pd.DataFrame | str) -> glm.TableFit:
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            pickle.dump(table, process.stdin)
            process.stdin.flush()
            return pickle.load(process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError):
            self.stop()  # the next table gets a new process
            return glm.failed_fit("the process that fitted it died; it may have run out of memory")

    def _start(self) -> subprocess.Popen[bytes]:
        self._process = subprocess.Popen(
            # -P: modules beside the script must not stand in for the standard library's.
            [sys.executable, "-P", str(glm.__file__)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **_ONE_THREAD},
        )
        assert self._process.stdin is not None
        pickle.dump(self._model, self._process.stdin)
        return self._process

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        process.wait()
