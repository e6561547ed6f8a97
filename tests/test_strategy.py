"""Plans of fits: the choices that `fit` makes, shown before anything is spent."""

from __future__ import annotations

import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from conftest import linear_model

import dpvim

X, Y = np.zeros((2000, 3)), np.zeros(2000)
BUDGET = {"epsilon": 1.0, "delta": 1e-5}


def test_the_plan_is_the_one_of_the_fit():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2000, 3)), rng.normal(size=2000)
    shown = dpvim.plan(linear_model, X, Y, **BUDGET)
    assert shown.plan == dpvim.fit(linear_model, x, y, **BUDGET, seed=0).plan
    assert (shown.variant, shown.family, shown.why_not_steered) == ("whitened", "full_rank", None)
    assert shown.epsilon <= 1.0
    assert shown.to_dict()["num_steps"] == 4096


def test_what_noise_adds_is_foretold():
    """Half of the run's steps at the answer, in units of the posterior's standard deviation."""
    shown = dpvim.plan(linear_model, X, Y, **BUDGET)
    plan = shown.plan
    noise = plan.noise_multiplier * plan.clip_norm / np.sqrt(plan.num_steps / 2)
    assert shown.expected_width == pytest.approx(np.sqrt(1 + noise**2 / 0.95), rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"clip_norm": 2.0}, "clip norm were given"),
        ({"learning_rate": 0.01}, "optimiser"),
        ({"optimizer": optax.sgd(0.1)}, "optimiser"),
        ({"variant": "aligned"}, "were given"),
        ({"family": "full_rank"}, "family"),
        ({"num_steps": 300}, "need at least 768 steps"),
        ({"num_epochs": 300}, "epochs"),
    ],
)
def test_whoever_chooses_gets_an_optimiser_and_the_reason(changes, why):
    shown = dpvim.plan(linear_model, X, Y, **BUDGET, **changes)
    assert why in shown.why_not_steered
    assert why in str(shown)
    assert shown.variant == "aligned"
    assert shown.expected_width is None


def test_models_that_releases_cannot_steer():
    def many(x):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([129]).to_event(1))
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("x", dist.Normal(w.sum(), 1), obs=x)

    def improper(x):
        mean = numpyro.sample("mean", dist.ImproperUniform(dist.constraints.real, (), ()))
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("x", dist.Normal(mean, 1), obs=x)

    assert "more than 128" in dpvim.plan(many, Y, **BUDGET).why_not_steered
    assert "improper" in dpvim.plan(improper, Y, **BUDGET).why_not_steered


def test_a_clip_norm_with_the_variant_by_name_is_in_its_units():
    shown = dpvim.plan(linear_model, X, Y, variant="whitened", clip_norm=0.2, **BUDGET)
    assert shown.why_not_steered is None
    assert "0.2 in units of the approximation: 5.2 sqrt(d / N)" in str(shown)


def test_a_mixture_is_announced():
    def mixture(x):
        locs = numpyro.sample("locs", dist.Normal(0, 3).expand([2]).to_event(1))
        parts = dist.MixtureSameFamily(
            dist.Categorical(probs=np.full(2, 0.5)), dist.Normal(locs, 1)
        )
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("x", parts, obs=x)

    assert "will be doubted" in str(dpvim.plan(mixture, Y, **BUDGET))
    assert "doubted" not in str(dpvim.plan(linear_model, X, Y, **BUDGET))


def test_a_missing_delta_is_named():
    with pytest.raises(TypeError, match=r"delta: .*got none.*1/\(10 N\)"):
        dpvim.plan(linear_model, X, Y, epsilon=1.0)
