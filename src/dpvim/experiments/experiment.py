"""An experiment of the paper: cells to run, what they measured, a figure, and a verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

# The paper's relation, sampling ratio, steps and clip norms; and what `dpvim.fit` does by default.
AS_PUBLISHED, RECOMMENDED = "as-published", "recommended"
WAYS = (AS_PUBLISHED, RECOMMENDED)

# Part of every cell of dpvim's defaults: raise it when `fit` or `synthesize` does something else by
# default, and these cells are run anew.
DEFAULTS_REVISION = 3

# Everything that a cell's numbers depend on, in values that json has: ``{"way": ..., "seed": 0}``.
Cell: TypeAlias = Mapping[str, Any]
# "not shown": too few repeats to tell.
Judgement: TypeAlias = Literal["holds", "holds in part", "does not hold", "not shown"]


class Scope(NamedTuple):
    """The part of an experiment that is asked for.

    Attributes:
        quick: About a minute, enough to see the direction of each claim; else the paper's grid.
        ways: Of `WAYS`.
        repeats: Seeds for each setting; None for as many as the experiment says.
        epsilons: None for the paper's.
        table, schema: A table of one's own in the place of the simulated population.
    """

    quick: bool = True
    ways: tuple[str, ...] = WAYS
    repeats: int | None = None
    epsilons: tuple[float, ...] | None = None
    table: Path | None = None
    schema: Path | None = None

    def seeds(self, *, quick: int, full: int) -> range:
        """Seeds of the repeats, by default so many."""
        return range(self.repeats or (quick if self.quick else full))


class CellResult(NamedTuple):
    """Measurements of one cell: numbers in rows, and arrays for figures and summaries."""

    rows: Sequence[Mapping[str, Any]]
    arrays: Mapping[str, Any] = {}


class Verdict(NamedTuple):
    """A claim of the paper, what was measured, and whether it holds."""

    claim: str
    measured: str
    judgement: Judgement


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One experiment.

    Attributes:
        name: On the command line.
        title: A few words.
        paper: Where it is in the paper.
        repeats: Of each setting, in the paper; 0 if it does not say.
        cells: The cells of a scope, in the order in which they are to be run.
        run: Runs cells that belong together, and returns their results in order.
        together: Cells for which this is equal may be run in one call.
        most_together: How many at most; what an interruption loses.
        summarise: From the rows of all cells (`frame`, with the cells' settings as columns, and the
            arrays in columns of objects) to the table that is shown.
        draw: The figure.
        judge: The verdicts.
        store: Name of the file with the cells; experiments that share it share their cells.
        takes: Which of the options ``ways``, ``epsilons`` and ``table`` mean something to it.
    """

    name: str
    title: str
    paper: str
    repeats: int
    cells: Callable[[Scope], list[Cell]]
    run: Callable[[Sequence[Cell]], Sequence[CellResult]]
    summarise: Callable[[pd.DataFrame], pd.DataFrame]
    draw: Callable[[pd.DataFrame], Figure]
    judge: Callable[[pd.DataFrame], list[Verdict]]
    together: Callable[[Cell], Hashable] = lambda cell: None
    most_together: int = 1
    store: str | None = None
    takes: frozenset[str] = frozenset()

    def check(self, scope: Scope) -> None:
        """Refuse options that would be ignored."""
        given = {
            "ways": scope.ways != WAYS,
            "epsilons": scope.epsilons is not None,
            "table": scope.table is not None,
        }
        for option, is_given in given.items():
            if is_given and option not in self.takes:
                raise ValueError(f"{self.name}: {_MEANINGLESS[option]}; leave it out.")

    @property
    def store_name(self) -> str:
        """Name of the file with the cells."""
        return self.store or self.name


_MEANINGLESS = {
    "ways": "--as-published and --recommended make no difference",
    "epsilons": "--epsilons makes no difference",
    "table": "--table makes no difference",
}


def mean_and_error(values: pd.DataFrame, by: Sequence[str], columns: Sequence[str]) -> pd.DataFrame:
    """Means with their standard errors (`..._se`) over repeats, and how many there were."""
    import pandas as pd

    groups = values.groupby(list(by), sort=False, dropna=False)
    found = {}
    for column in columns:
        found[column] = groups[column].mean()
        found[f"{column}_se"] = groups[column].sem()
    return pd.DataFrame({**found, "repeats": groups["seed"].nunique()}).reset_index()
