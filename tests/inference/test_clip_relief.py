"""The metric shrinks where the clip does more harm than noise, and nowhere else."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from dpvim.inference.clip_relief import believed_counts, count_error, excess, relief
from dpvim.privacy.norm_counts import NORM_BIN_ENDS
from dpvim.privacy.plan import PrivacyPlan

ENDS = np.array(NORM_BIN_ENDS)
PLAN = PrivacyPlan(
    num_examples=100_000, sampling_prob=0.1, num_steps=4096, clip_norm=0.1, noise_multiplier=30.0
)
ORDINARY = np.array([60_000.0, 20_000.0, 15_000.0, 4900.0, 100.0, 0.0, 0.0, 0.0, 0.0])
SHORT = np.array([90_000.0, 10_000.0, *[0.0] * 7])
LONG_TAILED = np.array([60_000.0, 20_000.0, 10_000.0, 4000.0, 3000.0, 2000.0, 1000.0, 0.0, 0.0])


def after(*counts, plan=PLAN, dim=10):
    """After wide windows with these counts."""
    released, steps = np.zeros((32, 9)), np.zeros(32)
    released[16 : 16 + len(counts)] = counts
    steps[: 16 + len(counts)] = 128
    return relief(released, steps, plan, dim)


def test_ordinary_norms_are_left_alone():
    assert after(ORDINARY) == 1.0


def test_noise_in_the_counts_does_not_shrink_the_metric():
    rng = np.random.default_rng(0)
    error = count_error(PLAN, 128)
    assert all(after(ORDINARY + error * rng.normal(size=9)) == 1.0 for _ in range(2000))


def test_long_tails_shrink_it_and_it_comes_back():
    shrunk = [after(*[LONG_TAILED] * count) for count in (1, 2, 3, 8)]
    assert shrunk == [2.0, 4.0, 8.0, 8.0]
    assert after(LONG_TAILED, LONG_TAILED, SHORT) == 2.0
    assert after(LONG_TAILED, *[SHORT] * 7) == 1.0


def test_counts_of_other_windows_do_not_matter():
    """While the run searches most gradients are long; narrow windows come too late."""
    released = np.tile(LONG_TAILED, (32, 1))
    released[16:24] = ORDINARY
    assert relief(released, np.full(32, 128.0), PLAN, 10) == 1.0


def test_the_more_noise_the_less_it_shrinks():
    plans = [dataclasses.replace(PLAN, noise_multiplier=noise) for noise in (1.0, 30.0, 3000.0)]
    found = [after(LONG_TAILED, plan=plan) for plan in plans]
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1] == 1.0


def test_the_change_is_the_best_of_all():
    """Against the sum of squares written down again."""
    counts = ORDINARY + 1400.0 * (ENDS == 1)
    certain = counts - np.where(ENDS < 1, 0, 5 * count_error(PLAN, 128))
    noise = (30.0 * PLAN.clip_norm / PLAN.sampling_prob) ** 2 / 0.95 / 2048
    changes = 2.0 ** np.arange(-1, 1.01, 0.25)
    tails = [sum(certain.clip(0) * np.clip(np.sqrt(2) * ENDS - k, 0, None)) for k in changes]
    costs = 10 * noise * changes**2 + np.square(0.3 * PLAN.clip_norm * np.array(tails))
    expected = changes[np.argmin(costs)]
    assert 1 < expected < 2
    assert after(counts) == expected


def test_excess_is_the_length_above_the_clip_norm():
    counts = np.zeros(9)
    counts[ENDS == 2.0] = 5.0
    assert excess(counts) == pytest.approx(5 * (2 * np.sqrt(2) - 1))
    assert excess(counts, 4.0) == 0.0


def test_counts_far_out_are_believed_if_they_cannot_be_noise():
    counts = np.array([0, 0, 0, 0, 10.0, 100.0, 2.0, 50.0, 2.0])
    np.testing.assert_array_equal(
        believed_counts(counts, 3.0), [0, 0, 0, 0, 10.0, 100.0, 0.0, 50.0, 0.0]
    )
    # Near the clip norm half of the bin before is believed.
    assert believed_counts(np.array([0, 0, 0, 0, 10.0, 8.0, 0, 0, 0]), 3.0)[5] == 5.0
