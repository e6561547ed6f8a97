r"""A latent trait model, fitted to noisy counts of pairs of columns, and draws of its posterior.

A record has r traits z, standard normal and independent. Given them its columns are independent,
and the log-probabilities of the cells of all columns are linear in the traits, :math:`b + z W`:
as in item response theory, for columns of any number of levels. Instead of all of space the traits
have K points :math:`z_k` that are drawn once and for all, so the model is a mixture of K products
(`Mixture`) in which all weights are 1 / K and few numbers, b and W, make all probabilities.

Why not a mixture whose components are free? Counts of pairs are far from telling all of it, and
what fits them best has relations of three columns that nothing speaks for. Normal traits have next
to none, like the distribution of largest entropy with these pairs (docs/synthesis.md has numbers).

Given the model the released counts y have mean M and the variance of the noise plus that of
sampling N records, about M itself, so what is minimised is
:math:`\frac12 \sum (y - M)^2 / (\sigma^2 + M)` (the denominator held fixed in its gradient), plus a
normal prior on W of mean zero, which pulls towards independent columns. Under it neighbouring cells
of an ordered column have slopes that are alike (`prior_factor`).

Traits cannot follow columns that nearly determine each other: the points are few, and each has all
cells of both. So **couples** of columns may have, beside what the traits say, log-odds for each
pair of cells, the same at all traits:
:math:`p(x_i, x_j | z) \propto p(x_i | z)\, p(x_j | z)\, e^{c_{ij}(x_i, x_j)}`. No column is in two
couples, so these are as good as independent columns of many cells, and cost no more than other
pairs. There are two fits:

* The **best** one, for tables that look like the original. How strongly the prior pulls, at all and
  at each column, is chosen by what predicts best: the noise of the counts is known, so they can be
  split into two sets with independent noise, one to fit and one to predict (`split_noise`). So is
  whether there are couples: of the columns that the traits alone explain worst.
* The **wide** one, where draws of the posterior begin: its prior hardly pulls. A prior that pulls
  makes a better guess of all pairs together, but strong relations are then guessed too weak, and
  intervals around them do not hold.

**Draws of the posterior** are fits to counts with fresh noise and fresh sampling errors added, and
with the prior's centre drawn from the prior (randomise, then optimise): exact where expected counts
are linear in the parameters, which they are over the width of a posterior that knows something.
That traits may be turned around each other does not matter: a draw is a distribution over tables,
and that is the same whatever its axes are called.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy
from jaxtyping import Array, Float

from dpvim._compile import single_precision
from dpvim.synthesis.marginals.mixture import (
    Couple,
    Mixture,
    coupled,
    expected_counts,
    release_again,
)
from dpvim.synthesis.marginals.pair_counts import (
    PairCounts,
    clear_misfits,
    misfit,
    split_noise,
)

# Points cost in proportion to their number and to the square of the number of cells.
_MOST_POINTS, _USUAL_POINTS, _FEW_CELLS = 1024, 512, 128
_MOST_TRAITS = 64
# Scales of W's prior that are tried, from the one that pulls most, and that of the wide fit.
SCALES = (0.09, 0.125, 0.18, 0.25, 0.35, 0.5, 0.7, 1.0)
_WIDE_SCALE = 1.0
# How alike slopes of neighbouring cells are, and over which part of a column's range.
_LIKENESS, _LENGTH = 0.9, 0.5
# A cell whose count is so many standard deviations of its noise has half of the usual slopes; none
# has less than so much of them.
_CLEAR, _LEAST_CLEAR = 3.0, 0.02
# How often scales are set anew by what was found for each column, and how far they may be apart.
_COLUMN_ROUNDS, _SMALLEST_FACTOR, _LARGEST_FACTOR = 3, 0.4, 3.0
# Couples are columns whose misfit is beyond so many standard errors, all of them, else the worse
# half, and so on for so many rounds. Log-odds of cells that stand out from the noise have this
# standard deviation under the prior.
_MISFIT_ERRORS, _COUPLE_ROUNDS, _TOGETHER_SCALE = 4.0, 3, 3.0
# They are not larger than this, so sums of odds and probabilities are neither zero nor infinite.
MOST_LOG_ODDS = 40.0
# How counts are split to choose among them: the second set has four times the noise of the first.
_SPLIT_RATIO = 0.5
# Steps and learning rates of fits from afar, and from nearby.
_FIT, _REFIT = (2000, 0.05), (600, 0.03)
_START_SCALE = 0.1
_POINTS_SEED = 0
# Fits that `fit_traits` makes, at most.
NUM_FITS = 2 * (len(SCALES) + _COLUMN_ROUNDS + _COUPLE_ROUNDS) + 2


Couples: TypeAlias = tuple[tuple[int, int], ...]
"""Pairs of columns, the smaller number first; none is in two."""


class Loadings(NamedTuple):
    """b and W: log-probabilities at the traits' mean, and how they change with each trait.

    For each couple of columns there are log-odds of pairs of their cells.
    """

    base: Float[Array | np.ndarray, " l"]
    slopes: Float[Array | np.ndarray, "r l"]
    together: tuple[Float[Array | np.ndarray, "a b"], ...] = ()


class FittedTraits(NamedTuple):
    """Two fits to the same counts.

    Attributes:
        num_points: Of the traits' distribution.
        scales: Of the best fit's prior, for each cell.
        couples: Columns that have log-odds together.
        best: The fit that predicts best.
        wide: The fit that draws of the posterior begin at.
    """

    num_points: int
    scales: Float[np.ndarray, " l"]
    couples: Couples
    best: Loadings
    wide: Loadings


@functools.cache
def points(num_points: int, num_traits: int) -> Float[np.ndarray, "k r"]:
    """Values of the traits: normal draws with mean zero and no correlations, always the same."""
    rng = np.random.default_rng([_POINTS_SEED, num_points, num_traits])
    drawn = rng.normal(size=(num_points, num_traits))
    if num_points > num_traits:
        left, _, right = np.linalg.svd(drawn - drawn.mean(axis=0), full_matrices=False)
        drawn = np.sqrt(num_points) * left @ right
    return drawn.astype(np.float32)


def mixture_of(
    loadings: Loadings, num_points: int, sizes: tuple[int, ...], couples: Couples = ()
) -> Mixture:
    """The mixture of products that these loadings make, in double precision."""
    slopes = np.asarray(loadings.slopes, float)
    logits = np.asarray(loadings.base, float) + points(num_points, len(slopes)) @ slopes
    columns = np.split(logits, list(itertools.accumulate(sizes))[:-1], axis=1)
    probs = [_softmax(column) for column in columns]
    found = []
    for (first, second), together in zip(couples, loadings.together, strict=True):
        odds, alone = np.exp(np.asarray(together, float)), probs[second]
        probs[first], probs[second], _ = coupled(probs[first], alone, odds)
        found.append(Couple(first, second, odds, alone))
    return Mixture(np.full(num_points, 1 / num_points), tuple(probs), tuple(found))


def _softmax(logits: np.ndarray) -> np.ndarray:
    odds = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return odds / odds.sum(axis=-1, keepdims=True)


def prior_factor(counts: PairCounts, in_order: Sequence[int]) -> Float[np.ndarray, "l l"]:
    """F with F'F the covariance of a trait's slopes under a prior of scale one.

    Slopes of cells whose counts do not stand out from the noise are close to zero: such cells go
    with others as chance has it. Otherwise every one of their pairs is fitted by itself, and where
    it is noise, by what is positive in it: rare levels would come out far too frequent.

    Args:
        counts: All that was released.
        in_order: For each column, how many of its first cells are in an order, in which neighbours
            are alike.
    """
    blocks = []
    for size, ordered in zip(counts.sizes, in_order, strict=True):
        covariance = np.eye(size)
        places = np.linspace(0, 1, max(ordered, 2))[:ordered]
        apart = (places[:, None] - places[None, :]) / _LENGTH
        covariance[:ordered, :ordered] *= 1 - _LIKENESS
        covariance[:ordered, :ordered] += _LIKENESS * np.exp(-(apart**2) / 2)
        blocks.append(np.linalg.cholesky(covariance).T)
    found, variance = counts.of_cells()
    clear = np.maximum(found, 0.0) / (np.maximum(found, 0.0) + _CLEAR * np.sqrt(variance))
    return scipy.linalg.block_diag(*blocks) * np.maximum(clear, _LEAST_CLEAR)


def fit_traits(
    counts: PairCounts,
    factor: Float[np.ndarray, "l l"],
    *,
    seed: int,
    num_points: int | None = None,
    after_fit: Callable[[], None] = lambda: None,
) -> FittedTraits:
    """Fit the model to released counts.

    Args:
        counts: All that was released.
        factor: Of the prior; see `prior_factor`.
        seed: Of what protects nothing: where the fit starts, how counts are split.
        num_points: Number of points; default by the number of cells.
        after_fit: Called after each of at most `NUM_FITS` fits.
    """
    size = sum(counts.sizes)
    if num_points is None:
        num_points = _MOST_POINTS if size <= _FEW_CELLS else _USUAL_POINTS
    for_start, for_split = map(np.random.default_rng, np.random.SeedSequence(seed).spawn(2))
    num_traits = min(_MOST_TRAITS, size, num_points)
    slopes = _START_SCALE * for_start.normal(size=(num_traits, size))
    start = Loadings(np.zeros(size, np.float32), slopes.astype(np.float32))

    nearest = functools.partial(_nearest, points(num_points, num_traits), factor)
    chosen = _best_trial(counts, nearest, start, num_points, for_split, after_fit)
    couples = chosen.couples
    best = nearest(counts, chosen.found[0], chosen.scales, couples, *_REFIT)
    after_fit()
    wide = nearest(counts, best, _WIDE_SCALE, couples, *_FIT)
    after_fit()
    return FittedTraits(num_points, chosen.scales, couples, best, wide)


class _Trial(NamedTuple):
    """A prior, the fits to parts of the counts with it, and how badly they predict the others."""

    error: float
    scales: Float[np.ndarray, " l"]
    couples: Couples
    found: list[Loadings]
    pairs: Float[np.ndarray, "l l"]


def _best_trial(
    counts: PairCounts,
    nearest: Callable[..., Loadings],
    start: Loadings,
    num_points: int,
    rng: np.random.Generator,
    after_fit: Callable[[], None],
) -> _Trial:
    """The prior whose fits to a part of the counts predict the other part best.

    First one scale for all, then for each column by the size of its slopes, while that helps; then
    couples.
    """
    splits = split_noise(counts, rng, ratio=_SPLIT_RATIO)

    def trial(
        scales: np.ndarray,
        starts: Sequence[Loadings],
        couples: Couples = (),
        effort: tuple[int, float] = _REFIT,
    ) -> _Trial:
        error, fits, mean = 0.0, [], np.zeros_like(counts.pairs)
        for (known, left_out), start in zip(splits, starts, strict=True):
            fits.append(nearest(known, start, scales, couples, *effort))
            after_fit()
            mixture = mixture_of(fits[-1], num_points, counts.sizes, couples)
            singles, pairs = expected_counts(mixture, counts.num_rows)
            error += misfit(left_out, singles, pairs)
            mean += pairs / len(splits)
        return _Trial(error, scales, couples, fits, mean)

    ones = np.ones(len(start.base))
    trials = [trial(SCALES[0] * ones, [start] * len(splits), effort=_FIT)]
    for scale in SCALES[1:]:
        trials.append(trial(scale * ones, trials[-1].found))
    best = min(trials, key=lambda each: each.error)
    overall = best.scales[0]
    for _ in range(_COLUMN_ROUNDS):
        scales = overall * _relative_sizes(best.found[0].slopes, counts)
        by_column = trial(scales, best.found)
        if by_column.error >= best.error:
            break
        best = by_column
    couples = _couples_of(clear_misfits(counts, best.pairs, errors=_MISFIT_ERRORS))
    for _ in range(_COUPLE_ROUNDS):
        if couples:
            with_couples = trial(best.scales, best.found, couples)
            if with_couples.error < best.error:
                return with_couples
            couples = couples[: len(couples) // 2]
    return best


def _couples_of(misfits: dict[tuple[int, int], float]) -> Couples:
    """The columns that are explained worst, none of them twice, the worst first."""
    found: list[tuple[int, int]] = []
    for pair in sorted(misfits, key=lambda pair: -misfits[pair]):
        if not {column for couple in found for column in couple} & set(pair):
            found.append(pair)
    return tuple(found)


def _relative_sizes(
    slopes: Float[Array | np.ndarray, "r l"], counts: PairCounts
) -> Float[np.ndarray, " l"]:
    """For each cell the size of its column's slopes, relative to those of all columns."""
    blocks = np.split(np.asarray(slopes), counts.offsets[1:-1], axis=1)
    sizes = np.array([np.sqrt(np.mean(np.square(block))) for block in blocks])
    factors = np.clip(sizes / np.sqrt(np.mean(sizes**2)), _SMALLEST_FACTOR, _LARGEST_FACTOR)
    return np.repeat(factors, counts.sizes)


