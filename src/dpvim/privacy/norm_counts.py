"""Counts of records by the norm of their gradient: the public numbers of a release's second part.

A record is in one bin of a fixed grid, so all counts together have sensitivity one; see
`dpvim.privacy.clipping`, where they are made.
"""

from __future__ import annotations

# Lower ends of the bins in units of the clip norm: one for every factor of two from an eighth of
# it to sixteen times of it, and one for what is below.
NORM_BIN_ENDS = (0.0, *(2.0**k for k in range(-3, 5)))
NUM_NORM_BINS = len(NORM_BIN_ENDS)
# s^2: the part of a record's share, in squares, that is its count. Gradients get 2.6 % more noise.
COUNT_SHARE = 0.05
