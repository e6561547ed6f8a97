"""Fits that one process and several ones take, to be compared bit by bit."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist

import dpvim
from dpvim.inference.variants import served_variants


def logistic_model(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def mean_model(x):
    mean = numpyro.sample("mean", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("x", dist.Normal(mean, 1).to_event(1), obs=x)


_BY_HAND = {"clip_norm": 1.0, "num_steps": 40, "learning_rate": 0.01}
# Batches of several microbatches and of one, steps on all records, of more and of fewer than one.
CASES: dict[str, dict[str, Any]] = {
    "steered": {"num_steps": 896},
    "aligned, large batches": {**_BY_HAND, "sampling_prob": 0.7},
    "full-rank, all records": {**_BY_HAND, "variant": "vanilla", "family": "full_rank"}
    | {"sampling_prob": 1.0},
    "small batches": {**_BY_HAND, "variant": "natural", "sampling_prob": 0.01},
    "few records": {**_BY_HAND, "sampling_prob": 1.0},
}
LONG_CASES: dict[str, dict[str, Any]] = {
    f"{variant}, {family}": {**_BY_HAND, "variant": variant, "family": family, "sampling_prob": 0.5}
    for family in ("mean_field", "full_rank", "low_rank")
    for variant in served_variants(family)
}


def data_of(case: str) -> tuple[Any, tuple[np.ndarray, ...]]:
    """The model and the records of a case."""
    rng = np.random.default_rng(0)
    if case == "few records":
        return mean_model, (rng.normal(1.0, 1.0, (301, 3)).astype(np.float32),)
    x = rng.normal(size=(3001, 5)).astype(np.float32)
    y = (rng.random(3001) < 1 / (1 + np.exp(-x @ np.arange(5) / 3))).astype(np.int32)
    return logistic_model, (x, y)


def bits_of(case: str, rows: slice = slice(None)) -> str:
    """A digest of all that a fit with these rows released."""
    model, arrays = data_of(case)
    options = (CASES | LONG_CASES)[case]
    own = [array[rows] for array in arrays]
    fit = dpvim.fit(model, *own, epsilon=1.0, delta=1e-5, seed=7, progress=False, **options)
    released = jax.tree.leaves((*fit.trace, fit.releases))
    return hashlib.sha256(b"".join(np.asarray(each).tobytes() for each in released)).hexdigest()


def own_rows(case: str, number: int, count: int) -> slice:
    """Shards of different size; one of four is empty."""
    total = len(data_of(case)[1][0])
    ends = [0, total // 3, total] if count == 2 else [0, total // 3, total // 2, total // 2, total]
    return slice(*ends[number:][:2])
