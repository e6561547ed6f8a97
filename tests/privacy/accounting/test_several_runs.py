"""Several runs on the same data: composed as one, against another accountant and closed forms."""

from __future__ import annotations

import math

import dp_accounting
import numpy as np
import pytest
from accountant_settings import ROWS, USUAL, cost, facts_of, with_cap

from dpvim.privacy import accounting
from dpvim.privacy.accounting.composition import compose
from dpvim.privacy.accounting.cross_check import epsilon_by_dp_accounting
from dpvim.privacy.accounting.pld import GridComposition, GridPLD
from dpvim.privacy.plan import PrivacyPlan
from dpvim.types import BudgetExceededError, Relation


def event(noise, **facts):
    return accounting.dp_event(noise_multiplier=noise, **(USUAL | facts))


def together(*events, delta=1e-6, relation=Relation.ZERO_OUT):
    return accounting.epsilon_of(events, delta=delta, relation=relation)


COUNTS = event(12.0, sampling_prob=1.0, num_steps=1)
MIXES = {
    "counts and gradients": (COUNTS, event(3.0)),
    "three kinds": (COUNTS, event(3.0), event(1.5, sampling_prob=1e-3, num_steps=500)),
    "a loud one and a quiet one": (event(0.9, num_steps=30), event(9.0, num_steps=20_000)),
    "large batches": (event(30.0, sampling_prob=0.4), event(20.0, sampling_prob=0.9, num_steps=90)),
}


@pytest.mark.parametrize("relation", list(Relation))
@pytest.mark.parametrize("name", MIXES)
def test_another_accountant_says_the_same(name, relation):
    """It adds losses on one grid without a tilt, and is an upper bound as well."""
    here = together(*MIXES[name], relation=relation)
    theirs = epsilon_by_dp_accounting(MIXES[name], delta=1e-6, relation=relation)
    assert 0.993 * theirs < here < 1.005 * theirs


