"""The privacy statement that goes with a result: what was released, under which guarantee."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from dpvim import _html
from dpvim.privacy.accounting import ACCOUNTANT
from dpvim.privacy.plan import PrivacyPlan
from dpvim.types import Relation, Unit

_RELATION_IN_WORDS = {
    Relation.ZERO_OUT: "zero_out: one {unit} replaced by nothing; the number of {unit}s is public",
    Relation.ADD_OR_REMOVE: "add_or_remove: one {unit} added or removed",
    Relation.REPLACE_ONE: "replace_one: one {unit} replaced by any other",
}

_ONE_RECORD_EACH = "Each person contributes one record."
_ONE_ID_EACH = "All rows of a person have the same id."
_ASSUMPTIONS = (
    "The model, the settings and every constant used to prepare the data (bounds, levels, "
    "standardisation, types of numbers) are public, or were paid for out of a budget of their own.",
    "Nothing but this result leaves the computation: no losses, exact sums or running times.",
    "Other results from the same data add to the cost, and so does a run that was started anew.",
)
_STOPPED = (
    "The run was stopped before its last step for a reason that has nothing to do with what it "
    "had released."
)
_CHOSEN = (
    "This is the best of several trials: the guarantee is that of all of them and the choice. Of "
    "the others nothing leaves the computation but what their plan says."
)
_SEEDED = (
    "FOR TESTING ONLY: batches and noise came from a given seed; whoever knows it can "
    "take the noise away. There is no privacy guarantee."
)


GRADIENTS, COUNTS = "gradients", "counts"
"""Mechanisms: noisy sums of clipped gradients, and noisy counts of declared cells."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrivacyStatement:
    """The guarantee of a private fit. Every field is public.

    >>> plan = PrivacyPlan(
    ...     num_examples=5000, sampling_prob=1.0, num_steps=1, clip_norm=1.0, noise_multiplier=4.0
    ... )
    >>> statement = PrivacyStatement.of(
    ...     plan, delta=1e-5, steps_done=1, released="a sum", for_testing=False
    ... )
    >>> print(str(statement).splitlines()[1])
      guarantee  (0.9266, 1e-05)-differential privacy
    """

    plan: PrivacyPlan
    delta: float
    steps_done: int
    released: str
    for_testing: bool
    epsilon: float
    mechanism: str = GRADIENTS
    chosen_at: float | None = None

    @property
    def private(self) -> bool:
        """True if the guarantee holds: not if the random numbers came from a given seed."""
        return not self.for_testing

    @property
    def relation(self) -> Relation:
        return self.plan.relation

    @property
    def unit(self) -> Unit:
        """The unit of privacy: one record, or one person with all rows."""
        return self.plan.unit

    @property
    def protects(self) -> str:
        """The unit of privacy in words."""
        if self.unit is Unit.RECORD:
            return "one record: one row of the data"
        most = self.plan.max_rows_per_person
        rows = "one row" if most == 1 else f"{most:,} rows"
        return (
            f"one person: all rows of a person together, of which at most {rows}, chosen at "
            "random, are used"
        )

    @property
    def noise_multiplier(self) -> float:
        return self.plan.noise_stddev / self.plan.clip_norm

    @property
    def clip_norm(self) -> float:
        return self.plan.clip_norm

    @property
    def sampling_prob(self) -> float:
        return self.plan.sampling_prob

    @property
    def num_steps(self) -> int:
        """Steps that were taken."""
        return self.steps_done

    @property
    def accountant(self) -> str:
        return ACCOUNTANT

    @classmethod
    def of(
        cls,
        plan: PrivacyPlan,
        *,
        delta: float,
        steps_done: int,
        released: str,
        for_testing: bool,
        mechanism: str = GRADIENTS,
        chosen_at: float | None = None,
    ) -> PrivacyStatement:
        """The statement of `steps_done` steps of `plan`: fewer, or more in several runs, than one
        run of it has.

        A result that was chosen among several has the cost of all of them, `chosen_at`.
        """
        alone = plan.with_steps(steps_done).epsilon(delta) if steps_done else 0.0
        return cls(
            plan=plan,
            delta=delta,
            steps_done=steps_done,
            released=released,
            for_testing=for_testing,
            epsilon=max(alone, chosen_at or 0.0),
            mechanism=mechanism,
            chosen_at=chosen_at,
        )

    @property
    def assumptions(self) -> tuple[str, ...]:
        stopped = self.steps_done < self.plan.num_steps
        chosen = (_CHOSEN,) * (self.chosen_at is not None)
        each = _ONE_RECORD_EACH if self.unit is Unit.RECORD else _ONE_ID_EACH
        always = (each, *_ASSUMPTIONS)
        return (_SEEDED,) * self.for_testing + always + chosen + (_STOPPED,) * stopped

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, ready for json."""
        plan = self.plan
        return {
            "private": self.private,
            "epsilon": self.epsilon,
            "delta": self.delta,
            "unit": self.unit.value,
            "max_rows_per_person": plan.max_rows_per_person,
            "protects": self.protects,
            "relation": plan.relation.value,
            "noise_multiplier": plan.noise_multiplier,
            "clip_norm": plan.clip_norm,
            "noise_stddev": plan.noise_stddev,
            "noise_grid": plan.noise_grid,
            "sampling_prob": plan.sampling_prob,
            "num_examples": plan.num_examples,
            "expected_batch_size": plan.expected_batch_size,
            "max_batch_size": plan.max_batch_size,
            "num_steps": self.steps_done,
            "planned_steps": plan.num_steps,
            "accountant": ACCOUNTANT,
            "mechanism": self.mechanism,
            "released": self.released,
            "assumptions": list(self.assumptions),
            "for_testing": self.for_testing,
            "chosen_at": self.chosen_at,
        }

    def __str__(self) -> str:
        plan = self.plan
        steps = f"{self.steps_done:,}"
        if self.steps_done < plan.num_steps:
            steps += f" of {plan.num_steps:,} planned (stopped early)"
        elif self.steps_done > plan.num_steps:
            steps += f" in several runs of at most {plan.num_steps:,}, all of them together"
        noise = f"noise multiplier {plan.noise_multiplier:.4g}"
        how = [
            ("mechanism", f"clipped sums (norm {plan.clip_norm:g}) + Gaussian noise, {noise},"),
            ("", f"both rounded to a grid of {plan.noise_grid:.3g} and added as integers"),
            (
                "sampling",
                f"each of {_count(plan)} {self.unit.value}s with probability "
                f"{plan.sampling_prob:.4g} a step; at most {plan.max_batch_size:,} a batch",
            ),
            ("steps", steps),
        ]
        if self.mechanism == COUNTS:
            how = [
                ("mechanism", f"counts + Gaussian noise, rounded to whole numbers; {noise},"),
                ("", f"for all counts together: a {self.unit.value}'s share of them has norm 1"),
                (f"{self.unit.value}s", f"all of them, {_count(plan)}"),
            ]
        rows = [
            ("guarantee", f"({round_up(self.epsilon)}, {self.delta:g})-differential privacy"),
            ("protects", self.protects),
            ("neighbours", _RELATION_IN_WORDS[plan.relation].format(unit=self.unit.value)),
            ("released", self.released),
            *how,
            ("accountant", ACCOUNTANT),
            *(("assumes" if i == 0 else "", text) for i, text in enumerate(self.assumptions)),
        ]
        title = "Privacy statement" + (" -- FOR TESTING ONLY, NOT PRIVATE" * self.for_testing)
        return "\n".join([title] + [f"  {label:<11}{text}" for label, text in rows])

    def _repr_html_(self) -> str:
        plan = self.plan
        guarantee = f"({round_up(self.epsilon)}, {self.delta:g})-differential privacy"
        rows = {
            "protects": self.protects,
            "neighbours": _RELATION_IN_WORDS[plan.relation].format(unit=self.unit.value),
            "released": self.released,
            "noise": f"multiplier {plan.noise_multiplier:.4g}, clip norm {plan.clip_norm:g}",
            "steps": f"{self.steps_done:,} of {plan.num_steps:,}",
        }
        return _html.card(
            "FOR TESTING ONLY, NOT PRIVATE" if self.for_testing else guarantee,
            _html.facts(rows),
            _html.details("It assumes", self.assumptions),
            is_bad=self.for_testing,
        )


def round_up(epsilon: float, digits: int = 4) -> str:
    """Epsilon rounded up to so many significant digits."""
    if epsilon == 0:
        return "0"
    unit = 10.0 ** (math.floor(math.log10(epsilon)) - digits + 1)
    return f"{math.ceil(epsilon / unit) * unit:.{digits}g}"


def _count(plan: PrivacyPlan) -> str:
    bound = "at most " if plan.relation is Relation.ADD_OR_REMOVE else ""
    return f"{bound}{plan.num_examples:,}"


@dataclasses.dataclass(frozen=True)
class NoPrivacy:
    """Stands where a private fit has its `PrivacyStatement`."""

    private = False
    epsilon = float("inf")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for json."""
        return {"private": False, "released": "a fit without clipping or noise"}

    def __str__(self) -> str:
        return (
            "NOT PRIVATE\n  This fit used the data without clipping or noise. "
            "It carries no privacy guarantee: do not publish it."
        )

    def _repr_html_(self) -> str:
        title, _, text = str(self).partition("\n")
        return _html.card(title, _html.paragraph(text.strip(), is_bad=True), is_bad=True)
