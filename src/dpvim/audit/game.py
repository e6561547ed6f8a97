r"""The distinguishing game: is the record there, or is it really absent?

The adversary writes all records, sees every release and every change of the parameters, and
scores each run. For claims (epsilon, delta) the share of runs above a threshold must obey

.. math:: P(\mathrm{present}) - e^\epsilon P(\mathrm{absent}) \le \delta

and the same with the worlds exchanged. The threshold is chosen on one half of the runs and tested
on the other, with exact binomial bounds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from jax_privacy import auditing
from scipy import stats

from dpvim.audit.findings import Finding
from dpvim.audit.target import Player, Seen, Target, make_player
from dpvim.plan import PrivacyPlan
from dpvim.randomness import SecretStreams
from dpvim.types import Relation

_DELTAS = (1e-3, 1e-2, 0.03, 0.1, 0.3)
# For the bound on epsilon that is reported next to the claim.
_DELTA_OF_BOUND = 1e-3
_WORTH_SAYING = 1e-3


@dataclasses.dataclass(frozen=True)
class Adversary:
    """Which record is the canary at each step, and in which company.

    Attributes:
        name: What it tries.
        canary: Shape [steps, d].
        others: Rows that are there in both worlds, shape [rows, d].
        direction: Where to look for the canary, shape [steps, d]; the canary itself where finite.
    """

    name: str
    canary: np.ndarray
    others: np.ndarray
    direction: np.ndarray


def adversaries(target: Target) -> list[Adversary]:
    """From the plain canary to rows that break careless arithmetic."""
    steps, dim, bound = target.plan.num_steps, target.engine.family.dim, target.plan.clip_norm
    axis = np.zeros((steps, dim), np.float32)
    axis[:, 0] = bound
    contrast = np.zeros((steps, dim), np.float32)
    contrast[:, 0], contrast[:, 1] = bound / np.sqrt(2), -bound / np.sqrt(2)
    signs = np.where(np.arange(steps) % 2, -1, 1)[:, None].astype(np.float32)
    bystander = np.zeros((1, dim), np.float32)
    crowd = np.repeat(axis[:1], 8, axis=0)
    unit = axis / bound

    def one(name: str, canary: np.ndarray, others: np.ndarray, look: np.ndarray) -> Adversary:
        return Adversary(name, canary.astype(np.float32), others, look)

    return [
        one("along one axis", axis, bystander, axis),
        one("alternating sign", signs * axis, bystander, signs * axis),
        one("contrast", contrast, bystander, contrast),
        one("just below the clip", 0.999 * axis, bystander, axis),
        one("against the crowd", -100 * axis, crowd, -axis),
        one("zero gradient", 0 * axis, crowd, axis),
        one("overflow", np.float32(1e25) * unit, bystander, axis),
        one("inf", np.float32(np.inf) * np.ones_like(axis), bystander, axis),
        one("nan", np.float32(np.nan) * axis, bystander, axis),
    ]


def game_checks(
    target: Target, streams: Callable[[], SecretStreams], *, runs: int
) -> list[Finding]:
    """Every adversary plays `runs` runs in each world."""
    claims = [(target.plan.epsilon(delta), delta) for delta in _DELTAS]
    play = make_player(target)
    return [_one_game(target, play, one, claims, streams, runs) for one in adversaries(target)]


def _one_game(
    target: Target,
    play: Player,
    adversary: Adversary,
    claims: list[tuple[float, float]],
    streams: Callable[[], SecretStreams],
    runs: int,
) -> Finding:
    present, absent = worlds(target, adversary)
    seen = [play(each, num_runs=runs, streams=streams()) for each in (present, absent)]
    looks, bound = [], 0.0
    for name, score in scores(target, adversary).items():
        inside, outside = (_finite_order(score(each)) for each in seen)
        for first, second in ((inside, outside), (-outside, -inside)):
            looks += [
                (p, f"score {name!r} breaks ({epsilon:.3g}, {delta:g})")
                for (epsilon, delta), p in zip(
                    claims, hockey_stick(first, second, claims), strict=True
                )
            ]
        bound = max(bound, _epsilon_bound(inside, outside))
    relation = target.plan.relation
    claimed = target.plan.epsilon(_DELTA_OF_BOUND)
    text = f"epsilon at least {bound:.2f}, claimed {claimed:.2f}"
    return strongest_look(f"game, {relation}", adversary.name, text, looks)


def strongest_look(check: str, question: str, text: str, looks: list[tuple[float, str]]) -> Finding:
    """The strongest of several attacks; which claim it breaks is said only if it does."""
    finding = Finding.strongest(check, question, looks)
    breaks = f"; {finding.observed}" if finding.p_value < _WORTH_SAYING else ""
    return dataclasses.replace(finding, observed=text + breaks)


def worlds(target: Target, adversary: Adversary) -> tuple[np.ndarray, np.ndarray]:
    """Records with the canary, and its neighbour: without it, or with its opposite."""
    steps = target.plan.num_steps
    others = np.broadcast_to(adversary.others, (steps, *adversary.others.shape))

    def with_row(row: np.ndarray) -> np.ndarray:
        return np.concatenate([others, row[:, None]], axis=1)

    if target.plan.relation is Relation.REPLACE_ONE:
        return with_row(adversary.canary), with_row(-adversary.canary)
    return with_row(adversary.canary), others


def scores(target: Target, adversary: Adversary) -> dict[str, Callable[[Seen], np.ndarray]]:
    """Ways to turn what is seen of a run into one number, larger if the canary is there."""
    plan = target.plan
    expected = np.stack([target.encode(i, row) for i, row in enumerate(adversary.direction)])
    lengths = np.linalg.norm(expected, axis=1)
    unit = expected / lengths[:, None]
    shift = np.minimum(lengths, plan.clip_norm)
    crowd = np.stack(
        [
            sum(_clipped(target.encode(i, row), plan.clip_norm) for row in adversary.others)
            for i in range(plan.num_steps)
        ]
    )

    def along(seen: Seen) -> np.ndarray:
        """The releases along the canary, less what the others are expected to add."""
        centred = seen.release - plan.sampling_prob * crowd
        return np.einsum("ntr,tr->nt", centred, unit)

    def log_ratio(seen: Seen) -> np.ndarray:
        """The best score for a sound mechanism."""
        at = along(seen)
        ratio = log_mixture(at, shift, plan)
        if plan.relation is Relation.REPLACE_ONE:
            ratio = ratio - log_mixture(at, -shift, plan)
        return ratio.sum(axis=1)

    return {
        "likelihood ratio": log_ratio,
        "sum": lambda seen: along(seen).sum(axis=1),
        "size": lambda seen: np.square(seen.release).sum(axis=(1, 2)),
        # Public arithmetic takes the release to the update; if it is anything else, it shows here.
        "change for its release": lambda seen: (
            np.abs(seen.update).sum(axis=(1, 2)) / (np.abs(seen.release).sum(axis=(1, 2)) + 1e-30)
        ),
    }


def _clipped(row: np.ndarray, bound: float) -> np.ndarray:
    return row * min(1.0, bound / (np.linalg.norm(row) + 1e-30))


def log_mixture(at: np.ndarray, shift: float | np.ndarray, plan: PrivacyPlan) -> np.ndarray:
    """Log ratio of the densities of a release with the canary and without it."""
    prob = plan.sampling_prob
    with np.errstate(invalid="ignore"):  # a release that is no number is judged by the score
        exponent = (at * shift - shift**2 / 2) / plan.noise_stddev**2
        return np.logaddexp(np.log1p(-prob), np.log(prob) + exponent)


def _finite_order(score: np.ndarray) -> np.ndarray:
    """A run that shows something other than a number has given itself away."""
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
    auditor = auditing.CanaryScoreAuditor(*finite)
    return float(
        auditor.epsilon_clopper_pearson(
            0.05,
            _DELTA_OF_BOUND,
            threshold_strategy=auditing.Split(seed=0),
        )
    )
