"""Epsilon by another accountant, so that no statement has to be taken on our word.

The accountant of dp-accounting shares no code with `dpvim.privacy.accounting` but the events.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dpvim.privacy.accounting.events import delta_without_truncation, kinds_of_steps
from dpvim.types import Relation

if TYPE_CHECKING:
    import dp_accounting

# Spacing of the grid that losses are put on. At 1e-3 the answer can be far above the tight value.
_INTERVAL = 1e-4


def epsilon_by_dp_accounting(
    events: Sequence[dp_accounting.SelfComposedDpEvent], *, delta: float, relation: Relation
) -> float:
    """Epsilon of runs by dp-accounting's accountant for privacy loss distributions.

    Its own analysis of batches that are cut to a cap takes minutes. Here, as in `accounting`, what
    the cap may cost is taken off delta, and the rest is accounted for without one.
    """
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    neighbours = {
        Relation.ZERO_OUT: dp_accounting.NeighboringRelation.REPLACE_SPECIAL,
        Relation.ADD_OR_REMOVE: dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
        Relation.REPLACE_ONE: dp_accounting.NeighboringRelation.REPLACE_ONE,
    }[relation]
    accountant = PLDAccountant(neighbours, _INTERVAL)
    for step, count in kinds_of_steps(events).items():
        accountant.compose(dp_accounting.SelfComposedDpEvent(step, count))
    return float(accountant.get_epsilon(delta_without_truncation(events, delta)))
