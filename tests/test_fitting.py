"""fit, as a user meets it."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from conftest import linear_model, logistic_model, normal_mean_model
from numpyro.infer import Predictive
from numpyro.infer.autoguide import (
    AutoDiagonalNormal,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)

import dpvim
from dpvim.privacy.steps import StepCounter
from dpvim.types import Origin

RNG = np.random.default_rng(0)
X = RNG.normal(size=(400, 3))
Y = X @ np.array([1.0, -0.5, 0.2]) + RNG.normal(size=400)
QUICK = {"delta": 1e-4, "num_steps": 50, "seed": 0, "progress": False}


def quick(**changes):
    return dpvim.fit(linear_model, X, Y, **({"epsilon": 1.0} | QUICK | changes))


@pytest.fixture(scope="module")
def correlated_regression():
    """Conjugate: the posterior is Gaussian with a covariance that is not diagonal."""
    rng = np.random.default_rng(1)
    base = rng.normal(size=(2000, 3))
    design = base @ np.array([[1.0, 0.7, 0.0], [0.0, 0.7, 0.3], [0.0, 0.0, 1.0]])
    outcome = design @ np.array([0.5, -1.0, 0.3]) + rng.normal(size=2000)
    precision = design.T @ design + np.eye(3)
    return design, outcome, np.linalg.solve(precision, design.T @ outcome), precision


@pytest.mark.parametrize("family", ["mean_field", "full_rank"])
def test_nonprivate_fit_finds_the_known_posterior(family, correlated_regression):
    design, outcome, mean, precision = correlated_regression
    schedule = optax.exponential_decay(2e-2, 1000, 0.5)
    fit = dpvim.fit_nonprivate(
        linear_model,
        design,
        outcome,
        family=family,
        optimizer=optax.adam(schedule),
        num_steps=8000,
        seed=0,
    )
    np.testing.assert_allclose(fit.posterior.loc, mean, atol=2e-3)
    if family == "full_rank":
        wanted = np.linalg.inv(precision)
        np.testing.assert_allclose(fit.posterior.covariance, wanted, atol=0.08 * wanted.max())
    else:
        # The mean-field optimum has the inverse diagonal of the precision.
        np.testing.assert_allclose(fit.posterior.scale, np.diag(precision) ** -0.5, rtol=0.03)


@pytest.mark.long
def test_private_fit_approaches_the_posterior_as_epsilon_grows(correlated_regression):
    design, outcome, mean, _ = correlated_regression
    errors = []
    for epsilon in (0.1, 1.0, 100.0):
        runs = [
            dpvim.fit(
                linear_model,
                design,
                outcome,
                epsilon=epsilon,
                delta=1e-5,
                clip_norm=10.0,
                learning_rate=1e-2,
                num_steps=2000,
                seed=seed,
            )
            for seed in range(3)
        ]
        errors.append(np.mean([np.linalg.norm(run.posterior.loc - mean) for run in runs]))
    assert errors[2] < 0.5 * errors[1] < 0.25 * errors[0]
    assert errors[2] < 0.05


def test_default_plan_follows_the_documented_rules():
    fit = dpvim.fit(linear_model, X, Y, epsilon=1.0, delta=1e-4, seed=0)
    assert fit.plan.sampling_prob == 1.0
    assert fit.plan.num_steps == 4096
    assert fit.plan.relation == "zero_out"
    assert 2.5 <= fit.plan.clip_norm / np.sqrt(3 / len(X)) < 4
    by_hand = dpvim.fit(linear_model, X, Y, epsilon=1.0, delta=1e-4, clip_norm=2.0, seed=0)
    assert by_hand.plan.num_steps == 10_000
    assert len(by_hand.trace) == 2001


def test_fit_has_what_the_contract_names(family_name, variant_name):
    fit = quick(
        family=family_name,
        variant=variant_name,
        clip_norm=0.5,
        learning_rate=1e-3,
        trace_every=10,
    )
    assert fit.trace.steps.tolist() == [0, 10, 20, 30, 40, 50]
    assert fit.trace.loc.shape == (6, 3)
    start = fit.family.init(jnp.zeros(3), 0.1)
    for name in ("raw_scale", "raw_tril"):
        if name in fit.trace.params._fields:
            assert getattr(fit.trace, name).shape == (6, *getattr(start, name).shape)
        else:
            with pytest.raises(AttributeError, match=f"no {name} in this family"):
                getattr(fit.trace, name)
    posterior = fit.posterior
    assert posterior.loc.shape == posterior.scale.shape == (3,)
    assert posterior.covariance.shape == (3, 3)
    np.testing.assert_allclose(np.sqrt(np.diag(posterior.covariance)), posterior.scale, rtol=1e-5)
    assert posterior.sample(7)["w"].shape == (7, 3)
    assert 0.99 <= fit.privacy.epsilon <= 1.0


@pytest.mark.long
def test_posterior_draws_are_constrained_and_follow_the_gaussian():
    def model(x):
        scale = numpyro.sample("scale", dist.Gamma(2.0, 1.0))
        weights = numpyro.sample("weights", dist.Dirichlet(np.ones(3)))
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("x", dist.Normal(weights[0], scale), obs=x)

    fit = dpvim.fit(model, Y, epsilon=1.0, **QUICK)
    draws = fit.posterior.sample(4000, seed=1)
    assert (draws["scale"] > 0).all()
    np.testing.assert_allclose(draws["weights"].sum(axis=1), 1.0, rtol=1e-5)
    logs = np.log(draws["scale"])
    assert logs.mean() == pytest.approx(fit.posterior.loc[0], abs=0.02)
    assert logs.std() == pytest.approx(fit.posterior.scale[0], rel=0.1)
    again = fit.posterior.sample(4000, seed=1)
    np.testing.assert_array_equal(draws["scale"], again["scale"])
    assert not np.array_equal(fit.posterior.sample(5)["scale"], fit.posterior.sample(5)["scale"])


def test_a_seed_repeats_and_is_announced():
    with pytest.warns(dpvim.NotForReleaseWarning, match="not for release"):
        first = quick(seed=3)
    np.testing.assert_array_equal(first.trace.loc, quick(seed=3).trace.loc)
    assert not np.array_equal(first.trace.loc, quick(seed=4).trace.loc)
    assert first.privacy.to_dict()["for_testing"]
    assert not first.privacy.to_dict()["private"]
    assert "FOR TESTING ONLY" in str(first.privacy)


def test_without_a_seed_no_two_fits_are_alike():
    fits = [quick(seed=None) for _ in range(2)]
    assert not np.array_equal(fits[0].trace.loc, fits[1].trace.loc)
    assert "FOR TESTING" not in str(fits[0].privacy)
    assert fits[0].privacy.to_dict()["private"]


def test_noise_multiplier_instead_of_epsilon():
    fit = quick(epsilon=None, noise_multiplier=30.0)
    assert fit.privacy.epsilon == fit.plan.epsilon(1e-4)
    assert fit.plan.noise_multiplier == 30.0


def test_epochs_are_passes_over_the_data():
    assert quick(num_steps=None, num_epochs=2, sampling_prob=0.1).plan.num_steps == 20


def test_statement_can_be_printed_and_saved():
    fit = quick(relation="replace_one", sampling_prob=0.1)
    facts = json.loads(json.dumps(fit.privacy.to_dict()))
    assert facts["relation"] == "replace_one"
    wanted = {"epsilon", "delta", "noise_multiplier", "clip_norm", "sampling_prob", "num_steps"}
    assert wanted | {"accountant", "assumptions"} <= facts.keys()
    privacy = fit.privacy
    assert privacy.relation == "replace_one"
    assert privacy.num_steps == 50
    assert privacy.sampling_prob == 0.1
    assert privacy.clip_norm == 1.0
    assert privacy.noise_multiplier == pytest.approx(fit.plan.noise_multiplier)
    assert "PLD" in privacy.accountant
    for piece in ("replace_one", "0.0001)-differential privacy", "PLD", "probability 0.1"):
        assert piece in str(fit.privacy)


def test_nonprivate_fit_cannot_be_mistaken():
    fit = dpvim.fit_nonprivate(linear_model, X, Y, num_steps=20)
    assert "NOT PRIVATE" in str(fit.privacy)
    assert "NOT PRIVATE" in repr(fit)
    assert not fit.privacy.private
    assert not hasattr(fit.plan, "epsilon")
    assert fit.privacy.epsilon == float("inf")


@pytest.mark.parametrize(
    ("family", "name"),
    [
        (AutoDiagonalNormal, "mean_field"),
        (AutoMultivariateNormal, "full_rank"),
        (AutoDiagonalNormal(linear_model), "mean_field"),
        (AutoLowRankMultivariateNormal, "low_rank"),
    ],
)
def test_numpyro_guides_name_families(family, name):
    assert quick(family=family).family.name == name


def test_a_guide_brings_its_rank():
    fit = quick(family=AutoLowRankMultivariateNormal(linear_model, rank=1))
    assert fit.family.options == {"rank": 1}
    assert fit.guide.rank == 1


def test_a_guide_brings_its_own_initial_scale():
    fit = quick(family=AutoDiagonalNormal(linear_model, init_scale=0.3))
    np.testing.assert_allclose(np.logaddexp(fit.trace.raw_scale[0], 0), 0.3, rtol=1e-5)


def test_results_plug_into_predictive(family_name):
    fit = quick(family=family_name)
    draws = Predictive(linear_model, fit.posterior.sample(5))(jax.random.key(0), X)
    assert draws["y"].shape == (5, 400)
    from_guide = Predictive(fit.guide, params=fit.params, num_samples=2000)
    w = np.asarray(from_guide(jax.random.key(0), X, Y)["w"])
    outcomes = Predictive(linear_model, guide=fit.guide, params=fit.params, num_samples=6)
    assert outcomes(jax.random.key(0), X[:7])["y"].shape == (6, 7)
    last = fit.posterior_from("last", noise_aware=None)
    np.testing.assert_allclose(w.mean(axis=0), last.loc, atol=0.02)
    np.testing.assert_allclose(np.cov(w.T), last.covariance, atol=0.003)


def test_initial_values_by_site_name():
    fit = quick(init_params={"w": np.array([1.0, 2.0, 3.0])}, init_scale=0.5)
    np.testing.assert_allclose(fit.trace.loc[0], [1, 2, 3], rtol=1e-6)
    np.testing.assert_allclose(np.logaddexp(fit.trace.raw_scale[0], 0), 0.5, rtol=1e-5)


def test_add_or_remove_with_a_declared_bound():
    fit = quick(relation="add_or_remove", num_examples=450)
    assert fit.plan.num_examples == 450
    assert "at most 450 records" in str(fit.privacy)


def test_interrupted_fit_reports_what_it_spent(monkeypatch, ctrl_c):
    monkeypatch.setattr("dpvim.inference.loop._LONGEST_CHUNK", 100)
    ctrl_c(5)
    fit = quick(epsilon=2.0, num_steps=2_000_000, trace_every=1000)
    assert fit.interrupted
    assert 0 < fit.privacy.epsilon < 2.0
    assert "stopped early" in str(fit.privacy)
    assert fit.privacy.to_dict()["num_steps"] == fit.trace.steps[-1] == int(fit.session.state.step)


def test_resume_takes_the_steps_that_are_left(family_name):
    whole = quick(num_steps=60, trace_every=10, family=family_name)
    assert whole.resume(X, Y) is whole
    optimizer = whole.session.prepared.options.optimizer
    width = "auto" if whole.family.is_gaussian else 1.0
    svi = dpvim.DPSVI(linear_model, family_name, optimizer, whole.plan, seed=0, probe_width=width)
    part = svi.run(jax.random.key(0), 25, X, Y, progress_bar=False, trace_every=10)
    counter = StepCounter(whole.plan, Origin.SEEDED, taken=25)
    stopped = dataclasses.replace(
        whole,
        privacy=svi.privacy(part.state, delta=1e-4),
        trace=part.trace,
        session=whole.session._replace(counter=counter, state=part.state),
    )
    assert stopped.interrupted
    done = stopped.resume(X, Y)
    assert not done.interrupted
    assert done.trace.steps.tolist() == [0, 10, 20, 25, 30, 40, 50, 60]
    assert done.privacy.epsilon == whole.privacy.epsilon
    # The noise of the second part is not that of the first.
    moves = np.diff(done.trace.loc, axis=0)
    assert len(np.unique(np.round(moves, 7), axis=0)) == len(moves)


_SAVE_A_FIT = """
import sys, jax, numpy as np, dpvim
from dpvim.models.regression import logistic
assert jax.config.jax_enable_x64 == (sys.argv[2] == "1")
rng = np.random.default_rng(0)
X = jax.numpy.asarray(rng.normal(size=(300, 3)))
y = np.asarray(X)[:, 0] > rng.normal(size=300)
options = dict(epsilon=1.0, delta=1e-4, num_steps=300, seed=0, progress=False)
fit = dpvim.fit(logistic, X, y, init_params={"intercept": jax.numpy.asarray(0.1)}, **options)
fit.save(sys.argv[1], not_for_release=True)
assert np.isfinite(fit.posterior.summary()[["mean", "sd"]]).all(axis=None)
dpvim.fit_many(logistic, X, y, each=[{"seed": 1}, {"seed": 2}], epsilon=1.0, delta=1e-4,
               num_steps=20, progress=False)
