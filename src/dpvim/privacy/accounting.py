r"""How much privacy a run costs, and how much noise a budget asks for.

One event describes the whole run (`dp_event`); the accountant interprets it and nothing else.

The accountant composes privacy loss distributions (PLD) and returns upper bounds. With P and Q
the distributions of one release on two neighbouring data sets, the privacy loss is
``L = log dP/dQ`` under P, the losses of T steps add, and ``delta(epsilon) = E max(0, 1 -
exp(epsilon - L))``. What is computed departs from that in one direction only:

* One step's loss is cut into pieces, and the mass of a piece is put on the two ends of an interval
  of the grid, so that its mass under P and under Q are kept (connect-the-dots). A spread like this
  can only raise delta. How far is known, and the width of the grid is chosen after it.
* The T-fold sum is one Fourier transform, under an exponential tilt that moves the losses of
  interest to the middle of the distribution. A delta of 1e-12 then keeps its leading digits. What
  wraps around counts on top of what belongs there, and what lies above the window is added.
* Mass that is cut off counts as infinite loss, and rounding errors are added at their bound.
* A record that is drawn with so many others that the batch is cut to size counts as infinite loss
  too (`cut_prob`). Plans have caps for which this is next to nothing.

>>> event = dp_event(noise_multiplier=4.0, sampling_prob=0.1, num_steps=1000,
...                  num_examples=10_000, max_batch_size=1310)
>>> 1.9 < epsilon_of(event, delta=1e-5, relation="zero_out") < 4.5
True
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import scipy

from dpvim import cache
from dpvim.types import Relation

if TYPE_CHECKING:
    import dp_accounting

ACCOUNTANT = "PLD (connect-the-dots, tilted Fourier transform, upper bound)"

# Part of what a cached answer is filed under: raise it with every change of the numbers.
_ALGORITHM = 2

# The grid's width is halved until that changes epsilon by less than this, relative to epsilon or to
# `_SMALL_EPSILON`, whichever is larger. What is left is a third of it, or all of it at worst.
_TOLERANCE = 2.5e-3
_SMALL_EPSILON = 0.01
# The search for a noise multiplier begins on grids that are cheaper by far.
_SEARCH_TOLERANCE = 3e-2
_LOG_NOISE_TOLERANCE = 4e-4

# Pieces of one step's loss, between points that are evenly spaced on the scale of the noise. Each
# is about 1/400 of a standard deviation wide, which adds less than 1e-5 of the loss's variance.
_PIECES = 2**13
# Mass that counts as infinite loss, and mass that wraps around, as parts of what makes up delta.
_CUT_OFF = 1e-7
_WRAPPED = 1e-5
# A bound on the relative rounding error of one step's masses, losses and Fourier coefficients:
# three times the most that is seen against extended precision. T steps have T times that.
_ROUNDING = 5e-15
# Where records are rarely in a batch (q < 1e-4, T > 1e5), the tilt may bring up single losses that
# are far above epsilon and far too rare to matter, and the window widens. A window of so many
# points is tried with less of a tilt, where rounding errors allow it.
_MANY_POINTS = 2**20
# Memory and time end here, and with them the refinement of the grid. What is returned is an upper
# bound still, but may be well above the tight value.
_MOST_POINTS = 2**22

_LEAST_NOISE = 1e-3
# Noise from disk may leave at most a small part of the budget unused.
_LEAST_PART = 0.98


def dp_event(
    *,
    noise_multiplier: float,
    sampling_prob: float,
    num_steps: int,
    num_examples: int,
    max_batch_size: int,
) -> dp_accounting.DpEvent:
    """The run as data: what sampler, clip and noise do together, `num_steps` times.

    A batch that holds every record is no subsampling; one that can hold every record is never
    truncated; otherwise the cap on the batch is part of the event.
    """
    import dp_accounting

    step: dp_accounting.DpEvent
    if sampling_prob == 1:
        step = dp_accounting.GaussianDpEvent(noise_multiplier)
    elif max_batch_size >= num_examples:
        step = dp_accounting.PoissonSampledDpEvent(
            sampling_prob, dp_accounting.GaussianDpEvent(noise_multiplier)
        )
    else:
        step = dp_accounting.TruncatedSubsampledGaussianDpEvent(
            dataset_size=num_examples,
            sampling_probability=sampling_prob,
            truncated_batch_size=max_batch_size,
            noise_multiplier=noise_multiplier,
        )
    return dp_accounting.SelfComposedDpEvent(step, num_steps)


def cut_prob(*, sampling_prob: float, num_examples: int, max_batch_size: int) -> float:
    """The probability that a step draws a record, and as many others as the cap or more.

    This is what the cap adds to delta in a step, for all relations and however batches are cut.
    Whether the others fill the batch depends on their own coins: it is the same for neighbours,
    independent of all else, and may be known. If they do not fill it, nothing is cut with the
    record or without it. If they do and it is not drawn, neighbours release the same. What is
    left is a step like one without a cap, one that costs nothing, and this event.
    """
    if max_batch_size >= num_examples:
        return 0.0
    # The upper tail of a binomial distribution over the others.
    others = scipy.special.betainc(max_batch_size, num_examples - max_batch_size, sampling_prob)
    return sampling_prob * float(others)


def epsilon_of(
    event: dp_accounting.SelfComposedDpEvent, *, delta: float, relation: Relation
) -> float:
    """The smallest epsilon the accountant can promise for `event` at `delta`.

    Guarantees:
        An upper bound, within 0.5 % of the tight value if that is at least 0.01 and the cap adds
        at most a thousandth of `delta`, see `cut_prob`. Rounding errors can make it 0.71 % where
        q < 1e-4, T > 1e4 and delta < 1e-10.

    Raises:
        ValueError: The cap alone adds `delta` or more.
    """
    return _epsilon_in_memory(event, float(delta), Relation(relation))


@functools.lru_cache(maxsize=1024)
def _epsilon_in_memory(
    event: dp_accounting.SelfComposedDpEvent, delta: float, relation: Relation
) -> float:
    """Epsilon, computed once in a process. No file is asked: this is what statements claim."""
    return _epsilon(event, delta, relation)


def calibrate_noise(
    *,
    epsilon: float,
    delta: float,
    relation: Relation,
    sampling_prob: float,
    num_steps: int,
    num_examples: int,
    max_batch_size: int,
) -> float:
    """The smallest noise multiplier whose run costs at most (epsilon, delta), to 4e-4 of itself.

    Guarantees:
        `epsilon_of` the run with this noise is at most `epsilon`.
    """
    relation = Relation(relation)

    def event_with(noise: float) -> dp_accounting.SelfComposedDpEvent:
        return dp_event(
            noise_multiplier=noise,
            sampling_prob=sampling_prob,
            num_steps=num_steps,
            num_examples=num_examples,
            max_batch_size=max_batch_size,
        )

    @functools.cache
    def cost(log_noise: float, tolerance: float) -> float:
        event = event_with(math.exp(log_noise))
        return _epsilon(event, delta, relation, tolerance, one_direction=True)

    def cost_of(noise: float) -> float:
        return epsilon_of(event_with(noise), delta=delta, relation=relation)

    def is_right(noise: float) -> bool:
        """Whether noise that was found on disk is enough, and not far more than that."""
        return noise >= _LEAST_NOISE and _LEAST_PART * epsilon <= cost_of(noise) <= epsilon

    def answer() -> float:
        guess = _gaussian_limit_noise(epsilon, delta, relation, sampling_prob, num_steps)
        rough = functools.partial(cost, tolerance=_SEARCH_TOLERANCE)
        fine = functools.partial(cost, tolerance=_TOLERANCE)
        near = _bracketed_root(rough, epsilon, math.log(guess))
        slope = (rough(near + 0.05) - rough(near)) / 0.05
        log_noise = _root_near(near, fine, epsilon, slope)
        while cost_of(math.exp(log_noise)) > epsilon:
            log_noise += _LOG_NOISE_TOLERANCE
        return math.exp(log_noise)

    question = {
        "delta": repr(float(delta)),
        "epsilon": repr(float(epsilon)),
        "event": repr(event_with(1.0)),
        "relation": relation.value,
    }
    versions = {"algorithm": str(_ALGORITHM)} | {
        name: importlib.metadata.version(name) for name in ("dpvim", "dp-accounting")
    }
    return cache.remember(versions | question, answer, is_right=is_right)


def _bracketed_root(cost: Callable[[float], float], epsilon: float, guess: float) -> float:
    """The logarithm of the noise that costs `epsilon`, to about 1 %."""
    high, width = guess + 0.05, 0.1
    while cost(high) > epsilon:
        high, width = high + width, 2 * width
    low = high - width
    while cost(low) <= epsilon:
        low, high, width = low - 2 * width, low, 2 * width
        if low < math.log(_LEAST_NOISE):
            raise ValueError(
                "delta: expected less than the probability that a record is in any batch at all. "
                f"At this one even next to no noise costs less than epsilon = {epsilon:g}, and "
                "protects nobody who was sampled; choose a smaller delta."
            )

    def log_excess(log_noise: float) -> float:  # closer to a straight line
        return math.log(max(cost(log_noise) / epsilon, 0.01))

    return float(scipy.optimize.brentq(log_excess, low, high, xtol=1e-2))


def _root_near(
    log_noise: float, cost: Callable[[float], float], epsilon: float, slope: float
) -> float:
    """The logarithm of a noise that costs `epsilon` or just less, in few evaluations."""
    low, high, last = -math.inf, math.inf, log_noise
    while high - low > _LOG_NOISE_TOLERANCE:
        if abs(log_noise - last) > 10 * _LOG_NOISE_TOLERANCE:  # else it is the grids that differ
            slope = (cost(log_noise) - cost(last)) / (log_noise - last)
        last = log_noise
        # Epsilon falls at least about as fast as the noise grows, whatever the errors of the rest.
        missing = (epsilon - cost(log_noise)) / min(slope, -0.5 * epsilon)
        if -_LOG_NOISE_TOLERANCE <= missing <= 0:
            return log_noise
        low, high = (log_noise, high) if missing > 0 else (low, log_noise)
        # Half of what is allowed to the safe side, and bisection where the slope is not to be had.
        log_noise += min(0.05, max(-0.05, missing)) + 0.5 * _LOG_NOISE_TOLERANCE
        if not low < log_noise < high:
            log_noise = (low + high) / 2
    return high


def _gaussian_limit_noise(
    epsilon: float, delta: float, relation: Relation, sampling_prob: float, num_steps: int
) -> float:
    """Noise multiplier of the central limit of `num_steps` subsampled Gaussian steps."""
    import dp_accounting

    noise = dp_accounting.get_sigma_gaussian(epsilon, delta)
    per_step = 1 / (noise * sampling_prob * math.sqrt(num_steps))
    sensitivity = 2.0 if relation is Relation.REPLACE_ONE else 1.0
    return sensitivity / math.sqrt(math.log1p(per_step**2))


@dataclasses.dataclass(frozen=True)
class _Pair:
    """One step on two neighbouring data sets, on the line on which they differ, in units of noise.

    P = (1 - p) N(0, 1) + p N(shift, 1) and Q = (1 - r) N(0, 1) + r N(-shift, 1).
    """

    p: float
    r: float
    shift: float

    def loss(self, x: np.ndarray) -> np.ndarray:
        """log dP/dQ, which grows with x."""
        return _log_mixture(self.p, x, self.shift) - _log_mixture(self.r, -x, self.shift)


def _log_mixture(prob: float, x: np.ndarray, shift: float) -> np.ndarray:
    """Logarithm of (1 - prob) N(0, 1) + prob N(shift, 1) relative to N(0, 1)."""
    exponent = shift * x - 0.5 * shift**2
    if prob in (0, 1):
        return prob * exponent
    near = np.log1p(prob * np.expm1(np.clip(exponent, -1, 1)))
    far = np.logaddexp(math.log1p(-prob), math.log(prob) + exponent)
    return np.where(np.abs(exponent) < 1, near, far)


def _directions(step: dp_accounting.DpEvent, relation: Relation) -> list[_Pair]:
    """What a step that is not cut may look like on neighbours: all of these have to be protected.

    Under `replace_one` the record moves the sum one way or the other way. Else it moves it or is
    not there, and P and Q may be either; Q, P is Q, P mirrored.
    """
    import dp_accounting

    if isinstance(step, dp_accounting.GaussianDpEvent):
        prob, noise = 1.0, step.noise_multiplier
    elif isinstance(step, dp_accounting.PoissonSampledDpEvent):
        prob, noise = step.sampling_probability, step.event.noise_multiplier
    else:
        prob, noise = step.sampling_probability, step.noise_multiplier
    sides = [(prob, prob)] if relation is Relation.REPLACE_ONE else [(prob, 0.0), (0.0, prob)]
    return [_Pair(p, r, 1 / noise) for p, r in sides]


def delta_without_cap(step: dp_accounting.DpEvent, num_steps: int, delta: float) -> float:
    """What is left of `delta` for steps that are not cut."""
    import dp_accounting

    if not isinstance(step, dp_accounting.TruncatedSubsampledGaussianDpEvent):
        return delta
    spent = num_steps * cut_prob(
        sampling_prob=step.sampling_probability,
        num_examples=step.dataset_size,
        max_batch_size=step.truncated_batch_size,
    )
    if spent >= delta:
        raise ValueError(
            f"delta: expected more than {spent:.3g}, the probability that a record is in a batch "
            f"that is cut to size, got {delta:g}. Choose a larger delta or fewer steps."
        )
    return delta - spent


def _epsilon(
    event: dp_accounting.SelfComposedDpEvent,
    delta: float,
    relation: Relation,
    tolerance: float = _TOLERANCE,
    one_direction: bool = False,
) -> float:
    """Upper bound on epsilon; in one direction it is nearly always the same."""
    import dp_accounting

    step, num_steps = event.event, event.count
    delta = delta_without_cap(step, num_steps, delta)
    if isinstance(step, dp_accounting.GaussianDpEvent):
        # A composition of Gaussians is one Gaussian.
        step = dp_accounting.GaussianDpEvent(step.noise_multiplier / math.sqrt(num_steps))
        num_steps = 1
    epsilon = 0.0
    for pair in _directions(step, relation)[: 1 if one_direction else None]:
        epsilon = _epsilon_above(epsilon, pair, num_steps, delta, tolerance)
    return epsilon


def _epsilon_above(
    floor: float, pair: _Pair, num_steps: int, delta: float, tolerance: float
) -> float:
    """Upper bound on epsilon in one direction, or `floor` if that is larger."""
    step = _cut_to_pieces(pair, _CUT_OFF * delta / num_steps)
    aim = max(floor, _SMALL_EPSILON, _renyi_guess(step, num_steps, delta))
    best = width = math.inf
    ease = 1.0
    while True:
        tilt = ease * _tilt_to(step, num_steps, aim)
        # The first grid is a coarse one, to see what to aim at.
        excess = (tolerance / 3 if best < math.inf else 0.01) * aim
        width = min(width / 2, _expected_width(step, num_steps, tilt, aim, excess))
        grid = _grid(step, tilt, width)
        low, high = _window(grid, num_steps, delta, aim)
        if high - low > _MANY_POINTS * width:
            less = _grid(step, 0.9 * tilt, width)
            # What a small part of delta adds to epsilon is about that part divided by the tilt.
            if _rounding_share(less, num_steps, delta, aim) < 0.4 * tolerance * less.tilt * aim:
                ease, width = 0.9 * ease, 2 * width
                continue
        if high - low > _MOST_POINTS * width:
            if best < math.inf:
                return best
            width = (high - low) / _MOST_POINTS
            grid = _grid(step, tilt, width)
            low, high = _window(grid, num_steps, delta, aim)
        epsilon = _solve(grid, num_steps, delta, floor, low, max(high, floor + width))
        if epsilon is None:  # it lies below all that is seen under this tilt
            ease, width = ease / 4, 2 * width
            continue
        change, best = abs(best - epsilon), min(best, epsilon)
        if best <= floor or change <= tolerance * max(best, _SMALL_EPSILON):
            return best
        aim = max(best, _SMALL_EPSILON)


@dataclasses.dataclass(frozen=True)
class _Pieces:
    """One step's loss in pieces: their ends, mean losses and masses; the mass that is in none."""

    low: np.ndarray
    high: np.ndarray
    mean: np.ndarray
    mass: np.ndarray
    lost: float


