"""Mixtures: the structured sum is the general one, no row exceeds the bound, draws are right."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
import pytest
from conftest import summing_raw_records
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.infer import Predictive
from numpyro.infer.util import log_density

import dpvim
from dpvim.bridge.data import prepare
from dpvim.bridge.model import bridge
from dpvim.inference.families import mean_field
from dpvim.inference.variants import VARIANTS
from dpvim.models import level_tables
from dpvim.models.columns import CategoricalColumn, CountColumn, NormalColumn, Response
from dpvim.models.mixture import Mixture
from dpvim.privacy.clipping import Likelihood
from dpvim.synthesis.encoding import EncodedTable, decode, encode
from dpvim.synthesis.model import build_mixture
from dpvim.synthesis.schema import Schema
from dpvim.types import ModelError

NUM_DRAWN = 20_000
NUM_ROWS = 64
BOUND = 0.8
MIXED = (
    CategoricalColumn("a", 5, nullable=True),
    CountColumn("n", upper=30, nullable=True),
    CountColumn("m", upper=300, overdispersed=True),
    NormalColumn("x", nullable=True),
    NormalColumn("age", lower=18, upper=90, integral=True),
    CategoricalColumn("b", 2),
    CategoricalColumn("y", 2, nullable=True),
)
MODELS = {
    "paper": Mixture(
        [*(CategoricalColumn(f"c{i}", n) for i, n in enumerate((4, 2, 3))), MIXED[-1]],
        5,
        Response("y", "poisson"),
    ),
    "mixed": Mixture(MIXED, 3, Response("x", "linear"), prior_scale=0.5),
    "counts": Mixture(MIXED[:2] + MIXED[3:4], 2, Response("n", "poisson")),
    "no levels": Mixture(
        [NormalColumn("x"), CountColumn("n", upper=9), CategoricalColumn("y", 2)],
        1,
        Response("y", "logistic"),
    ),
    "histograms": Mixture(
        [
            NormalColumn("x", nullable=True, num_bins=6),
            NormalColumn("k", lower=-3, upper=1, integral=True, num_bins=5),
            CategoricalColumn("c", 3),
            CategoricalColumn("y", 2),
        ],
        3,
        Response("y", "logistic"),
    ),
    # Columns that are called as features of others are.
    "alike": Mixture(
        [
            NormalColumn("b=1"),
            CategoricalColumn("b", 3),
            NormalColumn("x", nullable=True),
            NormalColumn("x missing"),
            CountColumn("intercept", upper=9),
            CountColumn("n", upper=30),
        ],
        2,
        Response("n", "poisson"),
    ),
}


@functools.cache
def setting(name):
    """The bridged model, the general likelihood, and rows as a batch."""
    model = MODELS[name]
    inputs = prepare(some_rows(model), {})
    found = summing_raw_records(bridge(model, inputs))
    return found, Likelihood.from_log_prob(found.problem.likelihood.log_prob), inputs.records


def some_rows(model, seed=0):
    """Rows of the right form, from no model at all."""
    rng = np.random.default_rng(seed)

    def values(column):
        if isinstance(column, CategoricalColumn):
            return rng.integers(0, column.num_levels, NUM_ROWS).astype(np.int32)
        if isinstance(column, CountColumn):
            return rng.binomial(column.upper, 0.2, NUM_ROWS).astype(np.int32)
        numbers = column.lower + (column.upper - column.lower) * rng.beta(2, 3, NUM_ROWS)
        return numbers.astype(np.int32 if column.integral else np.float32)

    missing = {column.name: rng.random(NUM_ROWS) < 0.2 for column in model.nullable}
    return {column.name: values(column) for column in model.columns}, missing


@functools.cache
def draw_of(model):
    """Values of all sites, of no special form."""
    priors = model._priors()

    @jax.jit
    def draw():
        raw = {n: biject_to(p.support).inverse_shape(p.shape()) for n, p in priors.items()}
        keys = jax.random.split(jax.random.key(0), len(priors))
        return {
            name: biject_to(priors[name].support)(0.7 * jax.random.normal(key, shape))
            for key, (name, shape) in zip(keys, raw.items(), strict=True)
        }

    return draw()


def latent_of(space, seed=1, scale=0.5):
    return scale * jax.random.normal(jax.random.key(seed), (space.dim,))


def weights_of(variant_name, dim):
    rng = np.random.default_rng(0)
    family = mean_field(dim)
    params = family.unpack(jnp.asarray(rng.normal(scale=0.7, size=2 * dim), jnp.float32))
    eta = jnp.asarray(rng.normal(size=dim), jnp.float32)
    return VARIANTS[variant_name](family).weights(params, eta)


@functools.cache
def compiled(likelihood):
    return jax.jit(likelihood.clipped_sum, static_argnums=4)


# -- the density and the prior -----------------------------------------------------------------


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


# -- the clipped sum ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_the_structured_sum_is_the_general_one(name):
    found, general, batch = setting(name)
    latent, is_padding = latent_of(found.space), jnp.arange(NUM_ROWS) % 7 == 3
    sums = compiled(found.problem.likelihood), compiled(general)
    for bound in (BOUND, float("inf")) if name == "counts" else (BOUND,):
        for variant_name in VARIANTS:
            weights = weights_of(variant_name, found.space.dim)
            scale = 1.0 if weights is None else np.sqrt(weights)
            ours, wanted = (
                np.asarray(s(latent, weights, batch, is_padding, bound)) * scale for s in sums
            )
            # The general sum rounds each row to 2^-18 of the bound.
            quantum = 0 if np.isinf(bound) else bound / 2**18 * np.sqrt(NUM_ROWS)
            tolerance = 1e-5 * np.abs(wanted).max() + quantum
            np.testing.assert_allclose(ours, wanted, rtol=1e-5, atol=tolerance)


def test_levels_in_great_number_are_read_from_tables(monkeypatch):
    found, _, batch = setting("paper")
    arguments = (latent_of(found.space), jnp.ones(found.space.dim), batch)
    nothing = jnp.zeros(NUM_ROWS, bool)
    wanted = compiled(found.problem.likelihood)(*arguments, nothing, BOUND)
    monkeypatch.setattr(level_tables, "_MOST_INDICATORS", 0)
    clipped_sum = found.problem.likelihood.clipped_sum
    ours = jax.jit(lambda *arguments: clipped_sum(*arguments, BOUND))(*arguments, nothing)
    np.testing.assert_allclose(ours, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["paper", "mixed"])
def test_what_is_not_finite_contributes_nothing(name):
    found, _, batch = setting(name)
    dim = found.space.dim
    clipped_sum = compiled(found.problem.likelihood)
    latent, nothing = latent_of(found.space), jnp.zeros(NUM_ROWS, bool)
    ones = jnp.ones(dim)
    assert not np.any(clipped_sum(latent, ones, batch, ~nothing, BOUND))
    for bad in (jnp.nan, jnp.inf):
        for at in (0, dim // 2, dim - 1):
            total = clipped_sum(latent.at[at].set(bad), ones, batch, nothing, BOUND)
            assert np.isfinite(total).all()
        assert not np.any(clipped_sum(jnp.full(dim, bad), ones, batch, nothing, BOUND))
    strange = jnp.ones(dim).at[1].set(jnp.nan).at[3].set(jnp.inf).at[4].set(0.0)
    total = np.asarray(clipped_sum(latent, strange, batch, nothing, BOUND))
    assert np.isfinite(total).all()
    assert not np.any(total[[1, 3, 4]])


def test_a_row_that_is_not_finite_leaves_the_others_alone():
    found, _, batch = setting("mixed")
    clipped_sum = compiled(found.problem.likelihood)
    latent, ones = latent_of(found.space), jnp.ones(found.space.dim)
    is_third = jnp.arange(NUM_ROWS) == 3
    for bad in (jnp.nan, jnp.inf):
        odd = [
            leaf.at[3].set(bad) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
            for leaf in batch
        ]
        present = [leaf.at[3].set(False) if leaf.dtype == bool else leaf for leaf in odd]
        ours = clipped_sum(latent, ones, present, jnp.zeros(NUM_ROWS, bool), BOUND)
        wanted = clipped_sum(latent, ones, batch, is_third, BOUND)
        np.testing.assert_array_equal(ours, wanted)


def allowed(dim, rows):
    """The share of the bound that `Lattice` sets aside, less the rounding of rows."""
    return 1 + (2 * dim + 32) * 2.0**-24 + 2 * (rows + 16) * rows * 2.0**-53


def extremes(dim, cases, seed=5):
    """Latents and weights of all sizes, some of them saturated."""
    rng = np.random.default_rng(seed)
    latents = rng.normal(size=(cases, dim)) * 10.0 ** rng.uniform(-2, 3, (cases, 1))
    latents *= 10.0 ** (rng.uniform(-2, 1, (cases, dim)) * (rng.random((cases, 1)) < 0.5))
    weights = 10.0 ** (rng.uniform(-12, 8, (cases, dim)) * (rng.random((cases, 1)) < 0.7))
    return latents.astype(np.float32), weights.astype(np.float32)


def norms_of(shares, weights):
    shares, weights = np.asarray(shares, np.float64), np.asarray(weights, np.float64)
    assert np.isfinite(shares).all()
    return np.sqrt((shares**2 * weights).sum(axis=-1))


@pytest.mark.parametrize("name", MODELS)
def test_no_row_by_itself_exceeds_the_bound(name):
    found, _, batch = setting(name)
    dim, cases = found.space.dim, 2000
    latents, weights = extremes(dim, cases)
    picked = [leaf[np.random.default_rng(1).integers(0, NUM_ROWS, cases)] for leaf in batch]

    @jax.jit
    @jax.vmap
    def alone(latent, weights, row):
        rows = [leaf[None] for leaf in row]
        return found.problem.likelihood.clipped_sum(
            latent, weights, rows, jnp.zeros(1, bool), BOUND
        )

    norms = norms_of(alone(latents, weights, picked), weights)
    assert norms.max() <= BOUND * allowed(dim, 1)
    assert (norms > 0.999 * BOUND).mean() > 0.1  # the bound was put to the test


@pytest.mark.parametrize("name", ["paper", "mixed", "counts"])
def test_no_row_of_a_batch_exceeds_the_bound(name):
    """What the sum changes by if a row is left out, in the compiled form that a run has."""
    found, _, batch = setting(name)
    dim, cases = found.space.dim, 40
    latents, weights = extremes(dim, cases, seed=6)
    clipped_sum = compiled(found.problem.likelihood)
    left_out = jnp.eye(NUM_ROWS, dtype=bool)
    largest = 0.0
    for latent, weight in zip(latents, weights, strict=True):
        whole = clipped_sum(latent, weight, batch, jnp.zeros(NUM_ROWS, bool), BOUND)
        for i in range(0, NUM_ROWS, 7):
            rest = clipped_sum(latent, weight, batch, left_out[i], BOUND)
            share = np.asarray(whole) - np.asarray(rest)
            largest = max(largest, norms_of(share, weight))
    assert 0.99 * BOUND < largest <= BOUND * allowed(dim, NUM_ROWS)


def test_norm_and_sum_see_numbers_that_are_stored():
    """The branch that keeps the compiler from working them out twice is still there."""
    found, _, batch = setting("mixed")
    arguments = (latent_of(found.space), jnp.ones(found.space.dim), batch)
    is_padding = jnp.zeros(NUM_ROWS, bool)
    program = compiled(found.problem.likelihood).lower(*arguments, is_padding, BOUND).compile()
    assert " conditional(" in program.as_text()


def test_the_sum_is_in_double_precision():
    found, _, batch = setting("paper")
    total = compiled(found.problem.likelihood)(
        latent_of(found.space), jnp.ones(found.space.dim), batch, jnp.zeros(NUM_ROWS, bool), BOUND
    )
    assert total.dtype == np.float64


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


def test_large_integers_stay_in_the_domain():
    column = NormalColumn("id", lower=-(2**31 - 1), upper=2**31 - 1, integral=True)
    values = np.array([-(2**31 - 1), 0, 2**31 - 1], np.int32)
    standard = column.standardised(jnp.asarray(values))
    np.testing.assert_allclose(standard, [-np.sqrt(3), 0, np.sqrt(3)], atol=1e-6)
    back = np.asarray(column.unstandardised(jnp.array([-9.0, 0.0, 9.0])), int)
    assert back[0] >= -(2**31 - 1)
    assert back[1] == 0
    assert back[2] > 2**31 - 200


@pytest.mark.parametrize("lower", [1_700_000_000, -(2**31 - 1)])
def test_large_integers_that_lie_close_together_are_told_apart(lower):
    column = NormalColumn("second", lower=lower, upper=lower + 100, integral=True)
    values = jnp.arange(lower, lower + 101, dtype=jnp.int32)
    standard = column.standardised(values)
    np.testing.assert_allclose(standard, np.linspace(-1, 1, 101) * np.sqrt(3), atol=1e-6)
    np.testing.assert_array_equal(column.unstandardised(standard), values)
    ends = column.unstandardised(jnp.array([-9.0, 9.0]))
    np.testing.assert_array_equal(ends, [lower, lower + 100])


def test_bins_of_a_histogram():
    """Whole numbers have bins of their own where there are as many; draws stay in their bins."""
    whole = NormalColumn("k", lower=-3, upper=1, integral=True, num_bins=5)
    assert whole.bin_of(jnp.arange(-3, 2)).tolist() == [0, 1, 2, 3, 4]
    real = NormalColumn("x", lower=10.0, upper=20.0, num_bins=4)
    assert real.bin_of(jnp.array([10.0, 12.4, 12.6, 20.0])).tolist() == [0, 0, 1, 3]
    for column in (whole, real):
        code = jnp.repeat(jnp.arange(column.num_bins), 50)
        place = jnp.tile(jnp.linspace(0.02, 0.98, 50), column.num_bins)
        values = column.unstandardised(column.within_bin(code, place))
        assert values.min() >= column.lower
        assert values.max() <= column.upper
        # Numbers that are rounded may land on the other side of an edge.
        assert jnp.abs(column.bin_of(values) - code).max() <= (1 if column.integral else 0)


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
