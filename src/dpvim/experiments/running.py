"""Run an experiment: cell by cell, both cores, and never the same cell twice.

A finished cell is a line of a file. A run that was interrupted, at whatever moment, goes on with
the cells that have no line; a line that was cut short counts as none.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import itertools
import json
import os
import platform
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from dpvim._progress import ProgressBar, show_progress
from dpvim.cells import THREADS, opened
from dpvim.experiments.experiment import Cell, CellResult, Experiment, Scope, Verdict
from dpvim.files import new_file, write_json
from dpvim.fitting import fit_many
from dpvim.ledger.book import Ledger
from dpvim.result import Fit

_DIGITS = 6
_FEWEST_TO_REFUTE = 3
_PACKAGES = ("dpvim", "jax", "jaxlib", "numpyro", "optax", "numpy", "pandas", "dp-accounting")


class Outcome(NamedTuple):
    """An experiment that was run, at least in part.

    Attributes:
        folder: With results.csv, summary.csv, summary.json, figure.png and manifest.json.
        summary: The table that is shown.
        verdicts: On the paper's claims.
        done, wanted: Numbers of cells.
    """

    folder: Path
    summary: pd.DataFrame
    verdicts: list[Verdict]
    done: int
    wanted: int


def reproduce(
    experiment: Experiment,
    scope: Scope,
    folder: Path,
    *,
    progress: bool | None = None,
    run: bool = True,
    ledger: Ledger | None = None,
    on: str = THREADS,
) -> Outcome:
    """Run the cells that have not been run, then write table, figure and manifest.

    Args:
        experiment: Which one.
        scope: How much of it.
        folder: For the results of all experiments.
        progress: Show a progress bar. Default: if standard error is a terminal.
        run: False to write what there is already.
        ledger: Of the table that is fitted: every batch of cells is booked before it is run.
        on: ``threads`` of this process, one batch of cells after the other, or ``ray``: batches on
            workers of a Ray cluster.
    """
    experiment.check(scope)
    if on != THREADS and ledger is not None:
        raise ValueError(
            f"on: expected {THREADS!r} with a ledger, got {on!r}. A batch of cells is booked where "
            "it is run, and a ledger is a file of this machine."
        )
    cells = experiment.cells(scope)
    if not cells:
        raise ValueError(f"{experiment.name}: there is nothing to run for what was asked.")
    store = CellStore(folder / "cells" / f"{experiment.store_name}.jsonl")
    if run:
        with booked_in(ledger, f"reproduce {experiment.name}"):
            _run_missing(experiment, cells, store, show_progress(progress), on)
    return _write(experiment, scope, cells, store, folder / experiment.name)


def _run_missing(
    experiment: Experiment, cells: Sequence[Cell], store: CellStore, show: bool, on: str
) -> None:
    todo = [cell for cell in cells if cell not in store]
    work = sum(_cost(cell) for cell in todo)
    with ProgressBar(work, show=show, label=experiment.name) as bar, opened(on) as ray:
        batches = list(_batches(experiment, todo))
        done: Iterable[tuple[int, Any]]
        if ray is None:
            done = ((i, _timed(experiment, batch)) for i, batch in enumerate(batches))
        else:
            done = ray.sweep(_timed, experiment, batches).results()
        for number, (results, seconds) in done:
            for cell, result in zip(batches[number], results, strict=True):
                store.add(cell, result, seconds)
            bar.advance(sum(_cost(cell) for cell in batches[number]))


def _timed(experiment: Experiment, batch: Sequence[Cell]) -> tuple[Sequence[CellResult], float]:
    """Results of a batch, and seconds a cell."""
    began = time.perf_counter()
    with quiet():
        results = experiment.run(batch)
    return results, (time.perf_counter() - began) / len(batch)


def _cost(cell: Cell) -> int:
    return int(cell.get("cost", cell.get("num_steps", 1)))


def _batches(experiment: Experiment, cells: Sequence[Cell]) -> Iterator[list[Cell]]:
    """Cells that may be run together, next to each other in the order of the experiment."""
    for _, group in itertools.groupby(cells, key=experiment.together):
        members, most = list(group), experiment.most_together
        yield from (members[i : i + most] for i in range(0, len(members), most))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what a user is told of seeds, of delta and of convergence.

    Nothing here is for release, and what has not converged is what is measured.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def fits(model: Any, *data: Any, each: Sequence[Mapping[str, Any]], **options: Any) -> list[Fit]:
    """`fit_many`, where an interruption is one: a cell is done or it is not.

    Raises:
        KeyboardInterrupt: If Ctrl-C stopped the fits.
    """
    if (ledger := _LEDGER.get()) is not None:
        options = {**options, "ledger": ledger[0], "purpose": ledger[1]}
    found = fit_many(model, *data, each=each, progress=False, **options)
    if any(fit.interrupted for fit in found):
        raise KeyboardInterrupt
    return found


_LEDGER: ContextVar[tuple[Ledger, str] | None] = ContextVar("ledger", default=None)


@contextlib.contextmanager
def booked_in(ledger: Ledger | None, purpose: str) -> Iterator[None]:
    """Book the fits of the block in a ledger, if there is one."""
    token = _LEDGER.set(None if ledger is None else (ledger, purpose))
    try:
        yield
    finally:
        _LEDGER.reset(token)


class CellStore:
    """A file of finished cells, one json document a line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries: dict[str, dict[str, Any]] = {}
        if path.exists():
            self._read()

    def _read(self) -> None:
        for line in self.path.read_bytes().splitlines():
            with contextlib.suppress(ValueError):  # the process was killed while it wrote
                entry = json.loads(line)
                self._entries[_key(entry["cell"])] = entry

    def __contains__(self, cell: Cell) -> bool:
        return _key(cell) in self._entries

    def add(self, cell: Cell, result: CellResult, seconds: float) -> None:
        """Append a finished cell; when this returns it is on the disk.

        In one piece, so that two experiments may share a file at the same time.
        """
        entry = {
            "cell": dict(cell),
            "rows": [_plain(row) for row in result.rows],
            "arrays": _plain(result.arrays),
            "seconds": round(seconds, 2),
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps(entry, separators=(",", ":")).encode() + b"\n"
        file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            if os.path.getsize(file) and os.pread(file, 1, os.path.getsize(file) - 1) != b"\n":
                line = b"\n" + line  # after one that was cut short
            os.write(file, line)
            os.fsync(file)
        finally:
            os.close(file)
        self._entries[_key(cell)] = entry

    def entries(self, cells: Iterable[Cell] | None = None) -> list[dict[str, Any]]:
        """Measurements of those of the cells (default: all) that are done."""
        if cells is None:
            return list(self._entries.values())
        keys = dict.fromkeys(_key(cell) for cell in cells)
        return [self._entries[key] for key in keys if key in self._entries]


def _key(cell: Cell) -> str:
    return json.dumps(_plain(cell), sort_keys=True)


def _plain(value: Any) -> Any:
    """Values that json has, with as many digits as anybody will look at."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | list | tuple):
        return [_plain(item) for item in (value.tolist() if hasattr(value, "tolist") else value)]
    if isinstance(value, np.generic):
        value = value.item()
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


def rows_of(entries: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """A row for each measurement, with its cell's settings, seconds and arrays."""
    rows = []
    for entry in entries:
        common = {**entry["cell"], "seconds": entry["seconds"]}
        arrays = {name: np.array(values) for name, values in entry["arrays"].items()}
        rows += [{**common, **row, **arrays} for row in entry["rows"]]
    return pd.DataFrame(rows)


def _write(
    experiment: Experiment, scope: Scope, cells: Sequence[Cell], store: CellStore, folder: Path
) -> Outcome:
    entries = store.entries(cells)
    complete = _of_complete_seeds(entries, cells)
    if not complete:
        raise ValueError(
            f"{experiment.name}: no repeat is complete yet; {len(entries)} of {len(cells)} cells "
            "are done."
        )
    frame = rows_of(complete)
    summary, manifest = experiment.summarise(frame), _manifest(experiment, scope, cells, complete)
    verdicts = _careful(experiment.judge(frame), manifest["repeats"]["least"])
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {name for entry in complete for name in entry["arrays"]}
    numbers = frame.drop(columns=list(arrays))
    numbers.to_csv(folder / "results.csv", index=False, float_format=f"%.{_DIGITS}g")
    summary.to_csv(folder / "summary.csv", index=False, float_format="%.5g")
    table = json.loads(summary.to_json(orient="records", double_precision=6))
    judged = [verdict._asdict() for verdict in verdicts]
    write_json(folder / "summary.json", {"summary": table, "verdicts": judged})
    write_json(folder / "manifest.json", manifest)
    with new_file(folder / "figure.png") as path:
        experiment.draw(frame).savefig(path, dpi=130)
    return Outcome(folder, summary, verdicts, len(entries), len(cells))


def _careful(verdicts: Sequence[Verdict], repeats: int) -> list[Verdict]:
    """With few repeats hardly any difference is clear: what they do not show they do not refute."""
    return [
        verdict._replace(judgement="not shown")
        if verdict.judgement == "does not hold" and repeats < _FEWEST_TO_REFUTE
        else verdict
        for verdict in verdicts
    ]


def _of_complete_seeds(
    entries: Sequence[dict[str, Any]], cells: Sequence[Cell]
) -> list[dict[str, Any]]:
    """Leave out repeats of which cells are missing: settings are compared seed by seed."""
    wanted = Counter(map(_repeat, cells))
    done = Counter(_repeat(entry["cell"]) for entry in entries)
    return [e for e in entries if done[_repeat(e["cell"])] == wanted[_repeat(e["cell"])]]


def _repeat(cell: Cell) -> tuple[Any, Any]:
    return cell.get("way"), cell.get("seed")


def _manifest(
    experiment: Experiment,
    scope: Scope,
    cells: Sequence[Cell],
    entries: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    settings = Counter(
        _key({name: value for name, value in entry["cell"].items() if name != "seed"})
        for entry in entries
    )
    repeats = {"least": min(settings.values()), "most": max(settings.values())}
    return {
        "experiment": experiment.name,
        "paper": experiment.paper,
        "size": "quick" if scope.quick else "full",
        "scope": {key: _of_path(value) for key, value in scope._asdict().items()},
        "cells": {"done": len(entries), "wanted": len(cells)},
        "repeats": repeats | {"paper": experiment.repeats or None},
        "seconds": round(sum(entry["seconds"] for entry in entries), 1),
        "written": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "not_for_release": "seeds are fixed, and constants were read off the data as in the paper",
    }


def _of_path(value: Any) -> Any:
    return value.name if isinstance(value, Path) else value
