r"""Draws of the posterior, tilted until columns go together as the released counts say.

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

Scores are places of values, as slopes of regressions have them (two levels are always in an order),
and of a few levels without an order whether it is this one, as means of groups are compared. Many
levels have none, and neither have missing values: these are left to the model.
"""

from __future__ import annotations

import itertools
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
# Levels without an order are left to the model where a column has more than this: their products
# are many, and rows that have all of them few.
_MOST_LEVELS = 5
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
    """A number for each group of a column, centred, in standard deviations.

    Attributes:
        values: The mean of each group, or whether it is a certain level; zero for missing values.
        missing: Which groups are missing values.
        kept: The share of the variance that is between groups, not within them.
        of_places: Whether these are places of values.
    """

    values: Float[np.ndarray, " groups"]
    missing: Float[np.ndarray, " groups"]
    kept: float
    of_places: bool


def scores_of(
    grid: Grid, groups: Groups, sizes: Float[np.ndarray, " groups"]
) -> tuple[Scores, ...]:
    """Scores of a column whose values differ: of one with an order one, of few levels one each.

    Args:
        grid: Its fine cells.
        groups: Groups of these.
        sizes: Estimated numbers of records in the groups.
    """
    if grid.ordered or grid.num_values == 2:
        return _scores_of_places(grid, groups, sizes)
    return _scores_of_levels(grid, groups, sizes) if grid.num_values <= _MOST_LEVELS else ()


def _scores_of_levels(
    grid: Grid, groups: Groups, sizes: Float[np.ndarray, " groups"]
) -> tuple[Scores, ...]:
    """Scores of all levels but the most frequent, which follows: whether a record has them."""
    missing = _are_missing(grid, groups)
    shares = np.where(missing, 0.0, np.maximum(sizes, 0.0))
    if not shares.sum() > 0:
        return ()
    shares /= shares.sum()
    levels = np.flatnonzero((shares >= _RARE) & (np.arange(len(shares)) != shares.argmax()))
    return tuple(
        Scores(
            np.where(missing, 0.0, (np.arange(len(shares)) == level) - shares[level])
            / np.sqrt(shares[level] * (1 - shares[level])),
            missing,
            kept=1.0,
            of_places=False,
        )
        for level in levels
    )


def _are_missing(grid: Grid, groups: Groups) -> Float[np.ndarray, " groups"]:
    present = np.arange(grid.num_cells) < grid.num_values
    return (np.bincount(groups.of_cell, present) == 0).astype(float)


def _scores_of_places(
    grid: Grid, groups: Groups, sizes: Float[np.ndarray, " groups"]
) -> tuple[Scores, ...]:
    present = np.arange(grid.num_cells) < grid.num_values
    places = np.append((grid.first + grid.last) / 2, np.zeros(grid.num_cells - grid.num_values))
    within = present * groups.probs / np.bincount(groups.of_cell, groups.probs)[groups.of_cell]
    probs = within * np.maximum(sizes, 0.0)[groups.of_cell]
    if not probs.sum() > 0:
        return ()
    probs /= probs.sum()
    centred = places - probs @ places
    variance = probs @ centred**2
    if not variance > 0:
        return ()
    values = np.bincount(groups.of_cell, within * centred) / np.sqrt(variance)
    kept = np.bincount(groups.of_cell, probs) @ values**2
    return (Scores(values, _are_missing(grid, groups), float(kept), of_places=True),)


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
    all_scores: Sequence[Sequence[Scores]],
    rng: np.random.Generator,
) -> TiltedRows:
    """Rows of a mixture, with weights that give them the moments of the counts.

    Args:
        mixture: A draw of the posterior.
        counts: What it was fitted to: the released counts, and noise and sampling once more.
        all_scores: Those of each column.
        rng: Randomness of the rows.
    """
    rows = int(np.clip(2 * counts.num_rows, _FEWEST_ROWS, _MOST_ROWS))
    cells = draw_cells(mixture, rows, rng)
    wanted = _moments_of(mixture, counts, all_scores)
    return TiltedRows(cells, _weights(cells, counts.sizes, wanted))


class _Moments(NamedTuple):
    """Moments that tilted rows should have: of all cells, and of pairs of scores.

    Scores are numbers of cells of a column; pairs are numbers of scores of different columns.
    """

    shares: Float[np.ndarray, " l"]
    scores: tuple[tuple[int, Float[np.ndarray, " groups"]], ...]
    pairs: tuple[tuple[int, int], ...]
    products: Float[np.ndarray, " p"]
    of_shares: Float[np.ndarray, " l"]
    of_products: Float[np.ndarray, " p"]


def _moments_of(
    mixture: Mixture, counts: PairCounts, all_scores: Sequence[Sequence[Scores]]
) -> _Moments:
    found, variance = (
        each / counts.num_rows**power for power, each in enumerate(counts.of_cells(), start=1)
    )
    shares = expected_counts(mixture, 1.0)[0]
    scores, kept = [], []
    for column, of_column in enumerate(all_scores):
        own = slice(*counts.offsets[column : column + 2])
        rare = shares[own] < _RARE
        for each in of_column:
            scores.append((column, np.where(rare, 0.0, each.values)))
            kept.append(each.kept)
            if each.of_places:
                shares[own] = _with_moments(shares[own], each, found[own])
    measured = set(counts.measured_pairs)
    pairs, products, of_products = [], [], []
    for first, second in itertools.combinations(range(len(scores)), 2):
        (a, of_a), (b, of_b) = scores[first], scores[second]
        if (a, b) in measured:
            at = counts.block(a, b)
            # Values of a group do not follow the other column: what is lost by it is made up for.
            weights = np.outer(of_a, of_b) / (counts.num_rows * kept[first] * kept[second])
            pairs.append((first, second))
            # No table has more, whatever noise says.
            products.append(np.clip(np.sum(weights * counts.pairs[at]), -1.0, 1.0))
            of_products.append(np.sum(weights**2 * counts.pairs_variance[at]))
    return _Moments(
        shares, tuple(scores), tuple(pairs), np.array(products), variance, np.array(of_products)
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
    products = _products(cells, wanted)
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


def _products(
    cells: Int[np.ndarray, "rows columns"], wanted: _Moments
) -> Float[np.ndarray, "rows p"]:
    """The products of each row's scores."""
    scores = [values[cells[:, column]] for column, values in wanted.scores]
    products = np.empty((len(cells), len(wanted.pairs)))
    for place, (first, second) in enumerate(wanted.pairs):
        np.multiply(scores[first], scores[second], out=products[:, place])
    return products


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
