"""The windows of a steered run: search, wide probes, narrow probes.

Within a window nothing moves: points are drawn around one centre, in one metric. What the window
released decides where the next one stands (`dpvim.inference.steering`). Short windows find the
place, where gradients are long and noise hardly matters; wide probes tell the curvature; narrow
ones, which get half of the run, tell the gradient where the log-likelihood is close to a quadratic.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

# Windows and their lengths in parts of the run.
_SEARCH, _WIDE, _NARROW = (16, 1), (8, 2), (8, 4)
_PARTS = sum(count * length for count, length in (_SEARCH, _WIDE, _NARROW))
NUM_WINDOWS = sum(count for count, _ in (_SEARCH, _WIDE, _NARROW))
NUM_WIDE, NUM_NARROW = _WIDE[0], _NARROW[0]
# A window has at least so many steps more than its regression has coefficients.
_RESIDUAL_STEPS = 8
_DEFAULT_SHORTEST = 64


class Window(NamedTuple):
    """Consecutive steps that probe around the same centre.

    Attributes:
        first, end: Its steps, without the last.
        searches: True while the centre may be far from the optimum.
        is_wide: True if probes are wider than the approximation.
    """

    first: int
    end: int
    searches: bool
    is_wide: bool

    @property
    def length(self) -> int:
        """Number of steps."""
        return self.end - self.first


def windows_of(num_steps: int) -> list[Window]:
    """The windows of a run.

    >>> [window.length for window in windows_of(640)][14:18]
    [10, 10, 20, 20]
    """
    lengths = [length for count, length in (_SEARCH, _WIDE, _NARROW) for _ in range(count)]
    ends = np.cumsum([0, *lengths]) * num_steps // _PARTS
    searches, wide = _SEARCH[0], _SEARCH[0] + _WIDE[0]
    return [
        Window(int(first), int(end), i < searches, i < wide)
        for i, (first, end) in enumerate(itertools.pairwise(ends))
    ]


def fewest_steps(dim: int) -> int:
    """Steps of the shortest run whose windows determine `dim` slopes."""
    return _PARTS * (dim + 1 + _RESIDUAL_STEPS)


def default_num_steps(dim: int) -> int:
    """Twice as many steps in the shortest window as it has coefficients, and at least 64.

    Batches of all records lose nothing by more steps or fewer: the noise of their mean is that of
    one release. Others come close to that within so many.

    >>> default_num_steps(5), default_num_steps(40)
    (4096, 6400)
    """
    return _PARTS * max(_DEFAULT_SHORTEST, 2 * math.ceil(1.2 * (dim + 1)))


def window_widths(width: float, num_steps: int) -> Callable[[Array], Array]:
    """By a step's number: `width` before the narrow windows, 1 in them."""
    narrow = windows_of(num_steps)[-NUM_NARROW].first
    return lambda step: jnp.where(step < narrow, width, 1.0)
