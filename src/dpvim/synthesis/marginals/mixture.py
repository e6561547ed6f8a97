r"""A mixture of product distributions, fitted to noisy counts of pairs of columns.

Component k has the weight :math:`\pi_k` and a distribution :math:`\theta_k` over the cells of every
column. Laid side by side, the cells of all columns are L; the expected counts of all pairs of them
are one matrix product,

.. math:: M = N\, \theta' \, diag(\pi)\, \theta .

The released counts y have known noise. Given the mixture they have mean M and the variance of the
noise plus that of sampling N records, about M itself, so what is minimised is
:math:`\frac12 \sum (y - M)^2 / (\sigma^2 + M)` (the denominator held fixed in its gradient), plus a
normal prior on the shifts of a component's log-probabilities from those of all, which pulls towards
independent columns. How strongly it pulls is learned for each column, as MacKay does it: the scale
is that of the shifts over the share of them that the counts tell, which draws of the posterior say.

**Draws of the posterior** are fits to counts with fresh noise and fresh sampling errors added, and
with the prior's centre drawn from the prior (randomise, then optimise): exact where expected counts
are linear in the parameters, which they are over the width of a posterior that knows something. A
table that is simulated from the fit has the sampling errors of cells, with all their correlations,
so no covariance matrix is ever formed. That components may change their names does not matter: a
draw is a distribution over tables, and that is the same whatever its components are called.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from dpvim._compile import single_precision
from dpvim.privacy.counts import Cells, Marginal, NoisyMarginal, count_cells
from dpvim.synthesis.marginals.drawing import draw_given

# Scale of the prior of components' log-weights, and where the scales of the shifts start.
_WEIGHT_SCALE = 2.0
_FIRST_SCALE = 2.0
_SMALLEST_SCALE, _LARGEST_SCALE = 0.1, 4.0
# How often the scales are learned anew, from how many draws, and the least share of shifts that the
# counts are taken to tell: draws are few.
NUM_ROUNDS, _SCALE_DRAWS, _LEAST_TOLD = 4, 6, 0.02
_STEPS, _RATE = 3000, 0.1
_REFIT_STEPS, _REFIT_RATE = 1000, 0.05
# Components start apart by so much.
_START_SCALE = 0.5
# The sampling errors of larger tables are those of so many rows, made smaller.
_SIMULATED_ROWS = 200_000


class PairCounts(NamedTuple):
    """Released counts, the cells of all columns side by side. Public.

    Attributes:
        sizes: Number of cells of each column.
        singles: Counts of cells.
        singles_variance: Of their noise; infinite where nothing was released.
        pairs: Counts of pairs of cells of different columns, the first column's first.
        pairs_variance: Of their noise; infinite elsewhere.
        num_rows: Number of records, or an estimate of it.
    """

    sizes: tuple[int, ...]
    singles: Float[np.ndarray, " l"]
    singles_variance: Float[np.ndarray, " l"]
    pairs: Float[np.ndarray, "l l"]
    pairs_variance: Float[np.ndarray, "l l"]
    num_rows: float

    @property
    def offsets(self) -> list[int]:
        return [0, *itertools.accumulate(self.sizes)]

    def block(self, first: int, second: int) -> tuple[slice, slice]:
        """Where the counts of a pair of columns are."""
        starts = self.offsets
        return (
            slice(starts[first], starts[first + 1]),
            slice(starts[second], starts[second + 1]),
        )

    @property
    def measured_pairs(self) -> list[tuple[int, int]]:
        columns = range(len(self.sizes))
        return [
            pair
            for pair in itertools.combinations(columns, 2)
            if np.isfinite(self.pairs_variance[self.block(*pair)]).all()
        ]


class MixtureParams(NamedTuple):
    """Unconstrained parameters: logits of the weights, of all, and shifts of components."""

    weights: Float[Array | np.ndarray, " k"]
    base: Float[Array | np.ndarray, " l"]
    shifts: Float[Array | np.ndarray, "k l"]


class FittedMixture(NamedTuple):
    """A fit, and the scales of the prior of its shifts, for each cell."""

    params: MixtureParams
    scales: Float[np.ndarray, " l"]


class Distribution(NamedTuple):
    """A mixture: weights of components, and for each column probabilities [k, cells]."""

    weights: Float[np.ndarray, " k"]
    probs: tuple[Float[np.ndarray, "k cells"], ...]


def gather(
    released: Iterable[NoisyMarginal],
    groups: Sequence[Int[np.ndarray, " cells"]],
    num_rows: float,
) -> PairCounts:
    """All counts of one and two columns that were released, the best of them for each cell.

    Args:
        released: Counts of fine cells (of one column), or of groups.
        groups: For each column the group of each fine cell.
        num_rows: Number of records, or an estimate of it.
    """
    sizes = tuple(int(of_cell.max()) + 1 for of_cell in groups)
    size, starts = sum(sizes), [0, *itertools.accumulate(sizes)]
    # Sums of counts by their precision, and of precisions.
    singles, pairs = np.zeros((2, size)), np.zeros((2, size, size))
    for each in released:
        counts = np.asarray(each.counts, float)
        if len(each.columns) == 1:
            (column,) = each.columns
            of_cell = groups[column] if len(counts) != sizes[column] else np.arange(sizes[column])
            cells = np.bincount(of_cell)
            at = slice(starts[column], starts[column + 1])
            precision = 1 / (each.variance * cells)
            singles[:, at] += np.bincount(of_cell, counts) * precision, precision
        else:
            first, second = each.columns
            block = (
                slice(starts[first], starts[first + 1]),
                slice(starts[second], starts[second + 1]),
            )
            pairs[(slice(None), *block)] += np.stack([counts, np.ones_like(counts)]) / each.variance
    return PairCounts(sizes, *_best(singles), *_best(pairs), num_rows)


def _best(sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    weighted, precision = sums
    with np.errstate(divide="ignore"):
        return weighted / np.where(precision > 0, precision, 1.0), 1 / precision


def fit_mixture(
    counts: PairCounts,
    num_components: int,
    *,
    seed: int,
    after_round: Callable[[], None] = lambda: None,
) -> FittedMixture:
    """The mixture that explains the released counts best; `NUM_ROUNDS` rounds of fitting."""
    starts, rounds = np.random.SeedSequence(seed).spawn(2)
    scales = np.full(sum(counts.sizes), _FIRST_SCALE)
    start = _start(counts, num_components, np.random.default_rng(starts))
    fitted = FittedMixture(_nearest(counts, start, scales, _STEPS, _RATE), scales)
    for each in rounds.spawn(NUM_ROUNDS):
        scales = _learned_scales(counts, fitted, each)
        nearest = _nearest(counts, fitted.params, scales, _REFIT_STEPS, _REFIT_RATE)
        fitted = FittedMixture(nearest, scales)
        after_round()
    return fitted


def _nearest(
    counts: PairCounts, start: MixtureParams, scales: np.ndarray, steps: int, rate: float
) -> MixtureParams:
    centre = jax.tree.map(jnp.zeros_like, start)
    return _minimise(_arrays(counts), start, centre, scales, counts.sizes, steps, rate)


def _learned_scales(
    counts: PairCounts, fitted: FittedMixture, seeds: np.random.SeedSequence
) -> Float[np.ndarray, " l"]:
    """Scales of the prior, one for each column, by what the counts tell of its shifts."""
    shifts = np.asarray(fitted.params.shifts)
    draws = [draw_mixture(counts, fitted, each).shifts for each in seeds.spawn(_SCALE_DRAWS)]
    spread = np.mean([(np.asarray(draw) - shifts) ** 2 for draw in draws], axis=0)
    scales = fitted.scales.copy()
    for start, end in itertools.pairwise(counts.offsets):
        old = scales[start]
        told = max(1 - float(np.mean(spread[:, start:end])) / old**2, _LEAST_TOLD)
        new = np.sqrt(np.mean(shifts[:, start:end] ** 2) / told)
        # Half of the way: what the draws say holds near the scales they were drawn with.
        scales[start:end] = np.clip(np.sqrt(old * new), _SMALLEST_SCALE, _LARGEST_SCALE)
    return scales


def draw_mixture(
    counts: PairCounts, fitted: FittedMixture, seeds: np.random.SeedSequence
) -> MixtureParams:
    """A draw of the posterior, near the fit that is given."""
    rng, params = np.random.default_rng(seeds), fitted.params
    disturbed = _disturbed(counts, distribution(params, counts.sizes), rng)

    def normal(shape: tuple[int, ...], scale: float | np.ndarray) -> np.ndarray:
        return (scale * rng.normal(size=shape)).astype(np.float32)

    centre = MixtureParams(
        normal(params.weights.shape, _WEIGHT_SCALE),
        np.zeros(params.base.shape, np.float32),
        normal(params.shifts.shape, fitted.scales),
    )
    return _minimise(
        _arrays(disturbed),
        params,
        centre,
        fitted.scales,
        counts.sizes,
        _REFIT_STEPS,
        _REFIT_RATE,
    )


def _disturbed(counts: PairCounts, fitted: Distribution, rng: np.random.Generator) -> PairCounts:
    """The counts with noise and sampling errors once more."""
    expected = expected_counts(fitted, counts)
    rows = int(min(max(counts.num_rows, 1), _SIMULATED_ROWS))
    simulated = _count_pairs(draw_cells(fitted, rows, rng), counts.sizes)
    # Sampling errors of N records are sqrt(N / rows) times those of fewer.
    scale = np.sqrt(counts.num_rows / rows)
    share = rows / counts.num_rows

    def moved(
        released: np.ndarray, variance: np.ndarray, found: np.ndarray, mean: np.ndarray
    ) -> np.ndarray:
        noise = np.sqrt(np.where(np.isfinite(variance), variance, 0)) * rng.normal(
            size=released.shape
        )
        return released + noise + scale * (found - share * mean)

    return counts._replace(
        singles=moved(counts.singles, counts.singles_variance, simulated[0], expected[0]),
        pairs=moved(counts.pairs, counts.pairs_variance, simulated[1], expected[1]),
    )


def _count_pairs(
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


def expected_counts(
    fitted: Distribution, counts: PairCounts
) -> tuple[Float[np.ndarray, " l"], Float[np.ndarray, "l l"]]:
    """Expected counts of cells, and of pairs of cells of different columns."""
    probs = np.concatenate(fitted.probs, axis=1)
    weighted = counts.num_rows * fitted.weights[:, None] * probs
    column = np.repeat(np.arange(len(counts.sizes)), counts.sizes)
    above = column[:, None] < column[None, :]
    return weighted.sum(axis=0), np.where(above, weighted.T @ probs, 0.0)


def distribution(params: MixtureParams, sizes: tuple[int, ...]) -> Distribution:
    """The mixture with these parameters, in double precision."""
    weights = np.asarray(params.weights, float)
    logits = np.asarray(params.base, float) + np.asarray(params.shifts, float)
    columns = np.split(logits, list(itertools.accumulate(sizes))[:-1], axis=1)
    return Distribution(_softmax(weights), tuple(map(_softmax, columns)))


def _softmax(logits: np.ndarray) -> np.ndarray:
    odds = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return odds / odds.sum(axis=-1, keepdims=True)


def draw_cells(
    mixture: Distribution, num_rows: int, rng: np.random.Generator, *, evenly: bool = False
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
    return np.stack(columns, axis=1).astype(np.int32)


# The fit, compiled


class _Arrays(NamedTuple):
    singles: Array | np.ndarray
    singles_variance: Array | np.ndarray
    pairs: Array | np.ndarray
    pairs_variance: Array | np.ndarray
    num_rows: Array | np.ndarray


def _arrays(counts: PairCounts) -> _Arrays:
    return _Arrays(*(np.asarray(each, np.float32) for each in counts[1:]))


def _start(counts: PairCounts, num_components: int, rng: np.random.Generator) -> MixtureParams:
    size = sum(counts.sizes)
    shifts = _START_SCALE * rng.normal(size=(num_components, size))
    return MixtureParams(
        np.zeros(num_components, np.float32), np.zeros(size, np.float32), shifts.astype(np.float32)
    )


@single_precision
@functools.partial(jax.jit, static_argnums=(4, 5))
def _minimise(
    counts: _Arrays,
    start: MixtureParams,
    centre: MixtureParams,
    scales: Array,
    sizes: tuple[int, ...],
    steps: int,
    rate: float,
) -> MixtureParams:
    ends = list(itertools.accumulate(sizes))[:-1]

    def loss(params: MixtureParams) -> Array:
        weights = jax.nn.softmax(params.weights)
        logits = jnp.split(params.base + params.shifts, ends, axis=1)
        probs = jnp.concatenate([jax.nn.softmax(each, axis=1) for each in logits], axis=1)
        weighted = jnp.asarray(counts.num_rows) * weights[:, None] * probs
        misfit = _misfit(counts.singles, counts.singles_variance, weighted.sum(axis=0))
        misfit += _misfit(counts.pairs, counts.pairs_variance, weighted.T @ probs)
        away = jnp.sum(((params.shifts - centre.shifts) / scales) ** 2)
        away += jnp.sum(((params.weights - centre.weights) / _WEIGHT_SCALE) ** 2)
        return (misfit + away) / 2

    optimizer = optax.adam(optax.cosine_decay_schedule(rate, steps))

    def step(
        _: Array, carry: tuple[MixtureParams, optax.OptState]
    ) -> tuple[MixtureParams, optax.OptState]:
        params, state = carry
        updates, state = optimizer.update(jax.grad(loss)(params), state)
        return optax.apply_updates(params, updates), state

    return jax.lax.fori_loop(0, steps, step, (start, optimizer.init(start)))[0]


def _misfit(released: Array | np.ndarray, variance: Array | np.ndarray, expected: Array) -> Array:
    """Squares of what is not explained; nothing where nothing was released."""
    total = variance + jax.lax.stop_gradient(jnp.maximum(expected, 1.0))
    return jnp.sum((released - expected) ** 2 / total)
