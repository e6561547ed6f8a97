"""``dpvim analyze``: one answer from many synthetic tables."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from dpvim._extras import require
from dpvim.cli.common import plain_errors, print_json
from dpvim.cli.options import AsJson, TwinFolder
from dpvim.synthesis.analysis.pooling import analyze as pooled
from dpvim.synthesis.schema import Levelled
from dpvim.synthesis.twin import DATA, Twin


class GlmFamily(StrEnum):
    """Distributions of an outcome, with their canonical links."""

    gaussian = "gaussian"
    linear = "linear"
    binomial = "binomial"
    logistic = "logistic"
    poisson = "poisson"


def analyze(
    twin: TwinFolder,
    formula: Annotated[str, typer.Argument(help="As in statsmodels: 'y ~ age + sex'.")],
    family: Annotated[GlmFamily, typer.Option(help="The outcome's distribution.")] = (
        GlmFamily.gaussian
    ),
    level: Annotated[float, typer.Option(help="Level of the intervals.")] = 0.95,
    as_json: AsJson = False,
) -> None:
    """Fit a generalised linear model to every synthetic table and pool by Rubin's rules.

    Example: `dpvim analyze twin "infected ~ age_group + sex" --family poisson`
    """
    with plain_errors("analyze", twin=twin):
        require("dpvim.synthesis.analysis.glm", extra="analysis")  # before tables are read
        source = Twin.load(twin)
        schema = source.schema
        if not (twin / DATA).is_dir():
            raise FileNotFoundError(
                f"{twin / DATA}: expected synthetic tables there, found none. Draw some: "
                f"dpvim sample {twin} -o {twin / DATA}"
            )
        result = pooled(
            sorted((twin / DATA).glob("synthetic-*")),
            formula,
            family=family.value,
            num_rows=source.num_rows,
            levels={c.name: c.levels for c in schema.columns if isinstance(c, Levelled)},
            dates=schema.dates,
            missing=schema.missing,
            level=level,
            twin=source,
        )
    if as_json:
        rows = result.combined.to_frame().reset_index(names="term").to_dict("records")
        print_json(
            {
                "formula": formula,
                "family": result.family,
                "num_datasets": result.num_datasets,
                "num_failed": result.num_failed,
                "doubts": list(result.doubts),
                "terms": rows,
            }
        )
    else:
        typer.echo(str(result))
