"""Cells of a sweep on Ray: for more of them than the cores of this machine can take.

Ray is only used where it is asked for (``on="ray"``), and only for what is many: by default cells
run on threads of this process. A cell is a call of a function on what all cells share; it is called
once. A worker that dies is an error and not called again: a fit that is made again is another
release. What is secret stays where it is drawn: a worker's noise comes from its own system.

A cluster that is running is used if this process is connected to it, or `RAY_ADDRESS` names it.
Otherwise one is started on this machine for as long as it takes, which listens on the loopback
alone, shows no page, and reports to nobody.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from dpvim import _validate
from dpvim._extras import require

THREADS, RAY = "threads", "ray"
PLACES = (THREADS, RAY)

Function: TypeAlias = Callable[[Any, Any], Any]
"""Of what all cells share, and a cell."""

_LOOPBACK = "127.0.0.1"
# Seconds in which Ctrl-C is noticed.
_PATIENCE = 0.5


class Cluster:
    """A Ray cluster that this process is connected to; from `opened`."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._cancelled = threading.Event()

    @property
    def num_processors(self) -> int:
        """Of all its machines."""
        return int(self._ray.cluster_resources().get("CPU", 1))

    def sweep(self, function: Function, shared: Any, cells: Sequence[Any]) -> Sweep:
        """Cells that are ready to be called. What cannot be pickled is refused here.

        Args:
            function: Of a module that workers can import.
            shared: Sent to each machine once.
            cells: Sent with their calls.
        """
        ray = self._ray
        try:
            sent = ray.put(shared), [ray.put(cell) for cell in cells]
        except TypeError as error:
            raise TypeError(
                "on: expected a model and options that can be pickled, as they are sent to Ray's "
                f"workers, got others ({str(error).splitlines()[0]}). Leave it out."
            ) from error
        return Sweep(ray, function, *sent, self._cancelled)

    def cancel(self) -> None:
        """Give up all sweeps, also those of other threads."""
        self._cancelled.set()


class Sweep:
    """Cells to be called; from `Cluster.sweep`."""

    def __init__(
        self, ray: Any, function: Function, shared: Any, cells: list[Any], cancelled: Any
    ) -> None:
        self._ray, self._cancelled = ray, cancelled
        # One that died is not called again: it may have been on its way to a release.
        self._call = ray.remote(num_cpus=1, max_retries=0)(function)
        self._shared, self._cells = shared, cells

    def results(self, stopped: Callable[[], bool] = lambda: False) -> Iterator[tuple[int, Any]]:
        """Numbers of cells and what their calls return, as they are done.

        Args:
            stopped: Asked now and then; if true, the cells that are left are given up.

        Raises:
            KeyboardInterrupt: They were given up.
            RuntimeError: A worker died. What it did is lost.
        """
        ray = self._ray
        calls = [self._call.remote(self._shared, cell) for cell in self._cells]
        numbers = {call: number for number, call in enumerate(calls)}
        try:
            while calls:
                done, calls = ray.wait(calls, timeout=_PATIENCE)
                if stopped() or self._cancelled.is_set():
                    raise KeyboardInterrupt
                for call in done:
                    yield numbers[call], _result(ray, call)
        finally:
            for call in calls:
                ray.cancel(call, force=True)


@contextlib.contextmanager
def opened(on: str) -> Iterator[Cluster | None]:
    """The running cluster, or one on this machine for the block; None for threads.

    Raises:
        MissingExtraError: Ray is not installed.
        RuntimeError: A cluster of one machine would listen to others.
    """
    if _validate.one_of("on", on, PLACES) == THREADS:
        yield None
        return
    # Ray gives a machine its address in the network, whatever it is told, but for this.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = require("ray", extra="ray")
    if ray.is_initialized():
        yield Cluster(ray)
        return
    if os.environ.get("RAY_ADDRESS"):
        ray.init(log_to_driver=False)
    else:
        _start(ray)
    try:
        yield Cluster(ray)
    finally:
        ray.shutdown()


def _start(ray: Any) -> None:
    ray.init(
        address="local",
        num_cpus=os.cpu_count(),
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address=_LOOPBACK,
    )
    found = {node["NodeManagerAddress"] for node in ray.nodes()}
    if found != {_LOOPBACK}:
        ray.shutdown()
        raise RuntimeError(
            f"ray: expected a cluster that listens on {_LOOPBACK} alone, got {', '.join(found)}. "
            "Was ray imported before dpvim used it? Set RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 before "
            "that, or call ray.init yourself."
        )


def _result(ray: Any, done: Any) -> Any:
    try:
        return ray.get(done)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error  # the cell's own
    except ray.exceptions.RayError as error:
        raise RuntimeError(
            f"ray: a worker died ({type(error).__name__}), and what it did is lost. Cells are not "
            "called again by themselves: a fit that is made again is another release."
        ) from error
