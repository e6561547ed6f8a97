"""A progress bar that shows steps, rate and time left, and nothing that depends on the data."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeAlias

if TYPE_CHECKING:
    from rich.progress import Progress


Listener: TypeAlias = Callable[[str, int, int], None]
"""Is told the label of a bar, what is done of it, and its total."""
_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Tell the progress of all bars that are made in this thread, shown or not, to a listener."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


class ProgressBar:
    """Use as a context manager; `advance` after every chunk."""

    def __init__(
        self, total: int, *, show: bool, label: str = "fitting", unit: str = "steps"
    ) -> None:
        # Others may advance the bar from threads of their own.
        self._listener, self._label = _listener.get(), label
        self._done, self._total = 0, total
        self._progress = _bar(label, unit) if show else None
        if self._progress is not None:
            self._task = self._progress.add_task(label, total=total)

    def advance(self, steps: int) -> None:
        self._done += steps
        self._tell()
        if self._progress is not None:
            self._progress.advance(self._task, steps)

    def _tell(self) -> None:
        if self._listener is not None:
            self._listener(self._label, self._done, self._total)

    def __enter__(self) -> Self:
        self._tell()
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.stop()


def _bar(label: str, unit: str) -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(f"{task.speed:,.0f}/s" if task.speed else "")

    return Progress(
        TextColumn(label),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        Rate(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )


def show_progress(progress: bool | None) -> bool:
    """True if a bar is to be shown: as asked, else where a person is likely to look."""
    return sys.stderr.isatty() if progress is None else progress