def _cut_to_pieces(pair: _Pair, cut_off: float) -> _Pieces:
    """The mean loss of a piece is log P/Q of its masses.

    This is what remains of it if all outcomes in the piece look the same: a little less than there
    is. It fixes how the grid shares out the mass of the piece, which makes it more than there is.
    """
    end = -scipy.special.ndtri(cut_off / 4)
    x = np.linspace(-end, end + (pair.shift if pair.p > 0 else 0.0), _PIECES + 1)
    loss = pair.loss(x)
    still = _normal_mass(x)
    upper = (1 - pair.p) * still + pair.p * _normal_mass(x - pair.shift)
    lower = (1 - pair.r) * still + pair.r * _normal_mass(x + pair.shift)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = np.nan_to_num(np.log(upper / lower), nan=np.inf)
    mean = np.clip(mean, loss[:-1], loss[1:])
    tails = scipy.special.ndtr([x[0], -x[-1], x[0] - pair.shift, pair.shift - x[-1]])
    lost = float(tails @ [1 - pair.p, 1 - pair.p, pair.p, pair.p])
    return _Pieces(loss[:-1], loss[1:], mean, upper, lost)


def _normal_mass(x: np.ndarray) -> np.ndarray:
    """Mass of N(0, 1) between neighbouring points, to full precision in both tails."""
    low, high = x[:-1], x[1:]
    above = low > 0
    upper, lower = np.where(above, -low, high), np.where(above, -high, low)
    return scipy.special.ndtr(upper) - scipy.special.ndtr(lower)


