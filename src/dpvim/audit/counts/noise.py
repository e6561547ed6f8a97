"""Moments of the noise of counts: of every marginal, across marginals, rounds and mechanisms.

Exact counts are taken off, so a marginal without noise shows as one of scale zero. The declared
scales are computed from the plan and what was asked, and not taken from the mechanism.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np
from scipy import stats

from dpvim.audit.counts.target import (
    CHECK,
    PAIRS,
    SINGLES,
    SLACK,
    TABLE,
    Observed,
    ask_in_rounds,
    declared_weights,
    make_plan,
)
from dpvim.audit.findings import Finding, chi_square, two_sided_normal
from dpvim.audit.noise import correlation
from dpvim.privacy.counts import NoisyMarginal
from dpvim.privacy.randomness import SecretStreams

_TAIL = 4.0
_LAGS = (1, 2, 3)
_ROUNDING_VARIANCE = 1 / 12


def noise_checks(streams: Callable[[], SecretStreams], *, mechanisms: int) -> list[Finding]:
    """Checks of the noise of many mechanisms on one table."""
    plan = make_plan(100, noise=20.0)
    names = [marginal.columns for marginal in (*SINGLES, *PAIRS)]
    noises: list[list[np.ndarray]] = [[] for _ in names]
    whole, right = True, True
    for _ in range(mechanisms):
        mechanism = Observed(plan, streams(), TABLE)
        ask_in_rounds(mechanism)
        for place, (noisy, stddev) in enumerate(_with_declared(mechanism)):
            noises[place].append((noisy.counts - _exact(TABLE, noisy)).ravel() / stddev)
            whole &= bool(np.all(noisy.counts == np.rint(noisy.counts)))
            right &= math.isclose(noisy.variance, stddev**2, rel_tol=SLACK)
    z = [np.stack(each) for each in noises]
    return [
        _scale(z, names),
        Finding.rule(CHECK, "variances as declared", "all" if right else "not all", holds=right),
        Finding.rule(CHECK, "whole numbers", "all" if whole else "not all", holds=whole),
        _mean(z),
        _across_marginals(z, names),
        _within_marginals(z, names),
        _across_mechanisms(z, names),
        _tail(z),
    ]


def _with_declared(mechanism: Observed) -> Iterator[tuple[NoisyMarginal, float]]:
    """Answers, and the standard deviation that the noise of each must have."""
    plan = mechanism.plan
    for asked in mechanism.rounds:
        weights = declared_weights(asked, plan.clip_norm)
        for noisy, weight in zip(asked.answer, weights, strict=True):
            variance = (plan.noise_stddev / weight) ** 2 + _ROUNDING_VARIANCE
            yield noisy, math.sqrt(variance)


def _exact(table: np.ndarray, noisy: NoisyMarginal) -> np.ndarray:
    counts = np.zeros(noisy.counts.shape, int)
    np.add.at(counts, tuple(table[:, noisy.columns].T), 1)
    return counts


def _scale(z: list[np.ndarray], names: list[tuple[int, ...]]) -> Finding:
    candidates = [
        (
            chi_square(float(np.sum(each**2)), each.size),
            f"{np.sqrt(np.mean(each**2)):.4f} of the declared standard deviation, columns {name}",
        )
        for each, name in zip(z, names, strict=True)
    ]
    return Finding.strongest(CHECK, "scale of every marginal", candidates)


def _mean(z: list[np.ndarray]) -> Finding:
    flat = np.concatenate([each.ravel() for each in z])
    p_value = float(two_sided_normal(flat.mean() * np.sqrt(flat.size)))
    return Finding(CHECK, "mean", f"{flat.mean():+.5f} sd", p_value)


def _across_marginals(z: list[np.ndarray], names: list[tuple[int, ...]]) -> Finding:
    """Of marginals of one round and of both, cell by cell as far as both have cells."""
    candidates = []
    for (first, name), (second, other) in itertools.combinations(zip(z, names, strict=True), 2):
        size = min(first.shape[1], second.shape[1])
        pair = (first[:, :size].ravel(), second[:, :size].ravel())
        candidates.append(correlation(*pair, f"columns {name} and {other}"))
    return Finding.strongest(CHECK, "correlation across marginals", candidates)


def _within_marginals(z: list[np.ndarray], names: list[tuple[int, ...]]) -> Finding:
    candidates = [
        correlation(each[:, :-lag].ravel(), each[:, lag:].ravel(), f"columns {name}, lag {lag}")
        for each, name in zip(z, names, strict=True)
        for lag in _LAGS
    ]
    return Finding.strongest(CHECK, "correlation across cells", candidates)


def _across_mechanisms(z: list[np.ndarray], names: list[tuple[int, ...]]) -> Finding:
    candidates = [
        correlation(each[:-1].ravel(), each[1:].ravel(), f"columns {name}")
        for each, name in zip(z, names, strict=True)
    ]
    return Finding.strongest(CHECK, "correlation across mechanisms", candidates)


def _tail(z: list[np.ndarray]) -> Finding:
    flat = np.abs(np.concatenate([each.ravel() for each in z]))
    far = int(np.sum(flat > _TAIL))
    p_value = float(stats.binomtest(far, flat.size, 2 * stats.norm.sf(_TAIL)).pvalue)
    return Finding(CHECK, "tails", f"{far} of {flat.size} beyond {_TAIL:g} sd", p_value)
