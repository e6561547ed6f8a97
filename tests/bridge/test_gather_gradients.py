"""Gradients by gathers: those of the general way, for whatever a record does with a table."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

from dpvim.bridge.gather_gradients import _find_gathers, _inline, gradients_by_record
from dpvim.bridge.latent_space import LatentSpace, Site

SIMPLEX = dist.constraints.simplex
SPACE = LatentSpace(
    [
        Site("weights", (4,), (3,), SIMPLEX),
        Site("probs", (4, 5), (4, 4), SIMPLEX),
        Site("cells", (2, 3, 5), (2, 3, 4), SIMPLEX),
        Site("scale", (), (), dist.constraints.positive),
    ]
)
RNG = np.random.default_rng(0)
LATENT = jnp.asarray(RNG.normal(size=SPACE.dim), jnp.float32)
BATCH = jnp.asarray(RNG.integers(0, 4, (20, 3)))


def mixed(logits):
    return jax.nn.logsumexp(logits)


def rows(v, x):
    return mixed(jnp.log(v["weights"]) + jnp.log(v["probs"]).T[x[:1]] / v["scale"])


def columns(v, x):
    return mixed(jnp.log(v["weights"]) + jnp.log(v["probs"][:, x[:1]]).T)


def indices_from_the_end(v, x):
    return mixed(jnp.log(v["probs"]).T[x[:1] - 5])


def taken(v, x):
    return mixed(jnp.log(jnp.take(v["probs"], x[0], axis=1)))


def normalised(v, x):
    table = v["probs"] ** 2
    return mixed(jnp.log((table / table.sum(axis=1, keepdims=True)).T[x[:1]]))


def categorical(v, x):
    return mixed(jnp.log(v["weights"]) + dist.Categorical(probs=v["probs"]).log_prob(x[:1, None]))


def one_event(v, x):
    return jnp.log(jnp.cumsum(v["weights"])[x[:1]]).sum()


def crossed(v, x):
    cells = jnp.transpose(jnp.log(v["cells"]), (1, 2, 0))[:, x[:1]]
    return jnp.sum(cells[:, 0] * jnp.arange(6.0).reshape(3, 2)) + rows(v, x[1:])


@jax.custom_vjp
def safe_log(weights):
    return jnp.log(weights)


safe_log.defvjp(
    lambda weights: (jnp.log(weights), weights),
    lambda weights, g: (g / jnp.maximum(weights, 1e-20),),
)


def one_event_backwards_only(v, x):
    return safe_log(v["weights"])[x[:1]].sum()


def half_precision(v, x):
    return mixed(jnp.log(v["probs"]).astype(jnp.float16).T[x[:1]].astype(jnp.float32))


def twice(v, x):
    table = jnp.log(v["probs"]).T
    return mixed(table[x[:1]] + table[x[1:2]])


def several_levels(v, x):
    return mixed(jnp.log(v["probs"]).T[x].sum(axis=0))


def not_only_gathered(v, x):
    return mixed(jnp.log(v["probs"]).T[x[:1]]) * v["probs"][0, 0]


def gathered_and_returned(v, x):
    return v["weights"][x[:1]].sum() + v["weights"].sum()


def events_meet(v, x):
    return mixed(jnp.log(jnp.cumsum(v["probs"], axis=0)).T[x[:1]])


def events_are_gathered(v, x):
    return jnp.log(v["probs"])[x[:1], x[1:2]].sum()


def an_index_made_of_a_site(v, x):
    return jnp.arange(20.0)[jnp.argmax(v["weights"])[None] + x[:1]].sum() * v["scale"]


GATHERED = {
    rows: ["probs"],
    columns: ["probs"],
    indices_from_the_end: ["probs"],
    taken: ["probs"],
    normalised: ["probs"],
    categorical: ["probs"],
    one_event: ["weights"],
    crossed: ["probs", "cells"],
    one_event_backwards_only: [],
    half_precision: [],
    twice: [],
    several_levels: [],
    not_only_gathered: [],
    gathered_and_returned: [],
    events_meet: [],
    events_are_gathered: [],
    an_index_made_of_a_site: [],
}


def general(log_prob, batch):
    @jax.jit
    def gradients(latent, batch):
        per_record = jax.vmap(jax.grad(log_prob), (None, 0))
        return SPACE.pull_back(latent, per_record(SPACE.constrain(latent), batch))

    return gradients(LATENT, batch)


def by_gathers(log_prob, batch):
    return jax.jit(gradients_by_record, static_argnums=(0, 1))(log_prob, SPACE, LATENT, batch)


@pytest.mark.parametrize("log_prob", GATHERED, ids=lambda f: f.__name__)
def test_sites_that_are_gathered_are_found(log_prob):
    program = jax.make_jaxpr(log_prob)(SPACE.constrain(LATENT), BATCH[0])
    assert list(_find_gathers(_inline(program), SPACE.sites)) == GATHERED[log_prob]


@pytest.mark.parametrize("log_prob", GATHERED, ids=lambda f: f.__name__)
def test_gradients_are_those_of_the_general_way(log_prob):
    ours, wanted = by_gathers(log_prob, BATCH), general(log_prob, BATCH)
    np.testing.assert_allclose(ours, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["clip", "fill", "promise_in_bounds"])
def test_indices_outside_the_table_are_treated_alike(mode):
    def log_prob(v, x):
        return jnp.log(v["probs"]).T.at[x[:1]].get(mode=mode).sum() + v["scale"] * x[1]

    outside = BATCH.at[3, 0].set(5).at[4, 0].set(99).at[5, 0].set(-7)
    wanted = general(log_prob, outside)
    np.testing.assert_allclose(by_gathers(log_prob, outside), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["clip", "fill", "promise_in_bounds"])
def test_a_level_outside_the_table_may_be_masked(mode):
    """Then the gradient at what was found is not finite, and does not count."""

    def log_prob(v, x):
        found = jax.nn.logsumexp(jnp.log(v["probs"].T.at[x[:1]].get(mode=mode)))
        return jnp.where(x[0] >= 5, 0.0, found) + jnp.log(v["scale"]) * x[1]

    outside = BATCH.at[3, 0].set(5).at[4, 0].set(99)
    ours, wanted = by_gathers(log_prob, outside), general(log_prob, outside)
    assert np.isfinite(wanted).all()
    np.testing.assert_allclose(ours, wanted, rtol=1e-5, atol=1e-5)


def test_a_record_does_not_change_the_gradients_of_others():
    changed = by_gathers(crossed, BATCH.at[7].set(jnp.array([4, 99, -1])))
    kept = np.arange(len(BATCH)) != 7
    np.testing.assert_array_equal(changed[kept], by_gathers(crossed, BATCH)[kept])


def test_runs_side_by_side_have_the_gradients_of_each():
    latents = jnp.stack([LATENT, -LATENT, 2 * LATENT])
    gradients = jax.jit(lambda latent: gradients_by_record(rows, SPACE, latent, BATCH))
    together, alone = jax.vmap(gradients)(latents), [gradients(latent) for latent in latents]
    np.testing.assert_allclose(together, jnp.stack(alone), rtol=1e-5, atol=1e-5)
