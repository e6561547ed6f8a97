r"""The distinguishing game: is the record there, or is it really absent?

The adversary writes all records, sees every release and every change of the parameters, and
scores each run. For claims (epsilon, delta) the share of runs above a threshold must obey

.. math:: P(\mathrm{present}) - e^\epsilon P(\mathrm{absent}) \le \delta

and the same with the worlds exchanged. The threshold is chosen on one half of the runs and tested
on the other, with exact binomial bounds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from scipy import stats

from dpvim._extras import require
from dpvim.audit.findings import Finding
from dpvim.audit.paths import Adversary
from dpvim.audit.target import AdversaryView, VectorizedRuns
from dpvim.privacy.plan import PrivacyPlan
from dpvim.privacy.randomness import SecretStreams
from dpvim.types import Relation

_DELTAS = (1e-3, 1e-2, 0.03, 0.1, 0.3)
# For the bound on epsilon that is reported next to the claim.
_DELTA_OF_BOUND = 1e-3
_REPORTED_P_VALUE = 1e-3


def game_checks(
    program: VectorizedRuns,
    relation: Relation,
    streams: Callable[[], SecretStreams],
    *,
    runs: int,
) -> list[Finding]:
    """Every adversary of the path plays `runs` runs in each world."""
    game = _Game(program, dataclasses.replace(program.target.plan, relation=relation))
    return [game.play(one, streams, runs) for one in program.target.path.adversaries]


class _Game:
    """The worlds of an adversary, and scores to tell them apart."""

    def __init__(self, program: VectorizedRuns, plan: PrivacyPlan) -> None:
        self._program, self._plan = program, plan
        self._path = program.target.path
        self._shares = program.target.shares()
        self._replaces = plan.relation is Relation.REPLACE_ONE

    def play(
        self, adversary: Adversary, streams: Callable[[], SecretStreams], runs: int
    ) -> Finding:
        scores = self._scores(adversary)
        inside, outside = (
            self._program.run_sampled(
                records,
                num_rows,
                runs=runs,
                streams=streams(),
                summarize=lambda view: {name: score(view) for name, score in scores.items()},
            )
            for records, num_rows in self._worlds(adversary)
        )
        check = f"game, {self._plan.relation}"
        return told_apart(check, adversary.name, inside, outside, self._plan)

    def _numbers(self, names: tuple[str, ...]) -> np.ndarray:
        """Row numbers for each step; names are taken one step after the other, and again."""
        steps = range(self._plan.num_steps)
        return np.array([self._path.row_number(names[i % len(names)]) for i in steps])

    def _worlds(self, adversary: Adversary) -> list[tuple[Any, int]]:
        """Records with the canary, and those of its neighbour; the number of rows that are there.

        The neighbour is without it, or has its opposite. Where the canary is absent its place is
        in the arrays, so that one program serves both worlds, but the sampler knows of no such row.
        """
        others = [self._path.row_number(name) for name in adversary.others]
        opposite = adversary.opposite if self._replaces else adversary.others[:1]

        def with_row(names: tuple[str, ...]) -> Any:
            rows = [np.array([*others, last]) for last in self._numbers(names)]
            return self._program.prepare_steps(self._path.rows, rows)

        return [
            (with_row(adversary.canary), len(others) + 1),
            (with_row(opposite), len(others) + self._replaces),
        ]

    def _scores(self, adversary: Adversary) -> dict[str, Callable[[AdversaryView], np.ndarray]]:
        """Scores of a run from the adversary's view of it, larger if the canary is there."""
        plan, steps = self._plan, np.arange(self._plan.num_steps)
        along, along_opposite = adversary.directions or (adversary.canary, adversary.opposite)
        here, there = (
            self._shares[steps, self._numbers((names,) if isinstance(names, str) else names)]
            for names in (along, along_opposite)
        )
        there = there if self._replaces else np.zeros_like(here)
        others = [self._path.row_number(name) for name in adversary.others]
        expected_rest = self._shares[:, others].sum(axis=1)
        away = here - there
        unit = away / np.linalg.norm(away, axis=1, keepdims=True)

        def centred(view: AdversaryView) -> np.ndarray:
            """The releases, less what the others are expected to add."""
            return view.release - (plan.sampling_prob * expected_rest).astype(np.float32)

        def log_ratio(view: AdversaryView) -> np.ndarray:
            """The best score for a sound mechanism."""
            at = centred(view)
            present = _log_likelihood_ratio_along(at, here, plan)
            return (present - _log_likelihood_ratio_along(at, there, plan)).sum(1)

        return {
            "likelihood ratio": log_ratio,
            "sum": lambda view: np.einsum("ntr,tr->n", centred(view), unit),
            "size": lambda view: np.square(view.release).sum(axis=(1, 2)),
            # Public arithmetic takes the release to the update; if it is anything else, it shows
            # here.
            "change for its release": lambda view: (
                view.update.sum(axis=1) / (np.abs(view.release).sum(axis=(1, 2)) + 1e-30)
            ),
        }


