r"""Mixtures of product distributions over the cells of columns: expected counts, and records.

Component k has the weight :math:`\pi_k` and a distribution :math:`\theta_k` over the cells of every
column. Laid side by side, the cells of all columns are L; the expected counts of all pairs of them
are one matrix product,

.. math:: M = N\, \theta' \, diag(\pi)\, \theta .

In a component columns are independent, but for couples: these have odds for each pair of cells that
all components share.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float, Int

from dpvim.privacy.counts import Cells, Marginal, count_cells
from dpvim.synthesis.marginals.drawing import draw_given
from dpvim.synthesis.marginals.pair_counts import PairCounts, noise_of

# The sampling errors of larger tables are those of so many rows, made smaller.
_SIMULATED_ROWS = 200_000


Matrix: TypeAlias = Any
"""Of NumPy or JAX."""


class Couple(NamedTuple):
    """Two columns that are not independent in a component.

    Attributes:
        first: Its number.
        second: Its number.
        odds: For each pair of cells how many times as likely it is as the two alone, up to factors.
        alone: Probabilities of the second column's cells in each component, but for the odds.
    """

    first: int
    second: int
    odds: Float[np.ndarray, "a b"]
    alone: Float[np.ndarray, "k b"]


class Mixture(NamedTuple):
    """Weights of components, for each column probabilities [k, cells], and couples of columns."""

    weights: Float[np.ndarray, " k"]
    probs: tuple[Float[np.ndarray, "k cells"], ...]
    couples: tuple[Couple, ...] = ()


def coupled(first: Matrix, second: Matrix, odds: Matrix) -> tuple[Matrix, Matrix, Matrix]:
    """Probabilities of two columns' cells in each component, and the sum of those of pairs.

    Args:
        first: Probabilities but for the odds, of each component.
        second: The same of the other column.
        odds: Of pairs of cells.
    """
    of_second = first @ odds
    total = (of_second * second).sum(axis=1, keepdims=True)
    first = first / total
    return first * (second @ odds.T), second * of_second / total, odds * (first.T @ second)


def expected_counts(
    mixture: Mixture, num_rows: float
) -> tuple[Float[np.ndarray, " l"], Float[np.ndarray, "l l"]]:
    """Expected counts of cells, and of pairs of cells of different columns."""
    probs = np.concatenate(mixture.probs, axis=1)
    weighted = num_rows * mixture.weights[:, None] * probs
    sizes = [each.shape[1] for each in mixture.probs]
    column = np.repeat(np.arange(len(sizes)), sizes)
    above = column[:, None] < column[None, :]
    pairs = np.where(above, weighted.T @ probs, 0.0)
    starts = [0, *itertools.accumulate(sizes)]
    for first, second, odds, alone in mixture.couples:
        of_first = mixture.weights[:, None] * mixture.probs[first] / (alone @ odds.T)
        at = np.s_[starts[first] : starts[first + 1], starts[second] : starts[second + 1]]
        pairs[at] = num_rows * odds * (of_first.T @ alone)
    return weighted.sum(axis=0), pairs


def draw_cells(
    mixture: Mixture, num_rows: int, rng: np.random.Generator, *, evenly: bool = False
) -> Int[np.ndarray, "rows columns"]:
    """Records: for each column the cell it is in.

    Args:
        mixture: What they are drawn from.
        num_rows: How many.
        rng: Randomness.
        evenly: Whether every component gets its share of the records, and every cell its share of
            a component's: less random than independent records, and closer to the mixture.
    """
    one = np.zeros(num_rows, np.int64)
    component = draw_given(mixture.weights[None], one, rng, evenly=evenly)
    columns = [draw_given(probs, component, rng, evenly=evenly) for probs in mixture.probs]
    for first, second, odds, alone in mixture.couples:
        for cell in range(len(odds)):
            own = np.flatnonzero(columns[first] == cell)
            if own.size:
                found = draw_given(alone * odds[cell], component[own], rng, evenly=evenly)
                columns[second][own] = found
    return np.stack(columns, axis=1).astype(np.int32)


def release_again(counts: PairCounts, mixture: Mixture, rng: np.random.Generator) -> PairCounts:
    """The released counts with noise and sampling errors once more.

    A table that is simulated from the mixture has the sampling errors of cells, with all their
    correlations, so no covariance matrix is ever formed.
    """
    rows = int(min(max(counts.num_rows, 1), _SIMULATED_ROWS))
    simulated = count_pairs(draw_cells(mixture, rows, rng), counts.sizes)
    expected = expected_counts(mixture, rows)
    # Sampling errors of N records are sqrt(N / rows) times those of fewer.
    scale = np.sqrt(counts.num_rows / rows)
    singles, pairs = (
        scale * (found - mean) for found, mean in zip(simulated, expected, strict=True)
    )
    return counts._replace(
        singles=counts.singles + noise_of(counts.singles_variance, rng) + singles,
        pairs=counts.pairs + noise_of(counts.pairs_variance, rng) + pairs,
    )


def count_pairs(
    codes: Int[np.ndarray, "rows columns"], sizes: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Counts of all cells and pairs of cells of a table that was simulated."""
    columns = range(len(sizes))
    wanted = [Marginal((c,)) for c in columns]
    wanted += [Marginal(pair) for pair in itertools.combinations(columns, 2)]
    cells = Cells(tuple(np.arange(size) for size in sizes))
    found = count_cells([codes], cells, wanted)
    starts = [0, *itertools.accumulate(sizes)]
    pairs = np.zeros((starts[-1], starts[-1]))
    for marginal, block in zip(wanted, found, strict=True):
        if len(marginal.columns) == 2:
            i, j = marginal.columns
            pairs[starts[i] : starts[i + 1], starts[j] : starts[j + 1]] = block
    return np.concatenate(found[: len(sizes)]).astype(float), pairs
