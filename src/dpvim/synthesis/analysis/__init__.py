"""Analyses of synthetic tables, pooled by the rules for fully synthetic data."""
