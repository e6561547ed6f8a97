"""Ready-made models with clipped sums of their own: regressions, and mixtures for tables."""
