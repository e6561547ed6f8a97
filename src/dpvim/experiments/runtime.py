"""Cost of the experiments here, beside the paper's minutes: the paper's tables of runtimes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from dpvim.experiments import pictures
from dpvim.experiments.experiment import AS_PUBLISHED
from dpvim.experiments.registry import RUNTIME
from dpvim.experiments.running import CellStore
from dpvim.files import new_file


class _Work(NamedTuple):
    """A kind of fit, and the paper's minutes for so many steps of it (from, to)."""

    what: str
    store: str
    chosen: Callable[[Mapping[str, Any]], bool]
    minutes: tuple[float, float]
    steps: int


_WORKS = (
    # The paper's 10 to 30 minutes are for a repeat of all five variants.
    _Work("Adult", "adult", lambda cell: True, (2, 6), 400_000),
    # Those with synthetic tables take longer, for other work.
    _Work(
        "mixture and Poisson regression",
        "ukb",
        lambda cell: "datasets" not in cell,
        (20, 40),
        100_000,
    ),
    # The paper's minutes are for a vanilla and an aligned fit together, on a GPU.
    _Work("full-rank, d 100", "full-rank", lambda cell: cell.get("dim") == 100, (3, 4), 100_000),
    _Work("full-rank, d 200", "full-rank", lambda cell: cell.get("dim") == 200, (4, 5), 100_000),
)


def runtimes(folder: Path) -> pd.DataFrame:
    """Seconds of a fit of the paper's length, from the cells that have been run in full.

    They are seconds on the clock for each fit of a call that runs several on both cores, with
    planning, compilation and measurement.
    """
    rows = []
    for work in _WORKS:
        entries = CellStore(folder / "cells" / f"{work.store}.jsonl").entries()
        published = [
            entry
            for entry in entries
            if entry["cell"].get("way") == AS_PUBLISHED
            and entry["cell"].get("num_steps", 0) >= work.steps
            and work.chosen(entry["cell"])
        ]
        if not published:
            continue
        steps = sum(entry["cell"]["num_steps"] for entry in published)
        seconds = sum(entry["seconds"] for entry in published) / steps * work.steps
        rows.append(
            {
                "work": work.what,
                "steps": work.steps,
                "fits": len(published),
                "seconds_a_fit": round(seconds, 1),
                "paper_minutes": f"{work.minutes[0]:g}-{work.minutes[1]:g}",
                "times_faster_than_its_best": round(60 * work.minutes[0] / seconds, 1),
            }
        )
    if not rows:
        raise ValueError(
            f"{RUNTIME}: expected experiments that were run with --full in {folder}, found none."
        )
    return pd.DataFrame(rows)


def write(folder: Path) -> pd.DataFrame:
    """The table and its figure, in a folder of their own beside the others."""
    table = runtimes(folder)
    target = folder / RUNTIME
    target.mkdir(parents=True, exist_ok=True)
    table.to_csv(target / "summary.csv", index=False)
    figure, axes = pictures.panels(1, 1, width=6.5, height=0.6 + 0.6 * len(table))
    ax = axes[0, 0]
    places = range(len(table))
    paper = [[60 * float(m) for m in text.split("-")] for text in table.paper_minutes]
    ax.barh(
        places,
        [high - low for low, high in paper],
        left=[low for low, _ in paper],
        height=0.4,
        color=pictures.GREY,
        label="the paper",
    )
    ax.plot(table.seconds_a_fit, places, "o", color=pictures.colour_of("aligned"), label="dpvim")
    ax.set_yticks(list(places), table.work)
    ax.legend(frameon=False, fontsize=8)
    pictures.finish(ax, "one fit of the paper's length", "seconds", "", log="x")
    with new_file(target / "figure.png") as path:
        figure.savefig(path, dpi=130)
    return table
