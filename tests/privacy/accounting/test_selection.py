"""The price of the best of several trials: its distribution, and bounds from elsewhere."""

from __future__ import annotations

import math

import dp_accounting
import numpy as np
import pytest
import scipy
from accountant_settings import USUAL, with_cap

from dpvim.privacy import accounting
from dpvim.privacy.accounting.pld import BinnedPLD
from dpvim.privacy.accounting.selection import Repeats, epsilon_of_selection, selection_event
from dpvim.types import Relation


def event(noise, **facts):
    return accounting.dp_event(noise_multiplier=noise, **(USUAL | facts))


GAUSSIAN = event(10.0, sampling_prob=1.0, num_steps=1)


@pytest.mark.parametrize("shape", [0.0, 0.5, 1.0, 3.0])
def test_numbers_of_trials_have_the_mean_and_the_chance(shape):
    repeats = Repeats(6.0, shape)
    rng = np.random.default_rng(0)
    drawn = np.array([repeats.draw(rng) for _ in range(20_000)])
    assert drawn.min() == 1
    assert abs(drawn.mean() - 6) < 5 * drawn.std() / math.sqrt(20_000)
    missed = np.mean(0.75**drawn)
    assert repeats.chance_of(0.25) == pytest.approx(1 - missed, abs=0.01)


def test_as_few_trials_as_have_the_chance():
    for shape in (0.5, 1.0, 2.0):
        repeats = Repeats.for_chance(0.7, 1 / 6, shape=shape)
        assert repeats.chance_of(1 / 6) == pytest.approx(0.7, abs=1e-4)
    with pytest.raises(ValueError, match="10 000 trials"):
        Repeats.for_chance(0.999, 1e-4)


def test_theorem_two_of_papernot_and_steinke():
    """By hand: a Gaussian's divergence of order a is a / 2 s^2."""
    repeats, noise, delta = Repeats(16.0, 1.0), 10.0, 1e-6
    orders = np.concatenate([np.arange(1.1, 64, 0.1), np.geomspace(64, 4096, 200)])
    one = orders / (2 * noise**2)
    other = 2 * np.min((1 - 1 / orders) * one - math.log(repeats.gamma) / orders)
    best = one + other + math.log(16.0) / (orders - 1)
    exact = np.min(best + np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1))
    found = epsilon_of_selection([GAUSSIAN], repeats, delta=delta, relation=Relation.ZERO_OUT)
    assert found == pytest.approx(exact, rel=0.01)


def test_it_costs_more_than_one_trial_and_less_than_all():
    one = accounting.epsilon_of(GAUSSIAN, delta=1e-6, relation=Relation.ZERO_OUT)
    facts = {"delta": 1e-6, "relation": Relation.ZERO_OUT}
    costs = [epsilon_of_selection([GAUSSIAN], Repeats(m), **facts) for m in (2.0, 10.0, 100.0)]
    assert one < costs[0] < costs[1] < costs[2]
    hundred = accounting.epsilon_of([GAUSSIAN] * 100, **facts)
    assert costs[2] < 0.5 * hundred


def test_all_that_a_trial_does_is_charged():
    facts = {"delta": 1e-6, "relation": Relation.ADD_OR_REMOVE}
    fit = event(3.0)
    both = epsilon_of_selection([fit, GAUSSIAN], Repeats(10.0), **facts)
    assert both > 1.01 * epsilon_of_selection([fit], Repeats(10.0), **facts)


def test_a_record_that_is_replaced_moves_twice_as_much():
    repeats = Repeats(10.0)
    replaced = epsilon_of_selection([GAUSSIAN], repeats, delta=1e-6, relation=Relation.REPLACE_ONE)
    half = event(5.0, sampling_prob=1.0, num_steps=1)
    assert replaced == epsilon_of_selection([half], repeats, delta=1e-6, relation=Relation.ZERO_OUT)
    with pytest.raises(ValueError, match="replace_one"):
        epsilon_of_selection([event(3.0)], repeats, delta=1e-6, relation=Relation.REPLACE_ONE)


def test_caps_of_batches_are_charged_for_every_trial():
    facts = with_cap({"sampling_prob": 0.02, "num_steps": 300}, 10_000) | {"max_batch_size": 275}
    cut = event(20.0, **facts)
    lost = 300 * accounting.truncation_prob(
        sampling_prob=0.02, num_examples=10_000, max_batch_size=275
    )
    whole = event(20.0, sampling_prob=0.02, num_steps=300)
    more = {"relation": Relation.ZERO_OUT}
    delta = 1000 * lost
    with_caps = epsilon_of_selection([cut], Repeats(10.0), delta=delta, **more)
    assert with_caps > epsilon_of_selection([whole], Repeats(10.0), delta=delta, **more)
    with pytest.raises(ValueError, match="cut to size"):
        epsilon_of_selection([cut], Repeats(10.0), delta=10 * lost, **more)


