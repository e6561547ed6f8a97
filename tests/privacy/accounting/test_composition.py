"""Composition by a Fourier transform, against convolution."""

from __future__ import annotations

import numpy as np
import pytest

from dpvim.privacy.accounting.composition import self_compose


@pytest.mark.parametrize("largest", [0.1, 0.97])
@pytest.mark.parametrize("size", [40, 4])
def test_composition_is_convolution_modulo_the_size(largest, size):
    rest = np.random.default_rng(0).dirichlet(np.ones(9)) * (1 - largest)
    weights = np.insert(rest, 6, largest)
    index = np.arange(-4, 6)
    masses, error = self_compose(index, weights, 3, size)
    expected = np.zeros(size)
    convolved = np.convolve(np.convolve(weights, weights), weights)
    np.add.at(expected, (np.arange(len(convolved)) - 12) % size, convolved)
    np.testing.assert_allclose(masses, expected, rtol=0, atol=3e-14)
    assert 0 < error < 1e-14
