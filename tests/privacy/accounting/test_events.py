"""Batches that are truncated: what they add to delta, against all batches of tiny data sets."""

from __future__ import annotations

import functools
import itertools
import math

import dp_accounting
import numpy as np
import pytest
from accountant_settings import calibrated, cost, with_cap
from dp_accounting.pld import PLDAccountant

from dpvim.privacy import accounting
from dpvim.types import Relation


@pytest.mark.parametrize("relation", list(Relation))
@pytest.mark.parametrize("spread", [5.5, 7, None])
def test_truncation_costs_no_less_than_dp_accounting_says(spread, relation):
    """Their analysis is finer where batches are often cut to size, and takes minutes elsewhere."""
    row = {"sampling_prob": 0.01, "num_steps": 300}
    facts = with_cap(row, 2_000)
    if spread is not None:
        facts["max_batch_size"] = math.ceil(20 + spread * math.sqrt(20))
    event = accounting.dp_event(noise_multiplier=1.5, **facts)
    theirs = PLDAccountant(dp_accounting_relation(relation), 3e-4)
    theirs.compose(event)
    ratio = accounting.epsilon_of(event, delta=1e-5, relation=relation) / theirs.get_epsilon(1e-5)
    assert 0.997 < ratio < (1.05 if spread == 5.5 else 1.003)


@pytest.mark.parametrize("relation", list(Relation))
@pytest.mark.parametrize(
    ("cap", "prob", "noise", "num_steps", "delta"),
    [
        (4, 0.05, 0.7, 2, 1e-4),
        (4, 0.3, 1.0, 2, 0.05),
        (3, 0.1, 0.4, 1, 1e-3),
        (2, 0.3, 1.0, 1, 0.2),
    ],
)
def test_what_is_promised_of_cut_batches_is_so(cap, prob, noise, num_steps, delta, relation):
    facts = {"sampling_prob": prob, "num_steps": num_steps, "num_examples": 5}
    epsilon = cost(noise, delta=delta, relation=relation, max_batch_size=cap, **facts)
    assert exact_delta(epsilon, relation, 5, cap, prob, noise, num_steps) <= delta


@pytest.mark.parametrize(
    ("num_examples", "cap", "prob", "noise", "num_steps", "delta", "refused"),
    [
        (2, 1, 0.05, 1.0, 2, 0.01, False),
        (6, 2, 0.9, 0.7, 1, 1e-6, True),
        (4, 1, 0.9, 0.7, 2, 1e-6, True),
    ],
)
def test_cut_batches_cost_more_than_others(
    num_examples, cap, prob, noise, num_steps, delta, refused
):
    """The others are pushed out by the record, or their number tells that it is there."""
    relation = Relation.ADD_OR_REMOVE
    exact = functools.partial(
        exact_delta,
        relation=relation,
        num_examples=num_examples,
        cap=cap,
        prob=prob,
        noise=noise,
        num_steps=num_steps,
    )
    facts = {"sampling_prob": prob, "num_steps": num_steps, "num_examples": num_examples}
    ask = functools.partial(cost, noise, delta=delta, relation=relation, **facts)
    assert exact(ask(max_batch_size=num_examples)) > delta
    if refused:
        with pytest.raises(ValueError, match="cut to size"):
            ask(max_batch_size=cap)
    else:
        assert exact(ask(max_batch_size=cap)) <= delta


def exact_delta(epsilon, relation, num_examples, cap, prob, noise, num_steps):
    """From all batches there are, and all ways to cut them."""
    others = [-1.0] * (num_examples - 1)  # a record in the place of one of them moves a sum by 2
    instead = {Relation.ZERO_OUT: [0.0], Relation.ADD_OR_REMOVE: [], Relation.REPLACE_ONE: [-1.0]}
    y = np.linspace(-num_examples - 7 * noise, num_examples + 7 * noise, 501)
    p, q = (
        mass_of_releases(y, values + others, prob, cap, noise, num_steps)
        for values in ([1.0], instead[relation])
    )
    return max(np.sum(np.maximum(0, a - math.exp(epsilon) * b)) for a, b in [(p, q), (q, p)])


def mass_of_releases(y, values, prob, cap, noise, num_steps):
    density = np.zeros_like(y)
    for coins in itertools.product([False, True], repeat=len(values)):
        drawn = list(itertools.compress(values, coins))
        chance = prob ** len(drawn) * (1 - prob) ** (len(values) - len(drawn))
        kept = list(itertools.combinations(drawn, min(cap, len(drawn))))
        for batch in kept:
            density += chance / len(kept) * np.exp(-(((y - sum(batch)) / noise) ** 2) / 2)
    mass = density * (y[1] - y[0]) / (noise * math.sqrt(2 * math.pi))
    assert np.sum(mass) == pytest.approx(1, abs=1e-9)
    return mass if num_steps == 1 else np.outer(mass, mass)


def test_a_delta_below_the_cost_of_the_cap_is_refused():
    facts = {"num_examples": 10_000, "max_batch_size": 250}
    spent = 2_000 * accounting.truncation_prob(
        sampling_prob=0.02, num_examples=10_000, max_batch_size=250
    )
    assert 1e-5 < spent < 1e-1
    for ask in (functools.partial(cost, 3.0), calibrated):
        with pytest.raises(ValueError, match="delta: expected more than"):
            ask(delta=spent, **facts)
        assert ask(delta=1.5 * spent, **facts) > 0


def dp_accounting_relation(relation):
    names = dp_accounting.NeighboringRelation
    return {
        Relation.ZERO_OUT: names.REPLACE_SPECIAL,
        Relation.ADD_OR_REMOVE: names.ADD_OR_REMOVE_ONE,
        Relation.REPLACE_ONE: names.REPLACE_ONE,
    }[relation]
