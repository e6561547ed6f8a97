"""Counting the steps on data: what was spent of a plan, and the statement about it."""

from __future__ import annotations

import threading

from dpvim.privacy.plan import Plan, PrivacyPlan
from dpvim.privacy.statement import NoPrivacy, PrivacyStatement
from dpvim.types import BudgetExceededError, Origin


def origin_of(plan: Plan, seed: int | None) -> Origin:
    """Protection of the steps of a plan whose batches and noise come from `seed`."""
    if not isinstance(plan, PrivacyPlan):
        return Origin.NOT_PRIVATE
    return Origin.PRIVATE if seed is None else Origin.SEEDED


class StepCounter:
    """Steps of one plan, from whatever states and by whatever verbs they are taken.

    Guarantees:
        Steps are counted before they are taken, by any number of threads. `spend` refuses steps
        that the plan does not pay for. The statement is about all steps counted.
    """

    def __init__(self, plan: Plan, origin: Origin, *, taken: int = 0) -> None:
        self._plan = plan
        self._origin = origin
        self._taken = taken
        self._lock = threading.Lock()

    def spend(self, num_steps: int, *, from_step: int, from_origin: Origin) -> Origin:
        """Count steps from a state on, or refuse them.

        Returns what protects the steps that will have led to the state after them.
        """
        with self._lock:
            taken = max(self._taken, from_step) + num_steps
            if taken > self._plan.num_steps and isinstance(self._plan, PrivacyPlan):
                raise BudgetExceededError(
                    f"{num_steps} steps: the plan pays for {self._plan.num_steps} in all, and "
                    f"{taken - num_steps} of them were taken, from this state or from others. Ask "
                    "for fewer, make a plan for more, or begin anew with another DPSVI: its cost "
                    "adds up."
                )
            self._taken = taken
            self._origin = max(self._origin, from_origin)
            return self._origin

    def count(self, num_steps: int) -> None:
        """Count steps of several runs on the same data, which may be more than the plan's."""
        with self._lock:
            self._taken += num_steps

    def give_back(self, num_steps: int) -> None:
        """Steps that were counted and not taken, since a run was interrupted."""
        with self._lock:
            self._taken -= num_steps

    def statement(
        self, *, delta: float | None, step: int, origin: Origin, released: str
    ) -> PrivacyStatement | NoPrivacy:
        """The statement for all steps counted, and those that led to a state."""
        origin = max(self._origin, origin)
        if origin == Origin.NOT_PRIVATE or not isinstance(self._plan, PrivacyPlan):
            return NoPrivacy()
        if delta is None:
            raise ValueError("delta: expected a number between 0 and 1, got None.")
        return PrivacyStatement.of(
            self._plan,
            delta=delta,
            steps_done=max(step, self._taken),
            released=released,
            for_testing=origin == Origin.SEEDED,
        )
