"""Synthetic twins of a sensitive table."""
