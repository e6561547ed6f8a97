"""Epsilon by another accountant, so that no statement has to be taken on our word.

The accountant of dp-accounting shares no code with `dpvim.privacy.accounting` but the events.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpvim.privacy.accounting.events import delta_without_truncation
from dpvim.types import Relation

if TYPE_CHECKING:
    import dp_accounting

# Spacing of the grid that losses are put on. At 1e-3 the answer can be far above the tight value.
_INTERVAL = 1e-4


def epsilon_by_dp_accounting(
    event: dp_accounting.SelfComposedDpEvent, *, delta: float, relation: Relation
) -> float:
    """Epsilon of a run by dp-accounting's accountant for privacy loss distributions.

    Its own analysis of batches that are cut to a cap takes minutes. Here, as in `accounting`, what
    the cap may cost is taken off delta, and the rest is accounted for without one.
    """
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    step = event.event
    if isinstance(step, dp_accounting.TruncatedSubsampledGaussianDpEvent):
        noise = dp_accounting.GaussianDpEvent(step.noise_multiplier)
        uncut = dp_accounting.PoissonSampledDpEvent(step.sampling_probability, noise)
    else:
        uncut = step
    neighbours = {
        Relation.ZERO_OUT: dp_accounting.NeighboringRelation.REPLACE_SPECIAL,
        Relation.ADD_OR_REMOVE: dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
        Relation.REPLACE_ONE: dp_accounting.NeighboringRelation.REPLACE_ONE,
    }[relation]
    accountant = PLDAccountant(neighbours, _INTERVAL)
    accountant.compose(dp_accounting.SelfComposedDpEvent(uncut, event.count))
    return float(accountant.get_epsilon(delta_without_truncation(step, event.count, delta)))
