"""How far synthetic tables are from an original, for benchmarks/twin_quality.py.

`distances`: total variation of pairs and triples of columns (means) and of one column (the
largest), with numbers in the bins of dpvim.synthesis.analysis.contingency; and the mean absolute
difference of correlations of numbers and ordered levels.

`utility`: the AUC, on rows that no synthesizer has seen, of classifiers that were trained on a
synthetic table (on 50 000 of its rows if it has more).

`intervals`: whether 95 % intervals hold what they should, and how wide they are: `one` for the
first table taken at face value, `pooled` for all tables by Rubin's rules (dpvim.analyze).
"""

from __future__ import annotations

import itertools
from typing import Protocol

import numpy as np
import pandas as pd
from scipy import stats
from twin_tables import Table

from dpvim import analyze
from dpvim.synthesis.analysis import glm
from dpvim.synthesis.analysis.contingency import BinnedTable, bin_table
from dpvim.synthesis.analysis.pooling import FailedFitsError
from dpvim.synthesis.encoding import EncodedTable, encode
from dpvim.synthesis.fidelity import marginal_tv, pairwise_tv, total_variation
from dpvim.synthesis.schema import Levelled, Numeric, Ordinal, Schema

MAX_TRIPLES = 100
MAX_TRAINING_ROWS = 50_000


# -- distances


def distances(original: pd.DataFrame, synthetic: pd.DataFrame, schema: Schema) -> dict[str, float]:
    """Of two tables of the same schema."""
    first, second = encode(original, schema), encode(synthetic, schema)
    binned = bin_table(first, schema), bin_table(second, schema)
    triples = list(itertools.combinations(schema.names, 3))
    chosen = np.random.default_rng(0).permutation(len(triples))[:MAX_TRIPLES]
    return {
        "pairs": float(pairwise_tv(*binned)["tv"].mean()),
        "triples": float(np.mean([_triple_tv(*binned, triples[i]) for i in chosen])),
        "column": float(marginal_tv(*binned).max()),
        "correlation": _correlation_error(first, second, schema),
    }


def _triple_tv(first: BinnedTable, second: BinnedTable, names: tuple[str, ...]) -> float:
    shape = tuple(first.bins[name].size for name in names)

    def counts(table: BinnedTable) -> np.ndarray:
        cells = np.ravel_multi_index([table.codes[name] for name in names], shape)
        return np.bincount(cells, minlength=int(np.prod(shape)))

    return total_variation(counts(first), counts(second))


def _correlation_error(first: EncodedTable, second: EncodedTable, schema: Schema) -> float:
    names = [c.name for c in schema.columns if isinstance(c, Numeric | Ordinal)]

    def correlations(table: EncodedTable) -> np.ndarray:
        values = {
            name: np.where(table.missing.get(name, False), np.nan, table.values[name])
            for name in names
        }
        # A constant column is correlated with nothing.
        return pd.DataFrame(values).corr().fillna(0).to_numpy()

    above = np.triu_indices(len(names), 1)
    return float(np.abs(correlations(first) - correlations(second))[above].mean())


# -- train on synthetic, test on real


class Predicted(Protocol):
    """Anything with a schema and a target: `outcome` is the condition on it that is predicted."""

    @property
    def schema(self) -> Schema: ...

    @property
    def target(self) -> str: ...

    @property
    def outcome(self) -> str: ...


def utility(table: Predicted, synthetic: pd.DataFrame, test: pd.DataFrame) -> dict[str, float]:
    """AUC of gradient boosting and of logistic regression."""
    # Not a dependency of the project: only this function needs it.
    from sklearn.ensemble import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
        HistGradientBoostingClassifier,
    )
    from sklearn.linear_model import LogisticRegression  # type: ignore
    from sklearn.metrics import roc_auc_score  # type: ignore

    if len(synthetic) > MAX_TRAINING_ROWS:
        synthetic = synthetic.sample(MAX_TRAINING_ROWS, random_state=0)
    synthetic, test = (frame.dropna(subset=table.target) for frame in (synthetic, test))
    wanted, truth = (frame.eval(table.outcome).to_numpy(bool) for frame in (synthetic, test))
    if wanted.all() or not wanted.any():
        return {"auc_boosting": 0.5, "auc_logistic": 0.5}
    X, X_test = (_features(frame, table) for frame in (synthetic, test))
    boosting = HistGradientBoostingClassifier(random_state=0).fit(X, wanted)
    logistic = LogisticRegression(max_iter=300).fit(X, wanted)
    return {
        "auc_boosting": float(roc_auc_score(truth, boosting.predict_proba(X_test)[:, 1])),
        "auc_logistic": float(roc_auc_score(truth, logistic.predict_proba(X_test)[:, 1])),
    }