@pytest.mark.parametrize("row", ROWS[::7], ids=range(len(ROWS[::7])))
def test_runs_that_are_nearly_alike_cost_what_one_long_run_does(row):
    """Noise that differs in the ninth digit makes two kinds of steps of one; the cost is known."""
    facts, num_steps = facts_of(row), int(row["num_steps"])
    if num_steps < 2:
        pytest.skip("one step cannot be cut into two runs")
    parts = [
        event(row["noise"] * factor, **(facts | {"num_steps": steps}))
        for factor, steps in [
            (1.0, num_steps // 3 or 1),
            (1 + 1e-9, num_steps - (num_steps // 3 or 1)),
        ]
    ]
    epsilon = together(*parts, delta=row["delta"], relation=Relation(row["relation"]))
    assert row["tight"] * (1 - 1e-5) <= epsilon <= row["tight"] * 1.005


@pytest.mark.parametrize("relation", list(Relation))
def test_gaussians_are_one_gaussian(relation):
    sensitivity = 2.0 if relation is Relation.REPLACE_ONE else 1.0
    events = [event(noise, sampling_prob=1.0, num_steps=steps) for noise, steps in [(3, 4), (5, 2)]]
    scaled = 1 / math.sqrt(4 / 9 + 2 / 25) / sensitivity
    exact = dp_accounting.get_epsilon_gaussian(scaled, 1e-6)
    assert exact <= together(*events, relation=relation) <= 1.005 * exact


@pytest.mark.parametrize("name", MIXES)
def test_composition_is_dearer_than_each_and_cheaper_than_the_sum(name):
    alone = [together(each) for each in MIXES[name]]
    assert max(alone) < together(*MIXES[name]) < sum(alone)
    assert together(*MIXES[name]) == pytest.approx(together(*reversed(MIXES[name])), rel=1e-3)


def test_a_direction_is_that_of_all_runs():
    """The worse directions of two runs, were they mixed, would cost more than there is."""
    parts = event(0.5, sampling_prob=0.3, num_steps=1), event(0.8, sampling_prob=0.6, num_steps=2)
    for relation in (Relation.ZERO_OUT, Relation.ADD_OR_REMOVE):
        theirs = epsilon_by_dp_accounting(parts, delta=1e-5, relation=relation)
        assert together(*parts, delta=1e-5, relation=relation) == pytest.approx(theirs, rel=5e-3)


def test_caps_of_all_runs_are_taken_off_delta():
    facts = with_cap({"sampling_prob": 0.02, "num_steps": 300}, 10_000) | {"max_batch_size": 270}
    lost = 300 * accounting.truncation_prob(
        sampling_prob=0.02, num_examples=10_000, max_batch_size=270
    )
    cut = event(2.0, **facts), event(3.0, **facts)
    whole = tuple(event(noise, sampling_prob=0.02, num_steps=300) for noise in (2.0, 3.0))
    assert together(*cut, delta=4 * lost) == pytest.approx(together(*whole, delta=2 * lost))
    with pytest.raises(ValueError, match="cut to size"):
        together(*cut, delta=1.5 * lost)


def test_masses_of_unlike_steps_are_convolved():
    rng = np.random.default_rng(0)
    parts = []
    for size, count in [(5, 2), (9, 1), (3, 3)]:
        mass = rng.dirichlet(np.ones(size))
        parts.append((GridPLD(0.0, 1.0, np.arange(size), mass, 0.0), count))
    masses, error = compose(GridComposition(tuple(parts), tilt=0.0), 40)
    expected = np.ones(1)
    for grid, count in parts:
        for _ in range(count):
            expected = np.convolve(expected, grid.mass)
    np.testing.assert_allclose(masses[: len(expected)], expected, rtol=0, atol=1e-14)
    assert np.linalg.norm(masses[: len(expected)] - expected) <= error < 1e-12


PLAN = PrivacyPlan(num_examples=10_000, sampling_prob=0.05, num_steps=500, clip_norm=1.0)


@pytest.mark.parametrize("relation", list(Relation))
def test_noise_beside_other_runs(relation):
    budget = {"epsilon": 1.0, "delta": 1e-6}
    other = PrivacyPlan(
        num_examples=10_000, sampling_prob=1.0, num_steps=1, clip_norm=1.0, relation=relation
    ).calibrate(epsilon=0.6, delta=1e-6)
    plan = PrivacyPlan(**(vars(PLAN) | {"relation": relation}))
    beside = plan.calibrate(**budget, beside=[other])
    assert beside.noise_multiplier > 1.05 * plan.calibrate(**budget).noise_multiplier
    events = [beside.dp_event, other.dp_event]
    total = accounting.epsilon_of(events, delta=1e-6, relation=relation)
    assert 0.995 < total <= 1.0
    with pytest.raises(BudgetExceededError, match="by themselves"):
        plan.calibrate(epsilon=0.5, delta=1e-6, beside=[other])


def test_runs_beside_each_other_have_one_relation():
    other = PrivacyPlan(**(vars(PLAN) | {"relation": "replace_one", "noise_multiplier": 9.0}))
    with pytest.raises(ValueError, match="relation"):
        PLAN.calibrate(epsilon=1.0, delta=1e-6, beside=[other])


def test_one_run_and_a_list_of_one_cost_the_same():
    assert together(event(3.0)) == cost(3.0)


def test_equal_runs_are_one_long_run():
    for sampling_prob in (0.02, 1.0):
        half = event(5.0, sampling_prob=sampling_prob, num_steps=50)
        whole = cost(5.0, sampling_prob=sampling_prob, num_steps=100)
        assert together(half, half) == pytest.approx(whole, rel=1e-6)


def test_noise_from_disk_is_that_of_the_same_runs_beside_it(monkeypatch, tmp_path):
    monkeypatch.setenv("DPVIM_CACHE", str(tmp_path))
    budget = {"epsilon": 1.0, "delta": 1e-6}
    others = [PLAN.calibrate(epsilon=part, delta=1e-6) for part in (0.3, 0.6)]
    noises = [PLAN.calibrate(**budget, beside=[other]).noise_multiplier for other in others]
    assert PLAN.calibrate(**budget).noise_multiplier < noises[0] < noises[1]
