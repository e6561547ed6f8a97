"""The NumPyro bridge: log densities equal NumPyro's, and models that do not fit are refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from conftest import linear_model, logistic_model
from numpyro.infer.util import log_density

from dpvim._compile import single_precision
from dpvim.bridge.data import prepare
from dpvim.bridge.model import bridge
from dpvim.types import ModelError

RNG = np.random.default_rng(0)
X = RNG.normal(size=(30, 4)).astype(np.float32)
Y = (RNG.random(30) < 0.5).astype(np.int32)
CATEGORIES = RNG.integers(0, 3, 30)


def mixture(c):
    """Simplex supports, one of them with a batch of events."""
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(4)))
    probs = numpyro.sample("probs", dist.Dirichlet(jnp.ones(3)).expand([4]).to_event(1))
    with numpyro.plate("records", c.shape[0]):
        numpyro.factor("c", jax.nn.logsumexp(jnp.log(weights) + jnp.log(probs[:, c].T), axis=-1))


def positive_and_interval(x):
    scale = numpyro.sample("scale", dist.Gamma(2.0, 1.0))
    loc = numpyro.sample("loc", dist.Uniform(jnp.array([-2.0, -1.0]), 3.0).to_event(1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("x", dist.Normal(loc, scale).to_event(1), obs=x[:, :2])


def correlated(x):
    factor = numpyro.sample("factor", dist.LKJCholesky(3, 2.0))
    ordered = numpyro.sample(
        "ordered", dist.ImproperUniform(dist.constraints.ordered_vector, (), (3,))
    )
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("x", dist.MultivariateNormal(ordered, scale_tril=factor), obs=x[:, :3])


def hierarchical(x):
    spread = numpyro.sample("spread", dist.HalfCauchy(1.0))
    with numpyro.plate("columns", 4):
        loc = numpyro.sample("loc", dist.Normal(0, spread))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("x", dist.Normal(loc, 1).to_event(1), obs=x)


def penalised(x):
    """An observed site that sees no data belongs to the prior."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([4]).to_event(1))
    numpyro.factor("penalty", -jnp.sum(jnp.abs(w)))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("x", dist.Normal(w, 1).to_event(1), obs=x)


def two_outcomes(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([4]).to_event(1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("x", dist.Normal(0.5, 1).expand([4]).to_event(1), obs=x)
        numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


MODELS = {
    "mixture": (mixture, (CATEGORIES,)),
    "positive_and_interval": (positive_and_interval, (X,)),
    "correlated": (correlated, (X,)),
    "hierarchical": (hierarchical, (X,)),
    "penalised": (penalised, (X,)),
    "two_outcomes": (two_outcomes, (X, Y)),
    "logistic": (logistic_model, (X, Y)),
}


def bridged(model, args, kwargs=None):
    inputs = prepare(args, kwargs or {})
    return bridge(model, inputs), inputs


def at_random(space, seed=3):
    return jax.random.normal(jax.random.key(seed), (space.dim,), jnp.float32) * 0.5


@pytest.mark.parametrize("name", MODELS)
@single_precision
def test_log_density_is_numpyros(name):
    model, args = MODELS[name]
    found, inputs = bridged(model, args)
    latent = at_random(found.space)
    log_lik = jax.vmap(found.problem.likelihood.log_prob, (None, 0))(latent, inputs.records)
    ours = log_lik.sum() + found.problem.log_prior(latent)
    theirs, _ = log_density(model, inputs.records, {}, found.space.constrain(latent))
    theirs += found.space.log_det(latent)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)


@pytest.mark.parametrize("name", MODELS)
@single_precision
def test_log_jacobian_is_the_determinant_of_the_transform(name):
    """Against autodiff, for supports whose dimension the transform keeps."""
    model, args = MODELS[name]
    found, _ = bridged(model, args)
    for site in found.space.sites:
        if site.shape != site.raw_shape:
            continue
        raw = jax.random.normal(jax.random.key(1), site.raw_shape) * 0.5
        jacobian = jax.jacobian(lambda u, s=site: s.constrain(u.reshape(s.raw_shape)).ravel())(
            raw.ravel()
        )
        wanted = np.linalg.slogdet(jacobian)[1]
        np.testing.assert_allclose(site.log_det(raw), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
@single_precision
def test_gradient_through_jacobian_blocks_is_the_gradient_through_the_transform(name):
    model, args = MODELS[name]
    found, inputs = bridged(model, args)
    latent = at_random(found.space)
    direct = jax.vmap(jax.grad(found.problem.likelihood.log_prob), (None, 0))
    gradients = np.asarray(direct(latent, inputs.records), float)
    ones, padding = jnp.ones(found.space.dim), jnp.zeros(30, bool)
    for clip in (jnp.inf, 0.3):
        factors = np.minimum(1, clip / np.linalg.norm(gradients, axis=1))
        ours = found.problem.likelihood.clipped_sum(latent, ones, inputs.records, padding, clip)
        np.testing.assert_allclose(ours, factors @ gradients, rtol=1e-3, atol=2e-4)


def test_a_function_that_mixes_records_is_refused():
    """JAX iterates the incomplete beta function until the slowest record of a batch is done, and
    the others move on with it."""

    def censored(k):
        p = numpyro.sample("p", dist.Beta(2.0, 2.0))
        with numpyro.plate("records", k.shape[0]):
            numpyro.factor("tail", jnp.log(jax.scipy.special.betainc(k + 1.0, 5.0, p)))

    with pytest.raises(ModelError, match="incomplete beta"):
        bridged(censored, (np.arange(30, dtype=np.float32),))


def test_constrain_and_unconstrain_are_inverse():
    found, _ = bridged(mixture, (CATEGORIES,))
    latent = at_random(found.space)
    again = found.space.unconstrain(found.space.constrain(latent))
    np.testing.assert_allclose(again, latent, atol=1e-4)


def test_latents_are_packed_as_numpyros_guide_packs_them():
    """So that parameters plug into AutoDiagonalNormal; site names out of order on purpose."""

    def model(x):
        z = numpyro.sample("z", dist.Normal(0, 1))
        a = numpyro.sample("a", dist.Gamma(2.0, 1.0).expand([2]).to_event(1))
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("x", dist.Normal(z, a.sum()), obs=x)

    guide = numpyro.infer.autoguide.AutoDiagonalNormal(model)
    with numpyro.handlers.seed(rng_seed=0):
        guide(X[:, 0])
    found, _ = bridged(model, (X[:, 0],))
    latent = at_random(found.space)
    theirs = guide._unpack_and_constrain(latent, {})
    for name, value in found.space.constrain(latent).items():
        np.testing.assert_allclose(value, theirs[name], rtol=1e-5)


# -- N, subsample_size and other ways to write the same model ---------------------------------


def with_total(X, y, N):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([4]).to_event(1))
    with numpyro.plate("records", N, subsample_size=X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def with_subsample(X, y, size):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([4]).to_event(1))
    with numpyro.plate("records", X.shape[0], subsample_size=size):
        batch_x = numpyro.subsample(X, event_dim=1)
        batch_y = numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Bernoulli(logits=batch_x @ w), obs=batch_y)


