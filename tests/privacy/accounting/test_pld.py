"""One step's privacy loss: both directions, and grids that never lower it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from accountant_settings import USUAL

from dpvim.privacy.accounting.events import dp_event
from dpvim.privacy.accounting.pld import (
    DominatingPair,
    bin_privacy_loss,
    discretize,
    dominating_pairs,
)
from dpvim.types import Relation


def test_a_record_may_come_or_go():
    """Neither direction is known to be the worse one in general: both are accounted for."""
    step = dp_event(noise_multiplier=2.0, **USUAL).event
    for relation in (Relation.ZERO_OUT, Relation.ADD_OR_REMOVE):
        pairs = dominating_pairs(step, relation)
        assert [(pair.prob_p, pair.prob_q, pair.shift) for pair in pairs] == [
            (0.02, 0.0, 0.5),
            (0.0, 0.02, 0.5),
        ]


PAIRS = [(1e-5, 0.0), (0.0, 1e-5), (0.3, 0.0), (0.0, 0.3), (0.02, 0.02), (1.0, 0.0), (1.0, 1.0)]


@pytest.mark.parametrize(("prob_p", "prob_q"), PAIRS)
@pytest.mark.parametrize("shift", [1e-6, 0.1, 1.0, 3.0])
def test_the_grid_keeps_both_masses_and_never_lowers_a_loss(prob_p, prob_q, shift):
    pair = DominatingPair(prob_p, prob_q, shift)
    step = bin_privacy_loss(pair, 1e-25)
    assert step.infinity_mass < 1e-24
    spread = math.sqrt(np.cov(step.loss, aweights=step.mass))
    for width in (0.01 * spread, spread):
        grid = discretize(step, 1.0, width)
        assert np.sum(grid.mass) == pytest.approx(1, abs=1e-14)
        other_mass = np.sum(step.mass * np.exp(-step.loss))
        assert np.sum(grid.mass * np.exp(-grid.loss)) == pytest.approx(other_mass, abs=1e-13)
        for loss in np.linspace(-3, 3, 13) * spread:
            exact = np.sum(step.mass * np.maximum(0, -np.expm1(loss - step.loss)))
            grown = np.sum(grid.mass * np.maximum(0, -np.expm1(loss - grid.loss)))
            assert exact * (1 - 1e-9) - 1e-16 <= grown
