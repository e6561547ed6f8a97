r"""How much privacy a run costs, and how much noise a budget asks for.

One event describes the whole run (`dp_event`); the accountant interprets it and nothing else.
The accountant is dp-accounting's privacy loss distribution (PLD), which returns upper bounds.

>>> event = dp_event(noise_multiplier=4.0, sampling_prob=0.1, num_steps=1000,
...                  num_examples=10_000, max_batch_size=1180)
>>> 1.9 < epsilon_of(event, delta=1e-5, relation="zero_out") < 4.5
True
"""

from __future__ import annotations

import functools
import math

import dp_accounting
from dp_accounting.pld import PLDAccountant
from scipy import optimize, special

from dpvim.types import Relation

ACCOUNTANT = "PLD (dp-accounting, connect-the-dots, upper bound)"

_NEIGHBOURS = {
    Relation.ZERO_OUT: dp_accounting.NeighboringRelation.REPLACE_SPECIAL,
    Relation.ADD_OR_REMOVE: dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    Relation.REPLACE_ONE: dp_accounting.NeighboringRelation.REPLACE_ONE,
}

# The grid of the privacy loss, as a share of the standard deviation of one step's loss. The
# bound's excess falls with its square: 1.5 % at 0.4, 0.09 % at 0.1 (400 000 steps, epsilon 1).
_GRID_PER_STEP_SD = 0.1
# Runs of a few large steps need a grid that resolves epsilon itself.
_COARSEST_GRID = 1e-3
# With little noise and rare sampling one step's loss ranges over many standard deviations; the
# grid is then as fine as memory and time allow, and the bound a little looser.
_MOST_GRID_POINTS = 200_000


def dp_event(
    *,
    noise_multiplier: float,
    sampling_prob: float,
    num_steps: int,
    num_examples: int,
    max_batch_size: int,
) -> dp_accounting.DpEvent:
    """The run as data: what sampler, clip and noise do together, `num_steps` times.

    A batch that holds every record is no subsampling; one that can hold every record is never
    truncated; otherwise the cap on the batch is part of the event.
    """
    step: dp_accounting.DpEvent
    if sampling_prob == 1:
        step = dp_accounting.GaussianDpEvent(noise_multiplier)
    elif max_batch_size >= num_examples:
        step = dp_accounting.PoissonSampledDpEvent(
            sampling_prob, dp_accounting.GaussianDpEvent(noise_multiplier)
        )
    else:
        step = dp_accounting.TruncatedSubsampledGaussianDpEvent(
            dataset_size=num_examples,
            sampling_probability=sampling_prob,
            truncated_batch_size=max_batch_size,
            noise_multiplier=noise_multiplier,
        )
    return dp_accounting.SelfComposedDpEvent(step, num_steps)


@functools.lru_cache(maxsize=1024)
def epsilon_of(
    event: dp_accounting.SelfComposedDpEvent, *, delta: float, relation: Relation
) -> float:
    """The smallest epsilon the accountant can promise for `event` at `delta`.

    Guarantees:
        An upper bound; for the settings in the tests within 0.2 % of the tight value.
    """
    relation = Relation(relation)
    accountant = PLDAccountant(_NEIGHBOURS[relation], _grid(event.event, relation))
    accountant.compose(event)
    return max(0.0, float(accountant.get_epsilon(delta)))


def calibrate_noise(
    *,
    epsilon: float,
    delta: float,
    relation: Relation,
    sampling_prob: float,
    num_steps: int,
    num_examples: int,
    max_batch_size: int,
) -> float:
    """The smallest noise multiplier whose run costs at most (epsilon, delta), to 1e-4 of itself.

    The limit of many small steps is Gaussian differential privacy, whose noise has a closed form;
    the search starts there.
    """

    def excess(log_noise: float) -> float:
        event = dp_event(
            noise_multiplier=math.exp(log_noise),
            sampling_prob=sampling_prob,
            num_steps=num_steps,
            num_examples=num_examples,
            max_batch_size=max_batch_size,
        )
        return epsilon_of(event, delta=delta, relation=relation) - epsilon

    guess = math.log(_gaussian_limit_noise(epsilon, delta, relation, sampling_prob, num_steps))
    low, high = guess - 0.05, guess + 0.05
    width = 0.1
    while excess(low) <= 0:
        low, high, width = low - width, low, 2 * width
    width = 0.1
    while excess(high) > 0:
        low, high, width = high, high + width, 2 * width
    log_noise = optimize.brentq(excess, low, high, xtol=5e-5)
    # brentq may stop on the wrong side of the root; the promise is an upper bound.
    while excess(log_noise) > 0:
        log_noise += 5e-5
    return math.exp(log_noise)


def _grid(step: dp_accounting.DpEvent, relation: Relation) -> float:
    """Discretisation of the privacy loss, from the standard deviation of one step's loss."""
    if isinstance(step, dp_accounting.TruncatedSubsampledGaussianDpEvent):
        rate, noise = step.sampling_probability, step.noise_multiplier
    elif isinstance(step, dp_accounting.PoissonSampledDpEvent):
        rate, noise = step.sampling_probability, step.event.noise_multiplier
    else:
        # A composition of plain Gaussians is one Gaussian: nothing accumulates.
        return _COARSEST_GRID / 10
    largest_loss = 10.0 / noise + 0.5 / noise**2
    finest = largest_loss / _MOST_GRID_POINTS
    return max(finest, min(_COARSEST_GRID, _GRID_PER_STEP_SD * _step_sd(rate, noise, relation)))


def _step_sd(rate: float, noise: float, relation: Relation) -> float:
    r""":math:`q \sqrt{e^{s^2/\sigma^2} - 1}`: one step's loss under the Gaussian limit, with
    sensitivity s = 2 under replace-one, else 1."""
    sensitivity = 2.0 if relation is Relation.REPLACE_ONE else 1.0
    return rate * math.sqrt(math.expm1(min((sensitivity / noise) ** 2, 50.0)))


def _gaussian_limit_noise(
    epsilon: float, delta: float, relation: Relation, sampling_prob: float, num_steps: int
) -> float:
    """Noise multiplier of the central limit of `num_steps` subsampled Gaussian steps."""

    def log_delta_excess(log_mu: float) -> float:
        mu = math.exp(log_mu)
        first = special.log_ndtr(-epsilon / mu + mu / 2)
        second = epsilon + special.log_ndtr(-epsilon / mu - mu / 2)
        if second >= first:
            return -math.inf
        return first + math.log1p(-math.exp(second - first)) - math.log(delta)

    low, high = math.log(1e-6), math.log(1e3)
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if log_delta_excess(middle) > 0 else (middle, high)
    mu = math.exp(low)
    per_step = mu / (sampling_prob * math.sqrt(num_steps))
    sensitivity = 2.0 if Relation(relation) is Relation.REPLACE_ONE else 1.0
    return sensitivity / math.sqrt(math.log1p(per_step**2))
