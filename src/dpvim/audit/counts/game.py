"""The distinguishing game on counts: is the record in the table, or is it really absent?

The adversary writes all records, and knows which cells they are in; only the noise is secret. The
best score of a sound mechanism adds up what the record's cells have more than the others explain;
which cells these are is what the library counts for it alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from dpvim.audit.counts.target import (
    CELLS,
    CHECK,
    COLUMNS,
    TABLE,
    Observed,
    Round,
    ask_in_rounds,
    make_plan,
)
from dpvim.audit.findings import Finding
from dpvim.audit.game import told_apart
from dpvim.privacy import counts
from dpvim.privacy.counts import Marginal
from dpvim.privacy.plan import PrivacyPlan
from dpvim.privacy.randomness import SecretStreams
from dpvim.synthesis.marginals import release as twin_release
from dpvim.synthesis.schema import Binary, Categorical, Integer, Schema
from dpvim.types import BudgetExceededError, Relation


def game_checks(
    relations: Sequence[Relation], streams: Callable[[], SecretStreams], *, runs: int
) -> Iterator[Finding]:
    """Every adversary plays `runs` runs in each world."""
    for relation in relations:
        for adversary in _adversaries():
            yield _play(adversary, relation, streams, runs=runs)


_SCORES = (
    "likelihood ratio",
    "cells that show it",
    "total",
    "reported number",
    "a group of its own",
)


class _Adversary(NamedTuple):
    """An adversary: writes all records, for a purpose.

    Attributes:
        name: For the report.
        ask: Has the counts released; returns the number of records that is reported, if any is.
        others: Codes of the bystanders.
        canary: Codes of the record in question.
        opposite: Codes of the one that it is replaced by.
    """

    name: str
    ask: Callable[[Observed], float]
    others: np.ndarray
    canary: np.ndarray
    opposite: np.ndarray


_SMALL = Schema(
    (
        Integer(name="age", lower=0, upper=59),
        Categorical(name="region", levels=("north", "east", "south"), nullable=True),
        Binary(name="smokes", levels=("no", "yes")),
    )
)


def _adversaries() -> list[_Adversary]:
    def rounds(mechanism: Observed) -> float:
        ask_in_rounds(mechanism)
        return 0.0

    def twin(mechanism: Observed) -> float:
        wanted = twin_release.design(_SMALL, mechanism.plan)
        return twin_release.release(mechanism, wanted).num_rows

    opposite = np.array([7, 8, 9])
    few = TABLE[:7]
    return [
        _Adversary("rounds, ordinary record", rounds, few, np.array([3, 1, 4]), opposite),
        _Adversary("rounds, codes of no cell", rounds, few, np.full(COLUMNS, 2**40), opposite),
        _Adversary(
            "release of a twin",
            twin,
            np.array([[3, 0, 0], [3, 1, 0], [3, 2, 1], [50, 0, 1], [51, 3, 1]]),
            np.array([27, 3, 1]),
            np.array([3, 0, 0]),
        ),
    ]


def _play(
    adversary: _Adversary,
    relation: Relation,
    streams: Callable[[], SecretStreams],
    *,
    runs: int,
) -> Finding:
    """Records with the canary, and with nobody or another one in its place."""
    others, replaces = adversary.others, relation is Relation.REPLACE_ONE
    plan = make_plan(len(others) + 1, relation=relation)
    there = [adversary.opposite] if replaces else np.zeros((0, others.shape[1]), int)
    inside, outside = (
        _scores_of_runs(adversary, plan, np.concatenate([others, last]), streams, runs)
        for last in ([adversary.canary], there)
    )
    claimed = PrivacyPlan(**dataclasses.asdict(plan))
    return told_apart(f"{CHECK}, {relation}", adversary.name, inside, outside, claimed)


def _scores_of_runs(
    adversary: _Adversary,
    plan: PrivacyPlan,
    table: np.ndarray,
    streams: Callable[[], SecretStreams],
    runs: int,
) -> dict[str, np.ndarray]:
    shares, scores = _Shares(adversary, plan), np.full((runs, len(_SCORES)), np.nan)
    for run in range(runs):
        mechanism = Observed(plan, streams(), table)
        # A run that ends with an error has no score, and is told from all others by that.
        with contextlib.suppress(ValueError, IndexError, OverflowError, BudgetExceededError):
            reported = adversary.ask(mechanism)
            scores[run] = _scores(adversary, mechanism, shares, reported)
    return dict(zip(_SCORES, scores.T, strict=True))


class _Share(NamedTuple):
    """Counts of a marginal by the canary, less its opposite, and by the others."""

    canary: np.ndarray
    others: np.ndarray


class _Shares:
    """Shares in the counts that were asked for, as the library counts them."""

    def __init__(self, adversary: _Adversary, plan: PrivacyPlan) -> None:
        replaces = plan.relation is Relation.REPLACE_ONE
        self._canary, self._others = adversary.canary[None], adversary.others
        self._opposite = adversary.opposite[None][: int(replaces)]
        self._kept: dict[tuple[Marginal, ...], list[_Share]] = {}

    def of(self, asked: Round) -> list[_Share]:
        if asked.cells is not CELLS:
            return self._count(asked)
        if asked.marginals not in self._kept:
            self._kept[asked.marginals] = self._count(asked)
        return self._kept[asked.marginals]

    def _count(self, asked: Round) -> list[_Share]:
        canary, opposite, others = (
            counts.count_cells([table], asked.cells, asked.marginals)
            for table in (self._canary, self._opposite, self._others)
        )
        away = map(np.subtract, canary, opposite)
        return [_Share(*each) for each in zip(away, others, strict=True)]


def _scores(
    adversary: _Adversary, mechanism: Observed, shares: _Shares, reported: float
) -> tuple[float, ...]:
    """Scores of a run from all that was released, larger if the canary is there."""
    evidence, shown, total = 0.0, 0, 0.0
    for asked in mechanism.rounds:
        for noisy, share in zip(asked.answer, shares.of(asked), strict=True):
            excess = noisy.counts - share.others
            evidence += float(np.vdot(share.canary, excess)) / noisy.variance
            shown += bool(np.all((excess == share.canary) | (share.canary == 0)))
            total += float(noisy.counts.sum()) / (noisy.variance * noisy.counts.size)
    of_code = mechanism.rounds[-1].cells.of_code[0]
    together = of_code == np.take(of_code, adversary.canary[0], mode="clip")
    return evidence, float(shown), total, reported, -float(together.sum())
