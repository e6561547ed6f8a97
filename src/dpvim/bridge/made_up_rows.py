"""Made-up rows, on which a model is checked: an error must not depend on the data."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dpvim.types import Record

NUM_ROWS = 3


class MadeUpRows(NamedTuple):
    """A few rows with the types and shapes of the data.

    They are kept as NumPy's arrays, of which rows are taken without a program being compiled.
    """

    records: list[np.ndarray]

    def first(self, count: int) -> Record:
        """The first rows, as a model sees them."""
        return [jnp.asarray(leaf[:count]) for leaf in self.records]

    def single(self, index: int) -> Record:
        """One row, as data of one row."""
        return [leaf[index : index + 1] for leaf in self.records]


def make_up_rows(records: list[Array]) -> list[MadeUpRows]:
    """Rows in the support of most likelihoods: floats in (0, 1), wider ones, zeros and ones."""
    rng = np.random.default_rng(0)

    def coins(size: tuple[int, ...]) -> np.ndarray:
        return rng.integers(0, 2, size)

    def make_up(leaf: Array, floats: Callable[..., np.ndarray]) -> np.ndarray:
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        values = (floats if is_float else coins)(size=(NUM_ROWS, *leaf.shape[1:]))
        return values.astype(leaf.dtype)

    styles: list[Callable[..., np.ndarray]] = [rng.uniform, rng.normal, coins]
    return [MadeUpRows([make_up(leaf, floats) for leaf in records]) for floats in styles]