def _tilted(mass: np.ndarray, loss: np.ndarray, tilt: float) -> tuple[float, np.ndarray]:
    """log E exp(tilt * loss), and the masses when each is weighted by its part in that."""
    with np.errstate(divide="ignore"):
        exponent = np.log(mass) + tilt * loss
    largest = float(exponent.max())
    weights = np.exp(exponent - largest)
    total = float(weights.sum())
    return largest + math.log(total), weights / total


def _mean(weights: np.ndarray, values: np.ndarray) -> float:
    # Not a matrix product: the threads of one would cost more than they gain.
    return float(np.sum(weights * values))


def _tilt_to(step: _Pieces, num_steps: int, loss: float) -> float:
    """The tilt under which the composed loss has its mean at `loss`."""

    def mean_excess(tilt: float) -> float:
        _, weights = _tilted(step.mass, step.mean, tilt)
        return num_steps * _mean(weights, step.mean) - loss

    return _crossing(mean_excess)


def _renyi_guess(step: _Pieces, num_steps: int, delta: float) -> float:
    """The best bound on epsilon by Renyi divergences, were the pieces all there is."""

    def log_delta_ratio(tilt: float) -> float:
        log_mgf, weights = _tilted(step.mass, step.mean, tilt)
        gain = tilt * _mean(weights, step.mean) - log_mgf
        return num_steps * gain + math.log1p(tilt) + math.log(delta)

    tilt = _crossing(log_delta_ratio)
    log_mgf, _ = _tilted(step.mass, step.mean, tilt)
    return _renyi_bound(num_steps * log_mgf, tilt, delta)