def _features(frame: pd.DataFrame, table: Predicted) -> np.ndarray:
    """All columns but the target: levels one by one, numbers by their place between the bounds."""
    encoded = encode(frame, table.schema)
    found: list[np.ndarray] = []
    for column in table.schema.columns:
        if column.name == table.target:
            continue
        values = np.asarray(encoded.values[column.name])
        missing = encoded.missing.get(column.name, np.zeros(len(values), bool))
        if isinstance(column, Levelled):
            found += [(values == code) & ~missing for code in range(1, len(column.levels))]
        elif values.dtype.kind == "f":  # a place already
            found.append(values)
        else:
            lower, upper = column.bounds
            found.append((values - lower) / (upper - lower))
        if column.nullable:
            found.append(missing)
    return np.stack(found, axis=1).astype(np.float32)


# -- intervals


class Described(Protocol):
    """Anything with a schema: tables of the comparison, and those of coverage trials."""

    @property
    def schema(self) -> Schema: ...


def estimates(table: Described, frame: pd.DataFrame, formula: str, family: str) -> pd.DataFrame:
    """Estimates with their 95 % intervals on one table, taken at face value."""
    fit = glm.fit_table(plain(frame), formula, family, _layout(table))
    if fit["failure"]:
        raise FailedFitsError(fit["failure"])
    half = stats.norm.ppf(0.975) * np.sqrt(np.diag(fit["covariance"]))
    columns = {"lower": fit["params"] - half, "upper": fit["params"] + half}
    return pd.DataFrame({"estimate": fit["params"], **columns}, index=fit["names"])


def intervals(
    table: Table, original: pd.DataFrame, tables: list[pd.DataFrame], shown: pd.DataFrame
) -> dict[str, float | str]:
    """For each question the share of intervals that hold, and their median width.

    They are those of one table, the one that is shown, and of all tables, pooled.

    Intercepts of regressions are left out. Where a fit fails the share is empty, as a reader is
    left without an interval, and `failed` says why.
    """
    as_floats = [plain(frame) for frame in tables]
    truths = table.truth() if table.truth else {}
    found: dict[str, float | str] = {}
    failed = []
    for name, (formula, family) in table.questions.items():
        truth = truths.get(formula)
        if truth is None:
            truth = estimates(table, original, formula, family)["estimate"]
        for way in ("one", "pooled"):
            try:
                if way == "one":
                    ends = estimates(table, plain(shown), formula, family)
                elif len(tables) > 1:
                    ends = pooled(table, as_floats, formula, family, len(original))
                else:
                    continue
            except FailedFitsError as error:
                failed.append(f"{name}, {way}: {str(error).splitlines()[-1].strip()}")
                continue
            ends = ends.drop(index="Intercept") if len(ends) > 1 else ends
            wanted = truth.loc[ends.index]
            held = (ends["lower"] <= wanted) & (wanted <= ends["upper"])
            found[f"{name}_{way}"] = float(held.mean())
            found[f"{name}_width_{way}"] = float((ends["upper"] - ends["lower"]).median())
    return found | {"failed": "; ".join(failed)}


def pooled(
    table: Described, tables: list[pd.DataFrame], formula: str, family: str, num_rows: int
) -> pd.DataFrame:
    found = analyze(
        tables,
        formula,
        family=family,
        num_rows=num_rows,
        levels=_layout(table)["levels"],
        workers=1,
        progress=False,
    )
    return found.combined.to_frame()


def _layout(table: Described) -> glm.Layout:
    texts = [c for c in table.schema.columns if isinstance(c, Levelled) and c.level_type is str]
    levels = {column.name: column.levels for column in texts}
    return glm.Layout(levels=levels, dates=table.schema.dates, missing=None)


def plain(frame: pd.DataFrame) -> pd.DataFrame:
    """Numbers as floats, for formulas: integers with gaps are of a type that patsy cannot take."""
    return frame.astype(dict.fromkeys(frame.select_dtypes("number"), float))
