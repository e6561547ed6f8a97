from __future__ import annotations

import numpy as np
import pytest
import scipy.signal
from hypothesis import given
from hypothesis import strategies as st

from dpvim.posterior.averaging import (
    mean_covariance,
    mean_variance,
    window_covariance,
    window_mean,
    window_variance,
)

PER_PARAMETER = pytest.mark.parametrize("statistic", [window_mean, window_variance, mean_variance])
MATRICES = pytest.mark.parametrize("matrix", [window_covariance, mean_covariance])


def ar1(rho: float | np.ndarray, innovations: np.ndarray) -> np.ndarray:
    """AR(1) series with these innovations, each with its own rho, from zero."""
    columns = np.broadcast_to(rho, innovations.shape[1:])
    series = [
        scipy.signal.lfilter([1.0], [1.0, -r], x)
        for r, x in zip(columns, innovations.T, strict=True)
    ]
    return np.stack(series, axis=1)


def accepts(estimate: float, truth: float) -> bool:
    return 0.85 * truth < estimate < 1.15 * truth


@given(data=st.data(), seed=st.integers(0, 100))
def test_each_parameter_has_its_own_window(data, seed):
    trace = np.random.default_rng(seed).normal(size=(30, 4))
    lengths = data.draw(st.lists(st.integers(2, 30), min_size=4, max_size=4))
    windows = [trace[-w:, j] for j, w in enumerate(lengths)]
    np.testing.assert_allclose(window_mean(trace, lengths), [w.mean() for w in windows])
    np.testing.assert_allclose(window_variance(trace, lengths), [w.var(ddof=1) for w in windows])


@PER_PARAMETER
def test_one_length_is_for_all(statistic):
    trace = np.random.default_rng(1).normal(size=(50, 3))
    np.testing.assert_array_equal(statistic(trace, 20), statistic(trace, np.array([20] * 3)))


@PER_PARAMETER
def test_what_came_before_the_window_does_not_matter(statistic):
    trace = np.random.default_rng(2).normal(size=(50, 2))
    expected = statistic(trace, [20, 30])
    trace[:20], trace[20:30, 0] = np.nan, np.inf
    np.testing.assert_array_equal(statistic(trace, [20, 30]), expected)


@PER_PARAMETER
def test_what_is_not_finite_stays_with_its_parameter(statistic):
    trace = np.random.default_rng(3).normal(size=(50, 3))
    expected = statistic(trace, 20)
    trace[45, 0], trace[40, 2] = np.nan, np.inf
    result = statistic(trace, 20)
    assert np.isnan(result[[0, 2]]).all()
    assert result[1] == expected[1]


@MATRICES
def test_what_is_not_finite_stays_in_its_row_and_column(matrix):
    trace = np.random.default_rng(3).normal(size=(50, 3))
    expected = matrix(trace, 20)
    trace[45, 2] = np.inf
    result = matrix(trace, 20)
    assert np.isnan(result[2]).all()
    np.testing.assert_allclose(result[:2, :2], expected[:2, :2])


@PER_PARAMETER
@pytest.mark.parametrize("length", [0, -1, 51])
def test_a_window_outside_the_trace_is_refused(statistic, length):
    with pytest.raises(ValueError, match="window: expected"):
        statistic(np.zeros((50, 2)), [20, length])


@MATRICES
def test_a_matrix_of_a_window_outside_the_trace_is_refused(matrix):
    with pytest.raises(ValueError, match="at most the 50 snapshots of the trace, got 51"):
        matrix(np.zeros((50, 2)), 51)


@PER_PARAMETER
def test_lengths_are_integers_one_for_each_parameter(statistic):
    with pytest.raises(TypeError, match="window: expected a positive integer"):
        statistic(np.zeros((50, 2)), [20.0, 10.0])
    with pytest.raises(ValueError, match="broadcast"):
        statistic(np.zeros((50, 2)), [20, 10, 5])


def test_one_snapshot_has_a_mean_and_no_variance():
    trace = np.array([[1.0, 2.0], [3.0, 4.0]])
    np.testing.assert_array_equal(window_mean(trace, 1), [3, 4])
    for variance in (window_variance, mean_variance):
        np.testing.assert_array_equal(variance(trace, 1), [0, 0])
    for matrix in (window_covariance, mean_covariance):
        np.testing.assert_array_equal(matrix(trace, 1), np.zeros((2, 2)))


