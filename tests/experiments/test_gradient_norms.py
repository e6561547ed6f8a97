"""Norms of the parts of a gradient: what each variant does to them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

from dpvim.experiments import adult, gradient_norms
from dpvim.experiments.experiment import Scope
from dpvim.experiments.gradient_norms import GRADIENTS, ONE_PART, TWO_PARTS
from dpvim.experiments.running import reproduce
from dpvim.inference.families import mean_field


@pytest.fixture(scope="module")
def norms():
    """Of a simulated logistic regression, at the scale 0.1."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(500, 20))
    y = (rng.random(500) < 1 / (1 + np.exp(-X[:, 0]))).astype(np.int32)
    family = mean_field(20)
    params = family.init(jnp.zeros(20), 0.1)
    eta = jax.random.normal(jax.random.key(0), (20,))
    return {
        name: gradient_norms.norms_of_parts(name, family, params, eta, X, y)
        for name in (*TWO_PARTS, *ONE_PART)
    }


def medians(norms, variant):
    return {part: float(np.median(values)) for part, values in norms[variant].items()}


def test_vanilla_has_small_scales_natural_small_means(norms):
    vanilla, natural, level = (medians(norms, variant) for variant in TWO_PARTS)
    assert vanilla["scales"] < 0.3 * vanilla["means"]
    assert natural["scales"] > 3 * natural["means"]
    assert 0.5 < level["scales"] / level["means"] < 2
    assert level["all"] > 1.2 * vanilla["all"]


def test_all_is_both_parts(norms):
    for variant in TWO_PARTS:
        parts = norms[variant]
        np.testing.assert_allclose(
            parts["all"], np.hypot(parts["means"], parts["scales"]), rtol=1e-4
        )


def test_aligned_variants_release_the_means_part_alone(norms):
    of_aligned = norms["aligned"]["all"]
    np.testing.assert_allclose(of_aligned, norms["vanilla"]["means"], rtol=1e-5)
    # At one scale for all, T^2 and T times it.
    np.testing.assert_allclose(norms["aligned_natural"]["all"], 0.01 * of_aligned, rtol=1e-4)
    np.testing.assert_allclose(norms["whitened"]["all"], 0.1 * of_aligned, rtol=1e-4)


@pytest.mark.long
@pytest.mark.skipif(adult.find() is None, reason="the Adult data are not here")
def test_the_quick_experiment(tmp_path):
    outcome = reproduce(GRADIENTS, Scope(), tmp_path, progress=False)
    rows = pd.read_csv(outcome.folder / "results.csv")
    once = GRADIENTS.judge(rows[rows["seed"] == 0])
    assert {verdict.judgement for verdict in once} == {"does not hold"}
    # The same numbers ten times are no longer chance.
    often = pd.concat([rows.assign(seed=rows["seed"] + 2 * i) for i in range(10)])
    assert [verdict.judgement for verdict in GRADIENTS.judge(often)[:3]] == ["holds"] * 3
    assert (outcome.folder / "figure.png").exists()
