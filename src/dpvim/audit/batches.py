"""Checks of the batches: inclusion rates, independence, sizes, and truncation of overfull ones."""

from __future__ import annotations

import numpy as np
from scipy import stats

from dpvim.audit.findings import Finding, chi_square, two_sided_normal
from dpvim.audit.target import Target
from dpvim.privacy.randomness import SecretStreams
from dpvim.privacy.sampling import EMPTY, PoissonSampler

CHECK = "batches"
_ROWS = 40
_SMALLEST_CELL = 10
# A cap that cuts about half of the batches, to see how they are cut.
_CUT_AT = 8


def batch_checks(
    target: Target, streams: SecretStreams, for_cut: SecretStreams, *, steps: int
) -> list[Finding]:
    """Checks of the batches that a run on forty rows would use."""
    prob = target.plan.sampling_prob
    batches = target.engine.source(_ROWS, streams).draw(steps, steps)[0]
    cut = PoissonSampler(for_cut, num_rows=_ROWS, sampling_prob=prob, max_batch_size=_CUT_AT)
    return [
        *membership_checks(membership(batches), prob),
        _cut_evenly(membership(cut.draw(steps)), prob),
    ]


def membership_checks(member: np.ndarray, prob: float) -> list[Finding]:
    """Checks of who is in which batch, shape [steps, rows]."""
    return [
        _rate(member, prob),
        _rates_by_row(member, prob),
        _pairs(member, prob),
        _steps(member, prob),
        _sizes(member.sum(axis=1), prob),
    ]


def membership(rows: np.ndarray, num_rows: int = _ROWS) -> np.ndarray:
    """Membership of rows in the steps' batches, shape [steps, rows]; a row twice counts twice."""
    if rows.shape[1] == 0:  # every row is taken, no row numbers are needed
        return np.ones((len(rows), num_rows))
    member = np.zeros((len(rows), num_rows))
    taken = rows != EMPTY
    np.add.at(member, (np.nonzero(taken)[0], rows[taken]), 1)
    return member


def _rate(member: np.ndarray, prob: float) -> Finding:
    z = (member.mean() - prob) / np.sqrt(prob * (1 - prob) / member.size)
    observed = f"{member.mean():.4f}, declared {prob:g}"
    return Finding(CHECK, "inclusion rate", observed, float(two_sided_normal(z)))


def _rates_by_row(member: np.ndarray, prob: float) -> Finding:
    variance = len(member) * prob * (1 - prob)
    statistic = float(np.sum((member.sum(axis=0) - len(member) * prob) ** 2 / variance))
    observed = f"{member.mean(axis=0).min():.4f} to {member.mean(axis=0).max():.4f}"
    return Finding(CHECK, "the same for every row", observed, chi_square(statistic, _ROWS))


def _pairs(member: np.ndarray, prob: float) -> Finding:
    standard = (member - prob) / np.sqrt(prob * (1 - prob))
    covariance = standard.T @ standard / np.sqrt(len(member))
    pairs = covariance[np.triu_indices(_ROWS, 1)]
    worst = pairs[np.abs(pairs).argmax()]
    # All pairs together: sampling without replacement makes each of them slightly negative.
    together = float(pairs.sum() / np.sqrt(len(pairs)))
    mean = pairs.mean() / np.sqrt(len(member))
    candidates = [
        (
            float(two_sided_normal(worst)) * len(pairs),
            f"largest correlation {worst / np.sqrt(len(member)):+.4f}",
        ),
        (float(two_sided_normal(together)), f"mean correlation {mean:+.5f}"),
    ]
    return Finding.strongest(CHECK, "rows are independent", candidates)


def _steps(member: np.ndarray, prob: float) -> Finding:
    standard = (member - prob) / np.sqrt(prob * (1 - prob))
    candidates = []
    for lag in (1, 2, 3):
        product = standard[:-lag] * standard[lag:]
        z = product.sum() / np.sqrt(product.size)
        candidates.append((float(two_sided_normal(z)), f"{product.mean():+.5f} at lag {lag}"))
    return Finding.strongest(CHECK, "steps are independent", candidates)


def _sizes(sizes: np.ndarray, prob: float) -> Finding:
    """Binomial sizes: chi-square over cells that are expected often enough."""
    expected = stats.binom.pmf(np.arange(_ROWS + 1), _ROWS, prob) * len(sizes)
    observed = np.bincount(sizes.astype(int), minlength=_ROWS + 1)[: _ROWS + 1]
    # The tails are one cell; it takes in the rarest of the others until it is large enough.
    order = np.argsort(expected)
    rare = np.zeros(len(expected), bool)
    rare[order[: np.searchsorted(np.cumsum(expected[order]), _SMALLEST_CELL) + 1]] = True
    rare |= expected < _SMALLEST_CELL
    expected = np.append(expected[~rare], expected[rare].sum())
    observed = np.append(observed[~rare], observed[rare].sum())
    statistic = float(np.sum((observed - expected) ** 2 / expected))
    text = f"mean {sizes.mean():.3f}, variance {sizes.var():.3f}"
    return Finding(CHECK, "sizes are binomial", text, chi_square(statistic, len(expected) - 1))


def _cut_evenly(member: np.ndarray, prob: float) -> Finding:
    """Every row is cut as often as any other: a trend along the rows, and any other pattern."""
    counts = member.sum(axis=0)
    share = member.mean()
    kept = stats.binom.pmf(np.arange(_ROWS + 1), _ROWS, prob) @ np.minimum(
        np.arange(_ROWS + 1), _CUT_AT
    )
    expected = len(member) * kept / _ROWS
    # Rows compete for places: their counts are negatively correlated, and vary around their mean
    # by more than independent ones of the same variance.
    pairs = (_size_variance(prob) - _ROWS * share * (1 - share)) / (_ROWS * (_ROWS - 1))
    variance = len(member) * (share * (1 - share) - pairs)
    statistic = float(np.sum((counts - counts.mean()) ** 2) / variance)
    trend = np.arange(_ROWS) - (_ROWS - 1) / 2
    z = float(counts @ trend / np.sqrt(variance * (trend @ trend)))
    total = (member.sum() - len(member) * kept) / np.sqrt(len(member) * _size_variance(prob))
    candidates = [
        (float(stats.chi2.sf(statistic, _ROWS - 1)), f"{counts.min():.0f} to {counts.max():.0f}"),
        (float(two_sided_normal(z)), f"trend along the rows {z:+.1f} sd"),
        (float(two_sided_normal(total)), f"mean {counts.mean():.0f}, expected {expected:.0f}"),
    ]
    return Finding.strongest(CHECK, "overfull batches are cut evenly", candidates)


def _size_variance(prob: float) -> float:
    sizes = np.arange(_ROWS + 1)
    chances, cut = stats.binom.pmf(sizes, _ROWS, prob), np.minimum(sizes, _CUT_AT)
    return float(chances @ cut**2 - (chances @ cut) ** 2)
