"""A twin in one page of HTML: what it promises, what it holds, how to use it.

The page needs no other file, no network and no script. With the original it also compares; that
page says on itself and on its pictures that it is not for release.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined

from dpvim.models.mixture import Mixture
from dpvim.synthesis import pictures, words
from dpvim.synthesis.comparison import Dataset, Downstream, NoAnalysisError, downstream, spoken
from dpvim.synthesis.contingency import BinnedTable, bin_table, cramers_v, stack
from dpvim.synthesis.fidelity import marginal_tv, pairwise_tv
from dpvim.synthesis.model import coefficient_names
from dpvim.synthesis.schema import Schema
from dpvim.synthesis.tables import read_table
from dpvim.synthesis.twin import Twin
from dpvim.types import ConvergenceWarning

REPORT = "report.html"
COMPARISON = "report-NOT-FOR-RELEASE.html"
MOST_PAIRS = 12
_MOST_MAPPED = 30
_MOST_COEFFICIENTS = 40
_WORST = 10
# Pairs are counted in the first rows of the tables: more rows would not change a shade.
_PAIR_ROWS = 200_000


@dataclass(frozen=True, eq=False)
class Picture:
    """A picture with a text for those who do not see it."""

    uri: str
    alt: str


@dataclass(frozen=True, eq=False)
class _Counted:
    """What the pictures need of the synthetic tables.

    Attributes:
        rows: Of each table.
        shares: By column, the shares of its groups in each table.
        pooled: Rows of all tables, as many as pairs are counted in.
    """

    rows: list[int]
    shares: dict[str, np.ndarray]
    pooled: BinnedTable


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
        formula: With `compare`: an analysis to compare, as in statsmodels; default the twin's target
            on all other columns.
        family: The formula's family, as in `dpvim.analyze`.
        command: The command that made the twin, to be shown.
        force: Whether a file that exists may be replaced.
    """
    target = Path(path)
    if target.exists() and not force:
        raise FileExistsError(f"{target}: exists already. Choose another name, or force it.")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{target.parent}: there is no such folder. Create it first.")
    if compare is None and (formula is not None or family is not None):
        raise ValueError("formula, family: expected only together with compare, got it without.")
    if formula is None and family is not None:
        raise ValueError(f"family: expected together with a formula, got {family!r} alone.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the page says it
        page = _render(twin, list(datasets), compare, formula, family, command)
    partial = target.with_name(target.name + ".partial")
    try:
        partial.write_text(page, encoding="utf-8")
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


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
    original = None if compare is None else bin_table(compare, twin.schema)
    counted = _count(datasets, twin.schema)
    dependence = _dependence(counted.pooled)
    content: dict[str, Any] = {
        "stamps": _stamps(twin, original),
        "private": twin.privacy.private,
        "promise": words.promise(twin.privacy),
        "good_for": words.good_for(twin),
        "not_good_for": words.not_good_for(twin),
        "facts": _facts(twin, counted),
        "columns": [
            {
                "name": column.name,
                "kind": column.kind,
                "values": words.values_of(column),
                "outside": words.outside_of(column),
                "nullable": column.nullable,
            }
            for column in twin.schema.columns
        ],
        "num_tables": len(counted.rows),
        "marginals": _marginals(counted, original),
        "pairs": _pairs(dependence, counted.pooled, original),
        "model": _model(twin),
        "target": _target(twin),
        "example": _example(twin.schema),
        "command": command,
        "version": metadata.version("dpvim"),
        "comparison": None,
    }
    if compare is not None and original is not None:
        content["comparison"] = {
            **_distances(original, counted.pooled),
            **_analysis(twin, datasets, compare, formula, family),
        }
    environment = Environment(
        loader=PackageLoader("dpvim", "synthesis/templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html").render(content)


def _stamps(twin: Twin, original: BinnedTable | None) -> list[tuple[str, str]]:
    """What must not be missed: a word, and why."""
    stamps = []
    if original is not None:
        why = "this page shows the original data, without any protection. Keep it with them."
        stamps.append((pictures.NOT_FOR_RELEASE, why))
    if not twin.privacy.private:
        why = "this twin carries no privacy guarantee. It is for tests and experiments."
        stamps.append(("NOT PRIVATE", why))
    return stamps


def _count(datasets: list[Dataset], schema: Schema) -> _Counted:
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
    return _Counted(rows, {name: np.stack(s) for name, s in shares.items()}, stack(kept))


def _facts(twin: Twin, counted: _Counted) -> list[tuple[str, str]]:
    few, many = min(counted.rows), max(counted.rows)
    model = "of the maker's own"
    if isinstance(twin.model, Mixture):
        model = f"a mixture of {twin.model.num_components} components"
        if twin.model.response is not None:
            name, kind = twin.model.response
            model += f", with a {kind} regression of {name} on the others"
    return [
        ("Guarantee", words.promise(twin.privacy).short),
        ("Rows of the original", f"{twin.num_rows:,} (public)"),
        ("Synthetic tables", f"{len(counted.rows):,}"),
        ("Rows of each", f"{few:,}" if few == many else f"{few:,} to {many:,}"),
        ("Columns", f"{len(twin.schema.columns):,}"),
        ("Model", f"{model}; {twin.fit.family.dim:,} parameters"),
    ]


def _marginals(counted: _Counted, original: BinnedTable | None) -> list[dict[str, Any]]:
    distances = None if original is None else marginal_tv(original, counted.pooled)
    found = []
    for name, shares in counted.shares.items():
        bins = counted.pooled.bins[name]
        ours = None if original is None else original.counts(name) / original.num_rows
        figure = pictures.marginal(bins, shares, ours)
        mean, low, high = pictures.spread(shares)
        told = [
            f"{bins.labels[i]} {mean[i]:.1%} ({low[i]:.1%} to {high[i]:.1%})"
            for i in np.argsort(-mean, kind="stable")[:5]
        ]
        alt = f"Distribution of {name}. Most frequent: {', '.join(told)}."
        if original is not None:
            alt = f"{pictures.NOT_FOR_RELEASE}. {alt} The original is drawn beside it."
        found.append(
            {
                "name": name,
                "picture": Picture(pictures.as_data_uri(figure), alt),
                "tv": None if distances is None else float(distances[name]),
            }
        )
    return found


def _dependence(table: BinnedTable) -> pd.DataFrame:
    """Pairs of columns, the most dependent ones first."""
    rows = [
        (a, b, cramers_v(table.pair_counts(a, b))) for a, b in itertools.combinations(table.names, 2)
    ]
    frame = pd.DataFrame(rows, columns=["first", "second", "v"]).astype({"v": float})
    return frame.sort_values("v", ascending=False, kind="stable", ignore_index=True)


def _pairs(
    dependence: pd.DataFrame, pooled: BinnedTable, original: BinnedTable | None
) -> dict[str, Any]:
    shown = []
    for row in dependence.head(MOST_PAIRS).itertuples():
        names = (str(row.first), str(row.second))
        figure = pictures.pair(
            names,
            (pooled.bins[names[0]], pooled.bins[names[1]]),
            pooled.pair_counts(*names),
            None if original is None else original.pair_counts(*names),
        )
        alt = f"Distribution of {names[1]} for each group of {names[0]}; Cramer's V {row.v:.2f}."
        if original is not None:
            alt = f"{pictures.NOT_FOR_RELEASE}. {alt} Synthetic beside original."
        shown.append(
            {"names": names, "v": row.v, "picture": Picture(pictures.as_data_uri(figure), alt)}
        )
    mapped = _most_dependent(dependence, pooled.names)
    heat_map = None
    if len(dependence):
        heat_map = Picture(
            pictures.as_data_uri(pictures.heat_map(mapped, _matrix(dependence, mapped))),
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
    if len(names) <= _MOST_MAPPED:
        return names
    ranked = dict.fromkeys(dependence[["first", "second"]].to_numpy().ravel().tolist())
    chosen = set(list(ranked)[:_MOST_MAPPED])
    return [name for name in names if name in chosen]


def _matrix(dependence: pd.DataFrame, names: list[str]) -> np.ndarray:
    places = {name: i for i, name in enumerate(names)}
    values = np.zeros((len(names), len(names)))
    for a, b, v in dependence.to_numpy():
        if a in places and b in places:
            values[places[a], places[b]] = values[places[b], places[a]] = v
    return values


def _model(twin: Twin) -> dict[str, Any]:
    """Posterior, trace and convergence."""
    fit, posterior = twin.fit, twin.fit.posterior
    settled, told = words.convergence(posterior)
    total = posterior.loc.size
    coefficients = None
    table = _coefficients(twin)
    if table is not None:
        alt = "Posterior of the regression's coefficients: " + "; ".join(
            f"{name} {row.estimate:.2f} ({row.lower:.2f} to {row.upper:.2f})"
            for name, row in table.head(12).iterrows()
        )
        coefficients = Picture(pictures.as_data_uri(pictures.intervals(table)), alt + ".")
    few = len(posterior.summary()) <= 40
    return {
        "settled": settled,
        "told": told,
        "total": total,
        "coefficients": coefficients,
        "num_coefficients": 0 if table is None else len(table),
        "posterior": Picture(
            _uri(fit.plot_posterior(), height=2 + 0.2 * len(posterior.summary()) if few else 3.6),
            f"Posterior intervals of all {total} parameters, with the part that is noise.",
        ),
        "trace": Picture(
            _uri(fit.plot_trace(), height=4.6),
            f"Means and standard deviations of {total} parameters against the steps of the run.",
        ),
        "convergence": Picture(
            _uri(fit.plot_convergence(), height=3.4),
            f"Length of each parameter's window in autocorrelation times. {told}",
        ),
    }


def _uri(figure: Any, *, height: float) -> str:
    return pictures.as_data_uri(pictures.for_page(figure, height=height))


def _coefficients(twin: Twin) -> pd.DataFrame | None:
    """Posterior of the target's coefficients, those farthest from zero if there are many."""
    model = twin.model
    if not isinstance(model, Mixture) or model.response is None:
        return None
    site = f"{model.response.name}.coefficients"
    ends = twin.fit.posterior.interval(0.9)[site]
    table = pd.DataFrame(
        {
            "estimate": twin.fit.posterior.mean[site],
            "lower": ends[:, 0],
            "upper": ends[:, 1],
        },
        index=coefficient_names(model, twin.schema),
    )
    distance = (table["estimate"] / (table["upper"] - table["lower"])).abs().to_numpy()
    chosen = np.sort(np.argsort(-distance, kind="stable")[:_MOST_COEFFICIENTS])
    return table.iloc[chosen]


def _target(twin: Twin) -> str | None:
    is_regression = isinstance(twin.model, Mixture) and twin.model.response is not None
    return twin.model.response.name if is_regression else None


def _example(schema: Schema) -> dict[str, str]:
    """A formula that can be typed as it stands."""
    names = [name for name in schema.names if name.isidentifier()]
    outcome, covariate = (names + ["y", "x"])[:2] if len(names) >= 2 else ("y", "x")
    return {"outcome": outcome, "covariate": covariate}


def _distances(original: BinnedTable, pooled: BinnedTable) -> dict[str, Any]:
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


def _analysis(
    twin: Twin,
    datasets: list[Dataset],
    compare: pd.DataFrame,
    formula: str | None,
    family: str | None,
) -> dict[str, Any]:
    try:
        if len(datasets) < 2:
            raise NoAnalysisError("one synthetic table cannot be pooled")
        found = downstream(twin, datasets, compare, formula=formula, family=family)
    except NoAnalysisError as error:
        return {"analysis": None, "no_analysis": str(error)}
    return {"analysis": _analysis_content(found, twin.schema), "no_analysis": ""}


def _analysis_content(found: Downstream, schema: Schema) -> dict[str, Any]:
    names = [spoken(name, schema) for name in found.original.index]
    original, synthetic = found.original.set_axis(names), found.synthetic.set_axis(names)
    chosen = slice(_MOST_COEFFICIENTS)
    figure = pictures.intervals(synthetic.iloc[chosen], other=original.iloc[chosen])
    inside = (synthetic["lower"] <= original["estimate"]) & (
        original["estimate"] <= synthetic["upper"]
    )
    alt = f"{pictures.NOT_FOR_RELEASE}. Coefficients of original and synthetic data, as in the table."
    return {
        "formula": found.formula,
        "family": found.family,
        "notes": found.notes,
        "inside": int(inside.sum()),
        "picture": Picture(pictures.as_data_uri(figure), alt),
        "rows": [
            {"name": name, "original": original.iloc[i], "synthetic": synthetic.iloc[i]}
            for i, name in enumerate(names)
        ],
    }