def test_a_large_level_does_not_drown_a_small_variance():
    noise = np.random.default_rng(4).normal(size=(4000, 3))
    trace = 1e6 + 1e-3 * noise
    np.testing.assert_allclose(
        window_variance(trace, 3000), 1e-6 * noise[-3000:].var(0, ddof=1), rtol=1e-6
    )
    np.testing.assert_allclose(
        mean_variance(trace, 3000), 1e-6 * mean_variance(noise, 3000), rtol=1e-4
    )
    exact = 1e6 + 1e-3 * noise[-3000:].mean(axis=0)
    np.testing.assert_allclose(window_mean(trace, 3000), exact, rtol=0, atol=1e-9)


def test_single_precision_is_summed_in_double():
    trace = np.full((4000, 1), np.float32(0.1))
    assert window_mean(trace, 4000) == pytest.approx(float(np.float32(0.1)), rel=1e-14)


@pytest.mark.parametrize("rho", [0.0, 0.8, 0.95])
def test_mean_variance_is_the_variance_of_the_mean(rho):
    trace = ar1(rho, np.random.default_rng(5).normal(size=(6000, 800)))
    truth = np.var(window_mean(trace, 4000))
    estimate = np.mean(mean_variance(trace, 4000))
    assert accepts(estimate, truth)
    assert not accepts(estimate, truth * 2 / 3)
    assert not accepts(estimate, truth * 3 / 2)
    if rho:
        assert not accepts(np.mean(window_variance(trace, 4000)) / 4000, truth)


def test_window_variance_is_the_variance_of_an_iterate():
    trace = ar1(0.9, np.random.default_rng(6).normal(size=(6000, 800)))
    truth = np.var(trace[-1])
    estimate = np.mean(window_variance(trace, 4000))
    assert accepts(estimate, truth)
    assert not accepts(estimate, truth * 2 / 3)
    assert not accepts(estimate, truth * 3 / 2)


# Matrices


def test_diagonals_are_the_variances():
    trace = ar1(0.8, np.random.default_rng(7).normal(size=(500, 6)))
    np.testing.assert_allclose(np.diag(window_covariance(trace, 400)), window_variance(trace, 400))
    np.testing.assert_allclose(np.diag(mean_covariance(trace, 400)), mean_variance(trace, 400))


def test_window_covariance_is_the_sample_covariance():
    trace = np.random.default_rng(8).normal(size=(500, 6))
    np.testing.assert_allclose(window_covariance(trace, 400), np.cov(trace[-400:].T))


def test_mean_covariance_is_the_covariance_of_the_mean():
    """Two parameters of different speed, pushed by correlated noise."""
    rng = np.random.default_rng(9)
    push = rng.normal(size=(5000, 300, 2)) @ np.linalg.cholesky([[1, 0.8], [0.8, 1]]).T
    fast, slow = ar1(0.0, push[..., 0]), ar1(0.9, push[..., 1])
    pairs = np.stack([fast, slow], axis=2)
    truth = np.cov(pairs[-4000:].mean(axis=0).T)
    estimate = np.mean([mean_covariance(pair, 4000) for pair in pairs.swapaxes(0, 1)], axis=0)
    for wanted, got in zip(truth.ravel(), estimate.ravel(), strict=True):
        assert accepts(got, wanted)
        assert not accepts(got, wanted * 2 / 3)
        assert not accepts(got, wanted * 3 / 2)
    # Single iterates hardly correlate: their matrix over the sample size would not do.
    iterates = window_covariance(pairs[:, 0], 4000)
    assert iterates[0, 1] / np.sqrt(iterates[0, 0] * iterates[1, 1]) < 0.5


@MATRICES
@pytest.mark.parametrize("length", [2, 3, 4, 10, 399])
def test_matrices_are_positive_semidefinite(matrix, length):
    covariance = matrix(ar1(0.8, np.random.default_rng(10).normal(size=(400, 40))), length)
    np.testing.assert_array_equal(covariance, covariance.T)
    assert np.linalg.eigvalsh(covariance).min() > -1e-10 * np.trace(covariance)


@MATRICES
def test_a_parameter_that_does_not_move_has_no_covariance(matrix):
    trace = np.random.default_rng(11).normal(size=(100, 3))
    trace[:, 1] = 0.1
    covariance = matrix(trace, 100)
    np.testing.assert_allclose(covariance[1], 0, atol=1e-15)
    assert covariance[0, 2] != 0
