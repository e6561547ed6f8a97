"""Models that do not fit are refused, and the checks do not look at the data."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro_models import X, bridged, penalised

from dpvim.types import ModelError


def no_observation(x):
    numpyro.sample("w", dist.Normal(0, 1))


def no_latent(x):
    numpyro.sample("x", dist.Normal(0, 1), obs=x)


def local_latents(x):
    with numpyro.plate("records", x.shape[0]):
        z = numpyro.sample("z", dist.Normal(0, 1))
        numpyro.sample("x", dist.Normal(z, 1), obs=x[:, 0])


def discrete_latent(x):
    k = numpyro.sample("k", dist.Bernoulli(0.5))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("x", dist.Normal(k, 1), obs=x[:, 0])


def centred(x):
    w = numpyro.sample("w", dist.Normal(0, 1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("x", dist.Normal(w, 1), obs=x[:, 0] - x[:, 0].mean())


def divided(x):
    w = numpyro.sample("w", dist.Normal(0, 1))
    numpyro.factor("lik", dist.Normal(w, 1).log_prob(x[:, 0]).mean())


def autoregressive(x):
    w = numpyro.sample("w", dist.Normal(0, 1))
    previous = jnp.concatenate([jnp.zeros(1), x[:-1, 0]])
    numpyro.sample("x", dist.Normal(w * previous, 1), obs=x[:, 0])


def empirical_prior(x):
    w = numpyro.sample("w", dist.Normal(x.mean(), 1))
    numpyro.sample("x", dist.Normal(w, 1), obs=x[:, 0])


def prior_from_count(x):
    w = numpyro.sample("w", dist.Normal(0, 1 / jnp.sqrt(x.shape[0])))
    numpyro.sample("x", dist.Normal(w, 1), obs=x[:, 0])


def moving_support(x):
    high = numpyro.sample("high", dist.Gamma(2.0, 1.0))
    w = numpyro.sample("w", dist.Uniform(0, high))
    numpyro.sample("x", dist.Normal(w, 1), obs=x[:, 0])


def observes_what_it_holds(x):
    w = numpyro.sample("w", dist.Normal(0, 1))
    numpyro.sample("held", dist.Normal(w, 1), obs=X[:, 0].mean())
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("x", dist.Normal(w, 1), obs=x[:, 0])


def centred_by_callback(x):
    """A statistic of the batch, which a model written with jax.numpy could not see."""
    w = numpyro.sample("w", dist.Normal(0, 1))
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    mean = jax.pure_callback(
        lambda batch: np.broadcast_to(np.mean(batch), batch.shape),
        shape,
        x,
        vmap_method="expand_dims",
    )
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("x", dist.Normal(w, 1), obs=(x - 0.0 * mean)[:, 0])


@jax.custom_batching.custom_vmap
def _as_it_is(x):
    return x


@_as_it_is.def_vmap
def _centred(axis_size, in_batched, x):
    return x - x.mean(axis=0), True


def centred_by_own_rule(x):
    w = numpyro.sample("w", dist.Normal(0, 1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("x", dist.Normal(w, 1), obs=_as_it_is(x)[:, 0])


def param_site(x):
    w = numpyro.sample("w", dist.Normal(0, 1))
    scale = numpyro.param("scale", 1.0)
    numpyro.sample("x", dist.Normal(w, scale), obs=x[:, 0])


def support_by_difference(x):
    a, b = (numpyro.sample(name, dist.Normal(0, 1)) for name in "ab")
    w = numpyro.sample("w", dist.Uniform(0, jnp.exp(a - b)))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("x", dist.Normal(w, 1), obs=x[:, 0])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (no_observation, "no observed site"),
        (no_latent, "no latent site"),
        (local_latents, "'z'.*grows with"),
        (discrete_latent, "'k'.*discrete.*MixtureSameFamily"),
        (centred, "'x'.*factorises"),
        (divided, "'lik'.*factorises"),
        (autoregressive, "'x'.*factorises"),
        (empirical_prior, "'w'.*does not depend on the data"),
        (prior_from_count, "'w'.*does not depend on the data"),
        (moving_support, "'w'.*fixed support"),
        (support_by_difference, "'w'.*fixed support"),
        (param_site, "'scale'.*numpyro.param"),
        (observes_what_it_holds, "'held'.*does not depend on them"),
        (centred_by_callback, "keeps the records of a batch apart.*call into Python"),
        (centred_by_own_rule, "keeps the records of a batch apart.*batching rule"),
    ],
)
def test_models_that_cannot_be_fitted_are_refused(model, message):
    with pytest.raises(ModelError, match=message):
        bridged(model, (X,))


def test_the_checks_do_not_look_at_the_data():
    """The same error or none, whatever the values are."""
    for data in (X, np.zeros_like(X), np.full_like(X, 1e30)):
        bridged(penalised, (data,))
        with pytest.raises(ModelError, match="factorises"):
            bridged(centred, (data,))


def test_a_function_that_mixes_records_is_refused():
    """JAX iterates the incomplete beta function until the slowest record of a batch is done, and
    the others move on with it."""

    def censored(k):
        p = numpyro.sample("p", dist.Beta(2.0, 2.0))
        with numpyro.plate("records", k.shape[0]):
            numpyro.factor("tail", jnp.log(jax.scipy.special.betainc(k + 1.0, 5.0, p)))

    with pytest.raises(ModelError, match="incomplete beta"):
        bridged(censored, (np.arange(30, dtype=np.float32),))
