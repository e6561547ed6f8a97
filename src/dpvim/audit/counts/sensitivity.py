"""The distance that one record can move all counts together, whatever it holds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np

from dpvim.audit.counts.target import (
    CELLS,
    CHECK,
    COLUMNS,
    PAIRS,
    SIZE,
    SLACK,
    TABLE,
    Observed,
    ask_in_rounds,
    declared_weights,
    make_plan,
)
from dpvim.audit.findings import Finding
from dpvim.privacy.counts import CountMechanism
from dpvim.privacy.randomness import SecretStreams

_Neighbours: TypeAlias = tuple[np.ndarray, np.ndarray, str]
_CANARIES = {
    "ordinary": (3, 1, 4),
    "first cells": (0,) * COLUMNS,
    "last cells": (SIZE - 1,) * COLUMNS,
    "codes of no cell": (SIZE,) * COLUMNS,
    "far outside": (2**40,) * COLUMNS,
    "largest integers": (2**63 - 1,) * COLUMNS,
    "negative": (-1,) * COLUMNS,
    "smallest integers": (-(2**63),) * COLUMNS,
    "some outside": (3, SIZE, -(2**31)),
}


def sensitivity_checks() -> Iterator[Finding]:
    """With a record and without it, or with another one; the noise is the same in both worlds."""
    yield _share_of_one_record()
    yield _one_record_replaced()
    yield _pieces_do_not_matter()


def weighted_release(table: np.ndarray) -> np.ndarray:
    """All counts of a table as one vector in which noise is even; noise is the same for all."""
    plan = make_plan(100)
    mechanism = Observed(plan, SecretStreams(0), table)
    ask_in_rounds(mechanism)
    return np.concatenate(
        [
            weight * np.asarray(noisy.counts, float).ravel()
            for asked in mechanism.rounds
            for weight, noisy in zip(
                declared_weights(asked, plan.clip_norm), asked.answer, strict=True
            )
        ]
    )


def _shift(first: np.ndarray, second: np.ndarray) -> float:
    """Distance of the releases of two tables; a table that is an error is far from all."""
    try:
        return float(np.linalg.norm(weighted_release(first) - weighted_release(second)))
    except (ValueError, IndexError, OverflowError):
        return math.inf


def _largest_shift(question: str, pairs: Iterator[_Neighbours], bound: float) -> Finding:
    shift, where = max((_shift(first, second), name) for first, second, name in pairs)
    observed = f"at most {shift:.6f} C ({where})"
    return Finding.rule(CHECK, question, observed, holds=shift <= bound + SLACK)


def _share_of_one_record() -> Finding:
    def pairs() -> Iterator[_Neighbours]:
        for name, row in _CANARIES.items():
            canary = np.array([row])
            bystanders = {
                "alone": TABLE[:0],
                "with others": TABLE,
                "with five of its kind": np.repeat(canary, 5, axis=0),
            }
            for with_whom, others in bystanders.items():
                yield np.concatenate([others, canary]), others, f"{name}, {with_whom}"

    return _largest_shift("share of one record, all rounds", pairs(), 1.0)


def _one_record_replaced() -> Finding:
    """Two cells of each marginal: less than the two clip norms that the accountant charges."""

    def pairs() -> Iterator[_Neighbours]:
        for (name, row), (other_name, other) in itertools.permutations(_CANARIES.items(), 2):
            first, second = (np.concatenate([TABLE, [each]]) for each in (row, other))
            yield first, second, f"{name}, {other_name}"

    return _largest_shift("one record replaced", pairs(), math.sqrt(2))


def _pieces_do_not_matter() -> Finding:
    """Counts are the same however a table is cut, and whatever integers it is made of."""

    def released(pieces: Sequence[np.ndarray]) -> list[np.ndarray]:
        mechanism = CountMechanism(make_plan(100), SecretStreams(0), lambda: iter(pieces))
        return [each.counts for each in mechanism.release(CELLS, PAIRS, share=1.0)]

    whole = released([TABLE])
    cut: dict[str, Sequence[np.ndarray]] = {
        "one by one": np.split(TABLE, len(TABLE)),
        "with an empty piece": [TABLE[:7], TABLE[:0], TABLE[7:]],
        "as bytes": [TABLE.astype(np.int8)],
        "in another order": [TABLE[::-1]],
    }
    differ = [
        name
        for name, pieces in cut.items()
        if not all(map(np.array_equal, released(pieces), whole))
    ]
    observed = ", ".join(differ) or f"{len(cut)} ways agree"
    return Finding.rule(CHECK, "pieces do not matter", observed, holds=not differ)
