"""Accounting and the plan that sampler, clip, noise and accountant come from."""

from __future__ import annotations

import dataclasses
import math

import dp_accounting
import pytest
from dp_accounting.rdp import RdpAccountant

from dpvim.privacy import accounting
from dpvim.privacy.plan import PrivacyPlan, default_sampling_prob, resolve_num_steps
from dpvim.types import PrivacyWarning, Relation

# Tight noise multipliers for epsilon 1 at sampling probability 0.01, on which a fine-grained PLD,
# the Fourier accountant and the PRV accountant agree to 0.1 %.
TIGHT = [
    (30_162, 1 / 30_162, 400_000, 21.861, 43.695),
    (58_261, 1 / 58_261, 100_000, 11.436, 22.818),
    (100_000, 1e-5, 100_000, 11.824, 23.595),
]
CASES = [
    (n, delta, steps, relation, replace if relation is Relation.REPLACE_ONE else usual)
    for n, delta, steps, usual, replace in TIGHT
    for relation in Relation
]


def plan_of(**changes):
    facts = {"num_examples": 10_000, "sampling_prob": 0.1, "num_steps": 500, "clip_norm": 1.0}
    return PrivacyPlan(**(facts | changes))


@pytest.mark.parametrize(("n", "delta", "steps", "relation", "tight"), CASES)
def test_calibration_is_an_upper_bound_close_to_the_tight_value(n, delta, steps, relation, tight):
    plan = plan_of(num_examples=n, sampling_prob=0.01, num_steps=steps, relation=relation)
    calibrated = plan.calibrate(epsilon=1.0, delta=delta)
    # The reference values are given to 0.1 %.
    assert tight * 0.999 <= calibrated.noise_multiplier <= tight * 1.005
    assert 0.998 <= calibrated.epsilon(delta) <= 1.0
    at_tight = dataclasses.replace(plan, noise_multiplier=tight)
    assert 0.999 <= at_tight.epsilon(delta) <= 1.005


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0])
@pytest.mark.parametrize("sampling_prob", [0.05, 1.0])
@pytest.mark.parametrize("relation", [Relation.ZERO_OUT, Relation.ADD_OR_REMOVE])
def test_never_above_the_bound_by_renyi_divergences(epsilon, sampling_prob, relation):
    """RDP is looser than PLD, so our epsilon must not exceed it (nor fall far below)."""
    plan = plan_of(sampling_prob=sampling_prob, relation=relation)
    plan = plan.calibrate(epsilon=epsilon, delta=1e-6)
    rdp = RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    gaussian = dp_accounting.GaussianDpEvent(plan.noise_multiplier)
    rdp.compose(dp_accounting.PoissonSampledDpEvent(sampling_prob, gaussian), plan.num_steps)
    assert 0.75 * rdp.get_epsilon(1e-6) < plan.epsilon(1e-6) <= rdp.get_epsilon(1e-6)


def test_one_full_batch_release_is_the_gaussian_mechanism():
    """Against the exact delta of the Gaussian mechanism (Balle and Wang 2018)."""
    plan = plan_of(sampling_prob=1.0, num_steps=1, noise_multiplier=4.0)
    exact = dp_accounting.get_epsilon_gaussian(4.0, 1e-6)
    assert exact <= plan.epsilon(1e-6) <= exact * 1.005


@pytest.mark.parametrize(
    ("num_examples", "sampling_prob", "cap"),
    [(30_162, 0.01, 476), (30_162, 0.181, 6_109), (10**5, 1e-5, 19), (40, 0.9, 40), (1, 0.5, 1)],
)
def test_the_cap_is_part_of_the_event_and_costs_next_to_nothing(num_examples, sampling_prob, cap):
    facts = {"num_examples": num_examples, "sampling_prob": sampling_prob, "num_steps": 10**7}
    plan = plan_of(**facts, noise_multiplier=3.0)
    assert plan.max_batch_size == plan.with_steps(1).max_batch_size == cap
    event = plan.dp_event.event
    if cap == num_examples:
        assert isinstance(event, dp_accounting.PoissonSampledDpEvent)
        return
    assert isinstance(event, dp_accounting.TruncatedSubsampledGaussianDpEvent)
    assert event.truncated_batch_size == cap
    # The record, and the cap or more of the others: exactly, from the terms of the binomial.
    others = sum(
        math.exp(
            math.lgamma(num_examples)
            - math.lgamma(k + 1)
            - math.lgamma(num_examples - k)
            + k * math.log(sampling_prob)
            + (num_examples - 1 - k) * math.log1p(-sampling_prob)
        )
        for k in range(cap, num_examples)
    )
    assert sampling_prob * others <= 1e-22
    del facts["num_steps"]
    charged = accounting.truncation_prob(**facts, max_batch_size=cap)
    assert charged == pytest.approx(sampling_prob * others, rel=1e-6)
    assert accounting.truncation_prob(**facts, max_batch_size=cap - 1) > 1e-22


def test_replace_one_needs_twice_the_noise():
    zero = plan_of().calibrate(epsilon=1.0, delta=1e-5).noise_multiplier
    replace = plan_of(relation="replace_one").calibrate(epsilon=1.0, delta=1e-5).noise_multiplier
    assert replace == pytest.approx(2 * zero, rel=0.03)


