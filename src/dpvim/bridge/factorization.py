"""Checks that a model's likelihood is a product over records, and that its prior sees no data.

Log-probabilities of all made-up rows at once are compared with those of each by itself.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from dpvim._compile import jit_once
from dpvim.bridge.latent_space import LatentSpace, Site
from dpvim.bridge.made_up_rows import NUM_ROWS, MadeUpRows
from dpvim.bridge.model_runner import ModelRunner
from dpvim.types import Latent, ModelError, Record


class ObservedSites(NamedTuple):
    """Names of observed sites: those that belong to records, and those that do not see data."""

    likelihood: list[str]
    prior: list[str]


class _SiteLogProbs(NamedTuple):
    """Log-probabilities of sites, for all made-up rows at once and for each by itself."""

    whole: dict[str, Any]
    by_row: dict[str, Any]


def classify_observed(
    runner: ModelRunner, space: LatentSpace, made_up: list[MadeUpRows]
) -> ObservedSites:
    """Sort the observed sites, and refuse those that do not factorise over records."""
    found = _site_log_probs(runner, space, made_up)
    latent = {site.name for site in space.sites}
    for site in space.sites:
        _check_prior_sees_no_data(site, found)
    observed = ObservedSites([], [])
    for name in found[0].whole:
        if name in latent:
            continue
        finite = [f for f in found if np.isfinite(f.by_row[name]).all()]
        if not finite:
            warnings.warn(
                f"site {name!r}: its log-probability is not finite at the rows made up for a "
                "check, so it is taken on trust that it factorises over records. Privacy does "
                "not depend on it, the posterior does.",
                stacklevel=4,
            )
        if all(_close(f.whole[name], f.by_row[name].sum()) for f in finite):
            observed.likelihood.append(name)
        elif _sees_no_data(name, finite):
            observed.prior.append(name)
        else:
            raise ModelError(
                f"site {name!r}: expected a likelihood that factorises over records, got one "
                "whose value for all rows is not the sum over single rows. Records must be "
                "independent given the latents: no statistics over the rows (such as X.mean(0)) "
                "inside the model."
            )
    if not observed.likelihood:
        raise ModelError("the model has no observed site that depends on the data.")
    return observed


def _site_log_probs(
    runner: ModelRunner, space: LatentSpace, made_up: list[MadeUpRows]
) -> list[_SiteLogProbs]:
    latent = jnp.asarray(np.random.default_rng(1).normal(scale=0.3, size=space.dim), jnp.float32)

    @functools.partial(jit_once, static_argnames="num_rows")
    def log_probs(latent: Latent, data: Record, num_rows: int) -> dict[str, Any]:
        return runner.log_probs(space.constrain(latent), data, num_rows=num_rows)

    def of_rows(rows: MadeUpRows) -> _SiteLogProbs:
        """Rows one at a time: a vectorised model could mix them here as it does there."""
        whole = log_probs(latent, rows.records, num_rows=NUM_ROWS)
        singles = [log_probs(latent, rows.single(i), num_rows=1) for i in range(NUM_ROWS)]
        by_row = {name: np.array([single[name] for single in singles]) for name in whole}
        return _SiteLogProbs(jax.tree.map(np.asarray, whole), by_row)

    return [of_rows(rows) for rows in made_up]


def _check_prior_sees_no_data(site: Site, found: list[_SiteLogProbs]) -> None:
    values = [np.append(f.by_row[site.name], f.whole[site.name]) for f in found]
    # Every entry's constants may be rounded differently for one row and for several.
    slack = 1e-5 * max(1, site.raw_size)
    if not np.allclose(values, values[0][0], rtol=1e-4, atol=slack, equal_nan=True):
        raise ModelError(
            f"site {site.name!r}: expected a prior that does not depend on the data, got one that "
            "changes with them (or with their number). A prior read off the data is not "
            "private; pass public constants instead."
        )


def _sees_no_data(name: str, found: list[_SiteLogProbs]) -> bool:
    """True if a site has one log-probability, whatever the rows and their number."""
    return all(
        _close(f.by_row[name], f.whole[name]) and _close(f.whole[name], found[0].whole[name])
        for f in found
    )


def _close(a: ArrayLike, b: ArrayLike) -> bool:
    return bool(np.allclose(a, b, rtol=1e-4, atol=1e-4))
