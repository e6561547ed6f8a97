"""Norms of what records add to a release. They are data: not for release."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from dpvim._compile import single_precision
from dpvim.bridge.latent_space import LatentSpace
from dpvim.inference.families import Params
from dpvim.models.columns import Rows
from dpvim.models.mixture import Mixture
from dpvim.result import Fit

if TYPE_CHECKING:
    from dpvim.experiments.ukb import Study

# Records that are looked at: enough for a median.
_NUM_RECORDS = 2048


@single_precision
def released_norms(study: Study, fit: Fit, params: Params) -> Float[np.ndarray, " records"]:
    """Norms of some records' gradients at these parameters, in the space that is released."""
    assert fit.session is not None
    variant = fit.session.prepared.engine.variant
    eta = jax.random.normal(jax.random.key(0), (fit.family.dim,))
    params = jax.tree.map(jnp.asarray, params)
    weights = variant.weights(params, eta)
    latent = fit.family.reparametrise(params, eta)
    gradients = _gradients(study.model, fit.space)(latent, _rows(study))
    return _norms(gradients, weights)


def _norms(gradients: Any, weights: Any) -> Float[np.ndarray, " records"]:
    squares = jnp.square(gradients)
    return np.asarray(jnp.sqrt((squares if weights is None else squares * weights).sum(axis=1)))


def _rows(study: Study) -> Rows:
    return Rows(
        {name: jnp.asarray(values[:_NUM_RECORDS]) for name, values in study.values.items()},
        {name: jnp.asarray(absent[:_NUM_RECORDS]) for name, absent in study.missing.items()},
    )


_KNOWN: dict[Mixture, Callable[..., Any]] = {}


def _gradients(model: Mixture, space: LatentSpace) -> Callable[..., Any]:
    """Gradients of records' log-likelihoods, compiled once for a model."""
    if model not in _KNOWN:

        def log_prob(latent: Any, row: Rows) -> Any:
            one = jax.tree.map(lambda leaf: leaf[None], row)
            return model.log_prob(space.constrain(latent), one)[0]

        _KNOWN[model] = jax.jit(jax.vmap(jax.grad(log_prob), (None, 0)))
    return _KNOWN[model]
