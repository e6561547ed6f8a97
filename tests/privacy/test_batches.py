"""Batches in pieces: the same sum, however they are cut and however many pieces are empty."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpvim.privacy.batches import microbatch_size, microbatched, select
from dpvim.privacy.clipping import Likelihood
from dpvim.privacy.plan import NonPrivatePlan, PrivacyPlan
from dpvim.privacy.sampling import EMPTY

LIKELIHOOD = Likelihood.from_log_prob(lambda latent, x: -0.5 * jnp.sum((latent - x) ** 2))
WEIGHTS = jnp.array([1.0, 0.5, 2.0])
NUM_ROWS = 100


@pytest.fixture(scope="module")
def records():
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.normal(0, 2, (NUM_ROWS, 3)), jnp.float32).at[5].set(jnp.nan)


def total(piece, records, rows, bound):
    batch_sum = microbatched(LIKELIHOOD.clipped_sum, piece)
    return jax.jit(batch_sum, static_argnums=4)(jnp.ones(3), WEIGHTS, records, rows, bound)


@pytest.mark.parametrize("bound", [1.5, np.inf])
@pytest.mark.parametrize("piece", [1, 7, 32, 99, 100])
@pytest.mark.parametrize("live", [0, 1, 31, 80])
def test_pieces_give_the_sum_of_the_whole(records, piece, live, bound):
    rows = np.full(80, EMPTY, np.int32)
    rows[:live] = np.random.default_rng(1).integers(0, NUM_ROWS, live)
    clipped_sum = jax.jit(LIKELIHOOD.clipped_sum, static_argnums=4)
    whole = clipped_sum(jnp.ones(3), WEIGHTS, *select(records, jnp.asarray(rows)), bound)
    # Norms may be rounded differently in batches of another size: a level or so of some rows.
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if np.isinf(bound) else {"rtol": 1e-6}
    np.testing.assert_allclose(total(piece, records, rows, bound), whole, **tolerance)


def test_rows_in_scattered_places_are_all_found(records):
    """If the number of records is private they stand anywhere among the places of a batch."""
    rows = np.full(96, EMPTY, np.int32)
    rows[[3, 40, 95]] = [10, 20, 30]
    together = total(32, records, rows, 1.5)
    alone = total(32, records, np.array([10, 20, 30]), 1.5)
    np.testing.assert_allclose(together, alone, rtol=1e-12)


@pytest.mark.parametrize("piece", [1, 7, 64, 99, 100, 1000])
def test_all_rows_need_no_numbers(records, piece):
    """A last slice that reaches over the end must not count records twice."""
    everyone = total(1000, records, np.arange(NUM_ROWS), 1.5)
    found = total(piece, records, np.zeros(0, np.int32), 1.5)
    np.testing.assert_allclose(found, everyone, rtol=1e-5)


def test_vectorised_runs_with_batches_of_different_sizes(records):
    rows = np.full((3, 64), EMPTY, np.int32)
    for run, live in enumerate([2, 40, 64]):
        rows[run, :live] = np.arange(live)
    together = jax.vmap(lambda rows: total(16, records, rows, 1.5))(jnp.asarray(rows))
    for one, numbers in zip(together, rows, strict=True):
        np.testing.assert_array_equal(one, total(16, records, numbers, 1.5))


def test_pieces_fit_usual_batches_and_the_memory():
    plan = PrivacyPlan(num_examples=30_162, sampling_prob=0.01, num_steps=10, clip_norm=1.0)
    assert 301 + 2 * 17 < microbatch_size(plan, dim=96) < plan.max_batch_size
    everything = NonPrivatePlan(num_examples=10**6, sampling_prob=1.0, num_steps=10)
    assert microbatch_size(everything, dim=1000) <= 2**20 / 1000 + 32
