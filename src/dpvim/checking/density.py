"""Log predictive density of records: its mean, as a release of counts."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from dpvim import _validate
from dpvim._compile import single_precision
from dpvim.bridge.data import ModelInput
from dpvim.bridge.persons import rows_of
from dpvim.checking.questions import (
    Question,
    booked,
    bridged_of,
    check_plan,
    check_signature,
    inputs_of,
    latents_of,
    mechanism_of,
    num_records_of,
    statement_of,
)
from dpvim.privacy.counts import Cells, CountMechanism, Marginal, NoisyMarginal
from dpvim.privacy.plan import PrivacyPlan
from dpvim.privacy.records import over_records
from dpvim.privacy.statement import PrivacyStatement
from dpvim.result import Fit
from dpvim.types import Record, Relation

_DRAWS = 64
# The scale of orders of magnitude: even steps of asinh(x / _UNIT), which are 1 % of large numbers.
_UNIT, _STEP, _LARGEST = 0.25, 0.01, 1e8
_STEPS = math.ceil(math.asinh(_LARGEST / _UNIT) / _STEP)
NUM_CODES = 2 * _STEPS + 1
# The first round counts in cells of so many steps, with that part of the release.
_COARSE = 32
_FIRST_SHARE = 0.25
_NUM_CELLS = 40
# A count that is so many standard deviations of its noise above zero is not noise; beside others
# that are not, one is enough.
_STANDS_OUT, _GOES_ON = 4.0, 1.0
_MARGIN = 2


@dataclasses.dataclass(frozen=True)
class Score:
    """A mean over records, released with noise.

    Attributes:
        mean: Of the log predictive density of a record, or of the difference of two fits'.
        noise: Standard deviation of what the privacy noise adds to it.
        sampling: Standard deviation of what it would vary by with other records of the same kind.
        low, high: Where what records say was cut off; found in a first round of counts.
        num_records: Public, or as many as the counts say.
        privacy: The guarantee.
    """

    mean: float
    noise: float
    sampling: float
    low: float
    high: float
    num_records: float
    privacy: PrivacyStatement

    @property
    def stderr(self) -> float:
        """Of the mean, for statements on records that are not in the data."""
        return math.hypot(self.noise, self.sampling)

    def __str__(self) -> str:
        return (
            f"{self.mean:.4g} +- {self.stderr:.2g} nats a record (of it noise {self.noise:.2g}), "
            f"{self.num_records:,.0f} records, each between {self.low:.3g} and {self.high:.3g}"
        )


def held_out(
    fit: Fit,
    *data: Any,
    epsilon: float,
    delta: float,
    against: Fit | None = None,
    relation: Relation | str = Relation.ZERO_OUT,
    num_examples: int | None = None,
    num_draws: int = _DRAWS,
    seed: int | None = None,
    ledger: Any = None,
    purpose: str | None = None,
    **keyword_data: Any,
) -> Score:
    """Release how well a fit predicts records: the mean of their log predictive density.

    Records that the fit has not seen are what a comparison should be made on: set some aside, by a
    rule that does not look at them. The cost adds to that of other releases from the same records.

    Args:
        fit: Made in this session, so that it knows its model.
        data, keyword_data: As in `dpvim.fit`, other records.
        epsilon, delta, relation, num_examples: The budget, as in `dpvim.fit`.
        against: Another fit to the same kind of records: then it is the difference of the two that
            is released, record by record, which varies less than both.
        num_draws: Draws of the posterior that the density is averaged over.
        seed: For tests: the result has no privacy guarantee.
        ledger, purpose: As in `dpvim.fit`: the release is booked before it is made.

    >>> import dpvim, numpyro, numpyro.distributions as dist
    >>> def model(x):
    ...     mean = numpyro.sample("mean", dist.Normal(0, 10))
    ...     with numpyro.plate("records", x.shape[0]):
    ...         numpyro.sample("x", dist.Normal(mean, 1), obs=x)
    >>> x = np.random.default_rng(0).normal(2.0, 1.0, 4000)
    >>> fit = dpvim.fit(model, x[:2000], epsilon=1.0, delta=1e-5)
    >>> score = held_out(fit, x[2000:], epsilon=1.0, delta=1e-5)
    >>> bool(-1.7 < score.mean < -1.1)  # about -1.42 for normal records
    True
    """
    _validate.positive_int("num_draws", num_draws)
    delta = _validate.open_unit("delta", delta)
    _validate.an_instance("against", against, (Fit, type(None)), "a dpvim.Fit")
    inputs = inputs_of(fit, data, keyword_data, seed)
    fits = [fit] if against is None else [fit, against]
    densities = [log_density(each, inputs, num_draws, seed) for each in fits]
    plan = check_plan(
        inputs, epsilon=epsilon, delta=delta, relation=relation, num_examples=num_examples
    )

    def codes(records: Record) -> Int[np.ndarray, "rows 1"]:
        found = [density(records) for density in densities]
        return magnitude_codes(found[0] if len(found) == 1 else found[0] - found[1])[:, None]

    what = "log predictive density" if against is None else "difference of log densities"
    mechanism = mechanism_of(Question(codes, (NUM_CODES,)), inputs, plan, seed)
    rows = rows_of(data, keyword_data).records
    facts: dict[str, Any] = {"otherwise": "held-out score", "delta": delta, "seed": seed}
    with booked(ledger, purpose, plan, rows, **facts):
        return _release_mean(
            mechanism, statement_of(plan, delta, seed, f"counts of records by {what}")
        )


def score_records(
    fit: Fit,
    data: tuple[Any, ...],
    keyword_data: Mapping[str, Any],
    plan: PrivacyPlan,
    *,
    delta: float,
    chosen_at: float,
    seed: int | None = None,
) -> Score:
    """Release the mean log predictive density of records, as one of the trials of a choice.

    Args:
        fit, data, keyword_data: As of `held_out`.
        plan: Calibrated.
        delta, chosen_at: Of the choice: its cost is the score's.
        seed: For tests.
    """
    inputs = inputs_of(fit, data, keyword_data, seed)
    density = log_density(fit, inputs, _DRAWS, seed)
    question = Question(lambda records: magnitude_codes(density(records))[:, None], (NUM_CODES,))
    mechanism = mechanism_of(question, inputs, plan, seed)
    what = "counts of records by log predictive density"
    return _release_mean(mechanism, statement_of(plan, delta, seed, what, chosen_at))


def _release_mean(mechanism: CountMechanism, privacy: PrivacyStatement) -> Score:
    """Release the mean of a number that is coded on the scale of orders of magnitude."""
    plan = mechanism.plan
    alone = [Marginal((0,))]
    values = magnitudes()
    coarse = np.arange(len(values)) // _COARSE
    (first,) = mechanism.release(Cells((coarse,)), alone, share=_FIRST_SHARE)
    low, high = _ends(first, values, coarse)
    edges = np.linspace(low, high, _NUM_CELLS + 1)
    cells = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, _NUM_CELLS - 1)
    (second,) = mechanism.release(Cells((cells,)), alone, share=1 - _FIRST_SHARE)
    counts = second.counts.astype(float)
    rows = num_records_of(plan, [second])
    # Around the middle, so that noise on many counts does not add up to a shift of all.
    middle = (low + high) / 2
    away = (edges[:-1] + edges[1:]) / 2 - middle
    mean = float(counts @ away) / rows
    spread = max(float(counts @ away**2) / rows - mean**2, 0.0)
    return Score(
        mean=middle + mean,
        noise=math.sqrt(second.variance * float(away @ away)) / rows,
        sampling=math.sqrt(spread / rows),
        low=low,
        high=high,
        num_records=rows,
        privacy=privacy,
    )


def magnitude_codes(numbers: Float[np.ndarray, " rows"]) -> Int[np.ndarray, " rows"]:
    """The place of each number on the scale of orders of magnitude; what is no number is lowest."""
    numbers = np.nan_to_num(np.asarray(numbers, float), nan=-np.inf)
    steps = np.rint(np.arcsinh(np.clip(numbers, -_LARGEST, _LARGEST) / _UNIT) / _STEP)
    return _STEPS + steps.astype(np.int64)


def magnitudes() -> Float[np.ndarray, " codes"]:
    """The number that each code stands for."""
    return _UNIT * np.sinh(_STEP * np.arange(-_STEPS, _STEPS + 1))


def _ends(
    first: NoisyMarginal, values: Float[np.ndarray, " codes"], coarse: Int[np.ndarray, " codes"]
) -> tuple[float, float]:
    """Between these lies all that stands out from the noise, and a little more on either side."""
    noise = math.sqrt(first.variance)
    low = high = int(np.argmax(first.counts))
    others = np.flatnonzero(first.counts > _STANDS_OUT * noise)
    goes_on = first.counts > _GOES_ON * noise
    while low > 0 and goes_on[low - 1]:
        low -= 1
    while high < len(goes_on) - 1 and goes_on[high + 1]:
        high += 1
    low, high = min([low, *others]) - _MARGIN, max([high, *others]) + _MARGIN
    inside = values[(coarse >= low) & (coarse <= high)]
    return float(inside[0]), float(inside[-1])


def log_density(
    fit: Fit, inputs: ModelInput, num_draws: int, seed: int | None
) -> Callable[[Record], Float[np.ndarray, " rows"]]:
    """The log predictive density of each record under a fit."""
    log_prob = bridged_of(fit).by_record.likelihood.log_prob
    check_signature(fit, inputs)
    latents = latents_of(fit, num_draws, seed)

    def of_record(latents: Array, record: Record) -> Array:
        each = jax.lax.map(lambda latent: log_prob(latent, record), latents)
        return jax.nn.logsumexp(each) - math.log(num_draws)

    compiled = jax.jit(functools.partial(over_records, of_record))

    @single_precision
    def of_records(records: Record) -> Float[np.ndarray, " rows"]:
        return np.asarray(compiled(latents, records), float)

    return of_records
