"""Theorem 1: the formulas of appendix D, and where the order of the variances holds."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from dpvim.experiments import variance
from dpvim.experiments.experiment import Scope
from dpvim.experiments.running import reproduce
from dpvim.experiments.variance import SAME_BIAS, SAME_C, VARIANCE


def measure(dim: int, noise: float, slope: float):
    cell = {"dim": dim, "noise_multiplier": noise, "slope": slope, "seed": 0}
    rows = VARIANCE.run([cell])[0].rows
    return {(row["variant"], row["rule"]): row for row in rows}


@pytest.mark.parametrize("slope", [0.01, 0.9])
def test_variances_are_those_of_the_formulas(slope):
    for row in measure(1, 1.0, slope).values():
        assert row["ratio"] == pytest.approx(1, abs=0.1)  # 4000 draws


def test_aligned_is_below_vanilla_for_small_slopes_by_their_square():
    found = measure(1, 20.0, 0.01)
    ratio = found["aligned", SAME_C]["variance"] / found["vanilla", SAME_C]["variance"]
    assert ratio == pytest.approx(0.01**2, rel=0.3)


def test_for_large_slopes_it_takes_the_same_clip_bias():
    found = measure(1, 1.0, 0.9)
    aligned = found["aligned", SAME_C]["variance"]
    assert aligned > 1.5 * found["vanilla", SAME_C]["variance"]
    assert aligned < 1.02 * found["vanilla", SAME_BIAS]["variance"]


def test_the_same_clip_bias_is_one():
    """In one coordinate the clipped sums of both variants are the same, draw by draw."""
    etas = np.random.default_rng(0).normal(size=(100, 1))
    signals = [
        variance.terms_of_formula(1, estimator, 0.7, 1.0, etas)[0]
        for estimator in (("aligned", SAME_C), ("vanilla", SAME_BIAS))
    ]
    assert signals[0] == pytest.approx(signals[1])


@pytest.mark.long
def test_the_quick_experiment(tmp_path):
    outcome = reproduce(VARIANCE, Scope(), tmp_path, progress=False)
    rows = pd.read_csv(outcome.folder / "results.csv")
    once = VARIANCE.judge(rows[rows["seed"] == 0])
    assert {verdict.judgement for verdict in once} == {"does not hold"}
    # The same numbers ten times are no longer chance.
    often = pd.concat([rows.assign(seed=rows["seed"] + 3 * i) for i in range(10)])
    judgements = [verdict.judgement for verdict in VARIANCE.judge(often)]
    assert judgements[:2] == ["holds", "holds"]
    assert judgements[3:] == ["holds in part", "does not hold"]
    assert (outcome.folder / "figure.png").exists()
