"""From a trace to a posterior that knows about the noise."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import DIM, standard_normal_log_prior
from scipy import linalg

from dpvim.inference import loop
from dpvim.inference.engine import make_engine
from dpvim.inference.families import FAMILIES, full_rank, mean_field
from dpvim.inference.gradient import Problem
from dpvim.inference.trace import Trace
from dpvim.inference.variants import VARIANTS
from dpvim.posterior.from_trace import DivergedError, posterior_from_trace
from dpvim.privacy.clipping import Likelihood
from dpvim.privacy.plan import PrivacyPlan
from dpvim.privacy.randomness import SecretStreams


def ar1(shape, rho=0.9, seed=0):
    """Stationary series with unit variance and a known autocorrelation."""
    rng = np.random.default_rng(seed)
    values = np.empty(shape)
    values[0] = rng.normal(size=shape[1:])
    for t in range(1, len(values)):
        values[t] = rho * values[t - 1] + np.sqrt(1 - rho**2) * rng.normal(size=shape[1:])
    return values


def trace_of(family, loc, scale=0.5):
    """A trace with given means and a constant scale."""
    params = jax.vmap(lambda row: family.init(row, scale))(jnp.asarray(loc, jnp.float32))
    return Trace(np.arange(len(loc)), jax.tree.map(np.asarray, params))


@pytest.mark.parametrize("window", ["auto", "slope", "rhat", 3000])
def test_variances_add(family_name, window):
    """Known noise: sd 0.2, autocorrelation 0.9, so the average of n has sd 0.2 sqrt(19 / n)."""
    family = FAMILIES[family_name](2)
    loc = 1.0 + 0.2 * ar1((6000, 2))
    trace = trace_of(family, loc)
    exact = 1e-4 if family.is_gaussian else 0.02  # else moments are those of 20 000 draws
    plain = posterior_from_trace(trace, family, noise_aware=None, window=window)
    np.testing.assert_allclose(plain.scale, 0.5, rtol=exact if family.is_gaussian else 0.08)
    np.testing.assert_array_equal(plain.dp_scale, 0.0)
    one = posterior_from_trace(trace, family, estimate="last", noise_aware="iterate", window=window)
    np.testing.assert_allclose(one.loc, loc[-1], atol=0.1 * exact if family.is_gaussian else 0.05)
    np.testing.assert_allclose(one.dp_scale, 0.2, rtol=0.15)
    np.testing.assert_allclose(one.scale, np.hypot(plain.scale, one.dp_scale), rtol=exact)
    mean = posterior_from_trace(trace, family, window=window)
    wanted = 0.2 * np.sqrt(19 / mean.windows.lengths)
    np.testing.assert_allclose(mean.dp_scale, wanted, rtol=0.35)
    np.testing.assert_allclose(mean.scale, np.hypot(plain.scale, mean.dp_scale), rtol=exact)


def test_added_spread_covers_the_optimum_and_naive_spread_does_not():
    """Interval coverage over 400 stationary traces: the check that would see a wrong formula."""
    family = mean_field(400)
    found = posterior_from_trace(trace_of(family, ar1((4000, 400), seed=3)), family)

    def coverage(scale):
        return np.mean(np.abs(found.loc) < 1.645 * scale)

    assert found.windows.converged.all()
    assert 0.85 < coverage(found.dp_scale) < 0.94
    # Ignoring autocorrelation is off by a factor of about 4.4.
    assert coverage(found.dp_scale / np.sqrt(19)) < 0.5


def test_full_rank_adds_correlated_noise():
    family = full_rank(2)
    noise = ar1((8000, 2), seed=4) @ np.array([[1.0, 0.9], [0.0, np.sqrt(1 - 0.81)]])
    found = posterior_from_trace(
        trace_of(family, noise, scale=0.1), family, estimate="last", noise_aware="iterate"
    )
    added = found.factor @ found.factor.T - 0.01 * np.eye(2)
    np.testing.assert_allclose(added, [[1, 0.9], [0.9, 1]], atol=0.15)
    average = posterior_from_trace(trace_of(family, noise, scale=0.1), family)
    added = average.factor @ average.factor.T - 0.01 * np.eye(2)
    correlation = added[0, 1] / np.sqrt(added[0, 0] * added[1, 1])
    assert 0.8 < correlation < 0.97


def test_averaging_is_in_the_unconstrained_space():
    family = mean_field(1)
    raw = np.array([[-1.0], [-3.0], [-1.0], [-3.0]])
    loc = np.array([[0.0], [1.0], [2.0], [5.0]])
    trace = Trace(np.arange(4), family.unpack(np.zeros(2))._replace(loc=loc, raw_scale=raw))
    found = posterior_from_trace(trace, family, noise_aware=None, window=4)
    np.testing.assert_allclose(found.loc, 2.0)
    np.testing.assert_allclose(found.factor, np.log1p(np.exp(-2.0)), rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("dim", [1, 3])
def test_edges(family_name, dim):
    family = FAMILIES[family_name](dim)
    for snapshots in (1, 2, 5):
        loc = np.arange(snapshots * dim, dtype=float).reshape(snapshots, dim)
        for name in ("average", "last"):
            for aware in ("average", "iterate", None):
                found = posterior_from_trace(
                    trace_of(family, loc), family, estimate=name, noise_aware=aware
                )
                assert np.isfinite(found.scale).all()
                assert np.isfinite(found.loc).all()
    single = posterior_from_trace(trace_of(family, np.ones((1, dim))), family)
    assert not single.windows.converged.any()
    longer = posterior_from_trace(trace_of(family, np.ones((50, dim))), family, window=1000)
    assert (longer.windows.lengths == 50).all()


def test_constant_trace_adds_nothing(family_name):
    family = FAMILIES[family_name](2)
    found = posterior_from_trace(trace_of(family, np.ones((200, 2))), family)
    np.testing.assert_array_equal(found.dp_scale, 0.0)
    assert found.windows.converged.all()


def test_a_run_that_diverged_is_named(family_name):
    family = FAMILIES[family_name](2)
    loc = ar1((100, 2))
    loc[60:, 1] = np.nan
    with pytest.raises(DivergedError, match=r"from step 60 on.*smaller learning rate"):
        posterior_from_trace(trace_of(family, loc), family)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"estimate": "averge"}, "Did you mean 'average'"),
        ({"noise_aware": "trace"}, "noise_aware: expected one of"),
        ({"window": "longest"}, "window: expected one of"),
        ({"window": 0}, "window: expected a positive integer"),
    ],
)
def test_unknown_options(options, message):
    family = mean_field(2)
    with pytest.raises(ValueError, match=message):
        posterior_from_trace(trace_of(family, ar1((50, 2))), family, **options)


# -- appendix E: iterates of constant-step SGD on a quadratic --------------------------------------

CURVATURE = np.array([[1.0, 0.4, 0.0], [0.4, 0.6, 0.1], [0.0, 0.1, 0.3]])


def stationary_covariance(noise_multiplier, rate=0.05):
    """Covariance of the iterates' means, from long private runs on a quadratic likelihood."""
    matrix = jnp.asarray(CURVATURE, jnp.float32)

    def log_likelihood(latent, record):
        return -0.5 * (latent - record) @ matrix @ (latent - record)

    problem = Problem(
        DIM, Likelihood.from_log_prob(log_likelihood), lambda z: 0.0 * standard_normal_log_prior(z)
    )
    # All records alike and always taken: the noise of the mechanism is the only one. The scale is
    # kept tiny, so that the draw eta adds nothing.
    plan = PrivacyPlan(
        num_examples=10,
        sampling_prob=1.0,
        num_steps=20_000,
        clip_norm=100.0,
        noise_multiplier=noise_multiplier,
    )
    family = FAMILIES["mean_field"](DIM)
    optimizer = optax.chain(
        optax.masked(
            optax.set_to_zero(), family.unpack(np.zeros(6))._replace(loc=False, raw_scale=True)
        ),
        optax.sgd(rate),
    )
    engine = make_engine(problem, family, VARIANTS["aligned"](family), optimizer, plan)
    one = engine.init(jax.random.key(0), jnp.zeros(DIM), 1e-4)
    runs = loop.run_many(
        engine,
        jax.tree.map(lambda leaf: jnp.stack([leaf] * 20), one),
        jnp.zeros((10, DIM)),
        stacked=False,
        num_steps=20_000,
        streams=[SecretStreams(5, run=i) for i in range(20)],
        trace_every=50,
    )
    tail = np.concatenate([done.trace.loc[100:] for done in runs]).astype(float)
    assert abs(tail.mean()) < 0.05 * tail.std()
    return np.cov(tail.T)


