from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from dpvim.privacy.noise import RoundedGaussianNoise
from dpvim.privacy.plan import PrivacyPlan
from dpvim.privacy.randomness import SecretStreams

STDDEV = 3.7
GRID = 2.0**-20


def draw(stddev=STDDEV, seed=1, steps=2000, size=25):
    source = RoundedGaussianNoise(SecretStreams(seed), stddev=stddev, grid=GRID, size=size)
    return source.draw(steps) * GRID


def test_scale_is_right_and_the_test_can_tell():
    """KS accepts the right scale and rejects two thirds and three halves of it."""
    noise = draw().ravel()

    def p_value(scale):
        return stats.kstest(noise, stats.norm(0, scale).cdf).pvalue

    assert p_value(STDDEV) > 0.01
    assert p_value(STDDEV * 2 / 3) < 1e-9
    assert p_value(STDDEV * 3 / 2) < 1e-9
    assert noise.std() == pytest.approx(STDDEV, rel=0.01)


def test_coordinates_and_steps_are_uncorrelated():
    noise = draw()
    across = np.corrcoef(noise.T)[np.triu_indices(noise.shape[1], 1)]
    along = [np.corrcoef(noise[:-1, j], noise[1:, j])[0, 1] for j in range(noise.shape[1])]
    bound = 5 / np.sqrt(len(noise))
    assert np.abs(across).max() < bound
    assert np.abs(along).max() < bound


def test_no_value_twice():
    noise = draw(steps=400)
    assert len(np.unique(noise)) > 0.999 * noise.size


def test_stream_does_not_depend_on_how_much_is_drawn_at_a_time():
    source = RoundedGaussianNoise(SecretStreams(1), stddev=STDDEV, grid=GRID, size=25)
    pieces = np.concatenate([source.draw(n) for n in (1, 7, 92)]) * GRID
    np.testing.assert_array_equal(pieces, draw(steps=100))


def test_noise_is_a_double_precision_normal_rounded_to_the_grid():
    exact = SecretStreams(1).generator("noise").standard_normal((2000, 25)) * STDDEV
    assert exact.dtype == np.float64
    np.testing.assert_allclose(draw(), exact, rtol=0, atol=GRID / 2 * (1 + 1e-9))


def test_noise_is_handed_out_as_integers():
    noise = RoundedGaussianNoise(SecretStreams(1), stddev=STDDEV, grid=GRID, size=3).draw(5)
    assert noise.dtype == np.int32


@pytest.mark.parametrize("stddev", [1e-4, 0.99, 1.0, 1.01, 373.0, 1e8])
def test_sixty_standard_deviations_fit_the_integers(stddev):
    plan = PrivacyPlan(
        num_examples=10, sampling_prob=1.0, num_steps=1, clip_norm=1.0, noise_multiplier=stddev
    )
    assert math.log2(plan.noise_grid).is_integer()
    assert 2**24 <= plan.noise_stddev / plan.noise_grid < 2**25


def test_tails_reach_beyond_single_precision():
    """A float32 normal by inversion ends at 5.42; this one does not."""
    assert np.abs(draw(stddev=1.0, steps=40_000, size=2500)).max() > 5.43


def test_zero_noise_for_nonprivate_runs():
    assert not draw(stddev=0.0).any()
