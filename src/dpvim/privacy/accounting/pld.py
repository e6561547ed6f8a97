r"""Privacy loss distributions of one step: dominating pairs, bins, and grids that bound them.

A `DominatingPair` has a density of its privacy loss; `bin_privacy_loss` integrates it over narrow
bins, and `discretize` puts these on an evenly spaced grid by connect-the-dots. The exponential
tilt, the weights ``mass * exp(tilt * loss)``, is what both are looked at through:
``log_mgf = log E exp(tilt * L)`` is Renyi's divergence but for a factor. A `Composition` is the sum
of the losses of steps that need not be alike.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

import numpy as np
import scipy

from dpvim.types import Relation

if TYPE_CHECKING:
    import dp_accounting

# Bins of one step's loss, between points that are evenly spaced on the scale of the noise. Each
# is about 1/400 of a standard deviation wide, which adds less than 1e-5 of the loss's variance.
_NUM_BINS = 2**13


@dataclasses.dataclass(frozen=True)
class DominatingPair:
    """One step on two neighbouring data sets, on the line on which they differ, in units of noise.

    P = (1 - prob_p) N(0, 1) + prob_p N(shift, 1), Q = (1 - prob_q) N(0, 1) + prob_q N(-shift, 1).
    """

    prob_p: float
    prob_q: float
    shift: float

    def privacy_loss(self, x: np.ndarray) -> np.ndarray:
        """log dP/dQ, which grows with x."""
        log_p = _log_density_ratio(self.prob_p, x, self.shift)
        return log_p - _log_density_ratio(self.prob_q, -x, self.shift)


def _log_density_ratio(prob: float, x: np.ndarray, shift: float) -> np.ndarray:
    """Logarithm of (1 - prob) N(0, 1) + prob N(shift, 1) relative to N(0, 1)."""
    exponent = shift * x - 0.5 * shift**2
    if prob in (0, 1):
        return prob * exponent
    near = np.log1p(prob * np.expm1(np.clip(exponent, -1, 1)))
    far = np.logaddexp(math.log1p(-prob), math.log(prob) + exponent)
    return np.where(np.abs(exponent) < 1, near, far)


def dominating_pairs(step: dp_accounting.DpEvent, relation: Relation) -> list[DominatingPair]:
    """Pairs that dominate a step that is not truncated: all of them have to be protected.

    Under `replace_one` the record moves the sum one way or the other way. Else it moves it or is
    not there, and P and Q may be either; Q, P is Q, P mirrored.
    """
    import dp_accounting

    if isinstance(step, dp_accounting.GaussianDpEvent):
        prob, noise = 1.0, step.noise_multiplier
    else:
        prob, noise = step.sampling_probability, step.event.noise_multiplier
    sides = [(prob, prob)] if relation is Relation.REPLACE_ONE else [(prob, 0.0), (0.0, prob)]
    return [DominatingPair(prob_p, prob_q, 1 / noise) for prob_p, prob_q in sides]


@dataclasses.dataclass(frozen=True)
class BinnedPLD:
    """One step's privacy loss in bins: their ends, mean losses and masses; the mass in none."""

    low: np.ndarray
    high: np.ndarray
    loss: np.ndarray
    mass: np.ndarray
    infinity_mass: float

    @classmethod
    def under_curve(cls, epsilon: np.ndarray, delta: np.ndarray) -> BinnedPLD:
        """A loss that dominates all whose delta is at most `delta` at each `epsilon` and minus it.

        Both directions must be under the curve. With x = exp(epsilon), delta is convex in x and
        falls, so it lies under the lower hull of the points, and the hull is the delta of a loss:
        its slope rises at a corner by the mass there under Q. Delta at -epsilon is that of the
        other direction: 1 - x + x delta(1 / x).

        Args:
            epsilon: Growing, from 0 on.
            delta: Upper bounds.
        """
        delta = np.minimum.accumulate(np.minimum(delta, 1.0))
        x = np.exp(np.concatenate([[-np.inf], -epsilon[:0:-1], epsilon]))
        # Up to x = 1 what is there beyond 1 - x, which would drown in rounding errors else.
        more = np.concatenate([[0.0], x[1 : len(epsilon)] * delta[:0:-1], delta])
        y = np.where(x <= 1, 1 - x + more, more)
        corners = _lower_hull(x, y)
        x, y, more = x[corners], y[corners], more[corners]
        slopes = np.where(x[1:] <= 1, np.diff(more) / np.diff(x) - 1, np.diff(y) / np.diff(x))
        mass = x[1:] * np.maximum(np.diff(slopes, append=0.0), 0.0)
        loss = np.log(x[1:])
        return cls(loss, loss, loss, mass, float(y[-1]))


