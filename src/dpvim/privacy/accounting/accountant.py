"""Epsilon of runs: privacy losses are composed on finer and finer grids until it stands still."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dpvim.privacy.accounting.composition import (
    MANY_POINTS,
    TAIL_MASS,
    chernoff_window,
    composed_epsilon,
    relative_rounding_error,
)
from dpvim.privacy.accounting.events import delta_without_truncation, kinds_of_steps
from dpvim.privacy.accounting.pld import (
    BinnedPLD,
    Composition,
    bin_privacy_loss,
    discretize_all,
    dominating_pairs,
    grid_width_for,
    renyi_epsilon,
    saddlepoint_tilt,
)
from dpvim.privacy.accounting.selection import SelectionCurve
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
    events: dp_accounting.SelfComposedDpEvent | Sequence[dp_accounting.SelfComposedDpEvent],
    *,
    delta: float,
    relation: Relation,
) -> float:
    """The smallest epsilon the accountant can promise for a run, or for several on the same data.

    Several are composed as one: what a run does may depend on what those before it released, but
    how many there are, their noise and their batches must not.

    Guarantees:
        An upper bound, within 0.5 % of the tight value if that is at least 0.01 and the caps add
        at most a thousandth of `delta`, see `truncation_prob`. Rounding errors can make it 0.71 %
        where q < 1e-4, T > 1e4 and delta < 1e-10.

    Raises:
        ValueError: The caps alone add `delta` or more.
    """
    together = tuple(events) if isinstance(events, Sequence) else (events,)
    return _epsilon_in_memory(together, float(delta), Relation(relation))


@functools.lru_cache(maxsize=1024)
def _epsilon_in_memory(
    events: tuple[dp_accounting.SelfComposedDpEvent, ...], delta: float, relation: Relation
) -> float:
    """Epsilon, computed once in a process. No file is asked: this is what statements claim."""
    return epsilon_upper_bound(events, delta, relation)


def epsilon_upper_bound(
    events: Sequence[dp_accounting.SelfComposedDpEvent],
    delta: float,
    relation: Relation,
    tolerance: float = TOLERANCE,
    one_direction: bool = False,
) -> float:
    """Upper bound on epsilon; in one direction it is nearly always the same."""
    delta = delta_without_truncation(events, delta)
    kinds = kinds_of_steps(events)
    num_steps = sum(kinds.values())
    tail_mass = TAIL_MASS * delta / num_steps
    # A record comes or goes in all events at once: directions are not mixed.
    directions = zip(*(_losses(step, relation, tail_mass) for step in kinds), strict=True)
    epsilon = 0.0
    for losses in list(directions)[: 1 if one_direction else None]:
        steps = Composition(tuple(zip(losses, kinds.values(), strict=True)))
        epsilon = _epsilon_of_composition(steps, delta, tolerance, floor=epsilon)
    return epsilon


def _losses(step: dp_accounting.DpEvent, relation: Relation, tail_mass: float) -> list[BinnedPLD]:
    """The privacy loss of a step in each direction."""
    from dp_accounting.dp_event import RepeatAndSelectDpEvent

    if isinstance(step, RepeatAndSelectDpEvent):
        # One bound serves both directions.
        loss = SelectionCurve(step, relation).loss(tail_mass)
        return [loss] * (1 if relation is Relation.REPLACE_ONE else 2)
    return [bin_privacy_loss(pair, tail_mass) for pair in dominating_pairs(step, relation)]


def _epsilon_of_composition(
    steps: Composition[BinnedPLD], delta: float, tolerance: float, *, floor: float
) -> float:
    """Upper bound on epsilon in one direction, or `floor` if that is larger."""
    target = max(floor, _SMALL_EPSILON, renyi_epsilon(steps, delta))
    best = width = math.inf
    damping = 1.0
    while True:
        tilt = damping * saddlepoint_tilt(steps, target)
        # The first grid is a coarse one, to see what to aim at.
        excess = (tolerance / 3 if best < math.inf else 0.01) * target
        width = min(width / 2, grid_width_for(steps, tilt, target, excess))
        grids = discretize_all(steps, tilt, width)
        low, high = chernoff_window(grids, delta, target)
        if high - low > MANY_POINTS * width:
            damped = discretize_all(steps, 0.9 * tilt, width)
            error = relative_rounding_error(damped, delta, target)
            # What a small part of delta adds to epsilon is about that part divided by the tilt.
            if error < 0.4 * tolerance * damped.tilt * target:
                damping, width = 0.9 * damping, 2 * width
                continue
        if high - low > _MAX_POINTS * width:
            if best < math.inf:
                return best
            width = (high - low) / _MAX_POINTS
            grids = discretize_all(steps, tilt, width)
            low, high = chernoff_window(grids, delta, target)
        window = low, max(high, floor + width)
        epsilon = composed_epsilon(grids, delta, window, floor=floor)
        if epsilon is None:  # it lies below all that is seen under this tilt
            damping, width = damping / 4, 2 * width
            continue
        change, best = abs(best - epsilon), min(best, epsilon)
        if best <= floor or change <= tolerance * max(best, _SMALL_EPSILON):
            return best
        target = max(best, _SMALL_EPSILON)
