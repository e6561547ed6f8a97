"""Twins from noisy counts of pairs of columns: one release, then post-processing without end."""
