"""Step functions: from a number's place among sorted thresholds to a cell.

Reading a number ends in a cell, and never in an earlier one for a larger number. So the reading is
known by the smallest number of each cell. Those are found by asking the encoder itself, to the last
bit; an engine then only compares, which all engines do alike. Arithmetic they round differently.

>>> first_of_each(lambda x: (x >= 0.3).astype(int) + (x > 1), 2)
array([0.3, 1. ])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Float

T = TypeVar("T")
# Doubles in their order, as integers: those of negative numbers have all bits but the sign turned.
_ALL_BITS_BUT_ONE = np.int64(2**63 - 1)


def first_of_each(
    step: Callable[[np.ndarray], np.ndarray], largest: int
) -> Float[np.ndarray, " steps"]:
    """The smallest doubles at which a step function is 1, 2, ..., up to `largest`.

    Args:
        step: From doubles, infinite ones too, to integers from 0 on; it never falls.
        largest: The function's last value that is asked for; NaN where it is never reached.
    """
    wanted = np.arange(1, largest + 1)
    low = np.full(largest, _key(np.array(-np.inf)))
    high = np.full(largest, _key(np.array(np.inf)))
    never = int(step(np.array([np.inf]))[0]) < wanted
    while (low < high).any():
        middle = (low >> 1) + (high >> 1) + (low & high & 1)  # the mean, without an overflow
        reached = step(_double(middle)) >= wanted
        high = np.where(reached, middle, high)
        low = np.where(reached, low, np.minimum(middle + 1, high))
    return np.where(never, np.nan, _double(high))


def choose(
    is_below: Callable[[T], Any],
    thresholds: Sequence[T],
    leaves: Sequence[Any],
    if_else: Callable[[Any, Any, Any], Any],
) -> Any:
    """The leaf of a value, by halving: the first if it is below the first threshold, and so on.

    Args:
        is_below: A condition: the value is below a threshold.
        thresholds: In their order.
        leaves: One more than thresholds; equal neighbours need no comparison.
        if_else: Puts a condition and what holds with it and without it together.
    """
    apart = [i for i in range(1, len(leaves)) if leaves[i] != leaves[i - 1]]
    if not apart:
        return leaves[0]
    middle = apart[len(apart) // 2]
    return if_else(
        is_below(thresholds[middle - 1]),
        choose(is_below, thresholds[: middle - 1], leaves[:middle], if_else),
        choose(is_below, thresholds[middle:], leaves[middle:], if_else),
    )


def _key(doubles: np.ndarray) -> np.ndarray:
    bits = np.asarray(doubles, np.float64).view(np.int64)
    return np.where(bits >= 0, bits, bits ^ _ALL_BITS_BUT_ONE)


def _double(keys: np.ndarray) -> np.ndarray:
    return np.where(keys >= 0, keys, keys ^ _ALL_BITS_BUT_ONE).view(np.float64)
