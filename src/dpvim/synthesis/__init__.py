"""Synthetic twins of sensitive tables."""