def test_noise_is_multiplier_times_clip_in_every_relation():
    for relation in Relation:
        plan = plan_of(relation=relation, clip_norm=0.5, noise_multiplier=3.0)
        assert plan.noise_stddev == 1.5


def test_epsilon_falls_with_noise_and_grows_with_steps():
    def cost(**changes):
        return plan_of(**({"noise_multiplier": 3.0} | changes)).epsilon(1e-6)

    assert cost(noise_multiplier=4.0) < cost() < cost(num_steps=600)
    assert cost(sampling_prob=0.05) < cost() < cost(relation="replace_one")


def test_plan_is_frozen_and_calibrate_returns_a_new_one():
    plan = plan_of()
    assert plan.calibrate(epsilon=1.0, delta=1e-5) is not plan
    assert plan.noise_multiplier is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.clip_norm = 2.0


def test_an_uncalibrated_plan_has_no_noise():
    with pytest.raises(ValueError, match="calibrate"):
        _ = plan_of().noise_stddev


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("clip_norm", None, "clip_norm.*not private"),
        ("clip_norm", 0.0, "clip_norm: expected a positive"),
        ("clip_norm", -1.0, "clip_norm"),
        ("clip_norm", math.inf, "clip_norm"),
        ("clip_norm", 1e-9, "between 1e-4 and 1e6"),
        ("sampling_prob", 0.0, r"sampling_prob: expected a number in \(0, 1\]"),
        ("sampling_prob", 1.5, "sampling_prob"),
        ("sampling_prob", 1e-16, "sampling_prob: expected at least 1e-09"),
        ("num_steps", 0, "num_steps: expected a positive integer"),
        ("num_steps", 1.5, "num_steps"),
        ("num_examples", True, "num_examples"),
        ("relation", "zero-out", "Did you mean 'zero_out'"),
        ("noise_multiplier", 0.0, "fit_nonprivate"),
    ],
)
def test_bad_fields_are_refused(field, value, message):
    with pytest.raises((ValueError, TypeError), match=message):
        plan_of(**{field: value})


@pytest.mark.parametrize(
    ("epsilon", "delta"), [(0, 1e-5), (-1, 1e-5), (1, 0), (1, 1), (1, math.nan)]
)
def test_bad_budgets_are_refused(epsilon, delta):
    with pytest.raises(ValueError, match="expected"):
        plan_of().calibrate(epsilon=epsilon, delta=delta)


def test_a_delta_that_needs_no_noise_is_refused():
    plan = plan_of(num_examples=40, sampling_prob=0.01, num_steps=1)
    with pytest.raises(ValueError, match="in any batch at all"):
        plan.calibrate(epsilon=1.0, delta=0.02)


def test_large_delta_is_warned_of():
    with pytest.warns(PrivacyWarning, match="1/N"):
        plan_of().calibrate(epsilon=1.0, delta=1e-3)


def test_rows_must_agree_with_the_plan():
    plan_of().check_num_rows(10_000)
    with pytest.raises(ValueError, match="10000 records, the data have 9999"):
        plan_of().check_num_rows(9_999)
    bound = plan_of(relation="add_or_remove")
    bound.check_num_rows(9_000)
    with pytest.raises(ValueError, match="Declare a larger one"):
        bound.check_num_rows(10_001)


def test_default_rules():
    assert default_sampling_prob(num_examples=500, dim=10) == 1.0
    assert default_sampling_prob(num_examples=10**6, dim=1000) == pytest.approx(524 / 10**6)
    assert default_sampling_prob(num_examples=10**6, dim=10**5) == pytest.approx(256 / 10**6)
    assert resolve_num_steps(num_steps=None, num_epochs=None, sampling_prob=0.1) == 10_000
    assert resolve_num_steps(num_steps=None, num_epochs=3, sampling_prob=0.01) == 300
    with pytest.raises(ValueError, match="got both"):
        resolve_num_steps(num_steps=3, num_epochs=3, sampling_prob=0.1)


@pytest.mark.parametrize("relation", list(Relation))
@pytest.mark.parametrize("sampling_prob", [0.01, 0.3, 1.0])
def test_a_second_accountant_agrees(relation, sampling_prob):
    """It shares no code with ours. Both are upper bounds."""
    plan = PrivacyPlan(
        num_examples=20_000,
        sampling_prob=sampling_prob,
        num_steps=2000,
        clip_norm=1.0,
        relation=relation,
    ).calibrate(epsilon=1.0, delta=1e-6)
    theirs = plan.epsilon(1e-6, accountant="dp_accounting")
    assert theirs == pytest.approx(plan.epsilon(1e-6), rel=5e-3)
    halved = dataclasses.replace(plan, noise_multiplier=plan.noise_multiplier / 2)
    assert halved.epsilon(1e-6, accountant="dp_accounting") > 1.9


def test_an_unknown_accountant_is_refused():
    with pytest.raises(ValueError, match="Did you mean 'dp_accounting'"):
        plan_of(noise_multiplier=1.0).epsilon(1e-5, accountant="dp-accounting")
