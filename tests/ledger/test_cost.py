"""Totals and offers: tight, monotone, and granted when they are asked for."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledgers import DELTA, plan_of

from dpvim.ledger import cost
from dpvim.ledger.cost import Budget
from dpvim.types import Relation

PLANS = st.builds(
    plan_of,
    noise=st.sampled_from([8.0, 15.0, 40.0]),
    num_steps=st.integers(1, 5),
    sampling_prob=st.sampled_from([1.0, 0.3]),
)
# Of the accountant, to either side.
TOLERANCE = 0.005


def budget(epsilon=1.0, relation=Relation.ZERO_OUT):
    return Budget(epsilon, DELTA, relation)


@settings(max_examples=15)
@given(plans=st.lists(PLANS, min_size=1, max_size=3), more=PLANS)
def test_more_releases_cost_more_and_less_than_the_sum(plans, more):
    before, after = budget().total(plans), budget().total([*plans, more])
    assert after >= (1 - TOLERANCE) * before
    assert after <= (1 + TOLERANCE) * (before + more.epsilon(DELTA))
    assert budget().total([more, *plans]) == pytest.approx(after, rel=TOLERANCE)


def test_nothing_costs_nothing():
    assert budget().total([]) == 0


@pytest.mark.parametrize("relation", [Relation.ZERO_OUT, Relation.REPLACE_ONE])
@pytest.mark.parametrize("releases", [1, 4])
def test_what_is_left_is_granted_and_more_is_not(relation, releases):
    whole = budget(relation=relation)
    spent = [plan_of(noise=20.0, num_steps=3, relation=relation)]
    each = cost.epsilon_left(whole, spent, releases)
    wanted = cost.one_release(whole, 1.0).calibrate(epsilon=each, delta=DELTA)
    assert whole.pays([*spent, wanted.with_steps(releases)])
    wanted = cost.one_release(whole, 1.0).calibrate(epsilon=1.02 * each, delta=DELTA)
    assert not whole.pays([*spent, wanted.with_steps(releases)])


def test_an_empty_ledger_has_all_of_its_budget_left():
    assert cost.epsilon_left(budget(), []) == pytest.approx(1.0, rel=0.01)


def test_a_spent_budget_has_nothing_left():
    spent = [plan_of(noise=20.0, num_steps=3)]
    exact = budget(epsilon=budget().total(spent))
    assert cost.epsilon_left(exact, spent) < 0.01
    assert cost.steps_left(exact, spent, plan_of()) == 0
    assert "next to nothing" in cost.offers(budget(epsilon=0.1), spent, plan_of(), DELTA)


def test_steps_and_releases_that_are_left():
    plan = plan_of(noise=20.0)
    whole = budget(epsilon=plan.with_steps(7).epsilon(DELTA) * 1.0001)
    assert cost.steps_left(whole, [plan], plan) == 6
    assert cost.steps_left(whole, [plan], plan, most=4) == 4
    assert cost.releases_left(whole, [plan], plan.with_steps(2)) == 3
    noise = cost.noise_left(whole, [plan], plan.with_steps(20))
    assert noise is not None
    assert whole.pays([plan, dataclasses.replace(plan, noise_multiplier=noise, num_steps=20)])


def test_batches_that_use_up_delta_cost_more_than_any_budget(monkeypatch):
    def refuses(*events, **settings):
        raise ValueError("delta: expected more than 1e-3")

    monkeypatch.setattr(cost.accounting, "epsilon_of", refuses)
    assert not budget(epsilon=1e9).pays([plan_of()])