def test_the_event_is_dp_accountings_own():
    found = selection_event([GAUSSIAN], Repeats(5.0, 1.0)).event
    assert isinstance(found, dp_accounting.dp_event.RepeatAndSelectDpEvent)
    assert (found.mean, found.shape) == (5.0, 1.0)


TRIALS = {"counts": [GAUSSIAN], "a fit and counts": [event(6.0), GAUSSIAN]}


@pytest.mark.parametrize("relation", [Relation.ZERO_OUT, Relation.ADD_OR_REMOVE])
@pytest.mark.parametrize("name", TRIALS)
def test_by_itself_it_composes_to_its_own_price(name, relation):
    """The privacy loss that is made of its curve gives the curve back, and no less."""
    facts = {"delta": 1e-6, "relation": relation}
    own = epsilon_of_selection(TRIALS[name], Repeats(10.0), **facts)
    found = accounting.epsilon_of(selection_event(TRIALS[name], Repeats(10.0)), **facts)
    assert own * (1 - 1e-6) <= found <= 1.005 * own


def test_with_other_runs_it_costs_less_than_the_sum_and_more_than_each():
    facts = {"delta": 1e-6, "relation": Relation.ZERO_OUT}
    best, run = selection_event([GAUSSIAN], Repeats(10.0)), event(6.0)
    together = accounting.epsilon_of([best, run], **facts)
    alone = [accounting.epsilon_of(each, **facts) for each in (best, run)]
    assert 1.1 * max(alone) < together < sum(alone)
    twice = accounting.epsilon_of([best, best], **facts)
    assert alone[0] < twice < 2 * alone[0]
    # Two selections are at least as dear as two single trials.
    assert twice > accounting.epsilon_of([GAUSSIAN, GAUSSIAN], **facts)


def test_caps_are_part_of_the_curve():
    facts = with_cap({"sampling_prob": 0.02, "num_steps": 300}, 10_000) | {"max_batch_size": 275}
    cut, whole = event(20.0, **facts), event(20.0, sampling_prob=0.02, num_steps=300)
    lost = 300 * accounting.truncation_prob(
        sampling_prob=0.02, num_examples=10_000, max_batch_size=275
    )
    more = {"delta": 50 * lost, "relation": Relation.ZERO_OUT}
    dear, cheap = (
        accounting.epsilon_of(selection_event([each], Repeats(10.0)), **more)
        for each in (cut, whole)
    )
    assert dear > 1.01 * cheap


class TestLossesUnderCurves:
    """Losses that dominate all whose delta lies under a curve."""

    epsilon = np.linspace(0, 6, 300)

    def delta_of(self, loss, epsilon):
        return loss.infinity_mass + float(
            np.sum(loss.mass * np.maximum(0, -np.expm1(epsilon - loss.loss)))
        )

    @pytest.mark.parametrize("mu", [0.3, 1.0])
    def test_of_a_gaussian_it_is_the_gaussian(self, mu):
        """In both directions, and between the points a little more."""

        def exact(epsilon):
            above, below = scipy.stats.norm.cdf([mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu])
            return above - math.exp(epsilon) * below

        loss = BinnedPLD.under_curve(self.epsilon, np.array([exact(e) for e in self.epsilon]))
        assert loss.mass.sum() + loss.infinity_mass == pytest.approx(1, abs=1e-12)
        for epsilon in (-2.0, -0.31, 0.0, 0.1, 0.77, 1.5, 3.0):
            found = self.delta_of(loss, epsilon)
            assert exact(epsilon) * (1 - 1e-9) - 1e-15 <= found
            assert found <= 1.01 * exact(epsilon) + 1e-9

    def test_of_pure_privacy_it_is_randomised_response(self):
        delta = np.maximum(0, (math.exp(1.0) - np.exp(self.epsilon)) / (1 + math.exp(1.0)))
        loss = BinnedPLD.under_curve(self.epsilon, delta)
        assert loss.infinity_mass == 0
        assert np.abs(loss.loss[loss.mass > 1e-9]) == pytest.approx(1.0, abs=0.03)

    def test_a_curve_that_is_not_convex_is_taken_at_its_hull(self):
        bumpy = 0.1 * np.exp(-self.epsilon) * (1 + 0.2 * np.sin(40 * self.epsilon))
        loss = BinnedPLD.under_curve(self.epsilon, bumpy)
        assert np.all(loss.mass >= 0)
        found = np.array([self.delta_of(loss, each) for each in self.epsilon])
        assert np.all(found <= bumpy + 1e-12)


@pytest.mark.parametrize("bad", [{"mean": 1.0}, {"mean": math.nan}, {"mean": 5.0, "shape": -1.0}])
def test_bad_distributions_are_refused(bad):
    with pytest.raises(ValueError, match="expected"):
        Repeats(**bad)
