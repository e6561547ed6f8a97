"""The loop: releases, chunks, interruption."""

from __future__ import annotations

import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import (
    DIM,
    gaussian_log_likelihood,
    make_parts,
    some_eta,
    standard_normal_log_prior,
)
from scipy import stats

from dpvim.inference import loop
from dpvim.inference.engine import SMALL_STEP, _etas, eta_for, make_engine
from dpvim.inference.families import FAMILIES
from dpvim.inference.gradient import Problem
from dpvim.inference.monitor import UNMONITORED, monitoring
from dpvim.inference.variants import make_variant
from dpvim.privacy.batches import with_public_shape
from dpvim.privacy.clipping import Likelihood
from dpvim.privacy.plan import PrivacyPlan
from dpvim.privacy.randomness import SecretStreams
from dpvim.privacy.sampling import EMPTY
from dpvim.types import BudgetExceededError


def plan_of(**changes):
    facts = {
        "num_examples": 50,
        "sampling_prob": 0.2,
        "num_steps": 400,
        "clip_norm": 0.5,
        "noise_multiplier": 2.0,
    }
    return PrivacyPlan(**(facts | changes))


def engine_of(problem, plan=None, family_name="mean_field", variant_name="aligned"):
    family, variant = make_parts(family_name, variant_name)
    return make_engine(problem, family, variant, optax.adam(1e-2), plan or plan_of())


def start(engine, seed=0):
    return engine.init(jax.random.key(seed), jnp.zeros(DIM), 0.1)


def run(engine, records, *, steps=400, seed=1, every=10, state=None, monitor=UNMONITORED):
    state = start(engine) if state is None else state
    streams = SecretStreams(seed, start_step=int(state.step))
    return loop.run(
        engine, state, records, num_steps=steps, streams=streams, trace_every=every, monitor=monitor
    )


def test_released_coordinates_have_the_noise_of_the_plan(
    family_name, variant_name, problem, records
):
    """Through the real step function: release minus clipped sum is N(0, (sigma C)^2)."""
    plan = plan_of()
    engine = engine_of(problem, plan, family_name, variant_name)
    source = engine.source(50, SecretStreams(3))
    rows, noise = source.draw(2000, 2000)
    state = start(engine)

    def releases(rows, noise):
        eta = some_eta(engine.family)
        with_noise = engine.step(state, eta, records, rows, noise)[1].release
        without = engine.step(state, eta, records, rows, jnp.zeros_like(noise))[1].release
        return with_noise - without

    found = np.asarray(jax.jit(jax.vmap(releases))(rows, noise)).ravel()
    wanted = plan.noise_multiplier * plan.clip_norm

    def p_value(scale):
        return stats.kstest(found, stats.norm(0, scale).cdf).pvalue

    assert p_value(wanted) > 1e-3
    assert p_value(wanted * 2 / 3) < 1e-9
    assert p_value(wanted * 3 / 2) < 1e-9


def test_one_record_moves_a_release_by_the_clip_norm_and_no_more(
    family_name, variant_name, problem, records
):
    """Through the real step function, for a record whose gradient is far above the threshold."""
    engine = engine_of(problem, plan_of(clip_norm=0.5), family_name, variant_name)
    state, eta = start(engine), some_eta(engine.family)
    huge = {"x": records["x"].at[0].set(100.0), "y": records["y"].at[0].set(-1000.0)}
    silence = jnp.zeros(engine.variant.num_released, jnp.int32)

    def release(rows):
        return np.asarray(engine.step(state, eta, huge, rows, silence)[1].release, float)

    everyone = jnp.arange(50)
    moved = release(everyone) - release(everyone.at[0].set(EMPTY))
    assert np.linalg.norm(moved) <= 0.5
    assert np.linalg.norm(moved) == pytest.approx(0.5, rel=1e-3)


def test_a_step_traces_once(records):
    calls = []

    def counted(latent, record):
        calls.append(1)
        return gaussian_log_likelihood(latent, record)

    problem = Problem(DIM, Likelihood.from_log_prob(counted), standard_normal_log_prior)
    # 400 steps in many chunks of different lengths.
    run(engine_of(problem), records, every=7)
    assert len(calls) == 1


def test_result_does_not_depend_on_the_chunks(problem, records, monkeypatch):
    whole = run(engine_of(problem), records)
    monkeypatch.setattr(loop, "_LONGEST_CHUNK", 7)
    pieces = run(engine_of(problem), records)
    np.testing.assert_array_equal(whole.trace.steps, pieces.trace.steps)
    np.testing.assert_array_equal(whole.trace.loc, pieces.trace.loc)


@pytest.mark.parametrize(("small_step", "programs"), [(SMALL_STEP, 3), (10, 0)])
def test_small_steps_run_on_one_thread(problem, monkeypatch, small_step, programs):
    made = []
    monkeypatch.setattr("dpvim.inference.engine.SMALL_STEP", small_step)
    monkeypatch.setattr(
        "dpvim.inference.engine.jit_on_one_thread", lambda step: made.append(step) or step
    )
    engine_of(problem)
    assert len(made) == programs


