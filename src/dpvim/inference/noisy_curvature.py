r"""Curvatures that one which was measured with noise may come from.

A symmetric matrix A was measured with independent errors in its entries. Each eigenvalue of what
was measured is too far out, and its eigenvectors are turned towards each other, the more the larger
the noise: to shrink entries one by one would lose the directions that matter most, those along
which the data tell little, because such a direction is a small part of every entry.

So A is inferred as a whole. A priori its eigenvectors are any, and the logarithms of its
eigenvalues have a t-distribution around a common middle, whose place and width are inferred too: A
is a multiple of the identity where the metric is right, and may be far from it where not. With
errors of equal size everything else is known given the rest: two eigenvectors turn against each
other by an angle with a von Mises distribution, an eigenvalue is normal times its prior. A Gibbs
sampler takes these in turn (Hoff 2009, for matrix Bingham distributions), a round of disjoint pairs
at a time. Errors of entries are taken for equal: in a metric that is about right they are.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

# Logarithms of eigenvalues: degrees of freedom of their t-distribution, its middle and its width.
_DF = 2.0
_MIDDLES = np.linspace(-3.0, 5.0, 41)[:, None]
_WIDTHS = np.array([0.1, 0.2, 0.35, 0.6, 1.0, 1.6, 2.4])
_TYPICAL_WIDTH, _WIDTH_SPREAD = 0.7, 0.5
_LOG_GRID = np.linspace(-6.0, 12.0, 289)
_GRID = np.exp(_LOG_GRID)
# An eigenvalue that was measured as negative begins at this one.
_FIRST_VALUE = 0.3


class CurvatureDraws(NamedTuple):
    """Draws of a positive definite matrix: eigenvalues and eigenvectors, in columns."""

    values: Float[np.ndarray, "draws d"]
    vectors: Float[np.ndarray, "draws d d"]

    def matrices(self) -> Float[np.ndarray, "draws d d"]:
        """The draws."""
        return self._of(self.values)

    def middle(self) -> Float[np.ndarray, "d d"]:
        """Their geometric mean: as far from a matrix that is too large as from one too small."""
        logs, vectors = np.linalg.eigh(self._of(np.log(self.values)).mean(axis=0))
        return (vectors * np.exp(logs)) @ vectors.T

    def _of(self, values: Float[np.ndarray, "draws d"]) -> Float[np.ndarray, "draws d d"]:
        return (self.vectors * values[:, None, :]) @ self.vectors.swapaxes(1, 2)


def number_of_chains(dim: int, *, most: int, entries: int) -> int:
    """A power of two: as many chains as have so many entries of matrices together.

    >>> number_of_chains(4, most=32, entries=2**16), number_of_chains(100, most=32, entries=2**16)
    (32, 4)
    """
    return min(most, 2 ** max(0, int(math.log2(entries / dim**2))))


def draw_curvatures(
    measured: Float[np.ndarray, "d d"],
    variance: Float[np.ndarray, "d d"],
    rng: np.random.Generator,
    *,
    chains: int,
    sweeps: int,
    kept: int,
) -> CurvatureDraws:
    """Draw matrices that a measured one may come from.

    Args:
        measured: The matrix with its errors: symmetric, not always positive.
        variance: Variances of its entries; the mean of those off the diagonal is used.
        rng: For the draws.
        chains: Number of chains; all begin at the measured matrix.
        sweeps: Of each chain, kept ones among them.
        kept: Draws of each chain: one every other sweep, the last ones.
    """
    dim = len(measured)
    error = np.mean(variance[~np.eye(dim, dtype=bool)]) if dim > 1 else variance[0, 0] / 2
    values, vectors = np.linalg.eigh(measured)
    turned = np.tile(np.diag(values), (chains, 1, 1))
    vectors = np.tile(vectors, (chains, 1, 1))
    values = np.tile(np.maximum(values, _FIRST_VALUE), (chains, 1))
    found = []
    for left in reversed(range(sweeps)):
        values = _draw_values(turned, error, *_draw_prior(values, rng), rng)
        for pairs in _rounds(dim):
            _turn(vectors, turned, values / (2 * error), pairs, rng)
        if left % 2 == 0 and left < 2 * kept:
            found.append((values, vectors.copy()))
    all_values, all_vectors = (np.concatenate(each) for each in zip(*found, strict=True))
    return CurvatureDraws(all_values, all_vectors)


def _draw_prior(
    values: Float[np.ndarray, "chains d"], rng: np.random.Generator
) -> tuple[Float[np.ndarray, "chains 1 1"], Float[np.ndarray, "chains 1 1"]]:
    """Middle and width of the logarithms of eigenvalues."""
    away = (np.log(values)[:, None, None, :] - _MIDDLES[..., None]) / _WIDTHS[:, None]
    weight = _log_t(away).sum(axis=-1) - values.shape[1] * np.log(_WIDTHS)
    weight = weight - 0.5 * np.square(_MIDDLES)
    weight = weight - 0.5 * np.square(np.log(_WIDTHS / _TYPICAL_WIDTH) / _WIDTH_SPREAD)
    weight = weight.reshape(len(values), -1)
    chosen = np.argmax(weight + rng.gumbel(size=weight.shape), axis=1)
    middle, width = np.unravel_index(chosen, (len(_MIDDLES), len(_WIDTHS)))
    return _MIDDLES[middle][..., None], _WIDTHS[width][:, None, None]


def _draw_values(
    turned: Float[np.ndarray, "chains d d"],
    error: float,
    middle: Float[np.ndarray, "chains 1 1"],
    width: Float[np.ndarray, "chains 1 1"],
    rng: np.random.Generator,
) -> Float[np.ndarray, "chains d"]:
    """Eigenvalues, given their eigenvectors: `turned` is what was measured, along these."""
    along = np.diagonal(turned, axis1=1, axis2=2)[..., None]
    weight = _log_t((_LOG_GRID - middle) / width) - np.square(along - _GRID) / (4 * error)
    cumulative = np.cumsum(np.exp(weight - weight.max(axis=-1, keepdims=True)), axis=-1)
    rank = rng.random((*along.shape[:2], 1)) * cumulative[..., -1:]
    return _GRID[(cumulative < rank).sum(axis=-1).clip(max=len(_GRID) - 1)]


def _turn(
    vectors: Float[np.ndarray, "chains d d"],
    turned: Float[np.ndarray, "chains d d"],
    strength: Float[np.ndarray, "chains d"],
    pairs: tuple[np.ndarray, np.ndarray],
    rng: np.random.Generator,
) -> None:
    """Turn disjoint pairs of eigenvectors against each other, in place."""
    i, j = pairs
    gap = strength[:, i] - strength[:, j]
    cosine = gap * 0.5 * (turned[:, i, i] - turned[:, j, j])
    sine = gap * turned[:, i, j]
    angle = 0.5 * rng.vonmises(np.arctan2(sine, cosine), np.hypot(cosine, sine))
    chains, dim = strength.shape
    # Each column becomes a multiple of itself plus one of its partner's; whole matrices at a time,
    # which is twice as fast as taking out the pairs and putting them back.
    partner, own, others = np.arange(dim), np.ones((chains, dim)), np.zeros((chains, dim))
    partner[i], partner[j] = j, i
    own[:, i] = own[:, j] = np.cos(angle)
    others[:, i] = np.sin(angle)
    others[:, j] = -others[:, i]
    for matrix, axis in ((vectors, 2), (turned, 2), (turned, 1)):
        along = (slice(None), None) if axis == 2 else (slice(None), slice(None), None)
        from_partner = np.take(matrix, partner, axis=axis)
        from_partner *= others[along]
        matrix *= own[along]
        matrix += from_partner


def _log_t(away: np.ndarray) -> np.ndarray:
    return -0.5 * (_DF + 1) * np.log1p(np.square(away) / _DF)


@functools.cache
def _rounds(dim: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """All pairs of numbers below `dim`, in rounds of disjoint ones: a tournament's.

    >>> [len(first) for first, _ in _rounds(5)]
    [2, 2, 2, 2, 2]
    """
    players = list(range(2 * math.ceil(dim / 2)))
    rounds = []
    for _ in players[1:]:
        half = len(players) // 2
        pairs = np.array([players[:half], players[half:][::-1]])
        pairs = pairs[:, (pairs < dim).all(axis=0)]
        if pairs.size:
            rounds.append((pairs[0], pairs[1]))
        players = [players[0], players[-1], *players[1:-1]]
    return rounds
