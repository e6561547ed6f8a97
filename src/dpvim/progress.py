"""A progress bar that shows steps, rate and time left, and nothing that depends on the data."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

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


class ProgressBar:
    """Use as a context manager; `advance` after every chunk."""

    def __init__(
        self, total: int, *, show: bool, label: str = "fitting", unit: str = "steps"
    ) -> None:
        self._progress = Progress(
            TextColumn(label),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(unit),
            _Rate(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not show,
        )
        self._task = self._progress.add_task(label, total=total)

    def advance(self, steps: int) -> None:
        self._progress.advance(self._task, steps)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:,.0f}/s" if task.speed else "")


def wanted(progress: bool | None) -> bool:
    """Whether to show a bar: as asked, else where a person is likely to look."""
    return sys.stderr.isatty() if progress is None else progress
