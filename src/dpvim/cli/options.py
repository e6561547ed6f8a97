"""Options that several commands have."""

from __future__ import annotations

import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from dpvim.synthesis.databases.addresses import without_password
from dpvim.types import Relation


class RegressionKind(StrEnum):
    """Regressions of a column on the others."""

    logistic = "logistic"
    poisson = "poisson"
    linear = "linear"


class Engine(StrEnum):
    """Engines of twins."""

    marginals = "marginals"
    dpvi = "dpvi"


class NumbersModel(StrEnum):
    """Distributions of integer and real columns within a component."""

    histogram = "histogram"
    normal = "normal"


class FormulasRule(StrEnum):
    """Treatment of texts in CSV files that spreadsheets would run."""

    refuse = "refuse"
    quote = "quote"
    allow = "allow"


class Format(StrEnum):
    """File formats of synthetic tables."""

    csv = "csv"
    csv_gz = "csv.gz"
    parquet = "parquet"


Table = Annotated[Path, typer.Argument(help="CSV, TSV (also gzipped) or Parquet.")]
AnyTable = Annotated[
    str,
    typer.Argument(
        help="CSV, TSV (also gzipped) or Parquet; a folder of Parquet; a table in a database: "
        "postgresql://user@host/database#table, file.duckdb#table or spark://host:7077#table."
    ),
]
Delimiter = Annotated[str | None, typer.Option(help="What separates fields of a CSV file.")]
Encoding = Annotated[str | None, typer.Option(help="Of a CSV file.  [default: utf-8]")]
SchemaFile = Annotated[Path, typer.Option("--schema", help="The table's schema (TOML).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print json, for scripts.")]
NewFolder = Annotated[Path, typer.Option("--output", "-o", help="A new folder.")]
TwinFolder = Annotated[Path, typer.Argument(help="A folder that synth made.")]
OwnModel = Annotated[
    Path | None, typer.Option("--model", help="A Python file with a model of your own; it is run.")
]
Epsilon = Annotated[float, typer.Option(help="The privacy budget.")]
Delta = Annotated[float | None, typer.Option(help="[default: a tenth of 1 / rows]")]
Target = Annotated[
    str | None, typer.Option(help="A column to be explained by all others: it gets less noise.")
]
EngineOption = Annotated[
    Engine | None,
    typer.Option(
        "--engine",
        help="Noisy counts of pairs of columns, or the paper's DPVI.  [default: marginals; dpvi "
        "with a model of your own]",
    ),
]
Components = Annotated[
    int | None,
    typer.Option(
        help="Number of components; with marginals, points of the latent traits.  [default: 512 or "
        "1024; 10 with dpvi]"
    ),
]
TargetModel = Annotated[
    RegressionKind | None,
    typer.Option(help="With dpvi: the target's regression.  [default: by its kind]"),
]
Numbers = Annotated[
    NumbersModel | None,
    typer.Option(help="With dpvi: integer and real columns in a component.  [default: histogram]"),
]
ClipNorm = Annotated[
    float | None,
    typer.Option(help="With dpvi: largest norm of one record's gradient.  [default: 2]"),
]
LearningRate = Annotated[
    float | None, typer.Option(help="With dpvi: of the optimiser, Adam.  [default: 0.02]")
]
SamplingProb = Annotated[
    float | None, typer.Option(help="Probability that a record is in a batch.  [default: by size]")
]
Steps = Annotated[int | None, typer.Option(help="With dpvi: number of steps.  [default: 4000]")]
# Where these are left out the run follows its releases, and there is nothing to choose.
ChosenClipNorm = Annotated[
    float | None, typer.Option("--clip-norm", help="Of one record's gradient.  [default: chosen]")
]
ChosenLearningRate = Annotated[
    float | None, typer.Option("--learning-rate", help="Of Adam.  [default: none is needed]")
]
ChosenSteps = Annotated[
    int | None, typer.Option("--steps", help="Number of steps.  [default: by size]")
]
Datasets = Annotated[int, typer.Option(help="Number of synthetic tables.")]
RowsOut = Annotated[
    int | None, typer.Option("--rows", help="Rows of each.  [default: as the original]")
]
TableFormat = Annotated[Format, typer.Option("--format", help="Of the synthetic tables.")]
Formulas = Annotated[
    FormulasRule,
    typer.Option(help="Texts in CSV files that a spreadsheet would run as formulas."),
]
RelationOption = Annotated[Relation, typer.Option(help="Which data sets are neighbours.")]
NumExamples = Annotated[
    int | None, typer.Option(help="Public bound on the rows; with add_or_remove.")
]
Person = Annotated[
    str | None,
    typer.Option(
        help="Column with the ids of persons who may have several rows: persons, not rows, are "
        "protected."
    ),
]
MaxRows = Annotated[
    int | None,
    typer.Option(help="With --person: use at most so many rows of each, chosen at random. Public."),
]
PrivateSeed = Annotated[
    int | None, typer.Option(help="For tests only: the result has no privacy guarantee.")
]
LedgerOption = Annotated[
    Path | None,
    typer.Option("--ledger", help="The table's ledger: pays for the release, or refuses it."),
]
Purpose = Annotated[str | None, typer.Option(help="Of the release, noted in the ledger; public.")]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Check everything, the table too; spend and write nothing."),
]
Checkpoint = Annotated[
    Path | None,
    typer.Option(
        help="A folder for the run's progress: after a crash the same command goes on from there."
    ),
]


def command_line() -> str:
    """The command as it was typed, to repeat it, but for passwords."""
    command = shlex.join(["dpvim", *map(without_password, sys.argv[1:])])
    # File names need not be text. That must not be an error when the budget is spent.
    return command.encode("utf-8", "backslashreplace").decode()
