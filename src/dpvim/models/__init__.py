"""The way from a model to the plain functions that the engine fits."""
