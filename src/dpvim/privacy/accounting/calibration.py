"""Calibration: the search for the smallest noise multiplier that keeps a run within its budget."""

from __future__ import annotations

import functools
import importlib.metadata
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import scipy

from dpvim import cache
from dpvim.privacy.accounting.accountant import TOLERANCE, epsilon_of, epsilon_upper_bound
from dpvim.privacy.accounting.events import dp_event
from dpvim.types import BudgetExceededError, Relation

if TYPE_CHECKING:
    import dp_accounting

# Part of what a cached answer is filed under: raise it with every change of the numbers.
_ALGORITHM_VERSION = 2

# The search for a noise multiplier begins on grids that are cheaper by far.
_COARSE_TOLERANCE = 3e-2
_LOG_NOISE_TOLERANCE = 4e-4

_MIN_NOISE, _MAX_NOISE = 1e-3, 1e12
# Noise from disk may leave at most a small part of the budget unused.
_MIN_BUDGET_USED = 0.98


def calibrate_noise(
    *,
    epsilon: float,
    delta: float,
    relation: Relation,
    sampling_prob: float,
    num_steps: int,
    num_examples: int,
    max_batch_size: int,
    beside: Sequence[dp_accounting.SelfComposedDpEvent] = (),
) -> float:
    """The smallest noise multiplier whose run costs at most (epsilon, delta), to 4e-4 of itself.

    Args:
        beside: Other runs on the same data, which are paid for out of the same budget.

    Guarantees:
        `epsilon_of` the run with this noise, and those beside it, is at most `epsilon`.

    Raises:
        BudgetExceededError: The others cost that much by themselves.
    """
    relation = Relation(relation)
    if beside:
        others = epsilon_of(beside, delta=delta, relation=relation)
        # Closer to the budget than the accountant's own precision there is nothing to search for.
        if others * (1 + 4 * TOLERANCE) >= epsilon:
            raise BudgetExceededError(
                f"epsilon: expected well above {others:.4g}, what the other runs on the same data "
                f"cost by themselves, got {epsilon:g}. Choose a larger one."
            )

    def event_with(noise: float) -> dp_accounting.SelfComposedDpEvent:
        return dp_event(
            noise_multiplier=noise,
            sampling_prob=sampling_prob,
            num_steps=num_steps,
            num_examples=num_examples,
            max_batch_size=max_batch_size,
        )

    @functools.cache
    def rough_cost(log_noise: float, tolerance: float) -> float:
        event = event_with(math.exp(log_noise))
        return epsilon_upper_bound((event, *beside), delta, relation, tolerance, one_direction=True)

    def cost(noise: float) -> float:
        return epsilon_of((event_with(noise), *beside), delta=delta, relation=relation)

    def is_valid(noise: float) -> bool:
        """Noise that was found on disk is enough, and not far more than that."""
        return noise >= _MIN_NOISE and _MIN_BUDGET_USED * epsilon <= cost(noise) <= epsilon

    def search() -> float:
        guess = _central_limit_noise(epsilon, delta, relation, sampling_prob, num_steps)
        # Beside others a coarse grid may see no way to stay within the budget.
        first = TOLERANCE if beside else _COARSE_TOLERANCE
        coarse = functools.partial(rough_cost, tolerance=first)
        fine = functools.partial(rough_cost, tolerance=TOLERANCE)
        near = _bracketed_root(coarse, epsilon, math.log(guess))
        slope = (coarse(near + 0.05) - coarse(near)) / 0.05
        log_noise = _refined_root(fine, epsilon, near, slope)
        while cost(math.exp(log_noise)) > epsilon:
            log_noise += _LOG_NOISE_TOLERANCE
        return math.exp(log_noise)

    question = {
        "delta": repr(float(delta)),
        "epsilon": repr(float(epsilon)),
        "event": repr(event_with(1.0)),
        "relation": relation.value,
    }
    if beside:
        question["beside"] = repr(tuple(beside))
    return cache.remember(_versions() | question, search, is_valid=is_valid)


def _versions() -> dict[str, str]:
    packages = {name: importlib.metadata.version(name) for name in ("dpvim", "dp-accounting")}
    return {"algorithm": str(_ALGORITHM_VERSION)} | packages


def _bracketed_root(cost: Callable[[float], float], epsilon: float, guess: float) -> float:
    """The logarithm of the noise that costs `epsilon`, to about 1 %."""
    high, width = guess + 0.05, 0.1
    while cost(high) > epsilon:
        if high > math.log(_MAX_NOISE):
            raise ValueError(
                f"epsilon and delta: expected larger ones than {epsilon:g} and what goes with it: "
                f"a noise multiplier of {_MAX_NOISE:g} would not do."
            )
        high, width = high + width, 2 * width
    low, least = high - width, math.log(_MIN_NOISE)
    while cost(low) <= epsilon:
        if low <= least:
            raise ValueError(
                "delta: expected less than the probability that a record is in any batch at all. "
                f"At this one even next to no noise costs less than epsilon = {epsilon:g}, and "
                "protects nobody who was sampled; choose a smaller delta, or a smaller epsilon."
            )
        low, high, width = max(least, low - 2 * width), low, 2 * width

    def log_excess(log_noise: float) -> float:  # closer to a straight line
        return math.log(max(cost(log_noise) / epsilon, 0.01))

    return float(scipy.optimize.brentq(log_excess, low, high, xtol=1e-2))


def _refined_root(
    cost: Callable[[float], float], epsilon: float, log_noise: float, slope: float
) -> float:
    """The logarithm of a noise that costs `epsilon` or just less, by safeguarded secant steps."""
    low, high, last = -math.inf, math.inf, log_noise
    while high - low > _LOG_NOISE_TOLERANCE:
        if abs(log_noise - last) > 10 * _LOG_NOISE_TOLERANCE:  # else it is the grids that differ
            slope = (cost(log_noise) - cost(last)) / (log_noise - last)
        last = log_noise
        # Epsilon falls at least about as fast as the noise grows, whatever the errors of the rest.
        missing = (epsilon - cost(log_noise)) / min(slope, -0.5 * epsilon)
        if -_LOG_NOISE_TOLERANCE <= missing <= 0:
            return log_noise
        low, high = (log_noise, high) if missing > 0 else (low, log_noise)
        # Half of what is allowed to the safe side, and bisection where the slope is not to be had.
        log_noise += min(0.05, max(-0.05, missing)) + 0.5 * _LOG_NOISE_TOLERANCE
        if not low < log_noise < high:
            log_noise = (low + high) / 2
    return high


def _central_limit_noise(
    epsilon: float, delta: float, relation: Relation, sampling_prob: float, num_steps: int
) -> float:
    """Noise multiplier of the central limit of `num_steps` subsampled Gaussian steps."""
    import dp_accounting

    noise = dp_accounting.get_sigma_gaussian(epsilon, delta)
    per_step = 1 / (noise * sampling_prob * math.sqrt(num_steps))
    sensitivity = 2.0 if relation is Relation.REPLACE_ONE else 1.0
    return sensitivity / math.sqrt(math.log1p(per_step**2))
