"""The target of attacks: the mechanism of counts, asked in rounds, and all that is seen of it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dpvim.privacy.counts import Cells, CountMechanism, Marginal, NoisyMarginal
from dpvim.privacy.plan import PrivacyPlan
from dpvim.privacy.randomness import SecretStreams
from dpvim.types import Relation

CHECK = "counts"
SIZE, COLUMNS = 16, 3
CELLS = Cells((np.arange(SIZE),) * COLUMNS)
SINGLES = [Marginal((column,)) for column in range(COLUMNS)]
# Weights as far apart as those of a target's pairs and others.
PAIRS = [
    Marginal(pair, 2.0 if 0 in pair else 1.0) for pair in itertools.combinations(range(COLUMNS), 2)
]
TABLE = np.random.default_rng(5).integers(0, SIZE, (40, COLUMNS))
# Weights are a billionth less than declared.
SLACK = 1e-8
_SHARES = (0.3, 0.7)


class Round(NamedTuple):
    """A question, and the answer."""

    cells: Cells
    marginals: tuple[Marginal, ...]
    share: float
    answer: list[NoisyMarginal]


class Observed(CountMechanism):
    """A mechanism, and all that an adversary sees of it."""

    def __init__(self, plan: PrivacyPlan, streams: SecretStreams, table: np.ndarray) -> None:
        super().__init__(plan, streams, lambda: iter([table]))
        self.rounds: list[Round] = []

    def release(
        self, cells: Cells, marginals: Sequence[Marginal], *, share: float
    ) -> list[NoisyMarginal]:
        answer = super().release(cells, marginals, share=share)
        self.rounds.append(Round(cells, tuple(marginals), share, answer))
        return answer


class FixedAnswers(Observed):
    """Answers that are the same for all tables: what is asked next must be the same, too."""

    def release(
        self, cells: Cells, marginals: Sequence[Marginal], *, share: float
    ) -> list[NoisyMarginal]:
        rng = np.random.default_rng(len(self.rounds))
        shapes = [tuple(cells.sizes[column] for column in m.columns) for m in marginals]
        answer = [
            NoisyMarginal(marginal.columns, rng.integers(-5, 50, shape), 4.0)
            for marginal, shape in zip(marginals, shapes, strict=True)
        ]
        self.rounds.append(Round(cells, tuple(marginals), share, answer))
        return answer


class _WithAnEmptyPlace(PrivacyPlan):
    """A record that was replaced by nothing leaves its place: the public number stays."""

    def check_num_rows(self, num_rows: int) -> None:
        if num_rows != self.num_examples - 1:
            super().check_num_rows(num_rows)


def make_plan(
    num_examples: int, *, relation: Relation = Relation.ADD_OR_REMOVE, noise: float = 1.0
) -> PrivacyPlan:
    """One step on all records."""
    kind = _WithAnEmptyPlace if relation is Relation.ZERO_OUT else PrivacyPlan
    return kind(
        num_examples=num_examples,
        sampling_prob=1.0,
        num_steps=1,
        clip_norm=1.0,
        relation=relation,
        noise_multiplier=noise,
    )


def ask_in_rounds(mechanism: CountMechanism) -> None:
    """Columns by themselves first, then all pairs."""
    mechanism.release(CELLS, SINGLES, share=_SHARES[0])
    mechanism.release(CELLS, PAIRS, share=_SHARES[1])


def declared_weights(asked: Round, norm: float) -> list[float]:
    """Weights of a record in each marginal, by what was asked."""
    weights = np.array([marginal.weight for marginal in asked.marginals])
    return list(norm * math.sqrt(asked.share) * weights / np.linalg.norm(weights))
