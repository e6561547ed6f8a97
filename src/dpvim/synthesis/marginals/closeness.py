"""Closeness of columns: in the released counts, and in tables drawn from the fit.

A model of traits makes columns that determine each other nearly (age and years married) go together
less closely than they do, and intervals of slopes between them are then narrow and wrong. The
released counts tell: for each pair of columns the association is one number, a sum over cells with
weights that the drawn tables fix, which the counts have with noise of known size and the tables
with a known spread. A pair is doubtful if the two differ by more than both allow.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from dpvim.privacy.counts import NoisyMarginal
from dpvim.synthesis.marginals.release import Releases

# Differences of so many standard errors are doubtful.
MOST_ERRORS = 3.0


class Closeness(NamedTuple):
    """The association of two columns, in counts of records, the tables' direction positive.

    Attributes:
        columns: Their numbers.
        released: From the counts.
        tables: Mean over tables.
        error: Standard error of the difference.
    """

    columns: tuple[int, int]
    released: float
    tables: float
    error: float

    @property
    def errors(self) -> float:
        """The difference in standard errors; positive if the counts are closer together."""
        return (self.released - self.tables) / self.error


def compare(
    releases: Releases, tables: Sequence[Int[np.ndarray, "rows columns"]]
) -> list[Closeness]:
    """Each pair of columns that was counted, beside at least two tables.

    Args:
        releases: The counts.
        tables: Groups of the cells of each record and column; see `groups_of`.
    """
    sizes = [each.size for each in releases.groups]
    found = []
    for each in releases.noisy:
        if len(each.columns) == 2:
            first, second = each.columns
            shape = sizes[first], sizes[second]
            drawn = np.stack([_counts(table, (first, second), shape) for table in tables])
            found.append(_compare(each, drawn * (releases.num_rows / len(tables[0]))))
    return found


def groups_of(
    releases: Releases, codes: Int[np.ndarray, "rows columns"]
) -> Int[np.ndarray, "rows columns"]:
    """The groups that the fine cells of records are in."""
    columns = [groups.of_cell[own] for groups, own in zip(releases.groups, codes.T, strict=True)]
    return np.stack(columns, axis=1)


def _counts(
    table: Int[np.ndarray, "rows columns"], columns: tuple[int, int], shape: tuple[int, int]
) -> Float[np.ndarray, "a b"]:
    cells = np.ravel_multi_index([table[:, column] for column in columns], shape)
    return np.bincount(cells, minlength=math.prod(shape)).reshape(shape).astype(float)


def _compare(released: NoisyMarginal, drawn: Float[np.ndarray, "tables a b"]) -> Closeness:
    weights = association_weights(drawn.mean(axis=0))
    of_tables = np.sum(drawn * weights, axis=(1, 2))
    noise = released.variance * float(np.sum(weights**2))
    spread = float(of_tables.var(ddof=1)) * (1 + 1 / len(drawn))
    first, second = released.columns
    return Closeness(
        (first, second),
        float(np.sum(released.counts * weights)),
        float(of_tables.mean()),
        math.sqrt(noise + spread) or 1.0,
    )


def association_weights(counts: Float[np.ndarray, "a b"]) -> Float[np.ndarray, "a b"]:
    """Weights of cells by which the association of two columns is summed up.

    The leading pair of scores of correspondence analysis, made so that margins do not matter.
    """
    total = counts.sum()
    rows, columns = counts.sum(axis=1) / total, counts.sum(axis=0) / total
    expected = np.maximum(total * np.outer(rows, columns), 1.0)
    left, _, right = np.linalg.svd((counts - expected) / np.sqrt(expected), full_matrices=False)
    weights = np.outer(left[:, 0], right[0]) / np.sqrt(expected)
    centred = weights - rows @ weights - (weights @ columns)[:, None] + rows @ weights @ columns
    return centred if float(np.sum(counts * centred)) >= 0 else -centred


def describe(found: Sequence[Closeness], names: Sequence[str]) -> list[str]:
    """Sentences on doubtful pairs of the named columns, the most doubtful first."""
    lines = []
    for each in sorted(found, key=lambda one: -abs(one.errors)):
        if abs(each.errors) > MOST_ERRORS:
            first, second = (names[column] for column in each.columns)
            how = "more" if each.errors > 0 else "less"
            lines.append(
                f"{first} and {second} go together {how} closely in the released counts than in "
                f"these tables ({abs(each.errors):.1f} standard errors): intervals of terms with "
                "them are too narrow, or off"
            )
    return lines


def among(found: Sequence[Closeness], columns: Sequence[int]) -> list[Closeness]:
    """Those that are about two of these columns."""
    wanted = set(itertools.combinations(sorted(columns), 2))
    return [each for each in found if tuple(sorted(each.columns)) in wanted]
