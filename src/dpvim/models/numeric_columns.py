"""Log-densities of numeric columns in every component, and their derivatives."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.nn import log_sigmoid
from jax.scipy.special import betaln, digamma
from jaxtyping import Array, Float

from dpvim.models.columns import CountColumn, NormalColumn, Rows
from dpvim.privacy.clipping import clamp


class LogDensity(NamedTuple):
    """A column's log-density in every component, and its derivatives by the raw values of sites."""

    log_prob: Float[Array, "k batch"]
    derivatives: dict[str, Float[Array, "k batch"]]


def numeric_log_density(
    column: CountColumn | NormalColumn, raw: dict[str, Array], batch: Rows
) -> LogDensity:
    """The log-density of a column, less constants that all components share; 0 where missing."""
    values = batch.values[column.name]
    if isinstance(column, NormalColumn):
        density = _normal(column, raw, column.standardised(values))
    elif column.overdispersed:
        density = _negative_binomial(column, raw, values.astype(jnp.float32))
    else:
        density = _poisson(column, raw, values.astype(jnp.float32))
    density = density._replace(derivatives=jax.tree.map(clamp, density.derivatives))
    if not column.nullable:
        return density
    absent = batch.missing[column.name]
    return jax.tree.map(lambda leaf: jnp.where(absent, 0.0, leaf), density)


def _normal(column: NormalColumn, raw: dict[str, Array], values: Array) -> LogDensity:
    log_scale = raw[f"{column.name}.scale"][:, None]
    precision = jnp.exp(-log_scale)
    residual = (values - raw[f"{column.name}.mean"][:, None]) * precision
    return LogDensity(
        -0.5 * residual**2 - log_scale,
        {f"{column.name}.mean": residual * precision, f"{column.name}.scale": residual**2 - 1},
    )


def _poisson(column: CountColumn, raw: dict[str, Array], values: Array) -> LogDensity:
    site = f"{column.name}.standard_log_rate"
    loc, scale = column.log_rate_prior
    log_rate = loc + scale * raw[site][:, None]
    rate = jnp.exp(log_rate)
    return LogDensity(values * log_rate - rate, {site: scale * (values - rate)})


def _negative_binomial(column: CountColumn, raw: dict[str, Array], values: Array) -> LogDensity:
    site, concentration = f"{column.name}.standard_log_rate", f"{column.name}.concentration"
    loc, scale = column.log_rate_prior
    log_mean, log_size = loc + scale * raw[site][:, None], raw[concentration][:, None]
    mean, size = jnp.exp(log_mean), jnp.exp(log_size)
    # size / (size + mean) and mean / (size + mean), by their logarithms
    log_stop, log_go = log_sigmoid(log_size - log_mean), log_sigmoid(log_mean - log_size)
    excess = (values - mean) * jnp.exp(log_stop)
    slope = digamma(values + size) - digamma(size) + log_stop
    # By the beta function: logarithms of gamma functions are larger than their difference.
    log_choices = -betaln(size, values + 1) - jnp.log(values + size)
    return LogDensity(
        log_choices + size * log_stop + values * log_go,
        {site: scale * excess, concentration: size * slope - excess},
    )
