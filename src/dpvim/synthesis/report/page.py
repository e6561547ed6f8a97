"""A twin in one page of HTML: what it promises, what it holds, how to use it.

The page needs no other file, no network and no script. With the original it also compares; that
page says on itself and on its pictures that it is not for release.

To change a sentence, or what is shown:

===================== ============================================================================
file                  what it has
===================== ============================================================================
templates/report.html headings, captions and fixed sentences of all sections, in their order
templates/report.css  the look
text.py               sentences that depend on the twin: guarantee, good and bad uses, noise, fit
page.py               the table of facts at the top, the stamps, the example of an analysis
tables.py             pictures of one column and of pairs of columns
model.py              the model: of DPVI its pictures, of a fit to counts what was released
comparison.py         what only a comparison with the original has: distances, an analysis of both
charts.py             how the pictures are drawn
names.py              names of files, and the stamp NOT FOR RELEASE
===================== ============================================================================
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined

from dpvim.files import new_file
from dpvim.synthesis.analysis.contingency import bin_table
from dpvim.synthesis.comparison import Dataset, target_of
from dpvim.synthesis.report import text
from dpvim.synthesis.report.comparison import analysis, distances
from dpvim.synthesis.report.model import model_content
from dpvim.synthesis.report.names import NOT_FOR_RELEASE
from dpvim.synthesis.report.tables import TableCounts, count_tables, marginals, pairs
from dpvim.synthesis.schema import Count, Levelled, Schema
from dpvim.synthesis.twin import ABOUT, Twin
from dpvim.types import ConvergenceWarning


def write_report(
    twin: Twin,
    datasets: Iterable[Dataset],
    path: str | Path,
    *,
    compare: pd.DataFrame | None = None,
    formula: str | None = None,
    family: str | None = None,
    command: str | None = None,
    force: bool = False,
) -> None:
    """Write a report on a twin: one HTML file, complete or not at all.

    Args:
        twin: What the report is on.
        datasets: Synthetic tables of it, frames or paths.
        path: The file.
        compare: The original. The report then shows it beside the twin and is not for release.
        formula: With `compare`: an analysis to compare, as in statsmodels; default the twin's
            target on all other columns.
        family: The formula's family, as in `dpvim.analyze`.
        command: The command that made the twin, to be shown.
        force: Whether a file that exists may be replaced.
    """
    target = Path(path)
    if target.exists() and not force:
        raise FileExistsError(f"{target}: exists already. Choose another name, or force it.")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{target.parent}: there is no such folder. Create it first.")
    if compare is not None and any(
        (folder / ABOUT).is_file() for folder in target.resolve().parents
    ):
        raise ValueError(
            f"{target}: expected a file outside of the twin's folder, which is made to be "
            "published, got one within it. A comparison shows the original data."
        )
    if compare is None and (formula is not None or family is not None):
        raise ValueError("formula, family: expected only together with compare, got it without.")
    if formula is None and family is not None:
        raise ValueError(f"family: expected together with a formula, got {family!r} alone.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the page says it
        page = _render(twin, list(datasets), compare, formula, family, command)
    with new_file(target) as partial:
        partial.write_text(page, encoding="utf-8")


def _render(
    twin: Twin,
    datasets: list[Dataset],
    compare: pd.DataFrame | None,
    formula: str | None,
    family: str | None,
    command: str | None,
) -> str:
    if not datasets:
        raise ValueError("datasets: expected at least one synthetic table, got none.")
    # First what may be refused: the original.
    original = None if compare is None else bin_table(compare, twin.schema)
    counted = count_tables(datasets, twin.schema)
    comparison = None
    if compare is not None and original is not None:
        comparison = {
            **distances(original, counted.pooled),
            **analysis(twin, datasets, compare, formula=formula, family=family),
        }
    environment = Environment(
        loader=PackageLoader("dpvim", "synthesis/report/templates"),
        autoescape=True,  # names and levels are anybody's
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html").render(
        _about(twin, counted),
        stamps=_stamps(twin, compares=compare is not None),
        comparison=comparison,
        marginals=marginals(counted, original),
        pairs=pairs(counted.pooled, original),
        model=model_content(twin),
        doubts=twin.doubts(datasets) if len(datasets) > 1 else [],
        command=command,
        version=metadata.version("dpvim"),
    )


def _about(twin: Twin, counted: TableCounts) -> dict[str, Any]:
    """Content of the sections that are text."""
    guarantee = text.describe_guarantee(twin.privacy)
    few, many = min(counted.rows), max(counted.rows)
    return {
        "private": twin.privacy.private,
        "guarantee": guarantee,
        "good_for": text.good_for(twin),
        "not_good_for": text.not_good_for(twin),
        "facts": [
            ("Guarantee", guarantee.short),
            text.describe_rows(twin),
            ("Synthetic tables", f"{len(counted.rows):,}"),
            ("Rows of each", f"{few:,}" if few == many else f"{few:,} to {many:,}"),
            ("Columns", f"{len(twin.schema.columns):,}"),
            ("Model", text.describe_model(twin)),
        ],
        "columns": [
            (column.name, column.kind, text.describe_values(column), text.describe_outside(column))
            for column in twin.schema.columns
        ],
        "constraints": [
            (constraint, text.describe_broken(share))
            for constraint, share in twin.broken_shares().items()
        ],
        "num_tables": len(counted.rows),
        "target": target_of(twin),
        "example": _example(twin.schema, target_of(twin)),
    }


def _stamps(twin: Twin, *, compares: bool) -> list[tuple[str, str]]:
    """Warnings that stand at both ends of the page: a stamp, and why."""
    stamps = []
    if compares:
        why = "This page shows the original data, without any protection. Keep it with them."
        stamps.append((NOT_FOR_RELEASE, why))
    if not twin.privacy.private:
        why = "This twin carries no privacy guarantee. It is for tests and experiments."
        stamps.append(("NOT PRIVATE", why))
    return stamps


def _example(schema: Schema, target: str | None) -> tuple[str, str]:
    """A formula that can be typed as it stands, and its family."""
    usable = [column for column in schema.columns if column.name.isidentifier()]
    outcomes = [c for c in usable if not (isinstance(c, Levelled) and len(c.levels) > 2)]
    # The target if there is one.
    outcomes.sort(key=lambda column: column.name != target)
    covariates = [column for column in usable if column not in outcomes[:1]]
    if not (outcomes and covariates):
        return "y ~ x", "gaussian"
    outcome = outcomes[0]
    family = "poisson" if isinstance(outcome, Count) else "gaussian"
    if isinstance(outcome, Levelled):
        family = "logistic"
    return f"{outcome.name} ~ {' + '.join(c.name for c in covariates[:2])}", family