def _renyi_bound(log_mgf: float, tilt: float, delta: float) -> float:
    """Epsilon from log E exp(tilt * L): from the largest (1 - exp(epsilon - l)) exp(-tilt * l)."""
    largest = tilt * math.log(tilt) - (1 + tilt) * math.log1p(tilt)
    return (log_mgf + largest - math.log(delta)) / tilt


def _crossing(function: Callable[[float], float]) -> float:
    """Where a growing function of a positive number becomes positive, to about 1 %."""
    low, high = -14.0, 18.0
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (low, middle) if function(math.exp(middle)) > 0 else (middle, high)
    return math.exp(high)


def _expected_width(
    step: _Pieces, num_steps: int, tilt: float, epsilon: float, excess: float
) -> float:
    """The width of a grid that can be expected to add `excess` to `epsilon`.

    log E exp(tilt * L) is too small for the pieces and too large for the grid. The difference,
    divided by the tilt, is what the grid adds to epsilon if many small losses make up the sum.
    """
    log_mgf, weights = _tilted(step.mass, step.mean, tilt)
    mean = _mean(weights, step.mean)
    spread = math.sqrt(num_steps * _mean(weights, (step.mean - mean) ** 2))
    # No step's loss is raised by more than twice the width, so that this width is always enough.
    finest = 0.5 * excess / num_steps
    width = max(min(0.5 * spread, epsilon / 16), finest)
    while width > finest:
        grid = _grid(step, tilt, width)
        added = num_steps * (_tilted(grid.mass, grid.loss, tilt)[0] - log_mgf) / tilt
        if added <= excess:
            break
        # What is added falls with the square of the width, later if not at first.
        width = max(finest, width * min(0.7, max(0.1, 0.95 * math.sqrt(excess / added))))
    return width


