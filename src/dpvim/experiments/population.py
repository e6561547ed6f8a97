"""A simulated population like the one of the paper's health study, with a known truth.

58 261 people, six categorical columns with 8, 2, 5, 5, 7 and 22 levels that depend on each other,
and a rare outcome by a Poisson regression on them. Its tables of probabilities and coefficients
are drawn once from a seed of their own, so that every population has the same truth.

>>> frame = simulate(1000, seed=0)
>>> [len(column.levels) for column in SCHEMA.columns[:-1]]
[8, 2, 5, 5, 7, 22]
>>> bool(0 < frame["infected"].mean() < 0.15)
True
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import pandas as pd

from dpvim.synthesis.schema import Binary, Categorical, Count, Ordinal, Schema

NUM_ROWS = 58_261
OUTCOME = "infected"
FORMULA = "infected ~ age_group + sex + ethnicity + deprivation + education + centre"
# Each column, its levels, and the columns that it depends on.
_LEVELS = {
    "age_group": [f"{first}-{first + 4}" for first in range(40, 80, 5)],
    "sex": ["female", "male"],
    "ethnicity": ["a", "b", "c", "d", "e"],
    "deprivation": ["q1", "q2", "q3", "q4", "q5"],
    "education": ["none", "gcse", "nvq", "a-level", "diploma", "degree", "other"],
    "centre": [f"centre {number:02}" for number in range(1, 23)],
}
_PARENTS = {
    "centre": [],
    "age_group": [],
    "sex": ["age_group"],
    "ethnicity": ["centre"],
    "deprivation": ["centre", "ethnicity"],
    "education": ["age_group", "deprivation"],
}
_TRUTH_SEED = 58_261
_BASE_RATE = 0.02
_COEFFICIENT_SCALE = 0.4

_KINDS = {"age_group": Ordinal, "sex": Binary, "deprivation": Ordinal}
SCHEMA = Schema(
    columns=(
        *(
            _KINDS.get(name, Categorical)(name=name, levels=tuple(levels), reviewed=True)
            for name, levels in _LEVELS.items()
        ),
        Count(name=OUTCOME, upper=4, reviewed=True),
    )
)


class Truth(NamedTuple):
    """Parameters that the population is drawn from.

    Attributes:
        tables: By column, probabilities of its levels given those of its parents.
        intercept: Of the Poisson regression.
        effects: By column, its levels' coefficients; the first level is the reference.
    """

    tables: dict[str, np.ndarray]
    intercept: float
    effects: dict[str, np.ndarray]

    def coefficients(self) -> pd.Series:
        """By the names that `FORMULA` gives them."""
        named = {"Intercept": self.intercept}
        for column, effects in self.effects.items():
            levels = _LEVELS[column]
            named |= {f"{column}[T.{levels[i]}]": effects[i] for i in range(1, len(levels))}
        return pd.Series(named)


@cache
def truth() -> Truth:
    """The same whenever it is asked for."""
    rng = np.random.default_rng(_TRUTH_SEED)
    tables = {}
    for column, parents in _PARENTS.items():
        size = len(_LEVELS[column])
        # Levels are of unequal size (the reference is a large one), and parents shift them.
        logits = rng.normal(0, 0.8, size)
        logits[0] += 1.0
        for parent in parents:
            shape = [len(_LEVELS[p]) if p == parent else 1 for p in parents]
            logits = logits + rng.normal(0, 0.8, (*shape, size))
        odds = np.exp(logits)
        tables[column] = odds / odds.sum(axis=-1, keepdims=True)
    effects = {
        column: np.append(0.0, rng.normal(0, _COEFFICIENT_SCALE, len(levels) - 1))
        for column, levels in _LEVELS.items()
    }
    return Truth(tables, float(np.log(_BASE_RATE)), effects)


def simulate(num_rows: int = NUM_ROWS, *, seed: int) -> pd.DataFrame:
    """A population: columns as in `SCHEMA`."""
    rng = np.random.default_rng(seed)
    known = truth()
    codes: dict[str, np.ndarray] = {}
    for column, parents in _PARENTS.items():
        probs = known.tables[column][tuple(codes[parent] for parent in parents)]
        below = np.broadcast_to(probs, (num_rows, probs.shape[-1])).cumsum(axis=1)
        codes[column] = (rng.random((num_rows, 1)) > below[:, :-1]).sum(axis=1)
    log_rate = known.intercept + sum(known.effects[c][codes[c]] for c in _LEVELS)
    frame = {column: np.array(_LEVELS[column], object)[codes[column]] for column in _LEVELS}
    return pd.DataFrame({**frame, OUTCOME: rng.poisson(np.exp(log_rate))})
