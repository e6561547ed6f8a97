"""The stationary covariance of iterates: its equations, and short runs."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from dpvim.experiments import ou
from dpvim.experiments.experiment import Scope
from dpvim.experiments.ou import OU
from dpvim.experiments.running import quiet, reproduce


def test_the_covariance_solves_the_equation():
    noise, A = ou.noise_of_gradient(1.0), ou.problem().curvature
    rates = ou.rates_of("adam", 1.0)
    found = ou.lyapunov(rates, noise)
    P = np.diag(rates)
    np.testing.assert_allclose(P @ A @ found + found @ A @ P, P @ noise @ P, atol=1e-12)


@pytest.mark.parametrize("first_moment", [0.0, 0.9])
def test_discrete_time_agrees_for_small_rates(first_moment):
    rates, noise = np.full(ou.DIM, 1e-4), ou.noise_of_gradient(1.0)
    found = ou.stationary_covariance(rates, noise, first_moment)
    np.testing.assert_allclose(found, ou.lyapunov(rates, noise), rtol=1e-3, atol=1e-9)


def test_the_recursion_is_what_it_says():
    """A simulation of SGD with normal noise, long enough to reject 2/3 and 3/2."""
    rng, rates = np.random.default_rng(0), np.full(ou.DIM, 0.2)
    noise, A = ou.noise_of_gradient(1.0), ou.problem().curvature
    z = rng.multivariate_normal(np.zeros(ou.DIM), noise, size=40_000)
    x, seen = np.zeros(ou.DIM), []
    for step in z:
        x = x - 0.2 * (A @ x + step)
        seen.append(x)
    ratio = np.trace(np.cov(np.transpose(seen))) / np.trace(
        ou.stationary_covariance(rates, noise, 0.0)
    )
    assert ratio == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(("optimizer", "power"), [("sgd", 2), ("adam", 1)])
def test_the_power_of_the_noise(optimizer, power):
    """With Adam the rates fall as the noise grows: the covariance grows with sigma."""
    traces = [np.trace(ou.predictions(optimizer, noise)["discrete"]) for noise in (8.0, 16.0)]
    assert np.log2(traces[1] / traces[0]) == pytest.approx(power, abs=0.05)


def test_iterates_of_sgd_have_the_covariance():
    cells = [
        {"optimizer": "sgd", "noise_multiplier": 2.0, "num_steps": 10_000, "seed": seed}
        for seed in range(2)
    ]
    with quiet():
        found = [result.rows[0]["of_discrete"] for result in OU.run(cells)]
    assert np.mean(found) == pytest.approx(1, abs=0.25)


def test_the_printed_equation_is_right_where_dp_noise_is_all_and_has_its_own_unit():
    right = ou.lyapunov(ou.rates_of("sgd", 100.0), ou.noise_of_gradient(100.0))
    np.testing.assert_allclose(np.diag(ou.as_printed(100.0)), np.diag(right), rtol=1e-2)
    factor = (ou.SAMPLING_PROB * ou.NUM_EXAMPLES / ou.CLIP_NORM) ** 2
    other = ou.as_printed(100.0, of_gradient=False)
    np.testing.assert_allclose(np.diag(other), factor * np.diag(right), rtol=1e-2)


@pytest.mark.long
def test_the_quick_experiment(tmp_path):
    outcome = reproduce(OU, Scope(), tmp_path, progress=False)
    table = outcome.summary.set_index(["optimizer", "noise_multiplier"])
    np.testing.assert_allclose(table["of_lyapunov"]["sgd"], 1, atol=0.15)
    rows = pd.read_csv(outcome.folder / "results.csv")
    # The same numbers ten times are no longer chance; once they are nothing else.
    often = pd.concat([rows.assign(seed=rows["seed"] + 2 * i) for i in range(10)])
    judgements = [verdict.judgement for verdict in OU.judge(often)]
    assert judgements[0] == judgements[2] == "holds"
    assert judgements[1] != "holds"
    assert judgements[4] == "does not hold"
    once = OU.judge(rows[rows["seed"] == 0])
    assert {verdict.judgement for verdict in once} == {"does not hold"}
    assert (outcome.folder / "figure.png").exists()