def test_the_number_of_threads_does_not_change_a_run(monkeypatch):
    """Operations of these steps are large enough for XLA to share them among threads."""
    dim, num_rows = 400, 1000
    problem = Problem(
        dim,
        Likelihood.from_log_prob(lambda latent, record: -jnp.sum((latent - record) ** 2)),
        standard_normal_log_prior,
    )
    records = jax.random.normal(jax.random.key(0), (num_rows, dim), jnp.float32)
    plan = plan_of(num_examples=num_rows, sampling_prob=0.9)
    family = FAMILIES["mean_field"](dim)

    def params_after_a_run(small_step):
        monkeypatch.setattr("dpvim.inference.engine.SMALL_STEP", small_step)
        variant = make_variant("vanilla", family)
        engine = make_engine(problem, family, variant, optax.adam(1e-2), plan)
        state = engine.init(jax.random.key(0), jnp.zeros(dim, jnp.float32), 0.1)
        return run(engine, records, steps=20, state=state).state.params

    jax.tree.map(
        np.testing.assert_array_equal, params_after_a_run(SMALL_STEP), params_after_a_run(0)
    )


@pytest.mark.parametrize(("steps", "every"), [(400, 10), (37, 10), (5, 100), (400, 399), (1, 1)])
def test_trace_has_the_first_the_multiples_and_the_last(problem, records, steps, every):
    done = run(engine_of(problem), records, steps=steps, every=every)
    wanted = sorted({*range(0, steps + 1, every), steps})
    assert done.trace.steps.tolist() == wanted
    assert done.trace.loc.shape == (len(wanted), DIM)
    np.testing.assert_array_equal(done.trace.loc[0], np.zeros(DIM))
    np.testing.assert_array_equal(done.trace.last.loc, done.state.params.loc)


def test_two_runs_one_after_the_other_continue(problem, records):
    engine = engine_of(problem)
    first = run(engine, records, steps=100)
    second = run(engine, records, steps=300, state=first.state)
    whole = first.trace.concat(second.trace)
    assert whole.steps.tolist() == list(range(0, 401, 10))
    with pytest.raises(ValueError, match="does not follow"):
        second.trace.concat(first.trace)


def test_no_step_beyond_the_plan(problem, records):
    with pytest.raises(BudgetExceededError, match="pays for 400"):
        run(engine_of(problem), records, steps=401)
    done = run(engine_of(problem), records)
    with pytest.raises(BudgetExceededError):
        run(engine_of(problem), records, steps=1, state=done.state)


def test_full_batches_and_empty_batches(problem, records):
    everything = run(engine_of(problem, plan_of(sampling_prob=1.0)), records)
    assert np.isfinite(everything.trace.loc).all()
    rare = run(engine_of(problem, plan_of(sampling_prob=0.001)), records)
    assert np.isfinite(rare.trace.loc).all()


def test_division_is_by_the_expected_batch_size(problem, records):
    """The step for an empty batch is that of the noise and the prior, divided by q N."""
    engine = engine_of(problem)
    state, eta = start(engine), jnp.zeros(DIM)
    noise = jnp.array([1 << 24, 2 << 24, 3 << 24])
    sgd = make_engine(problem, engine.family, engine.variant, optax.sgd(1.0), engine.plan)
    after, info = sgd.step(
        sgd.init(state.key, jnp.zeros(DIM), 0.1), eta, records, jnp.full(10, EMPTY), noise
    )
    np.testing.assert_array_equal(info.release, noise * engine.plan.noise_grid)
    np.testing.assert_allclose(after.params.loc, info.release / (0.2 * 50), rtol=1e-6)


def test_rows_that_are_not_finite_change_nothing(problem, records):
    spoilt = {"x": records["x"].at[3].set(jnp.nan), "y": records["y"].at[4].set(jnp.inf)}
    without = {
        "x": jnp.delete(records["x"], jnp.array([3, 4]), axis=0),
        "y": jnp.delete(records["y"], jnp.array([3, 4]), axis=0),
    }
    engine = engine_of(problem)
    state, eta = start(engine), jnp.ones(DIM)
    silence = jnp.zeros(DIM, jnp.int32)
    release = [
        engine.step(state, eta, data, jnp.arange(len(data["y"])), silence)[1].release
        for data in (spoilt, without)
    ]
    np.testing.assert_allclose(release[0], release[1], rtol=1e-5, atol=1e-6)


