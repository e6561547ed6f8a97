"""`Selection`: the plan of the best of a random number of trials, and its price."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dpvim.privacy.accounting.selection import Repeats, epsilon_of_selection, selection_event
from dpvim.privacy.plan import PrivacyPlan
from dpvim.types import Relation, Unit

if TYPE_CHECKING:
    import dp_accounting


@dataclasses.dataclass(frozen=True)
class Selection:
    """Trials of one plan, of which only the best is shown; how many there are is random and secret.

    Attributes:
        trial: Plans of all that one trial releases, its score included; calibrated, and on the
            same data.
        repeats: The number of trials.
    """

    trial: tuple[PrivacyPlan, ...]
    repeats: Repeats

    def __post_init__(self) -> None:
        if not self.trial:
            raise ValueError("trial: expected at least one plan, got none.")
        for plan in self.trial:
            plan.noise_stddev  # noqa: B018 -- refuse a plan that was not calibrated
            if (plan.relation, plan.unit) != (self.relation, self.unit):
                raise ValueError("trial: expected plans with one relation and unit, got several.")

    @property
    def relation(self) -> Relation:
        return self.trial[0].relation

    @property
    def unit(self) -> Unit:
        return self.trial[0].unit

    @property
    def dp_event(self) -> dp_accounting.DpEvent:
        """All trials together as an event of dp-accounting."""
        return selection_event([plan.dp_event for plan in self.trial], self.repeats)

    def epsilon(self, delta: float) -> float:
        """The cost of all trials together at `delta`: an upper bound."""
        trial = [plan.dp_event for plan in self.trial]
        return epsilon_of_selection(trial, self.repeats, delta=delta, relation=self.relation)
