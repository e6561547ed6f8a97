"""The budget of all rounds together, and the scales at which there is noise."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dpvim.audit.counts.target import CELLS, CHECK, SINGLES, SLACK, TABLE, make_plan
from dpvim.audit.findings import Finding
from dpvim.privacy.counts import CountMechanism, Marginal
from dpvim.privacy.randomness import SecretStreams
from dpvim.types import BudgetExceededError


def budget_checks() -> Iterator[Finding]:
    """Rounds beyond the budget, rounds that break off, and noise too large for its numbers."""
    yield _rounds_within_budget()
    yield _budget_of_a_round_that_broke()
    yield _noise_that_fits()


def _rounds_within_budget() -> Finding:
    """Halves, again and again, and then as little as there is."""
    mechanism = CountMechanism(make_plan(100), SecretStreams(0), lambda: iter([TABLE]))
    answered = 0.0
    for share in (0.5, 0.5, 0.5, 1.0, 0.1, 1e-3):
        try:
            mechanism.release(CELLS, SINGLES, share=share)
        except BudgetExceededError:
            continue
        answered += share
    observed = f"a record's squared norm is {answered:g} C^2"
    return Finding.rule(CHECK, "rounds within the budget", observed, holds=answered <= 1 + SLACK)


def _budget_of_a_round_that_broke() -> Finding:
    """A table that cannot be read to its end costs what one that can costs."""
    tables = iter([_broken(), iter([TABLE])])
    mechanism = CountMechanism(make_plan(100), SecretStreams(0), lambda: next(tables))
    answers = 0
    for _ in range(2):
        try:
            mechanism.release(CELLS, SINGLES, share=0.6)
        except (BudgetExceededError, OSError):
            continue
        answers += 1
    observed = f"{answers} answers after it"
    return Finding.rule(CHECK, "a round that broke off is paid for", observed, holds=answers == 0)


def _broken() -> Iterator[np.ndarray]:
    yield TABLE
    raise OSError("the disk is gone")


def _noise_that_fits() -> Finding:
    """Weights so small that the noise is beyond what integers or doubles can hold.

    Noise whose integers overflow, or whose last bits are always zero, leaves the bits of a count.
    """
    marginals = [Marginal((0,)), Marginal((1,), 1e-20)]
    mechanism = CountMechanism(make_plan(100), SecretStreams(0), lambda: iter([TABLE]))
    try:
        with np.errstate(invalid="ignore"):
            noisy = mechanism.release(CELLS, marginals, share=1.0)[1]
    except ValueError:
        return Finding.rule(CHECK, "noise fits its numbers", "else refused", holds=True)
    left = np.unique(noisy.counts % 2**10)
    observed = f"last bits of {noisy.counts.size} counts with endless noise: {left[:6].tolist()}"
    return Finding.rule(CHECK, "noise fits its numbers", observed, holds=False)
