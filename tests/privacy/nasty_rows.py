"""Rows that break careless arithmetic, and their clipped sums."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import numpy as np
from conftest import DIM
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dpvim.privacy.clipping import clip_factors, clipped_sum
from dpvim.privacy.plan import PrivacyPlan

# `make test` tries fewer.
NUM_EXAMPLES = 50 if os.environ.get("DPVIM_TESTS") == "quick" else 200
nasty = st.one_of(
    st.floats(-10, 10, width=32),
    st.sampled_from([0.0, np.nan, np.inf, -np.inf, 1e30, -1e30, 1e-30, 3e38, 1e19]),
)
rows = hnp.arrays(np.float32, st.tuples(st.integers(1, 6), st.just(DIM)), elements=nasty)
clip_norms = st.sampled_from([0.01, 1.0, 30.0])


def sum_of(gradients, weights, is_padding, bound):
    return clipped_sum(lambda: gradients, weights, is_padding, bound)


jitted_sum = jax.jit(sum_of, static_argnums=3)


def total(gradients, weights, bound):
    padding = jnp.zeros(len(gradients), bool)
    return jitted_sum(jnp.asarray(gradients), weights, padding, bound)


def factors_of_rows(gradients):
    rows = jnp.asarray(gradients)
    return clip_factors(jnp.linalg.norm(rows, axis=1), jnp.zeros(len(rows), bool), 1.0)


def plan_of(clip_norm=1.0, noise_multiplier=0.7, num_examples=100, sampling_prob=1.0):
    return PrivacyPlan(
        num_examples=num_examples,
        sampling_prob=sampling_prob,
        num_steps=1,
        clip_norm=clip_norm,
        noise_multiplier=noise_multiplier,
    )
