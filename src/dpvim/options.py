"""The options of a fit: one frozen object for how to optimise, one for the budget."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import optax

from dpvim import _validate
from dpvim.bridge.guides import family_spec, init_scale_of
from dpvim.inference.families import Family, FamilySpec, Layout
from dpvim.inference.families.base import scale_transform_of
from dpvim.inference.gradient import default_width, width_schedule
from dpvim.inference.release_sums import LARGEST_FULL_DIM
from dpvim.inference.variants import VARIANTS, Variant, make_variant, whitened_clip_norm
from dpvim.inference.windows import default_num_steps, window_widths
from dpvim.ledger.book import Ledger
from dpvim.ledger.payment import Account
from dpvim.privacy.plan import (
    DEFAULT_STEPS,
    SMALLEST_CLIP_NORM,
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

_STEERED = "whitened"
_DEFAULT_VARIANT, _DEFAULT_FAMILY = "aligned", "mean_field"
_DEFAULT_INIT_SCALE, _DEFAULT_LEARNING_RATE, _DEFAULT_CLIP_NORM = 0.1, 1e-3, 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitOptions:
    """Options of the optimisation; `dpvim.fit` says what each means.

    Made, they are checked as far as is possible without data: a misspelt name should not cost
    minutes. What is None was not given; `steered` and `by_hand` have every choice made.
    """

    variant: str | None = None
    family: Any = None
    optimizer: optax.GradientTransformation | None = None
    learning_rate: float | None = None
    init_scale: float | None = None
    init_params: Mapping[str, Any] | None = None
    scale_transform: str = "softplus"
    probe_width: float | Literal["auto"] = "auto"
    trace_every: int | None = None
    seed: int | None = None
    progress: bool | None = None
    checkpoint: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        if not isinstance(self.checkpoint, str | os.PathLike | None):
            raise TypeError(
                f"checkpoint: expected the name of a folder, got {type(self.checkpoint).__name__}."
            )
        if self.variant is not None:
            _validate.one_of("variant", self.variant, VARIANTS)
        _validate.seed("seed", self.seed)
        if self.trace_every is not None:
            _validate.positive_int("trace_every", self.trace_every)
        if self.init_params is not None:
            expected = "a dict of values by the names of sites"
            _validate.an_instance("init_params", self.init_params, Mapping, expected)
        _validate.an_instance("progress", self.progress, (bool, type(None)), "True, False or None")
        scale = init_scale_of(self.family, self.init_scale)
        if scale is not None:
            put(self, "init_scale", _validate.positive("init_scale", scale))
        if self.family is not None:
            put(self, "family", family_spec(self.family))
        self._check_optimizer()
        if self.learning_rate is not None:
            _validate.positive("learning_rate", self.learning_rate)
        scale_transform_of(self.scale_transform)
        self._check_probe_width()

    @property
    def is_open(self) -> bool:
        """True if nothing was said about how to optimise."""
        said = (self.variant, self.family, self.optimizer, self.learning_rate, self.init_scale)
        nothing = all(option is None for option in said)
        return nothing and (self.scale_transform, self.probe_width) == ("softplus", "auto")

    @property
    def is_steered(self) -> bool:
        """True if the run follows its releases instead of an optimiser."""
        no_optimizer = self.optimizer is None and self.learning_rate is None
        served = self.family is None or self.family.make(2, self.scale_transform).place is not None
        return self.variant == _STEERED and no_optimizer and served

    def steered(self) -> FitOptions:
        """The options of a run that follows its releases."""
        return dataclasses.replace(self, variant=_STEERED, family=family_spec("full_rank"))

    def by_hand(self) -> FitOptions:
        """The options with an optimiser, and defaults for what was not given."""
        optimizer = self.optimizer
        if optimizer is None and not self.is_steered:
            optimizer = optax.adam(self.learning_rate or _DEFAULT_LEARNING_RATE)
        return dataclasses.replace(
            self,
            variant=self.variant or _DEFAULT_VARIANT,
            family=self.family or family_spec(_DEFAULT_FAMILY),
            init_scale=self.init_scale or _DEFAULT_INIT_SCALE,
            optimizer=optimizer,
        )

    def parts(self, layout: Layout) -> tuple[Family, Variant]:
        """Family and variant for a latent."""
        spec: FamilySpec = self.family or family_spec(_DEFAULT_FAMILY)
        family = spec.make(layout, self.scale_transform)
        return family, make_variant(self.variant or _DEFAULT_VARIANT, family)

    def width_at(self, plan: Plan, dim: int, *, largest_block: int, several_modes: bool) -> Any:
        """The width of the probes by the step's number, or None if it is 1 throughout."""
        if self.is_steered:
            return window_widths(self.wide_probes(plan, dim), plan.num_steps)
        width = self.probe_width
        if width == "auto":
            # Wide probes tell the curvature, which is inferred only if all products are kept.
            inferred = largest_block <= LARGEST_FULL_DIM and not several_modes
            inferred = inferred and self._can_widen()
            width = self.wide_probes(plan, dim) if inferred else 1.0
        return None if width == 1 else width_schedule(width, plan.num_steps)

    def wide_probes(self, plan: Plan, dim: int) -> float:
        """The width of wide probes for a latent of which `dim` coordinates are informed."""
        return default_width(num_examples=plan.num_examples, dim=dim)

    def _can_widen(self) -> bool:
        """True where a gradient that was taken elsewhere can be carried back."""
        family, variant = self.parts(Layout.of(2))
        return variant.releases_gradient and family.is_gaussian

    def _check_probe_width(self) -> None:
        can_widen = self._can_widen()
        if isinstance(self.probe_width, str) and self.probe_width == "auto":
            return
        width = _validate.positive("probe_width", self.probe_width, hint="Or 'auto'.")
        if width < 1:
            raise ValueError(
                f"probe_width: expected at least 1, got {width:g}. 1 takes gradients where the "
                "approximation is."
            )
        if width != 1 and not can_widen:
            family, variant = self.parts(Layout.of(2))
            raise ValueError(
                f"probe_width: expected 1 for the variant {variant.name!r} of the family "
                f"{family.name!r}, whose releases depend on where the gradient is taken. 'aligned' "
                "can probe wider with Gaussian families."
            )

    def _check_optimizer(self) -> None:
        if self.optimizer is None or isinstance(self.optimizer, optax.GradientTransformation):
            return
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
    max_rows_per_person: int | None = None

    def __post_init__(self) -> None:
        if self.sampling_prob is not None:
            check_sampling_prob(self.sampling_prob)
        if self.num_steps is not None:
            _validate.positive_int("num_steps", self.num_steps)
        if self.num_epochs is not None:
            _validate.positive("num_epochs", self.num_epochs)
        if self.max_rows_per_person is not None:
            _validate.positive_int("max_rows_per_person", self.max_rows_per_person)

    def resolve(
        self, *, num_examples: int, dim: int, options: FitOptions | None = None
    ) -> dict[str, Any]:
        """Sampling probability, number of steps and rows of a person, for these options."""
        steered = options is not None and options.is_steered
        sampling_prob = self.sampling_prob
        if sampling_prob is None:
            sampling_prob = default_sampling_prob(
                num_examples=num_examples,
                dim=dim,
                products=steered,
                rows=self.max_rows_per_person or 1,
            )
        sampling_prob = check_sampling_prob(sampling_prob)
        steps = resolve_num_steps(
            num_steps=self.num_steps,
            num_epochs=self.num_epochs,
            sampling_prob=sampling_prob,
            default=default_num_steps(dim) if steered else DEFAULT_STEPS,
        )
        return {
            "sampling_prob": sampling_prob,
            "num_steps": steps,
            "max_rows_per_person": self.max_rows_per_person,
        }

    def plan(self, num_rows: int, dim: int, options: FitOptions | None = None) -> Plan:
        """The plan without clip and noise."""
        return NonPrivatePlan(num_examples=num_rows, **self.resolve(num_examples=num_rows, dim=dim))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget(RunLength):
    """A run and what it may cost; `dpvim.fit` says what each option means."""

    delta: float
    epsilon: float | None = None
    noise_multiplier: float | None = None
    clip_norm: float | None = None
    num_examples: int | None = None
    relation: str = Relation.ZERO_OUT
    ledger: Any = None
    purpose: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.purpose is not None:
            _validate.text("purpose", self.purpose)
        if self.num_examples is not None:
            _validate.positive_int("num_examples", self.num_examples)
        put = object.__setattr__
        for name in ("epsilon", "noise_multiplier", "clip_norm"):
            if getattr(self, name) is not None:
                put(self, name, _validate.positive(name, getattr(self, name)))
        if self.ledger is not None:
            put(self, "ledger", Ledger.of(self.ledger))
        elif self.purpose is not None:
            raise ValueError(
                f"purpose: expected with ledger=, where it is noted, got {self.purpose!r} alone."
            )
        hint = "A common choice is 1/(10 N)."
        put(self, "delta", _validate.open_unit("delta", self.delta, hint=hint))
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

    def account(self, otherwise: str) -> Account | None:
        """The ledger that the run is booked in, if any, with its purpose or another text."""
        if self.ledger is None:
            return None
        return Account(self.ledger, self.purpose or otherwise, self.delta)

    def plan(self, num_rows: int, dim: int, options: FitOptions | None = None) -> PrivacyPlan:
        """The plan for `dim` informed coordinates, calibrated.

        An accountant that fails does so here, before the run.
        """
        rows = num_rows if self.num_examples is None else self.num_examples
        plan = PrivacyPlan(
            num_examples=rows,
            clip_norm=_DEFAULT_CLIP_NORM if self.clip_norm is None else self.clip_norm,
            relation=Relation(self.relation),
            noise_multiplier=self.noise_multiplier,
            **self.resolve(num_examples=rows, dim=dim, options=options),
        )
        if self.epsilon is None:
            warn_if_delta_large(self.delta, rows)
            plan.epsilon(self.delta)
        else:
            plan = plan.calibrate(epsilon=self.epsilon, delta=self.delta)
        if self.clip_norm is None and options is not None and options.variant == _STEERED:
            noise = plan.noise_stddev / plan.sampling_prob / math.sqrt(plan.num_steps)
            whitened = whitened_clip_norm(num_examples=rows, dim=dim, noise=noise)
            plan = dataclasses.replace(plan, clip_norm=max(whitened, SMALLEST_CLIP_NORM))
        return plan


def take(kind: type[Options], given: dict[str, Any]) -> Options:
    """Take the options of a kind out of keyword arguments; the others stay."""
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    if "delta" in names and "delta" not in given:
        raise TypeError(
            "delta: expected a number well below 1/N as a keyword argument, got none. "
            "A common choice is 1/(10 N)."
        )
    return kind(**{name: given.pop(name) for name in names if name in given})
