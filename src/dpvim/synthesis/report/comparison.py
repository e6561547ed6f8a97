"""Section of a report that shows the original, which makes it not for release."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from dpvim.synthesis.analysis.contingency import BinnedTable
from dpvim.synthesis.comparison import (
    Dataset,
    Downstream,
    NoAnalysisError,
    downstream,
    readable_term,
)
from dpvim.synthesis.fidelity import marginal_tv, pairwise_tv
from dpvim.synthesis.report import charts
from dpvim.synthesis.report.charts import Picture
from dpvim.synthesis.report.names import NOT_FOR_RELEASE
from dpvim.synthesis.schema import Schema
from dpvim.synthesis.twin import Twin

_WORST = 10
_MAX_COEFFICIENTS = 40


def distances(original: BinnedTable, pooled: BinnedTable) -> dict[str, Any]:
    """Distances of columns and pairs, and those of two halves of the original for comparison."""
    marginals, pairs = marginal_tv(original, pooled), pairwise_tv(original, pooled)
    order = np.random.default_rng(0).permutation(original.num_rows)
    half = original.num_rows // 2
    content: dict[str, Any] = {
        "marginals": _summary(marginals),
        "pairs": _summary(pairs["tv"]),
        "num_pairs": len(pairs),
        "worst": pairs.sort_values("tv", ascending=False).head(_WORST).to_dict("records"),
        "halves": None,
    }
    if half:
        halves = original.rows(order[:half]), original.rows(order[half:])
        content["halves"] = {
            "marginals": _summary(marginal_tv(*halves)),
            "pairs": _summary(pairwise_tv(*halves)["tv"]),
        }
    return content


def _summary(distances: pd.Series) -> dict[str, float]:
    if not len(distances):
        return {"mean": 0.0, "worst": 0.0}
    return {"mean": float(distances.mean()), "worst": float(distances.max())}


def analysis(
    twin: Twin,
    datasets: list[Dataset],
    original: pd.DataFrame,
    *,
    formula: str | None,
    family: str | None,
) -> dict[str, Any]:
    """Coefficients of both; or, where nobody asked for an analysis, why there is none."""
    try:
        if len(datasets) < 2:
            raise NoAnalysisError("one synthetic table cannot be pooled")
        found = downstream(twin, datasets, original, formula=formula, family=family)
    except NoAnalysisError as error:
        if formula is not None:
            raise
        return {"analysis": None, "no_analysis": str(error)}
    return {"analysis": _analysis_content(found, twin.schema), "no_analysis": ""}


def _analysis_content(found: Downstream, schema: Schema) -> dict[str, Any]:
    names = [readable_term(name, schema) for name in found.original.index]
    original, synthetic = found.original.set_axis(names), found.synthetic.set_axis(names)
    chosen = slice(_MAX_COEFFICIENTS)
    figure = charts.intervals(synthetic.iloc[chosen], other=original.iloc[chosen])
    inside = original["estimate"].between(synthetic["lower"], synthetic["upper"])
    alt = f"{NOT_FOR_RELEASE}. Coefficients of original and synthetic data, as in the table."
    return {
        "formula": found.formula,
        "family": found.family,
        "notes": found.notes,
        "inside": int(inside.sum()),
        "picture": Picture(charts.as_data_uri(figure), alt),
        "rows": list(zip(names, original.itertuples(), synthetic.itertuples(), strict=True)),
    }
