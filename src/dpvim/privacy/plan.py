r"""One frozen plan couples sampler, clip, noise and accountant.

>>> plan = PrivacyPlan(num_examples=10_000, sampling_prob=0.1, num_steps=1000, clip_norm=1.0)
>>> plan = plan.calibrate(epsilon=1.0, delta=1e-5)
>>> plan.epsilon(1e-5) <= 1.0
True
>>> plan.noise_stddev == plan.noise_multiplier * plan.clip_norm
True
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from dpvim import _validate
from dpvim.privacy import accounting
from dpvim.types import PrivacyWarning, Relation, Unit

if TYPE_CHECKING:
    import dp_accounting

# What the cap on batches may add to delta in a step: a thousandth of 1e-12 in 10^7 steps. It takes
# nine to ten standard deviations above the mean for large batches, more for a few records. The
# cap must not depend on the number of steps: a run that is stopped keeps the one it had.
_MAX_TRUNCATION_PROB = 1e-22
# A record is drawn once in a billion steps, which is more than any run takes. Below 4e-16 the gaps
# between the records that are drawn would no longer fit 64 bits.
_SMALLEST_SAMPLING_PROB = 1e-9
# Fine enough that rounding costs next to nothing, coarse enough that 64 standard deviations of
# noise fit 32 bits.
_GRID_BITS = 24
# The range of clip norms in which the single-precision clip is safe against under- and overflow.
SMALLEST_CLIP_NORM, LARGEST_CLIP_NORM = 1e-4, 1e6
# With less noise there is no privacy to speak of, with more nothing is released; the accountant's
# squares of either fit a float.
_LEAST_NOISE, _MOST_NOISE = 1e-5, 1e12


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Schedule:
    """The sampling schedule, which private and non-private plans have in common."""

    num_examples: int
    sampling_prob: float
    num_steps: int
    max_rows_per_person: int | None = None

    @property
    def unit(self) -> Unit:
        """The unit that is sampled, clipped and protected: a record, or a person with all rows."""
        return Unit.RECORD if self.max_rows_per_person is None else Unit.PERSON

    @property
    def expected_batch_size(self) -> float:
        """q N: what sums are divided by. Never the realised size, which is private."""
        return self.sampling_prob * self.num_examples

    @property
    def max_batch_size(self) -> int:
        """Public cap on a batch; a larger draw is cut to a uniformly chosen part of it."""

        def rarely_truncates(cap: int) -> bool:
            added = accounting.truncation_prob(
                sampling_prob=self.sampling_prob,
                num_examples=self.num_examples,
                max_batch_size=cap,
            )
            return added <= _MAX_TRUNCATION_PROB

        return 1 + bisect.bisect_left(range(1, self.num_examples), True, key=rarely_truncates)

    def with_steps(self, num_steps: int) -> Self:
        """The same plan for another number of steps, at the same noise."""
        return dataclasses.replace(self, num_steps=num_steps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrivacyPlan(_Schedule):
    r"""Sampling, clip norm, noise and number of steps of a run, from which its cost follows.

    Each of ``num_steps`` steps takes every record independently with probability
    ``sampling_prob``, clips its contribution to ``clip_norm``, sums, and adds Gaussian noise of
    standard deviation ``noise_multiplier * clip_norm`` to every coordinate of the sum.

    Args:
        num_examples: Number of records N; public. Under ``add_or_remove`` a public bound on it.
        sampling_prob: Probability q with which a record is in a batch.
        num_steps: Number of releases.
        clip_norm: Largest l2 norm C of one record's contribution.
        relation: Which data sets are neighbours; see `Relation`.
        noise_multiplier: Noise in units of ``clip_norm``; None until calibrated.
        max_rows_per_person: If given, a record is a person: all rows of one, of which at most so
            many are used. ``num_examples`` is the number of persons then.

    Guarantees:
        All fields are public: none is read off the data, and all may be printed and saved.
    """

    clip_norm: float
    relation: Relation = Relation.ZERO_OUT
    noise_multiplier: float | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "num_examples", _validate.positive_int("num_examples", self.num_examples))
        put(self, "sampling_prob", check_sampling_prob(self.sampling_prob))
        put(self, "num_steps", _validate.positive_int("num_steps", self.num_steps))
        put(self, "clip_norm", _check_clip_norm(self.clip_norm))
        if self.max_rows_per_person is not None:
            _validate.positive_int("max_rows_per_person", self.max_rows_per_person)
        relation = _validate.one_of("relation", self.relation, [r.value for r in Relation])
        put(self, "relation", Relation(relation))
        if self.noise_multiplier is not None:
            put(self, "noise_multiplier", _check_noise(self.noise_multiplier))

    @property
    def num_rows_is_private(self) -> bool:
        """True if the number of records must not show, not even in the shape of an array."""
        return self.relation is Relation.ADD_OR_REMOVE

    @property
    def noise_stddev(self) -> float:
        """Standard deviation of the noise on each coordinate of a clipped sum."""
        if self.noise_multiplier is None:
            raise ValueError(
                "This plan has no noise multiplier yet: call plan.calibrate(epsilon=, delta=), "
                "or give noise_multiplier=."
            )
        return self.noise_multiplier * self.clip_norm

    @property
    def noise_grid(self) -> float:
        """Spacing of the lattice that releases lie on: a power of two, 2^-24 of the noise or so."""
        return 2.0 ** (math.floor(math.log2(self.noise_stddev)) - _GRID_BITS)

    @property
    def dp_event(self) -> dp_accounting.DpEvent:
        """The run as an event of dp-accounting, for its accountants or one of your own."""
        return accounting.dp_event(
            noise_multiplier=self.noise_stddev / self.clip_norm, **self._event_settings()
        )

    def epsilon(self, delta: float, *, accountant: str = "dpvim") -> float:
        """The cost of the run at `delta`: an upper bound.

        Args:
            delta: Probability with which the bound may fail.
            accountant: ``"dpvim"``, or ``"dp_accounting"`` for a second opinion that shares no code
                with it. For others there is `dp_event`.
        """
        delta = _validate.open_unit("delta", delta)
        _validate.one_of("accountant", accountant, ("dpvim", "dp_accounting"))
        if accountant == "dp_accounting":
            from dpvim.privacy.accounting.cross_check import epsilon_by_dp_accounting

            return epsilon_by_dp_accounting([self.dp_event], delta=delta, relation=self.relation)
        return accounting.epsilon_of(self.dp_event, delta=delta, relation=self.relation)

    def calibrate(
        self, *, epsilon: float, delta: float, beside: Sequence[PrivacyPlan] = ()
    ) -> Self:
        """The same plan with the least noise for which the run costs at most (epsilon, delta).

        Args:
            epsilon, delta: The budget.
            beside: Plans of other runs on the same data, which are paid for out of it, too.
        """
        epsilon = _validate.epsilon("epsilon", epsilon)
        delta = _validate.open_unit("delta", delta)
        warn_if_delta_large(delta, self.num_examples)
        if self.sampling_prob < 1:
            seen_at_all = -math.expm1(self.num_steps * math.log1p(-self.sampling_prob))
            if delta >= seen_at_all:
                raise ValueError(
                    f"delta: expected less than {seen_at_all:.3g}, the probability that a record "
                    f"is in any batch at all, got {delta:g}. Such a guarantee needs no noise and "
                    "protects nobody who was sampled; choose a smaller delta."
                )
        _validate.an_instance("beside", beside, (list, tuple), "a list of plans")
        for other in beside:
            _validate.an_instance("beside", other, PrivacyPlan, "a list of dpvim.PrivacyPlan")
            _validate.one_of("beside: relation", other.relation.value, [self.relation.value])
        noise = accounting.calibrate_noise(
            epsilon=epsilon,
            delta=delta,
            relation=self.relation,
            beside=[other.dp_event for other in beside],
            **self._event_settings(),
        )
        return dataclasses.replace(self, noise_multiplier=noise)

    def check_num_rows(self, num_rows: int) -> None:
        """Refuse data that contradict the declared number of records."""
        unit = self.unit.value
        if self.relation is Relation.ADD_OR_REMOVE:
            if num_rows > self.num_examples:
                raise ValueError(
                    f"num_examples: expected a public bound on the number of {unit}s, got "
                    f"{self.num_examples}, and the data have more. Declare a larger one."
                )
        elif num_rows != self.num_examples:
            raise ValueError(
                f"num_examples: the plan is for {self.num_examples} {unit}s, the data have "
                f"{num_rows}. Make a plan for these data (the number of {unit}s is public under "
                f"relation={self.relation.value!r})."
            )

    def _event_settings(self) -> dict[str, Any]:
        return {
            "sampling_prob": self.sampling_prob,
            "num_steps": self.num_steps,
            "num_examples": self.num_examples,
            "max_batch_size": self.max_batch_size,
        }


def check_sampling_prob(value: object) -> float:
    """A probability that the sampler can draw with: from 1e-9 to 1."""
    prob = _validate.probability("sampling_prob", value)
    if prob < _SMALLEST_SAMPLING_PROB:
        raise ValueError(
            f"sampling_prob: expected at least {_SMALLEST_SAMPLING_PROB:g}, got {value!r}: hardly "
            "any record would ever be used. Choose a larger one, or leave it to the default."
        )
    return prob


def _check_clip_norm(value: object) -> float:
    hint = "A threshold taken from the data is not private: choose one, e.g. 1.0."
    clip_norm = _validate.positive("clip_norm", value, hint=hint)
    if not SMALLEST_CLIP_NORM <= clip_norm <= LARGEST_CLIP_NORM:
        raise ValueError(
            f"clip_norm: expected a number between 1e-4 and 1e6, got {value!r}. Rescale the "
            "parameters of the model so that gradients are of order one."
        )
    return clip_norm


def _check_noise(value: object) -> float:
    hint = "For a run without noise use dpvim.fit_nonprivate."
    noise = _validate.positive("noise_multiplier", value, hint=hint)
    if not _LEAST_NOISE <= noise <= _MOST_NOISE:
        raise ValueError(
            f"noise_multiplier: expected a number between {_LEAST_NOISE:g} and {_MOST_NOISE:g}, "
            f"got {value!r}. {hint}"
        )
    return noise


@dataclasses.dataclass(frozen=True, kw_only=True)
class NonPrivatePlan(_Schedule):
    """The same steps without clip and noise. It has no epsilon."""

    clip_norm = math.inf
    noise_stddev = 0.0
    noise_grid = 0.0
    num_rows_is_private = False

    def check_num_rows(self, num_rows: int) -> None:
        """Refuse data of another length."""
        if num_rows != self.num_examples:
            raise ValueError(f"the plan is for {self.num_examples} rows, the data have {num_rows}.")


Plan = PrivacyPlan | NonPrivatePlan


def warn_if_delta_large(delta: float, num_examples: int) -> None:
    """delta > 1/N allows a mechanism that publishes one record outright."""
    if delta > 1 / num_examples:
        warnings.warn(
            f"delta = {delta:g} is larger than 1/N = {1 / num_examples:.3g}: such a guarantee "
            "allows that some person's record is published as it is. Choose delta well below 1/N.",
            PrivacyWarning,
            stacklevel=3,
        )


# The default plan. Averaged over a run, the noise is noise_multiplier / (q sqrt(T)), and that
# falls with the batch until it holds all records; a step costs batch x d operations. So: the
# largest batch whose gradient table stays in the processor's caches, and as many steps as Adam
# needs to travel a few units at the default learning rate.
_TABLE_ENTRIES = 2**19
# Where rows are multiplied by a matrix, a step takes batch x d^2 operations.
_PRODUCTS = 2**24
_SMALLEST_BATCH = 256
DEFAULT_STEPS = 10_000


def default_sampling_prob(
    *, num_examples: int, dim: int, products: bool = False, rows: int = 1
) -> float:
    """Large batches first: about 2^19 / d records, and all of them where that is half or more.

    With `products` rows are multiplied by a matrix, and there are at most 2^24 / d^2. A person has
    several `rows`, each with a gradient.

    >>> default_sampling_prob(num_examples=1000, dim=10)
    1.0
    >>> round(default_sampling_prob(num_examples=30_162, dim=96), 3)
    0.181
    """
    batch = _TABLE_ENTRIES // (dim * rows)
    if products:
        batch = min(batch, _PRODUCTS // dim**2)
    batch = max(_SMALLEST_BATCH, batch)
    return 1.0 if 2 * batch >= num_examples else batch / num_examples


def resolve_num_steps(
    *,
    num_steps: int | None,
    num_epochs: float | None,
    sampling_prob: float,
    default: int = DEFAULT_STEPS,
) -> int:
    """Steps from steps or epochs (an epoch is 1/q steps); the default if neither is given."""
    if num_steps is not None and num_epochs is not None:
        raise ValueError(
            f"num_steps and num_epochs: expected one of them, got both ({num_steps} and "
            f"{num_epochs}). An epoch is 1/sampling_prob steps; leave one out."
        )
    if num_epochs is not None:
        epochs = _validate.positive("num_epochs", num_epochs)
        return max(1, round(epochs / sampling_prob))
    if num_steps is not None:
        return _validate.positive_int("num_steps", num_steps)
    return default
