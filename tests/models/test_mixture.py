"""Mixtures: densities are NumPyro's, draws are right, a private fit finds the clusters."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
import pytest
from mixtures import MIXED, MODELS, NUM_ROWS, draw_of, latent_of, setting, some_rows
from numpyro import handlers
from numpyro.infer import Predictive
from numpyro.infer.util import log_density

import dpvim
from dpvim.bridge.data import prepare
from dpvim.models.columns import CategoricalColumn, CountColumn, NormalColumn, Response
from dpvim.models.mixture import Mixture
from dpvim.synthesis.encoding import EncodedTable, decode, encode
from dpvim.synthesis.model import build_mixture
from dpvim.synthesis.schema import Schema
from dpvim.types import ModelError

NUM_DRAWN = 20_000


@pytest.mark.long
def test_densities_and_their_gradients_are_numpyros():
    found, general, batch = setting("mixed")
    model = MODELS["mixed"]
    rows = prepare(some_rows(model), {})

    def theirs(latent):
        values = found.space.constrain(latent)
        density = rows.call(lambda *args: log_density(model, args, {}, values)[0], batch)
        return density + found.space.log_det(latent)

    def ours(latent):
        log_probs = jax.vmap(general.log_prob, (None, 0))(latent, batch)
        return log_probs.sum() + found.problem.log_prior(latent)

    latent = latent_of(found.space)
    one, other = (jax.jit(jax.value_and_grad(f))(latent) for f in (ours, theirs))
    np.testing.assert_allclose(one[0], other[0], rtol=1e-5)
    np.testing.assert_allclose(one[1], other[1], rtol=1e-4, atol=1e-4)


# -- drawing rows ------------------------------------------------------------------------------


def test_rows_have_the_moments_of_the_model():
    model = MODELS["mixed"]
    weights = np.array([0.2, 0.3, 0.5])
    draw = draw_of(model) | {
        "mixture.weights": jnp.asarray(weights),
        "n.standard_log_rate": jnp.array([-0.5, 0.3, 0.0]),
        "m.standard_log_rate": jnp.array([-1.0, 0.0, -0.5]),
        "m.concentration": jnp.array([2.0, 5.0, 3.0]),
        "age.mean": jnp.array([-0.5, 0.2, 0.3]),
        "age.scale": jnp.array([0.3, 0.2, 0.25]),
        "x.coefficients": 0.1 * draw_of(model)["x.coefficients"],
        "x.noise_scale": jnp.array(0.3),
    }
    rows = model.sample_rows(jax.random.key(0), draw, NUM_DRAWN)
    probs = {name: np.asarray(draw[f"{name}.missing_prob"]) for name in rows.missing}
    columns = {column.name: column for column in MIXED}

    def close(drawn, mean):
        assert abs(np.mean(drawn) - mean) < 4.5 * np.std(drawn) / np.sqrt(len(drawn))

    def present(name):
        values = np.asarray(rows.values[name], float)
        return values[~np.asarray(rows.missing[name])] if name in rows.missing else values

    def mixed(name, means):
        kept = weights * (1 - probs.get(name, np.zeros(3)))
        return kept @ np.asarray(means) / kept.sum()

    for name, absent in rows.missing.items():
        close(np.asarray(absent, float), weights @ probs[name])
    for level in range(5):
        close(present("a") == level, mixed("a", draw["a.probs"][:, level]))
    for name in ("n", "m"):
        rate = np.asarray(columns[name].rate(draw[f"{name}.standard_log_rate"]))
        close(present(name), mixed(name, rate))
        extra = 1 / np.asarray(draw["m.concentration"]) if name == "m" else np.zeros(3)
        close(present(name) ** 2, mixed(name, rate + rate**2 * (1 + extra)))
    age = np.asarray(columns["age"].standardised(present("age")))
    close(age, mixed("age", draw["age.mean"]))
    rounding = (np.sqrt(12) / 72) ** 2 / 12
    close(age**2, mixed("age", draw["age.mean"] ** 2 + draw["age.scale"] ** 2 + rounding))
    predicted = np.asarray(model.features(rows) @ draw["x.coefficients"])
    seen = ~np.asarray(rows.missing["x"])
    residual = np.asarray(columns["x"].standardised(present("x"))) - predicted[seen]
    close(residual, 0.0)
    close(residual**2, 0.3**2)


def test_rows_stay_in_the_domain():
    model = MODELS["mixed"]
    names = ("standard_log_rate", "mean", "scale", "coefficients", "concentration")
    wild = {k: v * 3 if k.endswith(names) else v for k, v in draw_of(model).items()}
    values, missing = model.sample_rows(jax.random.key(1), wild, NUM_DRAWN)
    assert list(values) == [column.name for column in MIXED]
    assert values["a"].dtype == values["n"].dtype == values["age"].dtype == jnp.int32
    for column in MIXED:
        drawn = np.asarray(values[column.name])
        upper = {"a": 4, "n": 30, "m": 300, "x": 1, "age": 90, "b": 1, "y": 1}[column.name]
        assert drawn.min() >= column.smallest
        assert drawn.max() <= upper
        if column.nullable:
            absent = np.asarray(missing[column.name])
            assert (drawn[absent] == column.smallest).all()


def test_predictive_draws_rows():
    model = Mixture([CategoricalColumn("a", 2, nullable=True)], 1)
    draws = {"a.probs": jnp.full((3, 1, 2), 0.5), "a.missing_prob": jnp.ones((3, 1))}
    drawn = Predictive(model, posterior_samples=draws)(jax.random.key(0), num_rows=7)
    assert drawn["a"].shape == (3, 7)
    assert drawn["a.missing"].all()


# -- tables ------------------------------------------------------------------------------------


def test_a_schema_makes_a_model_that_takes_its_tables():
    schema = Schema.from_dict(
        {
            "dpvim_schema": 1,
            "columns": [
                {"name": "smoker", "kind": "binary", "levels": ["no", "yes"], "nullable": True},
                {"name": "region", "kind": "categorical", "levels": ["n", "e", "s"]},
                {"name": "visits", "kind": "count", "upper": 30},
                {"name": "born", "kind": "integer", "lower": 1900, "upper": 2020},
                {"name": "dose", "kind": "real", "lower": 0.1, "upper": 100.0, "scale": "log"},
            ],
        }
    )
    frame = pd.DataFrame(
        {
            "smoker": ["yes", None, "no"],
            "region": ["s", "n", "n"],
            "visits": [0, 3, 99],
            "born": [1950, 2000, 2020],
            "dose": [0.1, 5.0, 7.0],
        }
    )
    kinds = {"smoker": "logistic", "visits": "poisson", "born": "linear", "dose": "linear"}
    for target, kind in kinds.items():
        model = build_mixture(schema, components=2, target=target)
        assert model.response == Response(target, kind)
    table = encode(frame, schema)
    rows = model.batch_of(table.values, table.missing)
    assert np.isfinite(model.log_prob(draw_of(model), rows)).all()
    drawn = model.sample_rows(jax.random.key(0), draw_of(model), 3)
    assert list(decode(EncodedTable(*drawn), schema).columns) == schema.names
    with pytest.raises(ValueError, match="3 levels"):
        build_mixture(schema, components=2, target="region")
    with pytest.raises(ValueError, match="target"):
        build_mixture(schema, components=2, target_model="linear")


# -- fits --------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_private_fit_finds_the_clusters():
    """Two groups that differ in every column; the fit is far better than one group."""
    columns = [
        CategoricalColumn("a", 4),
        CategoricalColumn("b", 2, nullable=True),
        CountColumn("n", upper=40),
        NormalColumn("x"),
        CategoricalColumn("y", 2),
    ]
    model = Mixture(columns, 2, Response("y", "logistic"))
    truth = {
        "mixture.weights": jnp.array([0.4, 0.6]),
        "a.probs": jnp.array([[0.7, 0.1, 0.1, 0.1], [0.05, 0.05, 0.1, 0.8]]),
        "b.probs": jnp.array([[0.9, 0.1], [0.15, 0.85]]),
        "n.standard_log_rate": jnp.array([-1.0, 0.5]),
        "x.mean": jnp.array([-0.8, 0.8]),
        "x.scale": jnp.array([0.4, 0.3]),
        "b.missing_prob": jnp.array([0.05, 0.3]),
        "y.coefficients": jnp.array([0.3, 0.0, 0.0, -1.0, 0.0, 0.0, 0.0, 0.5]),
    }
    count = 10_000
    rows = model.sample_rows(jax.random.key(0), truth, count)
    plan = dpvim.PrivacyPlan(
        num_examples=count, sampling_prob=0.05, num_steps=1500, clip_norm=8.0, noise_multiplier=1.0
    )
    svi = dpvim.DPSVI(model, "mean_field", optax.adam(0.02), plan, seed=0)
    result = svi.run(jax.random.key(1), 1500, *rows, progress_bar=False)
    values = svi.space.constrain(result.trace.params.loc[-100:].mean(axis=0))
    log_probs = {
        "truth": model.log_prob(truth, rows).mean(),
        "fit": model.log_prob(values, rows).mean(),
        "start": model.log_prob(svi.space.constrain(jnp.zeros(svi.space.dim)), rows).mean(),
    }
    gap = (log_probs["truth"] - log_probs["fit"]) / (log_probs["truth"] - log_probs["start"])
    assert gap < 0.05
    order = np.argsort(values["x.mean"])
    np.testing.assert_allclose(values["mixture.weights"][order], [0.4, 0.6], atol=0.05)
    np.testing.assert_allclose(values["b.missing_prob"][order], [0.05, 0.3], atol=0.05)


@pytest.mark.long
def test_many_runs_at_once_are_single_runs():
    model = MODELS["counts"]
    rows = some_rows(model)
    plan = dpvim.PrivacyPlan(
        num_examples=NUM_ROWS, sampling_prob=0.2, num_steps=5, clip_norm=1.0, noise_multiplier=1.0
    )
    svi = dpvim.DPSVI(model, "mean_field", optax.adam(0.02), plan, seed=0)
    keys = jax.random.split(jax.random.key(2), 2)
    many = svi.run_many(jax.random.key(2), 2, 5, *rows, progress_bar=False)
    alone = dpvim.DPSVI(model, "mean_field", optax.adam(0.02), plan, seed=0)
    one = alone.run(keys[0], 5, *rows, progress_bar=False)
    np.testing.assert_allclose(
        many[0].params["auto_loc"], one.params["auto_loc"], rtol=1e-4, atol=1e-5
    )


# -- errors ------------------------------------------------------------------------------------


def test_wrong_settings_are_refused():
    a = CategoricalColumn("a", 3)
    with pytest.raises(ValueError, match="every name once"):
        Mixture([a, a], 2)
    with pytest.raises(ValueError, match=r"a\.probs"):
        Mixture([a, CategoricalColumn("a.probs", 2)], 2)
    with pytest.raises(ValueError, match="at least 2 levels"):
        Mixture([CategoricalColumn("a", 1)], 2)
    with pytest.raises(ValueError, match="upper bound"):
        Mixture([CountColumn("a", 0)], 2)
    with pytest.raises(ValueError, match="lower < upper"):
        Mixture([NormalColumn("a", lower=1.0)], 2)
    with pytest.raises(TypeError, match="CategoricalColumn"):
        Mixture(["a"], 2)
    with pytest.raises(ValueError, match="besides the response"):
        Mixture([CategoricalColumn("a", 2)], 2, Response("a", "logistic"))
    with pytest.raises(ValueError, match="suits logistic or poisson"):
        Mixture([a, CategoricalColumn("b", 2)], 2, Response("b", "linear"))
    with pytest.raises(ValueError, match="num_components"):
        Mixture([a], 0)
    with pytest.raises(ModelError, match="'b'"):
        Mixture([a], 2).batch_of({"b": np.zeros(3, int)})
    with pytest.raises(ModelError, match="num_rows"), handlers.seed(rng_seed=0):
        Mixture([a], 2)()


@pytest.mark.parametrize("name", ["paper", "mixed"])
def test_the_regression_of_the_response_is_a_block_of_its_own(name):
    """It has one mode; the components of the mixture can change their places."""
    found, _, _ = setting(name)
    response = MODELS[name].response.name
    own = {f"{response}.coefficients", f"{response}.noise_scale"}
    sites = found.space.sites
    of_response = np.repeat([site.name in own for site in sites], [s.raw_size for s in sites])
    assert found.problem.blocks.labels == tuple(map(int, of_response))
    assert found.several_modes == tuple(site.name for site in sites if site.name not in own)
