"""Section of a report on synthetic tables: one column, and two of them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from dpvim.synthesis.analysis.contingency import BinnedTable, bin_table, concat, cramers_v
from dpvim.synthesis.comparison import Dataset
from dpvim.synthesis.fidelity import marginal_tv
from dpvim.synthesis.report import charts
from dpvim.synthesis.report.charts import Picture
from dpvim.synthesis.report.names import NOT_FOR_RELEASE
from dpvim.synthesis.schema import Schema
from dpvim.synthesis.tables import read_table

MAX_PAIRS = 12
_MAX_MAPPED = 30
# Pairs are counted in the first rows of the tables: more rows would not change a shade.
_PAIR_ROWS = 200_000


@dataclass(frozen=True, eq=False)
class TableCounts:
    """Shares and joint counts of the synthetic tables, for the pictures.

    Attributes:
        rows: Of each table.
        shares: By column, the shares of its groups in each table.
        pooled: Rows of all tables, as many as pairs are counted in.
    """

    rows: list[int]
    shares: dict[str, np.ndarray]
    pooled: BinnedTable


def count_tables(datasets: list[Dataset], schema: Schema) -> TableCounts:
    """Read the tables one after the other."""
    shares: dict[str, list[np.ndarray]] = {name: [] for name in schema.names}
    rows, kept = [], []
    quota = -(-_PAIR_ROWS // len(datasets))
    for dataset in datasets:
        is_frame = isinstance(dataset, pd.DataFrame)
        frame = dataset if is_frame else read_table(dataset, columns=schema.names)
        table = bin_table(frame, schema)
        rows.append(table.num_rows)
        kept.append(table.rows(slice(quota)))
        for name, column in shares.items():
            column.append(table.counts(name) / table.num_rows)
    return TableCounts(rows, {name: np.stack(s) for name, s in shares.items()}, concat(kept))


def marginals(counted: TableCounts, original: BinnedTable | None) -> list[dict[str, Any]]:
    """A picture of each column, and its distance from the original if there is one."""
    distances = None if original is None else marginal_tv(original, counted.pooled)
    found = []
    for name, shares in counted.shares.items():
        bins = counted.pooled.bins[name]
        ours = None if original is None else original.counts(name) / original.num_rows
        figure = charts.marginal(bins, shares, ours)
        mean, low, high = charts.mean_and_quantiles(shares)
        most_frequent = [
            f"{bins.labels[i]} {mean[i]:.1%} ({low[i]:.1%} to {high[i]:.1%})"
            for i in np.argsort(-mean, kind="stable")[:5]
        ]
        alt = f"Distribution of {name}. Most frequent: {', '.join(most_frequent)}."
        if original is not None:
            alt = f"{NOT_FOR_RELEASE}. {alt} The original is drawn beside it."
        found.append(
            {
                "name": name,
                "cut": bins.size if bins.size > charts.MAX_BARS and bins.edges is None else 0,
                "picture": Picture(charts.as_data_uri(figure), alt),
                "tv": None if distances is None else float(distances[name]),
            }
        )
    return found


def _dependence(table: BinnedTable) -> pd.DataFrame:
    """Pairs of columns, the most dependent ones first."""
    rows = [
        (a, b, cramers_v(table.pair_counts(a, b)))
        for a, b in itertools.combinations(table.names, 2)
    ]
    frame = pd.DataFrame(rows, columns=["first", "second", "v"]).astype({"v": float})
    return frame.sort_values("v", ascending=False, kind="stable", ignore_index=True)


def pairs(pooled: BinnedTable, original: BinnedTable | None) -> dict[str, Any]:
    """A heat map, and pictures of the pairs that depend most on each other."""
    dependence = _dependence(pooled)
    shown = []
    for row in dependence.head(MAX_PAIRS).itertuples():
        names = (str(row.first), str(row.second))
        figure = charts.pair(
            names,
            (pooled.bins[names[0]], pooled.bins[names[1]]),
            pooled.pair_counts(*names),
            None if original is None else original.pair_counts(*names),
        )
        alt = f"Distribution of {names[1]} for each group of {names[0]}; Cramer's V {row.v:.2f}."
        if original is not None:
            alt = f"{NOT_FOR_RELEASE}. {alt} Synthetic beside original."
        shown.append(
            {"names": names, "v": row.v, "picture": Picture(charts.as_data_uri(figure), alt)}
        )
    mapped = _most_dependent(dependence, pooled.names)
    heat_map = None
    if len(dependence):
        heat_map = Picture(
            charts.as_data_uri(charts.heat_map(mapped, _matrix(dependence, mapped))),
            "Heat map of Cramer's V between columns. Strongest: "
            + ", ".join(f"{a} and {b} {v:.2f}" for a, b, v in dependence.head(5).to_numpy())
            + ".",
        )
    return {
        "shown": shown,
        "total": len(dependence),
        "heat_map": heat_map,
        "mapped": len(mapped),
        "columns": len(pooled.names),
    }


def _most_dependent(dependence: pd.DataFrame, names: list[str]) -> list[str]:
    """Names in their order; of many only those in the strongest pairs."""
    if len(names) <= _MAX_MAPPED:
        return names
    ranked = dict.fromkeys(dependence[["first", "second"]].to_numpy().ravel().tolist())
    chosen = set(list(ranked)[:_MAX_MAPPED])
    return [name for name in names if name in chosen]


def _matrix(dependence: pd.DataFrame, names: list[str]) -> np.ndarray:
    places = {name: i for i, name in enumerate(names)}
    values = np.zeros((len(names), len(names)))
    for a, b, v in dependence.to_numpy():
        if a in places and b in places:
            values[places[a], places[b]] = values[places[b], places[a]] = v
    return values
