"""The posterior inferred from the released gradients and the points where they were taken."""
