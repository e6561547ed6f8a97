"""The paper's experiments. They read constants off the data (levels, standardisation), as the
paper does: what they print is for comparison, not for release."""
