"""Steered runs on a quadratic log-likelihood with known optimum and curvature."""

from __future__ import annotations

import numpy as np

from dpvim.inference.directions import Informed
from dpvim.inference.steering import Steering
from dpvim.inference.windows import windows_of
from dpvim.privacy.norm_counts import COUNT_SHARE, NUM_NORM_BINS
from dpvim.privacy.plan import PrivacyPlan

NUM_STEPS = 2048


def plan_of(noise_multiplier):
    return PrivacyPlan(
        num_examples=5000,
        sampling_prob=1.0,
        num_steps=NUM_STEPS,
        clip_norm=3 * np.sqrt(4 / 5000),
        noise_multiplier=noise_multiplier,
    )


PLAN = plan_of(150.0)
OPTIMUM = np.array([2.0, -300.0, 0.5, 1.0])
SCALE = np.array([3.0, 1000.0, 1.0, 4.0])
# Standard deviations and correlations of the likelihood: far smaller than the prior's.
SD = np.array([0.02, 5.0, 0.01, 0.1])
CORRELATION = np.array(
    [[1, 0.8, 0, 0], [0.8, 1, 0.1, 0], [0, 0.1, 1, -0.5], [0, 0, -0.5, 1]], float
)
PRECISION = np.linalg.inv(CORRELATION * np.outer(SD, SD))


def new_steering(informed=None, plan=PLAN, span=None):
    informed = np.ones(4, bool) if informed is None else informed
    span = np.eye(4)[:, informed] if span is None else span
    return Steering(plan, np.zeros(4), SCALE, Informed(span, span.shape[1]), width=6.0)


def quadratic(latents):
    """The gradient of the log-likelihood."""
    return (OPTIMUM - latents) @ PRECISION


def releases_at(steering, points, rng, plan=PLAN, gradient=quadratic, clipped=0.0):
    """Releases of a log-likelihood, whose sum is clipped as if all records agreed."""
    centre, factor = steering.place()
    gradients = gradient(centre + points @ factor.T) @ factor
    norms = np.linalg.norm(gradients, axis=1, keepdims=True)
    gradients *= np.minimum(1, plan.num_examples * plan.clip_norm / norms)
    away = norms[:, 0] / (plan.num_examples * plan.clip_norm)
    far = np.clip(clipped + np.maximum(0, away - 0.2), 0, 1)
    counts = np.zeros((len(points), NUM_NORM_BINS))
    counts[:, 3], counts[:, 5] = (1 - far) * plan.num_examples, far * plan.num_examples
    sums = np.sqrt(1 - COUNT_SHARE) * gradients
    counted = np.sqrt(COUNT_SHARE) * plan.clip_norm * counts
    noise = plan.noise_stddev * rng.normal(size=(len(points), 4 + NUM_NORM_BINS))
    return np.hstack([sums, counted]) + noise


def run_to_the_end(steering, chunk=10_000, seed=0, **settings):
    rng = np.random.default_rng(seed)
    for window in windows_of(NUM_STEPS):
        points = rng.normal(size=(window.length, 4)) * (6.0 if window.is_wide else 1.0)
        releases = releases_at(steering, points, rng, **settings)
        for start in range(0, window.length, chunk):
            part = slice(start, start + chunk)
            length = len(points[part])
            done = steering.add(window.first + start, length, points[part], releases[part])
            assert done == (start + length == window.length)
    return steering.releases()
