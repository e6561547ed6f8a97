"""Gaussian noise for the releases, drawn on the host and rounded to the release's lattice.

A single-precision normal ends at 5.42 standard deviations; over 400 000 steps the missing tail is
worth about delta once more. So the noise is drawn and scaled in float64. It is rounded to a
multiple of the grid: for a sum that lies on the grid, round(sum + z) = sum + round(z), so adding
the integers is the Gaussian mechanism followed by rounding, and no low-order bit tells anything.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dpvim.privacy.randomness import SecretStreams, move_to, position_of


class RoundedGaussianNoise:
    """A stream of noise vectors, one for each step, in units of the grid.

    Guarantees:
        Coordinates are independent normals of standard deviation `stddev`, rounded, across
        coordinates and steps; none is used twice; the stream does not depend on how many are
        drawn at a time.
    """

    def __init__(self, streams: SecretStreams, *, stddev: float, grid: float, size: int) -> None:
        self._generator = streams.generator("noise")
        self._stddev_in_grids = stddev / grid if stddev else 0.0
        self._size = size

    def draw(self, num_steps: int) -> np.ndarray:
        """Noise of the next `num_steps` steps, shape [num_steps, size], int32."""
        if self._stddev_in_grids == 0:
            return np.zeros((num_steps, self._size), dtype=np.int32)
        shape = (num_steps, self._size)
        return rounded_gaussian(self._generator, self._stddev_in_grids, shape).astype(np.int32)

    def position(self) -> dict[str, np.ndarray]:
        """Position in the stream, to go on from with the same key; secret."""
        return {"noise": position_of(self._generator)}

    def move_to(self, position: Mapping[str, np.ndarray]) -> None:
        """Go on from a position."""
        move_to(self._generator, position["noise"])


def rounded_gaussian(
    generator: np.random.Generator, stddev: float, shape: tuple[int, ...]
) -> np.ndarray:
    """Independent normals of this standard deviation, rounded to whole numbers (as float64)."""
    normal = generator.standard_normal(shape)
    normal *= stddev
    return np.rint(normal, out=normal)
