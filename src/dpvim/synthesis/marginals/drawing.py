"""Draws of cells from several distributions at once."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int


def draw_given(
    probs: Float[np.ndarray, "k cells"],
    given: Int[np.ndarray, " rows"],
    rng: np.random.Generator,
    *,
    evenly: bool,
) -> Int[np.ndarray, " rows"]:
    """A cell for each row, from the distribution that is given for it."""
    places = _even_places(given, rng) if evenly else rng.random(len(given))
    # All distribution functions one after the other: the k-th goes from k to k + 1.
    ends = np.cumsum(probs, axis=1)
    ends /= ends[:, -1:]
    ends += np.arange(len(probs))[:, None]
    found = np.searchsorted(ends.ravel(), given + places, side="right") - given * probs.shape[1]
    return np.clip(found, 0, probs.shape[1] - 1)


def _even_places(
    given: Int[np.ndarray, " rows"], rng: np.random.Generator
) -> Float[np.ndarray, " rows"]:
    """For the rows of each kind, places from 0 to 1 at even distances, in random order."""
    order = np.lexsort((rng.random(len(given)), given))
    sizes = np.bincount(given)
    starts = np.cumsum(sizes) - sizes
    ranks = np.empty(len(given))
    ranks[order] = np.arange(len(given)) - starts[given[order]]
    return (ranks + rng.random(len(sizes))[given]) / sizes[given]
