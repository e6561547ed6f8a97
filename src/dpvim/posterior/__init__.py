"""Posteriors from what a run released: post-processing, without access to data."""
