"""Choices of a fit, made before anything is spent: the estimator, the plan, and why.

>>> import numpy as np, numpyro, numpyro.distributions as dist
>>> def model(x):
...     mean = numpyro.sample("mean", dist.Normal(0, 10))
...     with numpyro.plate("records", x.shape[0]):
...         numpyro.sample("x", dist.Normal(mean, 1), obs=x)
>>> print(plan(model, np.zeros(5000), epsilon=1.0, delta=1e-5))
Plan of a fit
  model      5,000 records; 1 parameter
  estimator  whitened: the run follows its releases, there is nothing to choose
  steps      4,096 on all records: 1,024 find the place, 1,024 the curvature, 2,048 the answer
  clip norm  0.06081 in units of the approximation: 4.3 sqrt(d / N)
  noise      multiplier 238.9: (0.9999, 1e-05)-differential privacy for one record, zero_out
  expect     intervals 1.05 times as wide as without privacy, where a quadratic fits
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from dpvim import _html
from dpvim._compile import single_precision
from dpvim._extras import require
from dpvim.bridge.data import check_model
from dpvim.bridge.model import BridgedModel, bridge
from dpvim.bridge.persons import GROUP_BY, read_inputs
from dpvim.inference.release_sums import LARGEST_FULL_DIM
from dpvim.inference.windows import fewest_steps, windows_of
from dpvim.options import Budget, FitOptions, RunLength, take
from dpvim.prepared import gaussian_prior
from dpvim.privacy.norm_counts import COUNT_SHARE
from dpvim.privacy.plan import Plan, PrivacyPlan
from dpvim.privacy.randomness import SecretStreams

if TYPE_CHECKING:
    from dpvim.posterior.from_releases.regression import GaussianPrior


class Request(NamedTuple):
    """One fit that was asked for."""

    length: RunLength
    options: FitOptions

    @property
    def delta(self) -> float | None:
        """None for a run without noise."""
        return self.length.delta if isinstance(self.length, Budget) else None

    @property
    def is_open(self) -> bool:
        """True if nothing was said about how to optimise or to clip."""
        has_no_clip_norm = isinstance(self.length, Budget) and self.length.clip_norm is None
        return has_no_clip_norm and self.options.is_open


class Strategy(NamedTuple):
    """Choices for a fit.

    Attributes:
        options: Options with every choice made.
        plan: The plan, calibrated.
        prior: Gaussians that stand for the model's prior, if they were needed.
        why_not_steered: Reason for an optimiser; None if the run follows its releases.
    """

    options: FitOptions
    plan: Plan
    prior: GaussianPrior | None
    why_not_steered: str | None


def choose(requests: list[Request], bridged: BridgedModel, num_rows: int) -> list[Strategy]:
    """Choose estimator and plan for fits of one model that differ in budget, seed or start.

    Raises:
        ValueError: If the whitened variant was asked for and cannot follow its releases.
    """
    first = requests[0]
    prior, why_not = None, _why_not_steered(first, bridged)
    if why_not is None:
        try:
            prior = gaussian_prior(bridged)
        except NotImplementedError:
            why_not = "the prior is improper"
    if why_not is not None and first.options.is_steered:
        raise ValueError(
            f"variant: 'whitened' without an optimiser follows its releases, and cannot here: "
            f"{why_not}. Give optimizer= or learning_rate=, or leave the variant to the default."
        )
    chosen = []
    for request in requests:
        given = request.options
        options = given.steered() if why_not is None else given.by_hand()
        dim = bridged.informed().span.shape[1] if options.is_steered else bridged.problem.dim
        plan = request.length.plan(num_rows, dim, options)
        chosen.append(Strategy(options, plan, prior, why_not))
    return chosen


def _why_not_steered(request: Request, bridged: BridgedModel) -> str | None:
    """Reason not to steer the run by its releases; None if there is none."""
    if not (request.is_open or request.options.is_steered):
        return "options of an optimiser, a family or a clip norm were given"
    if request.delta is None:
        return "the run has no noise"
    if bridged.several_modes:
        return "the model declares several modes"
    informed = int(bridged.used.sum())
    if not 1 <= informed <= LARGEST_FULL_DIM:
        return f"{informed} parameters are more than {LARGEST_FULL_DIM}"
    if request.length.num_epochs is not None:
        return "its length was given in epochs"
    if request.length.num_steps is not None:
        fewest = fewest_steps(informed)
        if request.length.num_steps < fewest:
            return f"{informed} parameters need at least {fewest:,} steps"
    return None


@dataclasses.dataclass(frozen=True, repr=False)
class FitPlan:
    """A description of what a fit would do; `print` shows it.

    Attributes:
        plan: Sampling, clip norm, noise and steps.
        variant, family: The estimator and the approximation.
        parameters, informed: Numbers of coordinates, and of what the likelihood depends on: of
            coordinates, or of their combinations if the run follows its releases.
        delta: As asked for.
        why_not_steered: Reason for an optimiser; None if the run follows its releases.
        is_mixture: Whether an observed site is a mixture: a steered fit of it is always doubted.
        is_curved: Whether parameters act only together: then it is doubted, too.
    """

    plan: PrivacyPlan
    variant: str
    family: str
    parameters: int
    informed: int
    delta: float
    why_not_steered: str | None
    is_mixture: bool = False
    is_curved: bool = False

    @property
    def epsilon(self) -> float:
        """The cost of the fit."""
        return self.plan.epsilon(self.delta)

    @property
    def expected_width(self) -> float | None:
        """Width of intervals in units of those without privacy, from the noise alone; None for a
        run with an optimiser, where the clip norm decides."""
        if self.why_not_steered is not None:
            return None
        narrow = sum(w.length for w in windows_of(self.plan.num_steps) if not w.is_wide)
        one = self.plan.noise_stddev / self.plan.sampling_prob / math.sqrt(1 - COUNT_SHARE)
        return math.sqrt(1 + one**2 / narrow)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for scripts."""
        plan = dataclasses.asdict(self.plan)
        facts = {k: v for k, v in dataclasses.asdict(self).items() if k != "plan"}
        found = {"epsilon": self.epsilon, "expected_width": self.expected_width}
        return facts | plan | found | {"unit": self._unit}

    def __str__(self) -> str:
        rows = {
            "model": self._model(),
            "estimator": self._estimator(),
            "steps": self._steps(),
            "clip norm": self._clip_norm(),
            "noise": f"multiplier {self.plan.noise_multiplier:.4g}: ({self.epsilon:.4g}, "
            f"{self.delta:g})-differential privacy for one {self._unit}, "
            f"{self.plan.relation.value}",
        }
        if self.expected_width is not None:
            rows["expect"] = (
                f"intervals {self.expected_width:.3g} times as wide as without privacy, where a "
                "quadratic fits"
            )
            if self.is_mixture:
                rows["doubt"] = (
                    "the model is a mixture: its fit will be doubted, and half of the posterior "
                    "may be the prior"
                )
            if self.is_curved:
                rows["doubt"] = (
                    "parameters act only together (factors of a product, say): the fit will be "
                    "doubted, and half of the posterior will be the prior"
                )
        lines = [f"  {name:<10} {text}" for name, text in rows.items()]
        return "\n".join(["Plan of a fit", *lines])

    __repr__ = __str__

    def plot(self) -> Any:
        """Draw it: its steps, and what more or less epsilon would give; see `dpvim.plots`."""
        return require("dpvim.plots", extra="plots").plot_plan(self)

    def _repr_html_(self) -> str:
        title, *lines = str(self).splitlines()
        split = [line.strip().partition("  ") for line in lines]
        return _html.card(title, _html.facts({name: text.strip() for name, _, text in split}))

    def _model(self) -> str:
        prior_alone = self.parameters - self.informed
        others = f"; of {prior_alone} combinations the prior alone tells" if prior_alone else ""
        several = "" if self.parameters == 1 else "s"
        count = f"{self.parameters} parameter{several}{others}"
        most = self.plan.max_rows_per_person
        rows = "" if most is None else f", at most {most:,} rows of each"
        return f"{self.plan.num_examples:,} {self._unit}s{rows}; {count}"

    @property
    def _unit(self) -> str:
        return self.plan.unit.value

    def _estimator(self) -> str:
        if self.why_not_steered is None:
            return f"{self.variant}: the run follows its releases, there is nothing to choose"
        return f"{self.variant}, {self.family}, with an optimiser: {self.why_not_steered}"

    def _steps(self) -> str:
        plan = self.plan
        batch = f"about {plan.expected_batch_size:,.0f} {self._unit}s each"
        if plan.sampling_prob == 1:
            batch = f"all {self._unit}s"
        if self.why_not_steered is not None:
            return f"{plan.num_steps:,} on {batch}"
        windows = windows_of(plan.num_steps)
        search = sum(w.length for w in windows if w.searches)
        wide = sum(w.length for w in windows if w.is_wide) - search
        rest = plan.num_steps - search - wide
        return (
            f"{plan.num_steps:,} on {batch}: {search:,} find the place, {wide:,} the curvature, "
            f"{rest:,} the answer"
        )

    def _clip_norm(self) -> str:
        norm = self.plan.clip_norm
        if self.variant != "whitened":
            return f"{norm:.4g}, of a {self._unit}'s gradient"
        factor = norm / math.sqrt(self.informed / self.plan.num_examples)
        return f"{norm:.4g} in units of the approximation: {factor:.2g} sqrt(d / N)"


