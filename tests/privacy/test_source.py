"""The source of batches and noise: one stream for each purpose, and no noise twice."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from dpvim.privacy.plan import PrivacyPlan
from dpvim.privacy.randomness import SecretStreams
from dpvim.privacy.source import BatchNoiseSource

PLAN = PrivacyPlan(
    num_examples=50, sampling_prob=0.2, num_steps=400, clip_norm=0.5, noise_multiplier=2.0
)


def source_of(streams):
    return BatchNoiseSource(PLAN, streams, num_rows=50, num_released=6)


def test_a_source_of_noise_cannot_be_used_twice():
    source = source_of(SecretStreams())
    with pytest.raises(TypeError, match="used twice"):
        copy.deepcopy(source)
    with pytest.raises(TypeError, match="used twice"):
        pickle.dumps(source)
    source._process += 1  # as in a child process
    with pytest.raises(RuntimeError, match="forked"):
        source.draw(1, 1)


def test_membership_truncation_and_noise_have_streams_of_their_own():
    asked = []

    class Spy(SecretStreams):
        def generator(self, purpose):
            asked.append(purpose)
            return super().generator(purpose)

    source_of(Spy(1))
    assert sorted(asked) == ["membership", "noise", "truncation"]


def test_room_for_more_steps_does_not_change_what_is_drawn():
    """A step without its noise would be a release without privacy."""
    for drawn, padded in zip(
        source_of(SecretStreams(1)).draw(5, 5), source_of(SecretStreams(1)).draw(5, 8), strict=True
    ):
        np.testing.assert_array_equal(padded[:5], drawn)
        assert padded.shape[0] == 8
        assert not padded[5:].any()
        assert drawn.any(axis=1).all()
