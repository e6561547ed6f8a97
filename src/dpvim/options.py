"""The options of a fit: one frozen object for how to optimise, one for the budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import optax

from dpvim import _validate
from dpvim.bridge.guides import family_spec, init_scale_of
from dpvim.inference.families import Family, FamilySpec, Layout
from dpvim.inference.gradient import default_width, width_schedule
from dpvim.inference.release_sums import LARGEST_FULL_DIM
from dpvim.inference.variants import Variant, make_variant
from dpvim.privacy.plan import (
    NonPrivatePlan,
    Plan,
    PrivacyPlan,
    check_sampling_prob,
    default_sampling_prob,
    resolve_num_steps,
    warn_if_delta_large,
)
from dpvim.types import Relation

Options = TypeVar("Options")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitOptions:
    """Options of the optimisation; `dpvim.fit` says what each means.

    Made, they are checked as far as is possible without data: a misspelt name should not cost
    minutes.
    """

    variant: str = "aligned"
    family: Any = "mean_field"
    optimizer: optax.GradientTransformation | None = None
    learning_rate: float = 1e-3
    init_scale: float = 0.1
    init_params: Mapping[str, Any] | None = None
    scale_transform: str = "softplus"
    probe_width: float | Literal["auto"] = "auto"
    trace_every: int | None = None
    seed: int | None = None
    progress: bool | None = None

    def __post_init__(self) -> None:
        spec, scale = family_spec(self.family), init_scale_of(self.family, self.init_scale)
        object.__setattr__(self, "family", spec)
        object.__setattr__(self, "init_scale", _validate.positive("init_scale", scale))
        object.__setattr__(self, "optimizer", self._checked_optimizer())
        any_size = spec.make(2, self.scale_transform)
        variant = make_variant(self.variant, any_size)
        width = _check_probe_width(self.probe_width, variant, any_size)
        object.__setattr__(self, "probe_width", width)

    def parts(self, layout: Layout) -> tuple[Family, Variant]:
        """Family and variant for a latent."""
        spec: FamilySpec = self.family
        family = spec.make(layout, self.scale_transform)
        return family, make_variant(self.variant, family)

    def width_at(self, plan: Plan, dim: int, *, several_modes: bool) -> Any:
        """The width of the probes by the step's number, or None if it is 1 throughout."""
        width = self.probe_width
        if width == "auto":
            # Wide probes tell the curvature, which is inferred only if all products are kept.
            inferred = dim <= LARGEST_FULL_DIM and not several_modes
            width = default_width(num_examples=plan.num_examples, dim=dim) if inferred else 1.0
        return None if width == 1 else width_schedule(width, plan.num_steps)

    def _checked_optimizer(self) -> optax.GradientTransformation:
        if self.optimizer is None:
            return optax.adam(_validate.positive("learning_rate", self.learning_rate))
        if isinstance(self.optimizer, optax.GradientTransformation):
            return self.optimizer
        raise TypeError(
            f"optimizer: expected an optax optimiser, got {type(self.optimizer).__name__}. Use for "
            "instance optax.adam(1e-3)."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunLength:
    """Batches and steps, by the default rules where not given."""

    sampling_prob: float | None = None
    num_steps: int | None = None
    num_epochs: float | None = None

    def resolve(self, *, num_examples: int, dim: int) -> dict[str, Any]:
        """Sampling probability and number of steps."""
        sampling_prob = self.sampling_prob
        if sampling_prob is None:
            sampling_prob = default_sampling_prob(num_examples=num_examples, dim=dim)
        sampling_prob = check_sampling_prob(sampling_prob)
        steps = resolve_num_steps(
            num_steps=self.num_steps, num_epochs=self.num_epochs, sampling_prob=sampling_prob
        )
        return {"sampling_prob": sampling_prob, "num_steps": steps}

    def plan(self, num_rows: int, dim: int) -> Plan:
        """The plan without clip and noise."""
        return NonPrivatePlan(num_examples=num_rows, **self.resolve(num_examples=num_rows, dim=dim))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget(RunLength):
    """A run and what it may cost; `dpvim.fit` says what each option means."""

    delta: float
    epsilon: float | None = None
    noise_multiplier: float | None = None
    clip_norm: float = 1.0
    num_examples: int | None = None
    relation: str = Relation.ZERO_OUT

    def __post_init__(self) -> None:
        _validate.open_unit("delta", self.delta, hint="A common choice is 1/(10 N).")
        if (self.epsilon is None) == (self.noise_multiplier is None):
            both = f"both ({self.epsilon} and {self.noise_multiplier})"
            given = "neither" if self.epsilon is None else both
            raise ValueError(
                f"epsilon and noise_multiplier: expected one of them, got {given}. With epsilon "
                "the noise is calibrated; with noise_multiplier epsilon is reported."
            )
        _validate.one_of("relation", self.relation, [r.value for r in Relation])
        if self.num_examples is None and self.relation == Relation.ADD_OR_REMOVE:
            raise ValueError(
                "num_examples: expected with relation='add_or_remove', where the number of records "
                "is private. Declare a public bound on it."
            )

    def plan(self, num_rows: int, dim: int) -> PrivacyPlan:
        """The plan, calibrated; an accountant that fails does so here, before the run."""
        rows = num_rows if self.num_examples is None else self.num_examples
        plan = PrivacyPlan(
            num_examples=rows,
            clip_norm=self.clip_norm,
            relation=Relation(self.relation),
            noise_multiplier=self.noise_multiplier,
            **self.resolve(num_examples=rows, dim=dim),
        )
        if self.epsilon is None:
            warn_if_delta_large(self.delta, rows)
            plan.epsilon(self.delta)
            return plan
        return plan.calibrate(epsilon=self.epsilon, delta=self.delta)


def take(kind: type[Options], given: dict[str, Any]) -> Options:
    """Take the options of a kind out of keyword arguments; the others stay."""
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: given.pop(name) for name in names if name in given})


def _check_probe_width(
    width: float | Literal["auto"], variant: Variant, family: Family
) -> float | Literal["auto"]:
    """A width of at least 1, where a gradient taken elsewhere can be carried back."""
    can_widen = variant.releases_gradient and family.is_gaussian
    if width == "auto":
        return "auto" if can_widen else 1.0
    width = _validate.positive("probe_width", width, hint="Or 'auto'.")
    if width < 1:
        raise ValueError(
            f"probe_width: expected at least 1, got {width:g}. 1 takes gradients where the "
            "approximation is."
        )
    if width != 1 and not can_widen:
        raise ValueError(
            f"probe_width: expected 1 for the variant {variant.name!r} of the family "
            f"{family.name!r}, whose releases depend on where the gradient is taken. 'aligned' "
            "can probe wider with Gaussian families."
        )
    return width
