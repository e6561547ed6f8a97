r"""Draws of the posterior, tilted until ordered columns go together as the released counts say.

Noise makes cells look filled that nobody is in, and cells cannot hold less than nobody: a model of
cells makes close columns go together less closely than they do. A sum over all cells of a pair,
weighted by a score of the row and one of the column, has no such bias, since noise of both signs is
in it, and its size is known. So the distribution p of a draw is replaced by the nearest one whose
mean products of scores are the released ones T, and in which cells of single columns keep their
shares,

.. math:: q(x) \propto p(x) \exp(\lambda' f(x)), \qquad E_q f = T - V \lambda

(exponential tilting; calibration in surveys, entropy balancing). V has the variances of T's noise:
a little slack, for products that noise has made larger than any table has them.

Where columns go together more closely than rows of the model can be made to, few rows would be
left with all of the weight. Then there is more slack: draws go as far as the model's rows carry,
and `closeness` finds that they are not where the counts are.

Scores are places of values, as slopes of regressions have them. Columns of levels without an order
have none (two levels are always in an order), and neither have missing values: these are left to
the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from scipy import sparse
from threadpoolctl import threadpool_limits

from dpvim.synthesis.marginals.grids import Grid, Groups
from dpvim.synthesis.marginals.mixture import Mixture, draw_cells, expected_counts
from dpvim.synthesis.marginals.pair_counts import PairCounts

# Rows that stand for a draw: twice those of the table, between these.
_FEWEST_ROWS, _MOST_ROWS = 20_000, 200_000
# Cells with a smaller share have no score: far out and empty, they would be noise and leverage.
# They keep their share together with others of their column, since too few rows are in them.
_RARE = 1e-3
# Newton's method ends when a step gains less than this, or after so many.
_LEAST_GAIN, _MOST_STEPS = 1e-6, 50
# The most that the logarithm of a weight grows by in a step, relative to the mean.
_LONGEST_STEP = 10.0
# Slack beyond the noise, as standard deviations of mean products, until rows with these weights are
# worth so many that all weigh the same, as a share of all rows.
_MORE_SLACK = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8)
_LEAST_EFFECTIVE = 0.1
_RIDGE = 1e-9


class Scores(NamedTuple):
    """Places of the groups of an ordered column, in standard deviations of its values.

    Attributes:
        values: The mean of each group, centred; zero for missing values.
        missing: Which groups are missing values.
        kept: The share of the variance that is between groups, not within them.
    """

    values: Float[np.ndarray, " groups"]
    missing: Float[np.ndarray, " groups"]
    kept: float


def scores_of(grid: Grid, groups: Groups, sizes: Float[np.ndarray, " groups"]) -> Scores | None:
    """Scores of a column with an order, if its values differ.

    Args:
        grid: Its fine cells.
        groups: Groups of these.
        sizes: Estimated numbers of records in the groups.
    """
    if not grid.ordered and grid.num_values != 2:
        return None
    present = np.arange(grid.num_cells) < grid.num_values
    places = np.append((grid.first + grid.last) / 2, np.zeros(grid.num_cells - grid.num_values))
    within = present * groups.probs / np.bincount(groups.of_cell, groups.probs)[groups.of_cell]
    probs = within * np.maximum(sizes, 0.0)[groups.of_cell]
    if not probs.sum() > 0:
        return None
    probs /= probs.sum()
    centred = places - probs @ places
    variance = probs @ centred**2
    if not variance > 0:
        return None
    values = np.bincount(groups.of_cell, within * centred) / np.sqrt(variance)
    kept = np.bincount(groups.of_cell, probs) @ values**2
    missing = np.bincount(groups.of_cell, present) == 0
    return Scores(values, missing.astype(float), float(kept))


class TiltedRows(NamedTuple):
    """Rows of a model, some of which count more than others."""

    cells: Int[np.ndarray, "rows columns"]
    weights: Float[np.ndarray, " rows"]

    def draw(self, num_rows: int, rng: np.random.Generator) -> Int[np.ndarray, "drawn columns"]:
        """So many rows in random order, each as often as its weight says or once more or less."""
        ends = np.cumsum(self.weights)
        places = (np.arange(num_rows) + rng.random()) / num_rows * ends[-1]
        chosen = np.searchsorted(ends, places, side="right")
        return self.cells[rng.permutation(np.minimum(chosen, len(self.cells) - 1))]


def tilt(
    mixture: Mixture,
    counts: PairCounts,
    all_scores: Sequence[Scores | None],
    rng: np.random.Generator,
) -> TiltedRows:
    """Rows of a mixture, with weights that give them the moments of the counts.

    Args:
        mixture: A draw of the posterior.
        counts: What it was fitted to: the released counts, and noise and sampling once more.
        all_scores: Of each column, if it has some.
        rng: Randomness of the rows.
    """
    rows = int(np.clip(2 * counts.num_rows, _FEWEST_ROWS, _MOST_ROWS))
    cells = draw_cells(mixture, rows, rng)
    wanted = _moments_of(mixture, counts, all_scores)
    return TiltedRows(cells, _weights(cells, counts.sizes, wanted))


class _Moments(NamedTuple):
    """Moments that tilted rows should have: of all cells, and of pairs of columns with scores."""

    shares: Float[np.ndarray, " l"]
    scores: Float[np.ndarray, " l"]
    pairs: tuple[tuple[int, int], ...]
    products: Float[np.ndarray, " p"]
    of_shares: Float[np.ndarray, " l"]
    of_products: Float[np.ndarray, " p"]


def _moments_of(
    mixture: Mixture, counts: PairCounts, all_scores: Sequence[Scores | None]
) -> _Moments:
    found, variance = (
        each / counts.num_rows**power for power, each in enumerate(counts.of_cells(), start=1)
    )
    shares = expected_counts(mixture, 1.0)[0]
    values = np.zeros(len(shares))
    for column, scores in enumerate(all_scores):
        if scores is not None:
            own = slice(*counts.offsets[column : column + 2])
            values[own] = np.where(shares[own] < _RARE, 0.0, scores.values)
            shares[own] = _with_moments(shares[own], scores, found[own])
    pairs, products, of_products = [], [], []
    for first, second in counts.measured_pairs:
        a, b = all_scores[first], all_scores[second]
        if a is not None and b is not None:
            at = counts.block(first, second)
            # Values of a group do not follow the other column: what is lost by it is made up for.
            weights = np.outer(values[at[0]], values[at[1]]) / (counts.num_rows * a.kept * b.kept)
            pairs.append((first, second))
            # No table has more, whatever noise says.
            products.append(np.clip(np.sum(weights * counts.pairs[at]), -1.0, 1.0))
            of_products.append(np.sum(weights**2 * counts.pairs_variance[at]))
    return _Moments(
        shares, values, tuple(pairs), np.array(products), variance, np.array(of_products)
    )


def _with_moments(
    shares: Float[np.ndarray, " groups"], scores: Scores, released: Float[np.ndarray, " groups"]
) -> Float[np.ndarray, " groups"]:
    """Shares close to these, with the released mean and variance of the scores.

    As many are missing as the released counts say.
    """
    powers = np.stack([np.ones_like(shares), scores.values, scores.values**2, scores.missing])
    weighted = powers * shares
    change = np.linalg.lstsq(weighted @ powers.T, powers @ (released - shares), rcond=1e-9)[0]
    changed = np.maximum(shares + change @ weighted, shares / 4)
    return changed / changed.sum()


def _weights(
    cells: Int[np.ndarray, "rows columns"], sizes: tuple[int, ...], wanted: _Moments
) -> Float[np.ndarray, " rows"]:
    """Weights of rows under which they have the moments, up to the slack."""
    starts = np.cumsum((0, *sizes))
    of_cells = cells + starts[:-1]
    scores = wanted.scores[of_cells]
    products = np.empty((len(cells), len(wanted.pairs)))
    for place, (first, second) in enumerate(wanted.pairs):
        products[:, place] = scores[:, first] * scores[:, second]
    # Of each row the cells that it is in; rare ones of a column are one.
    rare = wanted.shares < _RARE
    named = np.where(
        rare, starts[-1] + np.repeat(np.arange(len(sizes)), sizes), np.arange(len(rare))
    )
    _, of_cell = np.unique(named, return_inverse=True)
    ends = np.arange(len(cells) + 1) * len(sizes)
    ones = sparse.csr_array(
        (np.ones(of_cells.size), of_cell[of_cells].ravel(), ends),
        shape=(len(cells), int(of_cell.max()) + 1),
    )
    targets = np.concatenate([np.bincount(of_cell, wanted.shares), wanted.products])
    slack = np.concatenate([np.bincount(of_cell, wanted.of_shares), wanted.of_products]) + _RIDGE
    is_product = np.arange(len(targets)) >= ones.shape[1]
    # Few rows nearly tell the slopes, and all of them mend them in a step or two. The products are
    # small: threads of the BLAS would wait for each other for most of the time.
    few = min(_FEWEST_ROWS, len(cells))
    with threadpool_limits(1, user_api="blas"):
        for more in _MORE_SLACK:
            loose = slack + np.where(is_product, more**2, 0.0)
            slopes, weights = _newton(ones[:few], products[:few], targets, loose)
            if _effective_share(weights) < _LEAST_EFFECTIVE:
                continue
            if few < len(cells):
                slopes, weights = _newton(ones, products, targets, loose, slopes)
            if _effective_share(weights) >= _LEAST_EFFECTIVE:
                return weights
    return np.full(len(cells), 1 / len(cells))


def _effective_share(weights: Float[np.ndarray, " rows"]) -> float:
    """Number of rows with equal weights that these are worth, of all."""
    return float(1 / (np.square(weights).sum() * len(weights)))


def _newton(
    ones: sparse.csr_array,
    products: Float[np.ndarray, "rows p"],
    targets: Float[np.ndarray, " m"],
    slack: Float[np.ndarray, " m"],
    slopes: Float[np.ndarray, " m"] | None = None,
) -> tuple[Float[np.ndarray, " m"], Float[np.ndarray, " rows"]]:
    """Newton's method on the dual of the tilt, which is convex: slopes, and weights of the rows."""
    num_cells = ones.shape[1]
    slopes = np.zeros(len(targets)) if slopes is None else slopes
    # A cell that none of these rows is in has no slope: it would grow without bounds, and take all
    # of the weight among more rows.
    empty = np.append(ones.sum(axis=0) == 0, np.zeros(len(targets) - num_cells, bool))
    targets = np.where(empty, 0.0, targets)

    def dual(slopes: np.ndarray) -> tuple[float, np.ndarray]:
        logs = ones @ slopes[:num_cells] + products @ slopes[num_cells:]
        odds = np.exp(logs - logs.max())
        total = logs.max() + np.log(odds.mean())
        return total - slopes @ targets + slopes**2 @ slack / 2, odds / odds.sum()

    at_zero = dual(np.zeros_like(slopes))
    value, weights = dual(slopes)
    if value > at_zero[0]:  # slopes that some rows liked and others do not
        slopes, (value, weights) = np.zeros_like(slopes), at_zero
    for _ in range(_MOST_STEPS):
        mean = np.concatenate([weights @ ones, weights @ products])
        weighted = weights[:, None] * products
        squares = np.empty((len(targets), len(targets)))
        squares[:num_cells, :num_cells] = (ones.T @ (ones * weights[:, None])).toarray()
        squares[:num_cells, num_cells:] = ones.T @ weighted
        squares[num_cells:, :num_cells] = squares[:num_cells, num_cells:].T
        squares[num_cells:, num_cells:] = weighted.T @ products
        gradient = mean - targets + slack * slopes
        step = np.linalg.solve(squares - np.outer(mean, mean) + np.diag(slack), gradient)
        gain = gradient @ step
        if gain < _LEAST_GAIN:
            break
        # A whole step may put all weight on one row, from where no way leads on.
        change = ones @ step[:num_cells] + products @ step[num_cells:]
        size = min(1.0, _LONGEST_STEP / max(float(np.max(weights @ change - change)), 1e-9))
        moved = dual(slopes - size * step)
        while moved[0] > value - size * gain / 10 and size > 1e-4:
            size /= 2
            moved = dual(slopes - size * step)
        slopes, (value, weights) = slopes - size * step, moved
    return slopes, weights