"""


@pytest.mark.long
def test_double_precision_elsewhere_changes_nothing(tmp_path):
    """Statisticians set JAX to it. The clip is made for single precision, and stays there."""
    files = []
    for wide in "01":
        environment = os.environ | {"JAX_ENABLE_X64": wide}
        command = [sys.executable, "-W", "ignore", "-c", _SAVE_A_FIT, tmp_path / wide, wide]
        subprocess.run(command, env=environment, check=True)
        files.append((tmp_path / wide).read_bytes())
    assert files[0] == files[1]


def test_a_fit_holds_no_data():
    marker = 123456.789
    data = X.copy()
    data[0, 0] = marker
    fit = dpvim.fit(normal_mean_model, data, epsilon=1.0, **QUICK)

    def arrays(thing, depth=0, seen=None):
        seen = set() if seen is None else seen
        if id(thing) in seen or depth > 12:
            return
        seen.add(id(thing))
        if isinstance(thing, np.ndarray | jax.Array):
            yield thing
            return
        children = []
        if isinstance(thing, dict):
            children = list(thing.values())
        elif isinstance(thing, list | tuple):
            children = list(thing)
        else:
            children = list(getattr(thing, "__dict__", {}).values())
            for cell in getattr(thing, "__closure__", None) or ():
                children.append(cell.cell_contents)
        for child in children:
            yield from arrays(child, depth + 1, seen)

    found = list(arrays(fit))
    assert found  # the walk reaches the trace and the state
    for array in found:
        if jax.numpy.issubdtype(array.dtype, np.floating):
            assert not np.isclose(np.asarray(array), marker).any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epsilon": 0.0}, "epsilon: expected a positive"),
        ({"epsilon": -1.0}, "epsilon"),
        ({"epsilon": float("nan")}, "epsilon"),
        ({"epsilon": "1"}, "epsilon"),
        ({"epsilon": None}, "got neither"),
        ({"noise_multiplier": 2.0}, "got both"),
        ({"delta": 0.0}, "delta: expected a number strictly between"),
        ({"delta": 1.0}, "delta"),
        ({"variant": "alined"}, "Did you mean 'aligned'"),
        ({"family": "meanfield"}, "Did you mean 'mean_field'"),
        ({"family": AutoNormal}, "expected one of 'mean_field'.*AutoDiagonalNormal.*AutoNormal"),
        ({"family": "full_rank", "variant": "natural"}, "cannot serve 'natural'"),
        ({"relation": "bounded"}, "relation: expected one of"),
        ({"relation": "add_or_remove"}, "num_examples: expected with"),
        ({"clip_norm": 0.0}, "clip_norm"),
        ({"num_epochs": 3}, "got both"),
        ({"num_steps": 0}, "num_steps"),
        ({"sampling_prob": 2.0}, "sampling_prob"),
        ({"learning_rate": -1.0}, "learning_rate"),
        ({"optimizer": "adam"}, "optax"),
        ({"init_scale": 0.0}, "init_scale"),
        ({"scale_transform": "sigmoid"}, "scale_transform"),
        ({"trace_every": 0}, "trace_every"),
        ({"init_params": {"v": 1.0}}, "init_params: expected one of 'w'"),
        ({"init_params": {"w": 1.0}}, r"expected shape \(3,\)"),
        ({"num_examples": 3}, "the data have 400"),
    ],
)
def test_bad_input_is_refused_before_any_budget_is_spent(changes, message, monkeypatch):
    def no_step(*args, **kwargs):
        raise AssertionError("a step was taken")

    monkeypatch.setattr("dpvim.inference.engine._run_chunk", no_step)
    with pytest.raises((ValueError, TypeError), match=message):
        quick(**changes)


def test_large_delta_warns():
    with pytest.warns(dpvim.PrivacyWarning, match="1/N"):
        quick(delta=0.01)
    with pytest.warns(dpvim.PrivacyWarning, match="1/N"):
        quick(delta=0.01, epsilon=None, noise_multiplier=10.0)


def test_misspelt_options_are_errors():
    """What is no option reaches the model as data, and the model does not know it."""
    with pytest.raises(TypeError, match="epsilonn"):
        quick(epsilonn=2.0)


def test_progress_bar_shows_steps_and_no_losses(capsys):
    quick(progress=True)
    shown = capsys.readouterr().err
    assert "50/50" in shown
    assert "loss" not in shown


def test_categories_and_booleans_are_data():
    fit = dpvim.fit(logistic_model, X, Y > 0, epsilon=1.0, **QUICK)
    assert np.isfinite(fit.posterior.loc).all()


# -- many fits at once -------------------------------------------------------------------------


def many_data():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(400, 2)).astype(np.float32)
    return X, (X[:, 0] + rng.normal(size=400) > 0).astype(np.float32)


SHORT = {"sampling_prob": 0.1, "num_steps": 60, "trace_every": 20, "progress": False}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::dpvim.NotForReleaseWarning")
def test_many_fits_are_the_single_ones():
    """Seeds, budgets and initial values, out of order; each as if it had been asked for alone."""
    each = [
        {"epsilon": 4.0, "seed": 1},
        {"epsilon": 1.0, "seed": 2},
        {"epsilon": 4.0, "seed": 3, "init_params": {"w": np.array([1.0, -1.0])}},
        {"noise_multiplier": 2.0, "seed": 1},
        {"epsilon": 4.0, "seed": 4},
    ]
    fits = dpvim.fit_many(logistic_model, *many_data(), each=each, delta=1e-4, **SHORT)
    for own, one in zip(each, fits, strict=True):
        alone = dpvim.fit(logistic_model, *many_data(), delta=1e-4, **own, **SHORT)
        np.testing.assert_allclose(one.trace.loc, alone.trace.loc, rtol=1e-4, atol=1e-5)
        assert one.privacy == alone.privacy
        np.testing.assert_allclose(one.releases.point, alone.releases.point, rtol=1e-4, atol=1e-4)
        assert not one.privacy.private  # the seed was given


def test_many_fits_without_a_seed_differ_and_are_private():
    fits = dpvim.fit_many(
        logistic_model, *many_data(), each=[{}] * 3, epsilon=2.0, delta=1e-4, **SHORT
    )
    assert all(one.privacy.private for one in fits)
    assert len({float(one.trace.loc[-1, 0]) for one in fits}) == 3


def test_a_seed_of_one_fit_is_no_seed_of_another():
    fits = dpvim.fit_many(
        logistic_model, *many_data(), each=[{"seed": 1}, {}], epsilon=2.0, delta=1e-4, **SHORT
    )
    assert [one.privacy.private for one in fits] == [False, True]


@pytest.mark.parametrize(
    ("each", "more", "message"),
    [
        ([], {"epsilon": 1.0}, "each: expected at least one"),
        ([{"clip_norm": 1.0}], {"epsilon": 1.0}, "each: expected one of"),
        ([{"epsilon": 1.0}], {"epsilon": 1.0}, "got both"),
        ([{}], {}, "epsilon and noise_multiplier"),
    ],
)
def test_many_fits_refuse_what_is_unclear(each, more, message):
    with pytest.raises(ValueError, match=message):
        dpvim.fit_many(logistic_model, *many_data(), each=each, delta=1e-4, **more, **SHORT)


def test_many_fits_stop_together(ctrl_c):
    ctrl_c(5)
    options = {**SHORT, "num_steps": 10_000_000, "trace_every": 100_000}
    fits = dpvim.fit_many(
        logistic_model,
        *many_data(),
        each=[{}, {}, {}],
        noise_multiplier=500.0,
        delta=1e-4,
        **options,
    )
    assert all(one.interrupted for one in fits)
    assert all(one.privacy.steps_done == one.trace.steps[-1] for one in fits)