def without_plate(X, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([4]).to_event(1))
    numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def as_factor(X, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([4]).to_event(1))
    numpyro.factor("lik", dist.Bernoulli(logits=X @ w).log_prob(y).sum())


@pytest.mark.parametrize(
    ("model", "extra"),
    [
        (with_total, {"N": 30}),
        (with_total, {"N": 1000}),
        (with_subsample, {"size": 10}),
        (without_plate, {}),
        (as_factor, {}),
    ],
)
def test_other_ways_to_write_the_model_give_the_same_functions(model, extra):
    plain, inputs = bridged(logistic_model, (X, Y))
    other, _ = bridged(model, (X, Y), extra)
    latent = at_random(plain.space)
    records = inputs.records
    for record in [[leaf[i] for leaf in records] for i in range(3)]:
        np.testing.assert_allclose(
            other.problem.likelihood.log_prob(latent, record),
            plain.problem.likelihood.log_prob(latent, record),
            rtol=1e-5,
        )
    np.testing.assert_allclose(
        other.problem.log_prior(latent), plain.problem.log_prior(latent), rtol=1e-5
    )


def test_a_scale_that_the_user_put_on_a_site_is_kept():
    def tempered(X, y):
        with numpyro.handlers.scale(scale=0.5):
            numpyro.sample("y", dist.Bernoulli(logits=X @ w_site(X)), obs=y)

    def w_site(X):
        return numpyro.sample("w", dist.Normal(0, 1).expand([4]).to_event(1))

    plain, inputs = bridged(without_plate, (X, Y))
    other, _ = bridged(tempered, (X, Y))
    latent, record = at_random(plain.space), [leaf[0] for leaf in inputs.records]
    np.testing.assert_allclose(
        other.problem.likelihood.log_prob(latent, record),
        0.5 * plain.problem.likelihood.log_prob(latent, record),
        rtol=1e-5,
    )


def test_outcomes_of_zeros_and_ones_may_be_floats():
    found, _ = bridged(logistic_model, (X, Y.astype(np.float32)))
    assert found.space.dim == 4


def test_keyword_data_and_pytrees():
    def model(data, *, offset):
        return linear_model(data["X"] + offset, data["y"])

    found, inputs = bridged(model, ({"X": X, "y": Y.astype(float)},), {"offset": 0.5})
    assert found.space.dim == 4
    assert len(inputs.records) == 2


# -- what is refused ---------------------------------------------------------------------------


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
