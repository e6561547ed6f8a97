"""Blocks that are read off a program: as small as they should be, and never too small."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

from dpvim.bridge import find_blocks as module
from dpvim.bridge.find_blocks import find_blocks
from dpvim.bridge.latent_space import LatentSpace, Site

REAL, POSITIVE = dist.constraints.real, dist.constraints.positive
SPACE = LatentSpace(
    [
        Site("a", (3,), (3,), REAL),
        Site("b", (2,), (2,), REAL),
        Site("scale", (), (), POSITIVE),
        Site("table", (4, 2), (4, 2), REAL),
        Site("shift", (4,), (4,), REAL),
        Site("probs", (3,), (2,), dist.constraints.simplex),
    ]
)
A, B, SCALE, TABLE, SHIFT, PROBS = range(6)
SITES = np.repeat(np.arange(6), [site.raw_size for site in SPACE.sites])


def log_normal(x, loc, scale=1.0):
    return -0.5 * ((x - loc) / scale) ** 2 - jnp.log(scale)


def two_regressions(v, r):
    first = log_normal(r["y"], r["x"] @ v["a"], v["scale"])
    return first + dist.Bernoulli(logits=r["x"][:2] @ v["b"]).log_prob(r["g"] % 2)


def one_regression(v, r):
    return log_normal(r["y"], r["x"] @ v["a"] + r["x"][:2] @ v["b"])


def a_mixture(v, r):
    joint = log_normal(r["x"], v["a"]) + jnp.log(v["probs"])
    return jax.nn.logsumexp(joint) - jnp.logaddexp(0.0, r["x"][:2] @ v["b"])


def by_entry(v, r):
    """Every entry has a term of its own; a sum of absolute values that is scaled by data."""
    return jnp.sum(jnp.abs(v["a"]) * r["x"]) / r["y"] - log_normal(r["y"], v["b"]).sum()


def groups(v, r):
    g = r["g"][None]
    return log_normal(r["y"], v["shift"][g] + (v["table"][g] * r["x"][:2]).sum(-1)).sum()


def groups_with_a_scale(v, r):
    return log_normal(r["y"], v["shift"][r["g"][None]], v["scale"]).sum()


def two_lookups(v, r):
    """Any entry of one can meet any entry of the other."""
    return log_normal(r["y"], v["shift"][r["g"][None]] + v["table"][r["h"][None], 0]).sum()


def the_next_group(v, r):
    """Another index: a group meets the next one, and by that all of them."""
    return log_normal(r["y"], v["shift"][r["g"][None]] * v["shift"][(r["g"][None] + 1) % 4]).sum()


def lookups_of_lookups(v, r):
    """An entry each, in fact; a lookup in what was looked up takes all places together."""
    return log_normal(r["y"], v["table"][r["g"][None]][:, r["h"][None] % 2]).sum()


def a_switch_that_parameters_turn(v, r):
    return jnp.where(v["a"][0] > 0, log_normal(r["y"], v["b"][0]), 0.0)


def a_switch_that_data_turn(v, r):
    return jnp.where(r["y"] > 0, log_normal(r["y"], v["b"][0]), jnp.abs(v["a"][0]))


def a_loop(v, r):
    return jax.lax.fori_loop(0, 3, lambda i, t: t + v["a"][i] * v["b"][0], 0.0) + r["y"]


def a_branch(v, r):
    return jax.lax.cond(r["y"] > 0, lambda: v["a"].sum() ** 2, lambda: v["b"].sum() ** 2)


def sorted_entries(v, r):
    return jnp.sum(jnp.sort(v["a"]) * r["x"])


def parameters_as_an_index(v, r):
    return v["shift"][jnp.floor(v["a"][:1]).astype(int)].sum() * r["y"]


def a_product(v, r):
    return jnp.sum(v["a"][:2] * v["b"]) * r["y"]


def a_matrix_product(v, r):
    return r["x"][:2] @ (v["table"].T @ v["shift"])


def a_ratio(v, r):
    return r["y"] * v["a"][0] / v["scale"]


def several_rows(v, r):
    return log_normal(r["y"], v["shift"][jnp.stack([r["g"], r["h"]])].sum())


# Blocks as sites and entries: names of sites for all of their entries, or places.
EXPECTED = {
    two_regressions: [[A, SCALE], [B]],
    one_regression: [[A, B]],
    a_mixture: [[A, PROBS], [B]],
    by_entry: [[(A, 0)], [(A, 1)], [(A, 2)], [(B, 0)], [(B, 1)]],
    groups: [[(TABLE, 2 * g), (TABLE, 2 * g + 1), (SHIFT, g)] for g in range(4)],
    groups_with_a_scale: [[SHIFT, SCALE]],
    two_lookups: [[SHIFT, *((TABLE, 2 * g) for g in range(4))]],
    the_next_group: [[SHIFT]],
    lookups_of_lookups: [[(TABLE, 2 * g + h) for g in range(4)] for h in range(2)],
    a_switch_that_parameters_turn: [[(A, 0), (B, 0)]],
    a_switch_that_data_turn: [[(A, 0)], [(B, 0)]],
    a_loop: [[A, B]],
    a_branch: [[A, B]],
    sorted_entries: [[A]],
    parameters_as_an_index: [[(A, 0), SHIFT]],
    several_rows: [[SHIFT]],
    a_product: [[(A, i), (B, i)] for i in range(2)],
    a_matrix_product: [[TABLE, SHIFT]],
    a_ratio: [[(A, 0), SCALE]],
}
CASES = pytest.mark.parametrize("log_prob", EXPECTED, ids=lambda f: f.__name__)


def log_prob_of(function):
    return lambda latent, record: function(SPACE.constrain(latent), record)


def record(rng):
    return {
        "x": rng.normal(size=3).astype(np.float32),
        "y": np.float32(rng.normal()),
        "g": np.int32(rng.integers(4)),
        "h": np.int32(rng.integers(4)),
    }


def labels_of(function, informed=None):
    informed = np.ones(SPACE.dim, bool) if informed is None else informed
    rng = np.random.default_rng(0)
    return np.array(find_blocks(log_prob_of(function), SPACE, informed, record(rng)).labels)


def coordinates(what):
    if isinstance(what, tuple):
        site, place = what
        return np.flatnonzero(site == SITES)[[place]]
    return np.flatnonzero(what == SITES)


@CASES
def test_blocks_are_those_of_the_terms(log_prob):
    """Coordinates that are not named are alone."""
    labels, named = labels_of(log_prob), []
    for block in EXPECTED[log_prob]:
        members = np.concatenate([coordinates(what) for what in block])
        named += list(members)
        assert len(set(labels[members])) == 1
        assert not set(labels[members]) & set(np.delete(labels, members)) or log_prob in COARSE
    others = np.delete(np.arange(SPACE.dim), named)
    assert log_prob in COARSE or len(set(labels[others])) == len(others)


# A loop is not looked into, nor are rows that parameters choose: these may bring more together.
COARSE = {a_loop, a_branch, sorted_entries, parameters_as_an_index, two_lookups, several_rows}


@CASES
def test_mixed_derivatives_are_zero_between_blocks(log_prob):
    """Whatever the record and the place."""
    labels, rng = labels_of(log_prob), np.random.default_rng(1)
    hessian = jax.jit(jax.hessian(log_prob_of(log_prob)))
    apart = labels[:, None] != labels
    for _ in range(20):
        found = np.asarray(hessian(rng.normal(size=SPACE.dim).astype(np.float32), record(rng)))
        assert np.isfinite(found).all()
        assert (found[apart] == 0).all()


def test_records_are_shapes():
    """No value is looked at: there is none."""
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype),
        record(np.random.default_rng(0)),
    )
    found = find_blocks(log_prob_of(groups), SPACE, np.ones(SPACE.dim, bool), shapes)
    np.testing.assert_array_equal(found.labels, labels_of(groups))


def test_coordinates_outside_of_the_likelihood_are_in_no_block():
    informed = np.isin(SITES, [A, B, SCALE])
    labels = labels_of(two_regressions, informed)
    np.testing.assert_array_equal(labels == -1, ~informed)


def test_large_latents_are_followed_by_site(monkeypatch):
    monkeypatch.setattr(module, "_MOST_COORDINATES", 3)
    labels = labels_of(by_entry)
    for site in (A, B):
        assert len(set(labels[site == SITES])) == 1
    assert labels_of(two_regressions)[0] != labels_of(two_regressions)[3]