class Draw(NamedTuple):
    """A draw of the posterior, and what it was fitted to."""

    loadings: Loadings
    counts: PairCounts


def draw_loadings(
    counts: PairCounts,
    factor: Float[np.ndarray, "l l"],
    fitted: FittedTraits,
    seeds: np.random.SeedSequence,
) -> Draw:
    """A draw of the posterior; arguments as in `fit_traits`."""
    rng = np.random.default_rng(seeds)
    couples, wide = fitted.couples, fitted.wide
    again = release_again(counts, mixture_of(wide, fitted.num_points, counts.sizes, couples), rng)
    traits = points(fitted.num_points, len(wide.slopes))
    centre = _WIDE_SCALE * rng.normal(size=wide.slopes.shape)
    centres = tuple(rng.normal(size=together.shape) for together in wide.together)
    found = _nearest(
        traits, factor, again, wide, _WIDE_SCALE, couples, *_REFIT, centre=(centre, centres)
    )
    return Draw(found, again)


# The fit, compiled


class _Arrays(NamedTuple):
    singles: Array | np.ndarray
    singles_variance: Array | np.ndarray
    pairs: Array | np.ndarray
    pairs_variance: Array | np.ndarray
    num_rows: Array | np.ndarray


def _nearest(
    traits: Float[np.ndarray, "k r"],
    factor: Float[np.ndarray, "l l"],
    counts: PairCounts,
    start: Loadings,
    scales: Float[np.ndarray, " l"] | float,
    couples: Couples,
    steps: int,
    rate: float,
    *,
    centre: tuple[Float[np.ndarray, "r l"], tuple[np.ndarray, ...]] | None = None,
) -> Loadings:
    """The loadings that explain the counts best, from a start.

    What is moved are W F^-1, independent under the prior: of these are the centre and the scales;
    and log-odds of couples in their standard deviations. Couples that the start does not have
    begin at zero.
    """
    arrays = _Arrays(*(np.asarray(each, np.float32) for each in counts[1:]))
    whitened = np.linalg.solve(factor.T, np.asarray(start.slopes, float).T).T
    # Cells that do not stand out from the noise have next to no slopes, and no log-odds either.
    clear = np.split(np.sqrt(np.square(factor).sum(axis=0)), counts.offsets[1:-1])
    spreads = tuple(_TOGETHER_SCALE * np.outer(clear[a], clear[b]) for a, b in couples)
    together = start.together or tuple(np.zeros_like(spread) for spread in spreads)
    odds = tuple(np.asarray(o) / spread for o, spread in zip(together, spreads, strict=True))
    if centre is None:
        centre = np.zeros_like(whitened), tuple(np.zeros_like(each) for each in odds)
    found = _minimise(
        arrays,
        traits,
        factor.astype(np.float32),
        _in_single((np.asarray(start.base), whitened, odds)),
        _in_single(centre),
        np.full(len(factor), scales, np.float32),
        _in_single(spreads),
        couples,
        counts.sizes,
        steps,
        rate,
    )
    slopes = np.asarray(found.slopes) @ factor
    together = tuple(
        np.clip(np.asarray(o) * spread, -MOST_LOG_ODDS, MOST_LOG_ODDS)
        for o, spread in zip(found.together, spreads, strict=True)
    )
    return Loadings(np.asarray(found.base), *_in_single((slopes, together)))


