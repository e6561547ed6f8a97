"""Rows that an adversary would try, made from ordinary ones: extreme values in every place.

Records are lists of arrays with a row for each record, as `dpvim.bridge.data.prepare` has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

Records: TypeAlias = list[np.ndarray]

_FLOATS = {
    "zero": 0.0,
    "tiny": 1e-30,
    "100": 100.0,
    "1e19": 1e19,
    "-1e25": -1e25,
    "3e38": 3e38,
    "inf": np.inf,
    "-inf": -np.inf,
    "nan": np.nan,
}
_INTEGERS = {"codes of -1": -1, "largest codes": 2**31 - 1}
# Exponents of the numbers of fuzzed rows: from below the smallest number to above the largest.
_EXPONENTS = (-42.0, 40.0)
# Shares of a fuzzed row's numbers that are random.
_FUZZED_SHARES = (0.1, 0.5, 1.0)
NOT_FINITE = ("inf", "-inf", "nan", "one nan")
"""Names of extreme rows that are not finite and must count for nothing."""


def extreme_rows(row: Records) -> dict[str, Records]:
    """A row with all of its numbers, or one of them, replaced by an extreme value; by name."""
    rows = {name: _filled(row, np.floating, value) for name, value in _FLOATS.items()}
    if any(_is_kind(leaf, np.integer) for leaf in row):
        rows |= {name: _filled(row, np.integer, value) for name, value in _INTEGERS.items()}
    first = next(i for i, leaf in enumerate(row) if _is_kind(leaf, np.floating))
    rows["one nan"] = [leaf.copy() for leaf in row]
    rows["one nan"][first].reshape(-1)[-1] = np.nan
    return rows


def fuzzed_rows(ordinary: Records, count: int, seed: int = 0) -> Records:
    """Ordinary rows in which some numbers were replaced by random ones of any size."""
    rng = np.random.default_rng(seed)
    chosen = rng.integers(0, len(ordinary[0]), count)
    shares = rng.choice(_FUZZED_SHARES, count)

    def one(leaf: np.ndarray) -> np.ndarray:
        base = leaf[chosen]
        is_random = rng.random(base.shape) < shares.reshape(-1, *(1,) * (base.ndim - 1))
        return np.where(is_random, _random_values(leaf.dtype, base.shape, rng), base)

    return [one(leaf) for leaf in ordinary]


def concat(parts: Sequence[Records]) -> Records:
    """Concatenate the rows of several records."""
    return [np.concatenate(leaves) for leaves in zip(*parts, strict=True)]


def take(records: Records, numbers: Sequence[int] | np.ndarray | slice) -> Records:
    """The rows with these numbers."""
    chosen = numbers if isinstance(numbers, slice) else np.asarray(numbers, int)
    return [leaf[chosen] for leaf in records]


def _random_values(dtype: np.dtype, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    makers: dict[str, Callable[[], np.ndarray]] = {
        "f": lambda: rng.choice([-1, 1], shape) * 10.0 ** rng.uniform(*_EXPONENTS, shape),
        "i": lambda: np.rint(rng.choice([-1, 1], shape) * 2.0 ** rng.uniform(0, 30.9, shape)),
        "b": lambda: rng.random(shape) < 0.5,
    }
    with np.errstate(over="ignore"):
        values = makers[dtype.kind]().astype(dtype)
    return np.where(rng.random(shape) < 0.05, np.nan, values) if dtype.kind == "f" else values


def _filled(row: Records, kind: type, value: float) -> Records:
    return [np.full_like(leaf, value) if _is_kind(leaf, kind) else leaf for leaf in row]


def _is_kind(leaf: np.ndarray, kind: type) -> bool:
    return np.issubdtype(leaf.dtype, kind)