@pytest.mark.long
def test_iterates_follow_the_ornstein_uhlenbeck_theory():
    """Sigma A + A Sigma = rate x noise covariance (discrete time: minus rate A Sigma A), and the
    covariance grows with the square of the noise."""
    rate, multiplier = 0.05, 0.002
    found = stationary_covariance(multiplier, rate)
    noise = np.eye(DIM) * (multiplier * 100.0 / 10) ** 2
    step = np.eye(DIM) - rate * CURVATURE
    wanted = linalg.solve_discrete_lyapunov(step, rate**2 * noise)
    continuous = linalg.solve_continuous_lyapunov(CURVATURE, rate * noise)
    np.testing.assert_allclose(wanted, continuous, rtol=0.06, atol=1e-9)
    np.testing.assert_allclose(found, wanted, rtol=0.12, atol=0.04 * wanted.max())
    # Power: half or twice the rate would not pass.
    for factor in (0.5, 2.0):
        other = linalg.solve_discrete_lyapunov(step, factor * rate**2 * noise)
        assert not np.allclose(np.diag(found), np.diag(other), rtol=0.3)
    doubled = stationary_covariance(2 * multiplier, rate)
    np.testing.assert_allclose(np.diag(doubled) / np.diag(found), 4.0, rtol=0.15)
