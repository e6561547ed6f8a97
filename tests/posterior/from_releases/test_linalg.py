"""Inverses and determinants by products: against NumPy's, with derivatives against autodiff's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpvim.posterior.from_releases.linalg import inverse_and_log_det


def random_definite(size):
    rng = np.random.default_rng(size)
    root = rng.normal(size=(size, size))
    return root @ root.T + np.eye(size)


@pytest.mark.parametrize("size", [1, 2, 6, 7, 13, 50])
def test_inverse_and_determinant_are_numpys(size):
    matrix = random_definite(size)
    with jax.enable_x64(True):
        inverse, log_det = jax.jit(inverse_and_log_det)(jnp.asarray(matrix))
    np.testing.assert_allclose(inverse, np.linalg.inv(matrix), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(log_det, np.linalg.slogdet(matrix)[1], rtol=1e-12)


def test_derivatives_of_first_and_second_order():
    base, change = random_definite(9), random_definite(9)

    def ours(t, matrices):
        inverse, log_det = inverse_and_log_det(matrices[0] + t * matrices[1])
        return jnp.sum(jnp.sin(inverse)) + log_det

    def theirs(t, matrices):
        matrix = matrices[0] + t * matrices[1]
        return jnp.sum(jnp.sin(jnp.linalg.inv(matrix))) + jnp.linalg.slogdet(matrix)[1]

    with jax.enable_x64(True):
        matrices = (jnp.asarray(base), jnp.asarray(change))
        for order in (jax.grad, lambda f: jax.grad(jax.grad(f)), lambda f: jax.jacfwd(jax.grad(f))):
            found, wanted = (jax.jit(order(f))(jnp.asarray(0.3), matrices) for f in (ours, theirs))
            np.testing.assert_allclose(found, wanted, rtol=1e-8)


def test_what_is_not_definite_is_not_a_number():
    indefinite = jnp.array([[1.0, 2.0], [2.0, 1.0]])
    assert not np.isfinite(jax.jit(inverse_and_log_det)(indefinite)[1])