def bin_privacy_loss(pair: DominatingPair, tail_mass: float) -> BinnedPLD:
    """Bins of the privacy loss, without tails of about `tail_mass`, which count as infinite loss.

    The mean loss of a bin is log P/Q of its masses. This is what remains of it if all outcomes in
    the bin look the same: a little less than there is. It fixes how the grid shares out the mass of
    the bin, which makes it more than there is.
    """
    p, q, shift = pair.prob_p, pair.prob_q, pair.shift
    end = -scipy.special.ndtri(tail_mass / 4)
    x = np.linspace(-end, end + (shift if p > 0 else 0.0), _NUM_BINS + 1)
    loss = pair.privacy_loss(x)
    unmoved = _normal_mass(x)
    mass_p = (1 - p) * unmoved + p * _normal_mass(x - shift)
    mass_q = (1 - q) * unmoved + q * _normal_mass(x + shift)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = np.nan_to_num(np.log(mass_p / mass_q), nan=np.inf)
    mean = np.clip(mean, loss[:-1], loss[1:])
    tails = scipy.special.ndtr([x[0], -x[-1], x[0] - shift, shift - x[-1]])
    infinity_mass = float(tails @ [1 - p, 1 - p, p, p])
    return BinnedPLD(loss[:-1], loss[1:], mean, mass_p, infinity_mass)


def _lower_hull(x: np.ndarray, y: np.ndarray) -> list[int]:
    """Corners of the largest convex function that lies under points with growing `x`."""
    kept: list[int] = []
    for i in range(len(x)):
        while len(kept) > 1:
            a, b = kept[-2], kept[-1]
            if (y[b] - y[a]) * (x[i] - x[b]) < (y[i] - y[b]) * (x[b] - x[a]):
                break
            kept.pop()
        kept.append(i)
    return kept


def _normal_mass(x: np.ndarray) -> np.ndarray:
    """Mass of N(0, 1) between neighbouring points, to full precision in both tails."""
    low, high = x[:-1], x[1:]
    above = low > 0
    upper, lower = np.where(above, -low, high), np.where(above, -high, low)
    return scipy.special.ndtr(upper) - scipy.special.ndtr(lower)


@dataclasses.dataclass(frozen=True)
class GridPLD:
    """One step's loss on the points ``origin + index * width``."""

    origin: float
    width: float
    index: np.ndarray
    mass: np.ndarray
    infinity_mass: float

    @property
    def loss(self) -> np.ndarray:
        return self.origin + self.width * self.index


PLD: TypeAlias = BinnedPLD | GridPLD


def discretize(step: BinnedPLD, tilt: float, width: float) -> GridPLD:
    """Connect the dots: each bin's mass on grid points around it, its masses under P and Q kept."""
    # Where nearly all of the mass is in one place, a point of the grid there keeps it in place.
    origin = float(step.loss[np.argmax(exponential_tilt(step, tilt)[1])])
    below = np.floor((step.low - origin) / width)
    above = np.maximum(np.ceil((step.high - origin) / width), below + 1)
    up = np.expm1(origin + below * width - step.loss) / np.expm1((below - above) * width)
    up = np.clip(up, 0, 1)
    mass = np.concatenate([step.mass * (1 - up), step.mass * up])
    index, place = np.unique(np.concatenate([below, above]), return_inverse=True)
    mass = np.bincount(place, weights=mass)
    return GridPLD(origin, width, index.astype(np.int64), mass, step.infinity_mass)


Step = TypeVar("Step", BinnedPLD, GridPLD)


@dataclasses.dataclass(frozen=True)
class Composition(Generic[Step]):
    """The sum of the losses of steps of several kinds, each kind so many times.

    Attributes:
        parts: The kinds, and how often there is a step of each.
    """

    parts: tuple[tuple[Step, int], ...]

    @property
    def num_steps(self) -> int:
        return sum(count for _, count in self.parts)

    def log_mgf(self, tilt: float) -> float:
        """log E exp(tilt * loss): those of the steps add."""
        return self.tilted(tilt)[0]

    def tilted(self, tilt: float) -> tuple[float, float]:
        """log E exp(tilt * loss), and the mean loss under that tilt."""
        total = mean = 0.0
        for step, count in self.parts:
            log_mgf, weights = exponential_tilt(step, tilt)
            total += count * log_mgf
            mean += count * weighted_mean(weights, step.loss)
        return total, mean

    def spread(self, tilt: float) -> float:
        """The standard deviation of the loss under a tilt."""
        variance = 0.0
        for step, count in self.parts:
            _, weights = exponential_tilt(step, tilt)
            mean = weighted_mean(weights, step.loss)
            variance += count * weighted_mean(weights, (step.loss - mean) ** 2)
        return math.sqrt(variance)


