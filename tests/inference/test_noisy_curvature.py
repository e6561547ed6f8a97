"""Curvatures that a measured one may come from."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import chi2

from dpvim.inference import noisy_curvature as curvature
from dpvim.inference.noisy_curvature import draw_curvatures


def noisy(matrix, error, rng):
    """The matrix with errors of variance error^2 off the diagonal, twice that on it."""
    noise = error * rng.normal(size=matrix.shape)
    return matrix + (noise + noise.T) / np.sqrt(2)


def variances(dim, error):
    return error**2 * (1 + np.eye(dim))


def draws_of(measured, error, seed=0, **settings):
    settings = {"chains": 16, "sweeps": 48, "kept": 12} | settings
    variance = variances(len(measured), error)
    return draw_curvatures(measured, variance, np.random.default_rng(seed), **settings)


def from_the_prior(dim, rng):
    """A matrix as the prior has them, and the width of its eigenvalues' logarithms."""
    middles, widths = curvature._MIDDLES[:, 0], curvature._WIDTHS
    of_middle = np.exp(-0.5 * middles**2)
    away = np.log(widths / curvature._TYPICAL_WIDTH) / curvature._WIDTH_SPREAD
    of_width = np.exp(-0.5 * away**2)
    middle = rng.choice(middles, p=of_middle / of_middle.sum())
    width = rng.choice(widths, p=of_width / of_width.sum())
    grid = curvature._LOG_GRID
    density = np.exp(curvature._log_t((grid - middle) / width))
    logs = rng.choice(grid, dim, p=density / density.sum())
    vectors = np.linalg.qr(rng.normal(size=(dim, dim)))[0]
    return (vectors * np.exp(logs)) @ vectors.T


@pytest.mark.parametrize("error", [0.05, 0.5])
def test_draws_are_calibrated(error):
    """Ranks of truths from the prior among their draws are even; with power."""
    rng = np.random.default_rng(1)
    direction = np.array([0.6, 0.0, 0.8])
    functions = {
        "smallest": lambda a: np.linalg.eigvalsh(a)[..., 0],
        "determinant": lambda a: np.linalg.slogdet(a)[1],
        "along": lambda a: np.einsum("i,...ij,j->...", direction, a, direction),
        "across": lambda a: a[..., 0, 1],
    }
    ranks = {name: [] for name in functions}
    for seed in range(160):
        truth = from_the_prior(3, rng)
        drawn = draws_of(noisy(truth, error, rng), error, seed, chains=7, sweeps=60, kept=1)
        for name, function in functions.items():
            jitter = 1e-9 * rng.normal(size=8)  # values are on a grid
            values = np.append(function(drawn.matrices()), function(truth)) + jitter
            ranks[name].append(int((values[:-1] < values[-1]).sum()))
    for name, found in ranks.items():
        counts = np.bincount(found, minlength=8)
        statistic = np.sum((counts - 20.0) ** 2 / 20.0)
        assert chi2.sf(statistic, 7) > 1e-3, (name, counts)


def test_noise_alone_is_no_structure():
    rng = np.random.default_rng(0)
    measured = noisy(np.eye(20), 0.3, rng)
    middle = draws_of(measured, 0.3).middle()
    assert np.linalg.eigvalsh(measured)[0] < -0.4
    assert np.linalg.eigvalsh(middle)[0] > 0.5
    assert np.linalg.norm(middle - np.eye(20)) < 0.3 * np.linalg.norm(measured - np.eye(20))


def test_a_direction_that_the_data_hardly_tell_is_seen_though_no_entry_shows_it():
    """Its share of an entry is smaller than the entry's error."""
    rng, dim, error = np.random.default_rng(0), 20, 0.06
    weak = np.ones(dim) / np.sqrt(dim)
    truth = np.eye(dim) - 0.95 * np.outer(weak, weak)
    assert np.abs(truth - np.eye(dim)).max() < error
    drawn = draws_of(noisy(truth, error, rng), error).matrices()
    along = np.einsum("i,kij,j->k", weak, np.linalg.inv(drawn), weak)
    assert along.min() > 2
    assert np.quantile(along, 0.95) > 10  # the truth is 20


def test_a_negative_eigenvalue_is_made_positive_within_its_error():
    found = np.linalg.eigvalsh(draws_of(np.diag([-0.2, 50.0]), 0.14).middle())
    assert 0 < found[0] < 0.4
    assert found[1] == pytest.approx(50, rel=0.03)


def test_one_parameter_has_a_curvature_too():
    found = draws_of(np.array([[2.0]]), 0.01)
    assert found.matrices().shape == (192, 1, 1)
    np.testing.assert_allclose(found.middle(), 2.0, rtol=0.05)


def test_all_pairs_turn_once():
    for dim in range(2, 9):
        pairs = [
            tuple(sorted(pair))
            for i, j in curvature._rounds(dim)
            for pair in zip(i, j, strict=True)
        ]
        assert len(pairs) == len(set(pairs)) == dim * (dim - 1) // 2
        assert all(
            len(set(np.concatenate(each))) == 2 * len(each[0]) for each in curvature._rounds(dim)
        )
