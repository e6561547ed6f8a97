"""Gaussian noise for the releases, drawn on the host in double precision.

A single-precision normal ends at 5.42 standard deviations; over 400 000 steps the missing tail is
worth about delta once more. So the noise is drawn and scaled in float64 and rounded to float32
last.
"""

from __future__ import annotations

import numpy as np

from dpvim.randomness import SecretStreams


class GaussianNoise:
    """A stream of noise vectors, one for each step.

    Guarantees:
        Coordinates are independent normals of standard deviation `stddev`, across coordinates and
        steps; none is used twice; the stream does not depend on how many are drawn at a time.
    """

    def __init__(self, streams: SecretStreams, *, stddev: float, size: int) -> None:
        self._generator = streams.generator("noise")
        self._stddev = stddev
        self._size = size

    def draw(self, num_steps: int) -> np.ndarray:
        """Noise of the next `num_steps` steps, shape [num_steps, size], float32."""
        if self._stddev == 0:
            return np.zeros((num_steps, self._size), dtype=np.float32)
        normal = self._generator.standard_normal((num_steps, self._size))
        normal *= self._stddev
        return normal.astype(np.float32)
