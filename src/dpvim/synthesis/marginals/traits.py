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
of an ordered column have slopes that are alike (`prior_factor`). There are two fits:

* The **best** one, for tables that look like the original. How strongly the prior pulls, at all and
  at each column, is chosen by what predicts best: the noise of the counts is known, so they can be
  split into two sets with independent noise, one to fit and one to predict (`split_noise`).
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
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy
from jaxtyping import Array, Float

from dpvim._compile import single_precision
from dpvim.synthesis.marginals.mixture import Mixture, expected_counts, release_again
from dpvim.synthesis.marginals.pair_counts import PairCounts, misfit, split_noise

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
# How counts are split to choose among them: the second set has four times the noise of the first.
_SPLIT_RATIO = 0.5
# Steps and learning rates of fits from afar, and from nearby.
_FIT, _REFIT = (2000, 0.05), (600, 0.03)
_START_SCALE = 0.1
_POINTS_SEED = 0
# Fits that `fit_traits` makes, at most.
NUM_FITS = len(SCALES) + _COLUMN_ROUNDS + 2


class Loadings(NamedTuple):
    """b and W: log-probabilities at the traits' mean, and how they change with each trait."""

    base: Float[Array | np.ndarray, " l"]
    slopes: Float[Array | np.ndarray, "r l"]


class FittedTraits(NamedTuple):
    """Two fits to the same counts.

    Attributes:
        num_points: Of the traits' distribution.
        scales: Of the best fit's prior, for each cell.
        best: The fit that predicts best.
        wide: The fit that draws of the posterior begin at.
    """

    num_points: int
    scales: Float[np.ndarray, " l"]
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


def mixture_of(loadings: Loadings, num_points: int, sizes: tuple[int, ...]) -> Mixture:
    """The mixture of products that these loadings make, in double precision."""
    slopes = np.asarray(loadings.slopes, float)
    logits = np.asarray(loadings.base, float) + points(num_points, len(slopes)) @ slopes
    columns = np.split(logits, list(itertools.accumulate(sizes))[:-1], axis=1)
    return Mixture(np.full(num_points, 1 / num_points), tuple(map(_softmax, columns)))


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
    best = nearest(counts, chosen.found, chosen.scales, *_REFIT)
    after_fit()
    wide = nearest(counts, best, _WIDE_SCALE, *_FIT)
    after_fit()
    return FittedTraits(num_points, chosen.scales, best, wide)


class _Trial(NamedTuple):
    """Scales, the fit to a part of the counts with them, and how badly it predicts the others."""

    error: float
    scales: Float[np.ndarray, " l"]
    found: Loadings


def _best_trial(
    counts: PairCounts,
    nearest: Callable[..., Loadings],
    start: Loadings,
    num_points: int,
    rng: np.random.Generator,
    after_fit: Callable[[], None],
) -> _Trial:
    """The scales of the prior whose fit to a part of the counts predicts the other part best.

    First one for all, then for each column by the size of its slopes, while that helps.
    """
    known, left_out = split_noise(counts, rng, ratio=_SPLIT_RATIO)

    def trial(scales: np.ndarray, start: Loadings, effort: tuple[int, float] = _REFIT) -> _Trial:
        found = nearest(known, start, scales, *effort)
        after_fit()
        mixture = mixture_of(found, num_points, counts.sizes)
        error = misfit(left_out, *expected_counts(mixture, counts.num_rows))
        return _Trial(error, scales, found)

    ones = np.ones(len(start.base))
    trials = [trial(SCALES[0] * ones, start, _FIT)]
    for scale in SCALES[1:]:
        trials.append(trial(scale * ones, trials[-1].found))
    best = min(trials, key=lambda each: each.error)
    overall = best.scales[0]
    for _ in range(_COLUMN_ROUNDS):
        scales = overall * _relative_sizes(best.found.slopes, counts)
        by_column = trial(scales, best.found)
        if by_column.error >= best.error:
            break
        best = by_column
    return best


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
    again = release_again(counts, mixture_of(fitted.wide, fitted.num_points, counts.sizes), rng)
    traits = points(fitted.num_points, len(fitted.wide.slopes))
    centre = _WIDE_SCALE * rng.normal(size=fitted.wide.slopes.shape)
    found = _nearest(traits, factor, again, fitted.wide, _WIDE_SCALE, *_REFIT, centre=centre)
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
    steps: int,
    rate: float,
    *,
    centre: Float[np.ndarray, "r l"] | float = 0.0,
) -> Loadings:
    """The loadings that explain the counts best, from a start.

    What is moved are W F^-1, independent under the prior: of these are the centre and the scales.
    """
    arrays = _Arrays(*(np.asarray(each, np.float32) for each in counts[1:]))
    whitened = np.linalg.solve(factor.T, np.asarray(start.slopes, float).T).T
    found = _minimise(
        arrays,
        traits,
        factor.astype(np.float32),
        Loadings(start.base, whitened.astype(np.float32)),
        np.full(whitened.shape, centre, np.float32),
        np.full(len(factor), scales, np.float32),
        counts.sizes,
        steps,
        rate,
    )
    slopes = np.asarray(found.slopes) @ factor
    return Loadings(np.asarray(found.base), slopes.astype(np.float32))


@single_precision
@functools.partial(jax.jit, static_argnums=6)
def _minimise(
    counts: _Arrays,
    traits: Array,
    factor: Array,
    start: Loadings,
    centre: Array,
    scales: Array,
    sizes: tuple[int, ...],
    steps: int,
    rate: float,
) -> Loadings:
    ends = list(itertools.accumulate(sizes))[:-1]

    def loss(loadings: Loadings) -> Array:
        logits = jnp.split(loadings.base + traits @ (loadings.slopes @ factor), ends, axis=1)
        probs = jnp.concatenate([jax.nn.softmax(each, axis=1) for each in logits], axis=1)
        weighted = jnp.asarray(counts.num_rows) / len(traits) * probs
        away = _misfit(counts.singles, counts.singles_variance, weighted.sum(axis=0))
        away += _misfit(counts.pairs, counts.pairs_variance, weighted.T @ probs)
        return (away + jnp.sum(((loadings.slopes - centre) / scales) ** 2)) / 2

    def cosine_decay(step: Array) -> Array:
        return rate * (1 + jnp.cos(jnp.pi * step / steps)) / 2

    optimizer = optax.adam(cosine_decay)

    def step(_: Array, carry: tuple[Loadings, optax.OptState]) -> tuple[Loadings, optax.OptState]:
        loadings, state = carry
        updates, state = optimizer.update(jax.grad(loss)(loadings), state)
        return optax.apply_updates(loadings, updates), state

    return jax.lax.fori_loop(0, steps, step, (start, optimizer.init(start)))[0]


def _misfit(released: Array | np.ndarray, variance: Array | np.ndarray, expected: Array) -> Array:
    """Squares of what is not explained; nothing where nothing was released."""
    total = variance + jax.lax.stop_gradient(jnp.maximum(expected, 1.0))
    return jnp.sum((released - expected) ** 2 / total)
