"""Costs of releases together, and what a budget would still buy. Nothing here depends on data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from dpvim.privacy import accounting
from dpvim.privacy.plan import PrivacyPlan
from dpvim.privacy.selection import Selection
from dpvim.privacy.statement import round_up
from dpvim.types import Relation

# Offers are found to this part of themselves, on the safe side.
_PRECISION = 0.01
# Noise beyond so many times what the whole budget asks for by itself is as good as no release.
_MOST_NOISE = 2.0**14

Price: TypeAlias = PrivacyPlan | Selection
"""All that can be paid for: it has an event for the accountant."""


class Budget(NamedTuple):
    """The most that all releases together may cost."""

    epsilon: float
    delta: float
    relation: Relation

    def total(self, plans: Sequence[Price]) -> float:
        """Epsilon of all plans together at the budget's delta; infinite if there is none."""
        return total_epsilon(plans, delta=self.delta, relation=self.relation)

    def pays(self, plans: Sequence[Price]) -> bool:
        """True if all plans together are within the budget."""
        return self.total(plans) <= self.epsilon


def total_epsilon(plans: Sequence[Price], *, delta: float, relation: Relation) -> float:
    """Epsilon of all plans together at `delta`: an upper bound by the accountant, not a sum."""
    if not plans:
        return 0.0
    events = [plan.dp_event for plan in plans]
    try:
        return accounting.epsilon_of(events, delta=delta, relation=relation)
    except ValueError:  # batches that are cut to size use up delta by themselves
        return math.inf


def one_release(budget: Budget, noise: float) -> PrivacyPlan:
    """The Gaussian mechanism on all records, to say what an amount of privacy would buy."""
    return PrivacyPlan(
        num_examples=1,
        sampling_prob=1.0,
        num_steps=1,
        clip_norm=1.0,
        relation=budget.relation,
        noise_multiplier=noise,
    )


def epsilon_left(budget: Budget, spent: Sequence[Price], releases: int = 1) -> float:
    """Epsilon that each of so many equal releases on all records may have, at the budget's delta.

    0 if nothing is left. Epsilons do not add up: the rest of a budget is what it would buy.
    """

    def pays(noise: float) -> bool:
        return budget.pays([*spent, one_release(budget, noise).with_steps(releases)])

    noise = _least_noise(pays, _noise_of_all(budget))
    return 0.0 if noise is None else budget.total([one_release(budget, noise)])


def releases_left(budget: Budget, spent: Sequence[Price], plan: PrivacyPlan) -> int:
    """Number of times that a plan may still be carried out."""

    def pays(count: int) -> bool:
        return budget.pays([*spent, plan.with_steps(count * plan.num_steps)])

    return _most(pays)


def steps_left(
    budget: Budget, spent: Sequence[Price], plan: PrivacyPlan, most: int | None = None
) -> int:
    """Number of steps of a plan, at its noise, that the budget would still pay for."""
    return _most(lambda steps: budget.pays([*spent, plan.with_steps(steps)]), most)


def noise_left(budget: Budget, spent: Sequence[Price], plan: PrivacyPlan) -> float | None:
    """The least noise multiplier with which the budget pays for the plan; None if none does."""

    def pays(noise: float) -> bool:
        return budget.pays([*spent, dataclasses.replace(plan, noise_multiplier=noise)])

    return _least_noise(pays, plan.noise_stddev / plan.clip_norm)


def offers(budget: Budget, spent: Sequence[Price], plan: PrivacyPlan, delta: float) -> str:
    """A sentence on what could be had instead of a plan that costs too much."""
    found = []
    steps = steps_left(budget, spent, plan, plan.num_steps)
    if steps:
        found.append(f"{steps:,} of its {plan.num_steps:,} steps at this noise")
    noise = noise_left(budget, spent, plan)
    if noise is not None:
        weaker = dataclasses.replace(plan, noise_multiplier=noise)
        steps_word = "the same release" if plan.num_steps == 1 else "all of its steps"
        # Rounded down: asked for, it must be granted.
        epsilon = math.floor(weaker.epsilon(delta) * 1e4) / 1e4
        found.append(
            f"{steps_word} with noise multiplier {round_up(noise)} instead of "
            f"{plan.noise_multiplier:.4g}, which is epsilon = {epsilon:.4g} at delta = {delta:g}"
        )
    if not found:
        return "There is next to nothing left."
    return "What is left would buy " + ", or ".join(found) + "."


def spelled(epsilon: float, delta: float) -> str:
    """A guarantee in brackets, rounded up."""
    return f"({round_up(epsilon) if math.isfinite(epsilon) else 'infinity'}, {delta:g})"


def _noise_of_all(budget: Budget) -> float:
    """Noise of a release that costs about the whole budget."""
    import dp_accounting

    sensitivity = 2.0 if budget.relation is Relation.REPLACE_ONE else 1.0
    return sensitivity * float(dp_accounting.get_sigma_gaussian(budget.epsilon, budget.delta))


def _least_noise(pays: Callable[[float], bool], guess: float) -> float | None:
    """The least noise that the budget pays for, a little above it; None if there is none."""
    high = guess
    while not pays(high):
        high *= 2
        if high > _MOST_NOISE * guess:
            return None
    low = high / 2
    while pays(low):
        low, high = low / 2, low
    while high > (1 + _PRECISION) * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high


def _most(pays: Callable[[int], bool], most: int | None = None) -> int:
    """The largest whole number that the budget pays for, or a little less if it is large."""
    low, high = 0, 1
    while (most is None or high <= most) and pays(high):
        low, high = high, 2 * high
    if most is not None:
        high = min(high, most + 1)
    while high - low > max(1, _PRECISION * low):
        middle = (low + high) // 2
        low, high = (middle, high) if pays(middle) else (low, middle)
    return low
