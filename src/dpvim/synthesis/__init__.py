"""Synthetic twins of tables."""