def _in_single(arrays: Any) -> Any:
    return jax.tree.map(lambda each: np.asarray(each, np.float32), arrays)


@single_precision
@functools.partial(jax.jit, static_argnums=(7, 8))
def _minimise(
    counts: _Arrays,
    traits: Array,
    factor: Array,
    start: tuple[Array, Array, tuple[Array, ...]],
    centre: tuple[Array, tuple[Array, ...]],
    scales: Array,
    spreads: tuple[Array, ...],
    couples: Couples,
    sizes: tuple[int, ...],
    steps: int,
    rate: float,
) -> Loadings:
    starts = [0, *itertools.accumulate(sizes)]
    total = jnp.asarray(counts.num_rows)

    def loss(loadings: Loadings) -> Array:
        logits = jnp.split(
            loadings.base + traits @ (loadings.slopes @ factor), starts[1:-1], axis=1
        )
        columns = [jax.nn.softmax(each, axis=1) for each in logits]
        joint = {}
        for (a, b), spread, each in zip(couples, spreads, loadings.together, strict=True):
            odds = jnp.exp(jnp.clip(spread * each, -MOST_LOG_ODDS, MOST_LOG_ODDS))
            columns[a], columns[b], joint[a, b] = coupled(columns[a], columns[b], odds)
        probs = jnp.concatenate(columns, axis=1)
        weighted = total / len(traits) * probs
        pairs = weighted.T @ probs
        for (a, b), found in joint.items():
            pairs = jax.lax.dynamic_update_slice(
                pairs, total / len(traits) * found, (starts[a], starts[b])
            )
        away = _misfit(counts.singles, counts.singles_variance, weighted.sum(axis=0))
        away += _misfit(counts.pairs, counts.pairs_variance, pairs)
        away += jnp.sum(((loadings.slopes - centre[0]) / scales) ** 2)
        for each, middle in zip(loadings.together, centre[1], strict=True):
            away += jnp.sum((each - middle) ** 2)
        return away / 2

    def cosine_decay(step: Array) -> Array:
        return rate * (1 + jnp.cos(jnp.pi * step / steps)) / 2

    optimizer = optax.adam(cosine_decay)

    def step(_: Array, carry: tuple[Loadings, optax.OptState]) -> tuple[Loadings, optax.OptState]:
        loadings, state = carry
        updates, state = optimizer.update(jax.grad(loss)(loadings), state)
        return optax.apply_updates(loadings, updates), state

    begin = Loadings(*start)
    return jax.lax.fori_loop(0, steps, step, (begin, optimizer.init(begin)))[0]


def _misfit(released: Array | np.ndarray, variance: Array | np.ndarray, expected: Array) -> Array:
    """Squares of what is not explained; nothing where nothing was released."""
    total = variance + jax.lax.stop_gradient(jnp.maximum(expected, 1.0))
    return jnp.sum((released - expected) ** 2 / total)
