"""The algorithm: families, gradient variants, the loop of steps, what a run leaves behind."""