def told_apart(
    check: str,
    question: str,
    inside: Mapping[str, np.ndarray],
    outside: Mapping[str, np.ndarray],
    plan: PrivacyPlan,
) -> Finding:
    """Test the claims of a plan by scores of independent runs in both worlds."""
    claims = [(plan.epsilon(delta), delta) for delta in _DELTAS]
    candidates, bound = [], 0.0
    for name in inside:
        present, absent = _nan_to_inf(inside[name]), _nan_to_inf(outside[name])
        for first, second in ((present, absent), (-absent, -present)):
            p_values = hockey_stick(first, second, claims)
            candidates += [
                (p, f"score {name!r} breaks ({epsilon:.3g}, {delta:g})")
                for (epsilon, delta), p in zip(claims, p_values, strict=True)
            ]
        bound = max(bound, _epsilon_bound(present, absent))
    text = f"epsilon at least {bound:.2f}, claimed {plan.epsilon(_DELTA_OF_BOUND):.2f}"
    return strongest_attack(check, question, text, candidates)


def strongest_attack(
    check: str, question: str, text: str, candidates: list[tuple[float, str]]
) -> Finding:
    """The strongest of several attacks; which claim it breaks is said only if it does."""
    finding = Finding.strongest(check, question, candidates)
    breaks = f"; {finding.observed}" if finding.p_value < _REPORTED_P_VALUE else ""
    return dataclasses.replace(finding, observed=text + breaks)


def _log_likelihood_ratio_along(at: np.ndarray, share: np.ndarray, plan: PrivacyPlan) -> np.ndarray:
    """`log_likelihood_ratio` for releases [runs, steps, r] and shares of the canary [steps, r]."""
    lengths = np.linalg.norm(share, axis=1)
    unit = share / np.maximum(lengths, 1e-30)[:, None]
    return log_likelihood_ratio(np.einsum("ntr,tr->nt", at, unit), lengths, plan)


def log_likelihood_ratio(
    at: np.ndarray, shift: float | np.ndarray, plan: PrivacyPlan
) -> np.ndarray:
    """Log ratio of the densities of a release with the canary and without it."""
    prob = plan.sampling_prob
    with np.errstate(invalid="ignore"):  # a release that is no number is judged by the score
        exponent = (at * shift - shift**2 / 2) / plan.noise_stddev**2
        return np.logaddexp(np.log1p(-prob), np.log(prob) + exponent)


def _nan_to_inf(score: np.ndarray) -> np.ndarray:
    """Scores with NaN as the largest: a run that shows no number has given itself away."""
    return np.where(np.isnan(score), np.inf, score)


def hockey_stick(
    present: np.ndarray, absent: np.ndarray, claims: list[tuple[float, float]]
) -> list[float]:
    """p-values of the claims (epsilon, delta), given scores of independent runs."""
    half = len(present) // 2
    thresholds = np.unique(np.concatenate([present[:half], absent[:half]]))
    inside = _shares_at_least(present[:half], thresholds)
    outside = _shares_at_least(absent[:half], thresholds)
    p_values = []
    for epsilon, delta in claims:
        threshold = thresholds[np.argmax(inside - np.exp(epsilon) * outside)]
        hits, false_hits = (int(np.sum(s[half:] >= threshold)) for s in (present, absent))
        trials = len(present) - half
        p_values.append(_exact_p_value(hits, false_hits, trials, epsilon, delta))
    return p_values


def _shares_at_least(scores: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    return 1 - np.searchsorted(np.sort(scores), thresholds) / len(scores)


def _exact_p_value(hits: int, false_hits: int, trials: int, epsilon: float, delta: float) -> float:
    """The smallest level at which Clopper-Pearson bounds contradict the claim."""

    def contradicts(log_level: float) -> bool:
        level = np.exp(log_level) / 2
        low = stats.beta.ppf(level, hits, trials - hits + 1) if hits else 0.0
        high = stats.beta.isf(level, false_hits + 1, trials - false_hits)
        return bool(low - np.exp(epsilon) * high > delta)

    if false_hits == trials or not contradicts(np.log(0.5)):
        return 1.0
    certain, unsure = np.log(0.5), np.log(1e-300)
    if contradicts(unsure):
        return 1e-300
    for _ in range(30):
        middle = (certain + unsure) / 2
        certain, unsure = (middle, unsure) if contradicts(middle) else (certain, middle)
    return float(np.exp(certain))


def _epsilon_bound(present: np.ndarray, absent: np.ndarray) -> float:
    """A lower bound on epsilon that holds with probability 95 %."""
    finite = [np.nan_to_num(each.astype(float), posinf=1e300) for each in (present, absent)]
    auditing = require("jax_privacy.auditing", extra="audit")
    auditor = auditing.CanaryScoreAuditor(*finite)
    return float(
        auditor.epsilon_clopper_pearson(
            0.05,
            _DELTA_OF_BOUND,
            threshold_strategy=auditing.Split(seed=0),
        )
    )