@single_precision
def plan(model: Callable[..., Any], *data: Any, **options: Any) -> FitPlan:
    """Show what `dpvim.fit` would do with these arguments. Nothing is spent.

    Of the data their shapes are used, and nothing else: zeros will do.

    Args:
        model, data, options: As in `dpvim.fit`. With a ledger, what it does not pay for is refused.
    """
    request = Request(take(Budget, options), take(FitOptions, options))
    check_model(model, data, [name for name in options if name != GROUP_BY])
    inputs = read_inputs(
        data,
        options,
        max_rows_per_person=request.length.max_rows_per_person,
        streams=SecretStreams(),
    )
    bridged = bridge(model, inputs)
    (strategy,) = choose([request], bridged, inputs.num_rows)
    assert isinstance(strategy.plan, PrivacyPlan)
    assert request.delta is not None
    informed, is_curved = int(bridged.used.sum()), False
    if strategy.why_not_steered is None:
        found = bridged.informed()
        informed = found.span.shape[1]
        is_curved = found.at_a_place < informed
    strategy.plan.check_num_rows(inputs.num_rows)
    if isinstance(request.length, Budget) and request.length.ledger is not None:
        request.length.ledger.check_affordable(strategy.plan, delta=request.delta)
    return FitPlan(
        plan=strategy.plan,
        variant=str(strategy.options.variant),
        family=strategy.options.family.name,
        parameters=bridged.problem.dim,
        informed=informed,
        delta=request.delta,
        why_not_steered=strategy.why_not_steered,
        is_mixture=bridged.is_mixture,
        is_curved=is_curved,
    )
