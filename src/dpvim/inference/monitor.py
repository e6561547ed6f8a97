"""Progress of a run, and Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from dpvim._progress import ProgressBar


class RunMonitor(NamedTuple):
    """Callbacks of a run: ``advance`` is told about steps, ``stopped`` asks it to stop.

    ``begin`` is told about steps before they are taken: from then on they are paid for, whatever
    becomes of them.
    """

    advance: Callable[[int], None]
    stopped: Callable[[], bool]
    begin: Callable[[int], None] = lambda steps: None


UNMONITORED = RunMonitor(lambda steps: None, lambda: False)


@contextmanager
def monitoring(num_steps: int, *, progress: bool) -> Iterator[RunMonitor]:
    """A progress bar for so many steps, if wanted; Ctrl-C stops the runs between two chunks.

    What was released until then is returned by the runs.
    """
    with ProgressBar(num_steps, show=progress) as bar, _stop_on_interrupt() as stopped:
        yield RunMonitor(bar.advance, stopped)


@contextmanager
def _stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C into a flag; the second one is an ordinary interrupt."""
    previous = signal.getsignal(signal.SIGINT)
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or previous is signal.SIG_IGN:  # a job in the background ignores Ctrl-C
        yield lambda: False
        return
    pressed = threading.Event()

    def handler(signum: int, frame: Any) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    signal.signal(signal.SIGINT, handler)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, previous)
