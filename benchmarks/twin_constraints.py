"""A twin with constraints between columns, and the same without: how far each is from the original.

    python benchmarks/twin_constraints.py  # writes benchmarks/results/twin_constraints.csv

The table is `fair` (benchmarks/twin_tables.py). Nobody, or hardly anybody, has been married for
more years than since childhood; ages and years are levels there, so that is said level by level.
Rows that break a rule are drawn again: as whole rows, which is what twins do, or with the point of
the traits that they had before, which keeps the weights of points as they were.
"""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from twin_tables import TABLES

from dpvim.synthesis.analysis.contingency import bin_table
from dpvim.synthesis.encoding import EncodedTable, encode, obey
from dpvim.synthesis.fidelity import marginal_tv, pairwise_tv
from dpvim.synthesis.fitting import synthesize
from dpvim.synthesis.marginals.drawing import draw_given
from dpvim.synthesis.marginals.fit import MarginalFit
from dpvim.synthesis.schema import Schema
from dpvim.synthesis.twin import Twin
from dpvim.types import NotForReleaseWarning

RESULT = Path(__file__).parent / "results" / "twin_constraints.csv"
RULES = (
    "not (age == '17.5' and yrs_married > '2.5')",
    "not (age <= '22' and yrs_married > '9')",
    "not (age <= '27' and yrs_married > '13')",
    "not (age <= '32' and yrs_married > '16.5')",
)
PAIR = ("age", "yrs_married")
FITS, DRAWS, EPSILON = 3, 2, 1.0


def within_points(twin: Twin, num_rows: int, seed: int) -> EncodedTable:
    """The closest table, rows that break a rule drawn again given their point."""
    rng = np.random.default_rng(seed)
    fit, schema = twin.fit, twin.schema
    assert isinstance(fit, MarginalFit)
    mixture = fit._mixture(fit.traits.best)
    point = draw_given(mixture.weights[None], np.zeros(num_rows, int), rng, evenly=True)
    cells = [draw_given(probs, point, rng, evenly=True) for probs in mixture.probs]
    while True:
        table = EncodedTable(dict(zip(schema.names, cells, strict=True)), {})
        broken = np.flatnonzero(~obey(table, schema).all(axis=0))
        if not len(broken):
            return table
        for column, probs in zip(cells, mixture.probs, strict=True):
            column[broken] = draw_given(probs, point[broken], rng, evenly=False)


def rows_of(seed: int) -> list[dict[str, Any]]:
    """Distances of closest tables of one fit."""
    table = TABLES["fair"]
    free = table.schema
    schema = dataclasses.replace(free, constraints=RULES)
    frame = table.load(0)
    original = bin_table(frame, free)
    held = obey(encode(frame, schema), schema).all(axis=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotForReleaseWarning)
        twin = synthesize(frame, schema, epsilon=EPSILON, seed=seed, progress=False)
    without = dataclasses.replace(twin, schema=free)
    found = []
    for draw in range(DRAWS):
        drawn: dict[str, EncodedTable] = {
            "without": encoded(without, free, draw),
            "whole rows": encoded(twin, free, draw),
            "within points": within_points(twin, len(frame), draw),
        }
        for rule, each in drawn.items():
            binned = bin_table(each, free)
            pairs = pairwise_tv(original, binned).set_index(["first", "second"])["tv"]
            found.append(
                {
                    "fit": seed,
                    "draw": draw,
                    "rows": rule,
                    "broken": float((~obey(each, schema).all(axis=0)).mean()),
                    "broken_in_original": float((~held).mean()),
                    "columns": float(marginal_tv(original, binned).mean()),
                    "pairs": float(pairs.mean()),
                    "age_and_years": float(pairs[PAIR]),
                }
            )
    return found


def encoded(twin: Twin, schema: Schema, seed: int) -> EncodedTable:
    """The closest table as arrays."""
    return encode(twin.closest(seed=seed), schema)


if __name__ == "__main__":
    result = pd.DataFrame([row for seed in range(FITS) for row in rows_of(seed)])
    result.to_csv(RESULT, index=False, float_format="%.6f")
    print(result.groupby("rows", sort=False).mean(numeric_only=True).round(4).to_string())