@dataclasses.dataclass(frozen=True)
class GridComposition(Composition[GridPLD]):
    """The sum of losses on grids of one width.

    Attributes:
        tilt: The tilt that the grids are meant for.
    """

    tilt: float

    @property
    def width(self) -> float:
        return self.parts[0][0].width

    @property
    def origin(self) -> float:
        return sum(count * step.origin for step, count in self.parts)

    @property
    def infinity_mass(self) -> float:
        """The probability that any step's loss is infinite."""
        logs = (count * math.log1p(-step.infinity_mass) for step, count in self.parts)
        return -math.expm1(sum(logs))


def discretize_all(steps: Composition[BinnedPLD], tilt: float, width: float) -> GridComposition:
    """All steps on grids of one width, so that their sum is on one, too."""
    parts = tuple((discretize(step, tilt, width), count) for step, count in steps.parts)
    return GridComposition(parts, tilt)


def grid_width_for(
    steps: Composition[BinnedPLD], tilt: float, epsilon: float, excess: float
) -> float:
    """The width of a grid that can be expected to add `excess` to `epsilon`.

    log E exp(tilt * L) is too small for the bins and too large for the grid. The difference,
    divided by the tilt, is what the grid adds to epsilon if many small losses make up the sum.
    """
    log_mgf = steps.log_mgf(tilt)
    # No step's loss is raised by more than twice the width, so that this width is always enough.
    finest = 0.5 * excess / steps.num_steps
    width = max(min(0.5 * steps.spread(tilt), epsilon / 16), finest)
    while width > finest:
        added = (discretize_all(steps, tilt, width).log_mgf(tilt) - log_mgf) / tilt
        if added <= excess:
            break
        # What is added falls with the square of the width, later if not at first.
        width = max(finest, width * min(0.7, max(0.1, 0.95 * math.sqrt(excess / added))))
    return width


def exponential_tilt(pld: PLD, tilt: float) -> tuple[float, np.ndarray]:
    """log E exp(tilt * loss), and the masses when each is weighted by its part in that."""
    with np.errstate(divide="ignore"):
        exponent = np.log(pld.mass) + tilt * pld.loss
    largest = float(exponent.max())
    weights = np.exp(exponent - largest)
    total = float(weights.sum())
    return largest + math.log(total), weights / total


def weighted_mean(weights: np.ndarray, values: np.ndarray) -> float:
    """Mean of values under weights that sum to one."""
    # Not a matrix product: the threads of one would cost more than they gain.
    return float(np.sum(weights * values))


def saddlepoint_tilt(steps: Composition[BinnedPLD], loss: float) -> float:
    """The tilt under which the composed loss has its mean at `loss`."""
    return increasing_root(lambda tilt: steps.tilted(tilt)[1] - loss)


def renyi_epsilon(steps: Composition[BinnedPLD], delta: float) -> float:
    """The best bound on epsilon by Renyi divergences, were the bins all there is."""

    def log_delta_ratio(tilt: float) -> float:
        log_mgf, mean = steps.tilted(tilt)
        return tilt * mean - log_mgf + math.log1p(tilt) + math.log(delta)

    tilt = increasing_root(log_delta_ratio)
    return epsilon_from_log_mgf(steps.log_mgf(tilt), tilt, delta)


def epsilon_from_log_mgf(log_mgf: float, tilt: float, delta: float) -> float:
    """Epsilon from log E exp(tilt * L): from the largest (1 - exp(epsilon - l)) exp(-tilt * l)."""
    largest = tilt * math.log(tilt) - (1 + tilt) * math.log1p(tilt)
    return (log_mgf + largest - math.log(delta)) / tilt


def increasing_root(function: Callable[[float], float]) -> float:
    """The root of a growing function of a positive number, to about 1 %, by bisection."""
    low, high = -14.0, 18.0
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (low, middle) if function(math.exp(middle)) > 0 else (middle, high)
    return math.exp(high)
