"""Attacks on noisy counts: on the mechanism by itself, and on the release that a twin makes of it.

Rules come first, since they are certain: what one record can move, what all rounds together may
ask for, and whether anything but a release decides what is asked next. Then moments of the noise,
and games. Weights and exact counts are computed here once more, from the plan and the table, and
not taken from the mechanism.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from dpvim.audit.counts.budget import budget_checks
from dpvim.audit.counts.databases import database_checks
from dpvim.audit.counts.game import game_checks
from dpvim.audit.counts.noise import noise_checks
from dpvim.audit.counts.sensitivity import sensitivity_checks
from dpvim.audit.counts.twins import twin_checks
from dpvim.audit.findings import Finding
from dpvim.privacy.randomness import SecretStreams
from dpvim.types import Relation

_LEAST_MECHANISMS = 1000
# A run is one mechanism, asked in rounds, and takes longer than steps that run side by side.
_LEAST_RUNS = 1000


def count_checks(
    relations: Sequence[Relation], streams: Callable[[], SecretStreams], *, runs: int
) -> Iterator[Finding]:
    """All checks of counts, those that take a moment first.

    Args:
        relations: Whose claims are tested in the game.
        streams: Randomness for one mechanism after the other.
        runs: Of the whole audit.
    """
    yield from sensitivity_checks()
    yield from budget_checks()
    yield from twin_checks()
    yield from noise_checks(streams, mechanisms=max(runs // 20, _LEAST_MECHANISMS))
    yield from game_checks(relations, streams, runs=max(runs // 4, _LEAST_RUNS))
    yield from database_checks()