def test_interrupt_stops_between_chunks_and_keeps_what_was_released(
    problem, records, monkeypatch, ctrl_c
):
    monkeypatch.setattr(loop, "_LONGEST_CHUNK", 50)
    plan = plan_of(num_steps=10_000_000)
    ctrl_c(5)
    with monitoring(10_000_000, progress=False) as monitor:
        done = run(engine_of(problem, plan), records, steps=10_000_000, every=1000, monitor=monitor)
    assert 0 < int(done.state.step) < 10_000_000
    assert done.trace.steps[-1] == int(done.state.step)
    # The ordinary handler is back.
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_many_runs_at_once_are_the_single_runs(problem, records):
    engine = engine_of(problem)
    states = [start(engine, seed) for seed in range(3)]
    together = loop.run_many(
        engine,
        jax.tree.map(lambda *leaves: jnp.stack(leaves), *states),
        records,
        stacked=False,
        num_steps=120,
        streams=[SecretStreams(seed) for seed in range(3)],
        trace_every=10,
    )
    for seed, many in enumerate(together):
        single = run(engine, records, steps=120, seed=seed, state=states[seed])
        np.testing.assert_array_equal(many.trace.steps, single.trace.steps)
        np.testing.assert_allclose(many.trace.loc, single.trace.loc, rtol=1e-4, atol=1e-5)


def test_many_runs_on_data_of_their_own(problem, records):
    engine = engine_of(problem)
    worlds = jax.tree.map(lambda leaf: jnp.stack([leaf, -leaf]), records)
    states = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), start(engine))
    together = loop.run_many(
        engine,
        states,
        worlds,
        stacked=True,
        num_steps=60,
        streams=[SecretStreams(4), SecretStreams(4)],
        trace_every=10,
    )
    mirrored = jax.tree.map(jnp.negative, records)
    for data, many in zip((records, mirrored), together, strict=True):
        single = run(engine, data, steps=60, seed=4)
        np.testing.assert_allclose(many.trace.loc, single.trace.loc, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("prob", [0.2, 0.7])
def test_the_loop_draws_batches_at_the_rate_of_the_plan(problem, prob):
    """Mean and variance of a binomial: twice the rate or a fixed size would not have them."""
    plan = plan_of(sampling_prob=prob)
    source = engine_of(problem, plan).source(50, SecretStreams(2))
    rows = source.draw(20_000, 20_000)[0]
    sizes = np.sum(rows != EMPTY, axis=1)
    assert rows.shape[1] == plan.max_batch_size  # the cap that is accounted for
    assert sizes.mean() == pytest.approx(50 * prob, rel=0.01)
    assert sizes.var() == pytest.approx(50 * prob * (1 - prob), rel=0.05)


def cancelling_records(num_rows, dim=3):
    """Large numbers whose residuals are rounding errors: other instructions give others."""
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(1, dim)) * 1e6).astype(np.float32).repeat(num_rows, axis=0)
    latent = rng.normal(size=dim).astype(np.float32)
    y = (x @ latent).astype(np.float32)
    return latent, {"x": jnp.asarray(x), "y": jnp.asarray(y)}


@pytest.mark.parametrize("prob", [0.4, 1.0])
def test_without_a_record_the_others_stay_as_they_are(prob):
    """Also where gradients are nothing but rounding errors, and the number of rows is private.

    In both worlds the program is the same and the others have the same places: the releases
    differ by the record's own share.
    """
    num_rows = 101
    latent, data = cancelling_records(num_rows)
    plan = PrivacyPlan(
        num_examples=120,
        sampling_prob=prob,
        num_steps=20,
        clip_norm=1.0,
        relation="add_or_remove",
        noise_multiplier=5.0,
    )
    problem = Problem(
        DIM, Likelihood.from_log_prob(gaussian_log_likelihood), standard_normal_log_prior
    )
    engine = engine_of(problem, plan)
    state = engine.init(jax.random.key(0), jnp.asarray(latent), 1e-20)
    source = engine.source(num_rows, SecretStreams(1))
    batches = source.draw(20, 20)[0]
    assert batches.shape[1] == plan.max_batch_size
    silent = jnp.zeros(engine.variant.num_released, jnp.int32)

    @jax.jit
    def release(records, rows):
        return engine.step(state, jnp.zeros(DIM), records, rows, silent)[1].release

    whole = with_public_shape(data, plan)
    fewer = jax.tree.map(lambda leaf: leaf[:-1], data)
    shortened = with_public_shape(fewer, plan)
    assert jax.tree.map(jnp.shape, whole) == jax.tree.map(jnp.shape, shortened)
    last = num_rows - 1
    for rows in batches:
        without = np.where(rows == last, EMPTY, rows)
        shift = np.asarray(release(whole, rows), float) - release(shortened, without)
        assert np.linalg.norm(shift) <= plan.clip_norm


def test_draws_in_blocks_are_those_of_the_steps(problem):
    engine = engine_of(problem)
    state = start(engine)._replace(step=jnp.asarray(5, jnp.int32))
    etas = _etas(engine.family, state, jnp.asarray(40), 70)
    wanted = [eta_for(engine.family, state.key, jnp.asarray(5 + i)) for i in range(40)]
    np.testing.assert_allclose(etas[:40], np.stack(wanted), rtol=1e-5)
    assert len(etas) >= 70