@dataclasses.dataclass(frozen=True)
class _Grid:
    """One step's loss on the points ``origin + index * width``, and the tilt it is meant for."""

    origin: float
    width: float
    index: np.ndarray
    mass: np.ndarray
    lost: float
    tilt: float

    @property
    def loss(self) -> np.ndarray:
        return self.origin + self.width * self.index


def _grid(step: _Pieces, tilt: float, width: float) -> _Grid:
    """Each piece's mass on the points around it, such that its masses under P and Q stay."""
    # Where nearly all of the mass is in one place, a point of the grid there keeps it in place.
    origin = float(step.mean[np.argmax(_tilted(step.mass, step.mean, tilt)[1])])
    below = np.floor((step.low - origin) / width)
    above = np.maximum(np.ceil((step.high - origin) / width), below + 1)
    up = np.expm1(origin + below * width - step.mean) / np.expm1((below - above) * width)
    up = np.clip(up, 0, 1)
    mass = np.concatenate([step.mass * (1 - up), step.mass * up])
    index, place = np.unique(np.concatenate([below, above]), return_inverse=True)
    mass = np.bincount(place, weights=mass)
    return _Grid(origin, width, index.astype(np.int64), mass, step.lost, tilt)


def _window(grid: _Grid, num_steps: int, delta: float, epsilon: float) -> tuple[float, float]:
    """Composed losses outside of which there is next to nothing.

    Above there is little against delta. What else is outside comes in again at the other side, and
    is little against what makes up delta at `epsilon` under the tilt.
    """
    log_mgf, _ = _tilted(grid.mass, grid.loss, grid.tilt)
    log_share = math.log(delta) + grid.tilt * epsilon - num_steps * log_mgf
    log_outside = math.log(_WRAPPED) + min(0.0, log_share)
    low = _edge(grid, num_steps, grid.tilt, log_outside, side=-1)
    high = _edge(grid, num_steps, grid.tilt, log_outside, side=1)
    return low, max(high, _edge(grid, num_steps, 0.0, math.log(_CUT_OFF * delta), side=1))


