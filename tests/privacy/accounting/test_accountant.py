"""The accountant over its whole range, against computations that share no code with it."""

from __future__ import annotations

import itertools
import math

import dp_accounting
import numpy as np
import pytest
from accountant_settings import RANGES, ROWS, USUAL, calibrated, cost, facts_of, with_cap
from dp_accounting.rdp import RdpAccountant

from dpvim.types import Relation


def test_the_reference_fills_the_box():
    assert len(ROWS) == 100
    assert {row["relation"] for row in ROWS} == {relation.value for relation in Relation}
    assert sum(not math.isnan(row["prv_low"]) for row in ROWS) >= 60
    for row in ROWS:
        # The reference values are good to 1e-5; prv-accountant brackets them.
        assert not row["tight"] < row["prv_low"] * (1 - 1e-5)
        assert not row["tight"] > row["prv_high"] * (1 + 1e-5)
    for name, key in [("delta", "delta"), ("sampling_prob",) * 2, ("num_steps",) * 2]:
        low, high = RANGES[name]
        values = [row[key] for row in ROWS]
        assert min(values) < 5 * low
        assert max(values) > high / 5


@pytest.mark.parametrize("row", ROWS, ids=range(len(ROWS)))
def test_an_upper_bound_within_half_a_percent(row):
    epsilon = cost(row["noise"], delta=row["delta"], relation=row["relation"], **facts_of(row))
    assert not epsilon < row["prv_low"]
    assert row["tight"] * (1 - 1e-5) <= epsilon <= row["tight"] * 1.005


@pytest.mark.parametrize("row", [row for row in ROWS if row["relation"] != "replace_one"][::6])
def test_never_above_the_bound_by_renyi_divergences(row):
    rdp = RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    gaussian = dp_accounting.GaussianDpEvent(row["noise"])
    step = dp_accounting.PoissonSampledDpEvent(row["sampling_prob"], gaussian)
    rdp.compose(step, int(row["num_steps"]))
    epsilon = cost(row["noise"], delta=row["delta"], relation=row["relation"], **facts_of(row))
    assert epsilon <= rdp.get_epsilon(row["delta"])


@pytest.mark.parametrize("num_steps", [1, 10**7])
@pytest.mark.parametrize("relation", list(Relation))
def test_full_batches_are_the_gaussian_mechanism(relation, num_steps):
    """Its delta has a closed form (Balle and Wang 2018)."""
    sensitivity = 2.0 if relation is Relation.REPLACE_ONE else 1.0
    for delta, scaled in itertools.product([1e-12, 1e-9, 1e-5, 1e-2], [0.15, 1.0, 8.0, 300.0]):
        exact = dp_accounting.get_epsilon_gaussian(scaled, delta)
        noise = scaled * sensitivity * math.sqrt(num_steps)
        facts = {"sampling_prob": 1.0, "num_steps": num_steps}
        epsilon = cost(noise, delta=delta, relation=relation, **facts)
        assert exact - 1e-12 <= epsilon <= max(exact * 1.005, 5e-5)


@pytest.mark.parametrize("num_examples", [40, 10**4, 10**7])
@pytest.mark.parametrize("row", ROWS[::5], ids=range(len(ROWS[::5])))
def test_a_plan_with_a_cap_is_within_half_a_percent(row, num_examples):
    """If all others are zero the cap does nothing but leave the record out, at a rate of 1e-17.

    So the tight value without a cap is, but for that, a lower bound on the tight value with one.
    """
    facts = with_cap(row, num_examples)
    epsilon = cost(row["noise"], delta=row["delta"], relation=row["relation"], **facts)
    assert row["tight"] * (1 - 1e-5) <= epsilon <= row["tight"] * 1.005


@pytest.mark.long
@pytest.mark.parametrize("seed", range(24))
def test_random_plans_with_caps_over_the_whole_box(seed):
    rng = np.random.default_rng([seed, 2])
    epsilon, delta, prob, num_steps = (
        math.exp(rng.uniform(math.log(low), math.log(high))) for low, high in RANGES.values()
    )
    num_steps, num_examples = round(num_steps), round(10 ** rng.uniform(1, 7))
    if delta >= -math.expm1(num_steps * math.log1p(-prob)):
        delta = prob * 1e-2  # above the probability of being in a batch no noise is needed
    budget = {"delta": delta, "relation": list(Relation)[seed % 3]}
    row = {"sampling_prob": prob, "num_steps": num_steps}
    facts = with_cap(row, num_examples)
    noise = calibrated(epsilon=epsilon, **budget, **facts)
    here = cost(noise, **budget, **facts)
    assert 0.99 * epsilon <= here <= epsilon
    assert here == pytest.approx(cost(noise, **budget, **facts_of(row)), rel=1e-3)

    more = with_cap(row | {"sampling_prob": min(1, 1.05 * prob)}, num_examples)
    assert cost(noise * 1.01, **budget, **facts) < here
    assert cost(noise, **(budget | {"delta": 1.05 * delta}), **facts) < here
    assert cost(noise, **budget, **(facts | {"num_steps": math.ceil(1.05 * num_steps)})) > here
    assert cost(noise, **budget, **more) > here


MONOTONE = [
    {"noise": 1.2, "delta": 1e-6},
    {"noise": 30.0, "delta": 1e-12, "sampling_prob": 0.3, "num_steps": 10**5},
    {"noise": 0.7, "delta": 1e-9, "sampling_prob": 1e-4, "num_steps": 10**4},
    {"noise": 2.0, "delta": 1e-3, "sampling_prob": 0.9, "num_steps": 20},
]


@pytest.mark.parametrize("setting", MONOTONE)
@pytest.mark.parametrize("relation", list(Relation))
@pytest.mark.parametrize("factor", [1.01, 1.1])
def test_epsilon_is_monotone_in_each_argument(setting, relation, factor):
    facts = {"relation": relation} | USUAL | setting
    here = cost(**facts)
    assert cost(**(facts | {"noise": facts["noise"] * factor})) < here
    assert cost(**(facts | {"delta": facts["delta"] * factor**3})) < here
    assert cost(**(facts | {"sampling_prob": min(1, facts["sampling_prob"] * factor)})) > here
    assert cost(**(facts | {"num_steps": math.ceil(facts["num_steps"] * factor**2)})) > here


@pytest.mark.long
@pytest.mark.parametrize("relation", list(Relation))
@pytest.mark.parametrize("corner", list(itertools.product(*RANGES.values())), ids=str)
def test_corners_of_the_box(corner, relation):
    epsilon, delta, prob, num_steps = corner
    budget = {"delta": delta, "relation": relation}
    facts = {"sampling_prob": prob, "num_steps": num_steps}
    if delta > prob * num_steps:
        with pytest.raises(ValueError, match="in any batch at all"):
            calibrated(epsilon=epsilon, **budget, **facts)
        assert cost(1.0, **budget, **facts) == 0
        return
    noise = calibrated(epsilon=epsilon, **budget, **facts)
    assert 0.99 * epsilon <= cost(noise, **budget, **facts) <= epsilon


@pytest.mark.parametrize("relation", list(Relation))
def test_far_outside_of_the_box(relation):
    assert cost(1e9, relation=relation) == 0
    assert cost(1e-3, relation=relation, num_steps=1) > 1e4
    assert math.isfinite(cost(0.01, relation=relation, num_steps=10**8))
