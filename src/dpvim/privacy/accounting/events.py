"""A run as an event of dp-accounting, and the part of delta that truncated batches cost."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import scipy

if TYPE_CHECKING:
    import dp_accounting


def dp_event(
    *,
    noise_multiplier: float,
    sampling_prob: float,
    num_steps: int,
    num_examples: int,
    max_batch_size: int,
) -> dp_accounting.DpEvent:
    """The run as data: sampler, clip and noise together, `num_steps` times.

    A batch that holds every record is no subsampling; one that can hold every record is never
    truncated; otherwise the cap on the batch is part of the event.
    """
    import dp_accounting

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


def truncation_prob(*, sampling_prob: float, num_examples: int, max_batch_size: int) -> float:
    """The probability that a step draws a record, and as many others as the cap or more.

    This is what the cap adds to delta in a step, for all relations and however batches are cut.
    Whether the others fill the batch depends on their own coins: it is the same for neighbours,
    independent of all else, and may be known. If they do not fill it, nothing is cut with the
    record or without it. If they do and it is not drawn, neighbours release the same. What is
    left is a step like one without a cap, one that costs nothing, and this event.
    """
    if max_batch_size >= num_examples:
        return 0.0
    # The upper tail of a binomial distribution over the others.
    others = scipy.special.betainc(max_batch_size, num_examples - max_batch_size, sampling_prob)
    return sampling_prob * float(others)


def lost_to_truncation(events: Iterable[dp_accounting.SelfComposedDpEvent]) -> float:
    """The part of delta that the caps of all batches cost."""
    import dp_accounting

    lost = 0.0
    for event in events:
        step = event.event
        if isinstance(step, dp_accounting.TruncatedSubsampledGaussianDpEvent):
            lost += event.count * truncation_prob(
                sampling_prob=step.sampling_probability,
                num_examples=step.dataset_size,
                max_batch_size=step.truncated_batch_size,
            )
    return lost


def delta_without_truncation(
    events: Iterable[dp_accounting.SelfComposedDpEvent], delta: float
) -> float:
    """The rest of `delta`, for steps that are not truncated.

    Raises:
        ValueError: Nothing is left.
    """
    lost = lost_to_truncation(events)
    if lost >= delta:
        raise ValueError(
            f"delta: expected more than {lost:.3g}, the probability that a record is in a batch "
            f"that is cut to size, got {delta:g}. Choose a larger delta or fewer steps."
        )
    return delta - lost


def kinds_of_steps(
    events: Iterable[dp_accounting.SelfComposedDpEvent],
) -> dict[dp_accounting.DpEvent, int]:
    """The steps of all events, those that are alike together, without the caps of their batches.

    Any number of Gaussians is one Gaussian: their precisions add.
    """
    import dp_accounting

    kinds: dict[dp_accounting.DpEvent, int] = {}
    precision = 0.0
    for event in events:
        step = event.event
        if isinstance(step, dp_accounting.GaussianDpEvent):
            precision += event.count / step.noise_multiplier**2
            continue
        if isinstance(step, dp_accounting.TruncatedSubsampledGaussianDpEvent):
            noise = dp_accounting.GaussianDpEvent(step.noise_multiplier)
            step = dp_accounting.PoissonSampledDpEvent(step.sampling_probability, noise)
        kinds[step] = kinds.get(step, 0) + event.count
    if precision:
        kinds[dp_accounting.GaussianDpEvent(1 / math.sqrt(precision))] = 1
    return kinds