def _solve(
    grid: _Grid, num_steps: int, delta: float, floor: float, low: float, high: float
) -> float | None:
    """The least epsilon, from `floor` on, at which the composed loss has at most `delta`.

    None if it lies below all that can be seen: below the window, or where tilted masses mean
    nothing because exp(700) is about the largest number there is.
    """
    rounding = num_steps * _ROUNDING
    infinite = -math.expm1(num_steps * math.log1p(-grid.lost))
    budget = delta * (1 - rounding - _CUT_OFF) - infinite
    log_mgf, weights = _tilted(grid.mass, grid.loss, grid.tilt)
    if _renyi_bound(num_steps * log_mgf, grid.tilt, budget) + rounding <= floor:
        return floor

    low = max(low, (num_steps * log_mgf - 700) / grid.tilt)
    start = num_steps * grid.origin
    first = math.floor((max(low, floor) - start) / grid.width)
    last = math.ceil((high - start) / grid.width)
    size = scipy.fft.next_fast_len(last - math.floor((low - start) / grid.width) + 1, real=True)

    index = np.arange(first, last + 1)
    loss = start + grid.width * index
    mass, error = _composed(grid.index, weights, num_steps, size)
    untilt = np.exp(np.minimum(num_steps * log_mgf - grid.tilt * loss, 700))
    mass = mass[index % size] * untilt
    error *= _norm_of_what_is_summed(grid.tilt, grid.width)
    # delta(loss) = E max(0, 1 - exp(loss - L)) = P(L > loss) - E [exp(loss - L), L > loss]
    decay = math.exp(-grid.width)
    at_or_above = np.cumsum(mass[::-1])[::-1]
    discounted = scipy.signal.lfilter([1.0], [1.0, -decay], mass[::-1])[::-1]
    budgets = budget - error * untilt
    too_low = np.flatnonzero(at_or_above[1:] - decay * discounted[1:] > budgets[:-1])
    if too_low.size == 0:
        return floor if low <= floor else None
    below, above = too_low[-1], too_low[-1] + 1
    # Between points of the grid delta is linear in exp(epsilon). Where the rounding errors alone
    # exceed the budget there may be no mass, and no way back.
    excess, most = at_or_above[above] - budgets[below], discounted[above]
    step_back = math.log(excess / most) if excess < most else 0.0
    return max(floor, float(loss[above]) + step_back + rounding)


