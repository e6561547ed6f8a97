"""A progress bar that shows steps, rate and time left, and nothing that depends on the data."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress


class ProgressBar:
    """Use as a context manager; `advance` after every chunk."""

    def __init__(
        self, total: int, *, show: bool, label: str = "fitting", unit: str = "steps"
    ) -> None:
        self._progress = _bar(label, unit) if show else None
        if self._progress is not None:
            self._task = self._progress.add_task(label, total=total)

    def advance(self, steps: int) -> None:
        if self._progress is not None:
            self._progress.advance(self._task, steps)

    def __enter__(self) -> Self:
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
