"""Epsilon of a run: privacy losses are composed on finer and finer grids until it stands still."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

from dpvim.privacy.accounting.composition import (
    MANY_POINTS,
    TAIL_MASS,
    chernoff_window,
    composed_epsilon,
    relative_rounding_error,
)
from dpvim.privacy.accounting.events import delta_without_truncation
from dpvim.privacy.accounting.pld import (
    DominatingPair,
    bin_privacy_loss,
    discretize,
    dominating_pairs,
    grid_width_for,
    renyi_epsilon,
    saddlepoint_tilt,
)
from dpvim.types import Relation

if TYPE_CHECKING:
    import dp_accounting

ACCOUNTANT = "PLD (connect-the-dots, tilted Fourier transform, upper bound)"

# The grid's width is halved until that changes epsilon by less than this, relative to epsilon or to
# `_SMALL_EPSILON`, whichever is larger. What is left is a third of it, or all of it at worst.
TOLERANCE = 2.5e-3
_SMALL_EPSILON = 0.01
# Memory and time end here, and with them the refinement of the grid. What is returned is an upper
# bound still, but may be well above the tight value.
_MAX_POINTS = 2**22


def epsilon_of(
    event: dp_accounting.SelfComposedDpEvent, *, delta: float, relation: Relation
) -> float:
    """The smallest epsilon the accountant can promise for `event` at `delta`.

    Guarantees:
        An upper bound, within 0.5 % of the tight value if that is at least 0.01 and the cap adds
        at most a thousandth of `delta`, see `truncation_prob`. Rounding errors can make it 0.71 %
        where q < 1e-4, T > 1e4 and delta < 1e-10.

    Raises:
        ValueError: The cap alone adds `delta` or more.
    """
    return _epsilon_in_memory(event, float(delta), Relation(relation))


@functools.lru_cache(maxsize=1024)
def _epsilon_in_memory(
    event: dp_accounting.SelfComposedDpEvent, delta: float, relation: Relation
) -> float:
    """Epsilon, computed once in a process. No file is asked: this is what statements claim."""
    return epsilon_upper_bound(event, delta, relation)


def epsilon_upper_bound(
    event: dp_accounting.SelfComposedDpEvent,
    delta: float,
    relation: Relation,
    tolerance: float = TOLERANCE,
    one_direction: bool = False,
) -> float:
    """Upper bound on epsilon; in one direction it is nearly always the same."""
    import dp_accounting

    step, num_steps = event.event, event.count
    delta = delta_without_truncation(step, num_steps, delta)
    if isinstance(step, dp_accounting.GaussianDpEvent):
        # A composition of Gaussians is one Gaussian.
        step = dp_accounting.GaussianDpEvent(step.noise_multiplier / math.sqrt(num_steps))
        num_steps = 1
    epsilon = 0.0
    for pair in dominating_pairs(step, relation)[: 1 if one_direction else None]:
        epsilon = _epsilon_of_pair(pair, num_steps, delta, tolerance, floor=epsilon)
    return epsilon


def _epsilon_of_pair(
    pair: DominatingPair, num_steps: int, delta: float, tolerance: float, *, floor: float
) -> float:
    """Upper bound on epsilon in one direction, or `floor` if that is larger."""
    step = bin_privacy_loss(pair, TAIL_MASS * delta / num_steps)
    target = max(floor, _SMALL_EPSILON, renyi_epsilon(step, num_steps, delta))
    best = width = math.inf
    damping = 1.0
    while True:
        tilt = damping * saddlepoint_tilt(step, num_steps, target)
        # The first grid is a coarse one, to see what to aim at.
        excess = (tolerance / 3 if best < math.inf else 0.01) * target
        width = min(width / 2, grid_width_for(step, num_steps, tilt, target, excess))
        grid = discretize(step, tilt, width)
        low, high = chernoff_window(grid, num_steps, delta, target)
        if high - low > MANY_POINTS * width:
            damped = discretize(step, 0.9 * tilt, width)
            error = relative_rounding_error(damped, num_steps, delta, target)
            # What a small part of delta adds to epsilon is about that part divided by the tilt.
            if error < 0.4 * tolerance * damped.tilt * target:
                damping, width = 0.9 * damping, 2 * width
                continue
        if high - low > _MAX_POINTS * width:
            if best < math.inf:
                return best
            width = (high - low) / _MAX_POINTS
            grid = discretize(step, tilt, width)
            low, high = chernoff_window(grid, num_steps, delta, target)
        window = low, max(high, floor + width)
        epsilon = composed_epsilon(grid, num_steps, delta, window, floor=floor)
        if epsilon is None:  # it lies below all that is seen under this tilt
            damping, width = damping / 4, 2 * width
            continue
        change, best = abs(best - epsilon), min(best, epsilon)
        if best <= floor or change <= tolerance * max(best, _SMALL_EPSILON):
            return best
        target = max(best, _SMALL_EPSILON)