def _rounding_share(grid: _Grid, num_steps: int, delta: float, epsilon: float) -> float:
    """About how large a part of delta the rounding errors are at `epsilon`.

    A smaller transform, in which masses lie on top of each other, has about the same errors.
    """
    log_mgf, weights = _tilted(grid.mass, grid.loss, grid.tilt)
    _, error = _composed(grid.index, weights, num_steps, _MANY_POINTS // 4)
    untilt = math.exp(min(num_steps * log_mgf - grid.tilt * epsilon - math.log(delta), 700.0))
    return error * _norm_of_what_is_summed(grid.tilt, grid.width) * untilt


def _norm_of_what_is_summed(tilt: float, width: float) -> float:
    """Euclidean norm of (1 - exp(-l)) exp(-tilt * l) on the grid's points l > 0, or more."""
    ratio = math.exp(-2 * tilt * width)
    rest = -math.expm1(-2 * tilt * width)
    return math.sqrt(min(1 / rest, width**2 * ratio * (1 + ratio) / rest**3))


def _edge(grid: _Grid, num_steps: int, tilt: float, log_outside: float, side: int) -> float:
    """Beyond it the composed loss has at most that mass under `tilt` (Chernoff)."""
    log_mgf, _ = _tilted(grid.mass, grid.loss, tilt)

    def exponent(further: float) -> tuple[float, float]:
        other, weights = _tilted(grid.mass, grid.loss, tilt + side * further)
        return num_steps * (other - log_mgf), num_steps * _mean(weights, grid.loss)

    def log_mass_ratio(further: float) -> float:
        log_ratio, mean = exponent(further)
        return side * further * mean - log_ratio + log_outside

    further = _crossing(log_mass_ratio)
    return side * (exponent(further)[0] - log_outside) / further


def _composed(
    index: np.ndarray, weights: np.ndarray, num_steps: int, size: int
) -> tuple[np.ndarray, float]:
    """Masses of the sum of `num_steps` indices modulo `size`; a bound on the norm of their error.

    Every coefficient F of a transform is off by a small part of the norm of what is transformed,
    and F^T by T |F|^(T - 1) times that. Where most of the mass is at one point, the point is kept
    out of the transforms: (atom + rest)^T - atom^T is small, and so is its error.
    """
    middle = int(index[np.argmax(weights)])
    rest = np.bincount((index - middle) % size, weights=weights, minlength=size)
    atom, rest[0] = rest[0], 0.0
    spectrum = scipy.fft.rfft(rest)
    norm = math.sqrt(np.sum(rest**2))
    log_all_atom = num_steps * math.log(atom)
    if atom > 0.6 and log_all_atom > -30:
        part = spectrum / atom
        log_size = 0.5 * np.log1p(2 * part.real + part.real**2 + part.imag**2)
        log_one = log_size + 1j * np.arctan2(part.imag, 1 + part.real)
        mass = scipy.fft.irfft(np.expm1(num_steps * log_one), size) * math.exp(log_all_atom)
        mass[0] += math.exp(log_all_atom) * (1 + num_steps * _ROUNDING)
    else:
        spectrum += atom
        norm = math.hypot(norm, atom)
        # Most of it vanishes in the power, and is not worth the time.
        loud = np.abs(spectrum) > math.exp(-60 / num_steps)
        power = np.zeros_like(spectrum)
        power[loud] = spectrum[loud] ** num_steps
        mass = scipy.fft.irfft(power, size)
        norm *= math.sqrt(np.sum(np.abs(spectrum[loud]) ** (2 * num_steps - 2)) / len(spectrum))
    mass = np.roll(np.maximum(mass, 0), num_steps * middle % size)
    return mass, num_steps * _ROUNDING * norm
