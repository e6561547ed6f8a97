r"""The price of the best of several tries, of which only the best is shown.

A trial is run a random number of times, and the trial with the best score is released; the others,
and how many there were, are not. If the number of trials follows a truncated negative binomial
distribution, the cost grows with the logarithm of its mean, not with the number of trials
(Papernot and Steinke 2022, theorem 2). It is a bound on Renyi divergences, so one trial's cost is
taken from dp-accounting's Renyi accountant, and the selection is its `RepeatAndSelectDpEvent`.

>>> repeats = Repeats(mean=16.0, shape=1.0)
>>> 0.79 < repeats.chance_of(1 / 5) < 0.81
True
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import scipy

from dpvim.privacy.accounting.events import kinds_of_steps, lost_to_truncation
from dpvim.privacy.accounting.pld import BinnedPLD
from dpvim.types import Relation

if TYPE_CHECKING:
    import dp_accounting
    from dp_accounting.dp_event import RepeatAndSelectDpEvent

# Points of the curve from which its privacy loss is made.
_POINTS = 1024
# Orders of Renyi divergences: low ones for large epsilon, high ones for small.
_ORDERS = (
    *np.arange(1.1, 11, 0.1).round(1).tolist(),
    *range(11, 65),
    *np.geomspace(70, 8192, 40).round().tolist(),
)


@dataclasses.dataclass(frozen=True)
class Repeats:
    """The distribution of the number of trials: truncated negative binomial, at least one.

    Attributes:
        mean: Expected number of trials, more than one.
        shape: 0 is the logarithmic distribution, 1 the geometric one; larger ones are narrower and
            cost more.
    """

    mean: float
    shape: float = 1.0

    def __post_init__(self) -> None:
        if not (1 < self.mean <= 1e4):
            raise ValueError(f"mean: expected more than 1 and at most 10 000, got {self.mean!r}.")
        if not (0 <= self.shape <= 100):
            raise ValueError(f"shape: expected a number from 0 to 100, got {self.shape!r}.")

    @functools.cached_property
    def gamma(self) -> float:
        """The success probability of the distribution with this mean."""

        def excess(log_gamma: float) -> float:
            return _mean(math.exp(log_gamma), self.shape) - self.mean

        return math.exp(scipy.optimize.brentq(excess, -40.0, -1e-12))

    def chance_of(self, share: float) -> float:
        """The probability that what a trial tries with probability `share` is tried at all."""
        return 1 - _generating_function(self.gamma, self.shape, 1 - share)

    def draw(self, rng: np.random.Generator) -> int:
        """A number of trials."""
        if self.shape == 0:
            return int(rng.logseries(1 - self.gamma))
        while True:
            number = int(rng.negative_binomial(self.shape, self.gamma))
            if number > 0:
                return number

    @classmethod
    def for_chance(cls, chance: float, share: float, *, shape: float = 1.0) -> Repeats:
        """As few trials as try something of that share with probability `chance`.

        >>> Repeats.for_chance(0.8, 1 / 10).mean
        36.0
        """

        def missing(log_mean: float) -> float:
            return chance - cls(math.exp(log_mean), shape).chance_of(share)

        low, high = math.log(1.001), math.log(9_999)
        if missing(low) <= 0:
            return cls(math.exp(low), shape)
        if missing(high) > 0:
            raise ValueError(
                f"chance: expected one that 10 000 trials have, got {chance:g} for a share of "
                f"{share:g}. Ask for a smaller one, or compare fewer."
            )
        mean = math.exp(scipy.optimize.brentq(missing, low, high))
        return cls(round(mean, 6), shape)


def _mean(gamma: float, shape: float) -> float:
    """Of the truncated negative binomial distribution."""
    if shape == 0:
        return (1 / gamma - 1) / -math.log(gamma)
    return shape * (1 - gamma) / gamma / -math.expm1(shape * math.log(gamma))


def _generating_function(gamma: float, shape: float, x: float) -> float:
    """E x^K."""
    base = 1 - (1 - gamma) * x
    if shape == 0:
        return math.log(base) / math.log(gamma)
    return (base**-shape - 1) / (gamma**-shape - 1)


def selection_event(
    trial: Sequence[dp_accounting.SelfComposedDpEvent], repeats: Repeats
) -> dp_accounting.SelfComposedDpEvent:
    """The selection as an event of dp-accounting, with the caps of its batches.

    Args:
        trial: All that one trial does to the data, the release of its score included.
        repeats: The number of trials, which must not depend on data.
    """
    import dp_accounting
    from dp_accounting.dp_event import RepeatAndSelectDpEvent

    one = dp_accounting.ComposedDpEvent(tuple(trial))
    best = RepeatAndSelectDpEvent(one, repeats.mean, repeats.shape)
    return dp_accounting.SelfComposedDpEvent(best, 1)


class SelectionCurve:
    """Upper bounds on epsilon and delta of a selection; in both directions they are the same.

    Trials that cut a batch with the record in it are left out of the distributions on both of two
    neighbours; there are `mean` trials on average, whatever the data. What is left out of the
    second counts e^epsilon times.

    Raises:
        ValueError: Under `replace_one`, for batches that are sampled: there is no Renyi bound.
    """

    def __init__(self, event: RepeatAndSelectDpEvent, relation: Relation) -> None:
        import dp_accounting
        from dp_accounting.dp_event import RepeatAndSelectDpEvent
        from dp_accounting.rdp import RdpAccountant

        trial = event.event.events
        steps = [
            dp_accounting.SelfComposedDpEvent(step, count)
            for step, count in kinds_of_steps(_with_sensitivity(trial, relation)).items()
        ]
        uncut = dp_accounting.ComposedDpEvent(steps)
        self._renyi = RdpAccountant(_ORDERS, dp_accounting.NeighboringRelation.REPLACE_SPECIAL)
        self._renyi.compose(RepeatAndSelectDpEvent(uncut, event.mean, event.shape))
        self._lost = event.mean * lost_to_truncation(trial)

    def epsilon(self, delta: float) -> float:
        """Epsilon at `delta`."""
        # At half of delta it is more than it will be.
        lost = self._lost_at(float(self._renyi.get_epsilon(delta / 2)))
        if lost > delta / 2:
            raise ValueError(
                f"delta: expected more than {2 * lost:.3g}, twice the probability that a record is "
                f"in a batch that is cut to size, got {delta:g}. Choose a larger delta or fewer "
                "steps."
            )
        return float(self._renyi.get_epsilon(delta - lost))

    def delta(self, epsilon: float) -> float:
        """Delta at `epsilon`."""
        return float(self._renyi.get_delta(epsilon)) + self._lost_at(epsilon)

    def loss(self, tail_mass: float) -> BinnedPLD:
        """A privacy loss that dominates the selection, to be composed with those of others."""
        end = float(self._renyi.get_epsilon(tail_mass))
        epsilons = np.linspace(0.0, end, _POINTS)
        return BinnedPLD.under_curve(epsilons, np.array([self.delta(each) for each in epsilons]))

    def _lost_at(self, epsilon: float) -> float:
        return self._lost * (1 + math.exp(min(epsilon, 500.0)))


def epsilon_of_selection(
    trial: Sequence[dp_accounting.SelfComposedDpEvent],
    repeats: Repeats,
    *,
    delta: float,
    relation: Relation,
) -> float:
    """An upper bound on the cost of the best of a random number of trials.

    Args:
        trial, repeats: As in `selection_event`.
        delta, relation: Of the guarantee.
    """
    event = selection_event(trial, repeats).event
    return SelectionCurve(event, Relation(relation)).epsilon(delta)


def _with_sensitivity(
    trial: Sequence[dp_accounting.SelfComposedDpEvent], relation: Relation
) -> list[dp_accounting.SelfComposedDpEvent]:
    """The trial with noise in units of what a record can move: twice the norm if it is replaced."""
    import dp_accounting

    if relation is not Relation.REPLACE_ONE:
        return list(trial)
    halved = []
    for event in trial:
        if not isinstance(event.event, dp_accounting.GaussianDpEvent):
            raise ValueError(
                "relation: expected 'zero_out' or 'add_or_remove' for the best of several fits "
                "whose batches are sampled, got 'replace_one': no bound on its Renyi divergences "
                "is known. Choose another relation, or sampling_prob=1."
            )
        step = dp_accounting.GaussianDpEvent(event.event.noise_multiplier / 2)
        halved.append(dp_accounting.SelfComposedDpEvent(step, event.count))
    return halved
