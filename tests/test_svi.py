"""The step-by-step face."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import optax
import pytest
from conftest import linear_model

import dpvim
from dpvim.models.regression import Regression
from dpvim.privacy.plan import NonPrivatePlan
from dpvim.privacy.randomness import SecretStreams

RNG = np.random.default_rng(0)
X = RNG.normal(size=(200, 3)).astype(np.float32)
Y = (X @ np.array([1.0, -0.5, 0.2]) + RNG.normal(size=200)).astype(np.float32)


def svi_of(*, plan=None, family="mean_field", **options):
    plan = plan or dpvim.PrivacyPlan(
        num_examples=200, sampling_prob=0.1, num_steps=30, clip_norm=1.0, noise_multiplier=2.0
    )
    return dpvim.DPSVI(linear_model, family, optax.adam(1e-2), plan, **options)


def test_a_loop_of_updates_is_a_run():
    svi = svi_of(seed=1)
    state = svi.init(jax.random.key(0), X, Y)
    for _ in range(30):
        state, info = svi.update(state, X, Y)
        assert info.release.shape == info.point.shape == (3,)
    result = svi_of(seed=1).run(jax.random.key(0), 30, X, Y, progress_bar=False)
    for name, value in svi.get_params(state).items():
        np.testing.assert_allclose(value, result.params[name], rtol=1e-5, atol=1e-6)


def test_init_can_be_compiled_within_another_program():
    svi = svi_of(seed=1)
    usual = svi.init(jax.random.key(0), X, Y)
    compiled = jax.jit(lambda key: svi.init(key, X, Y))(jax.random.key(0))
    np.testing.assert_allclose(compiled.params.loc, usual.params.loc, rtol=1e-6)


def test_what_update_releases_has_the_noise_of_the_plan():
    """Records without a gradient: the release is the noise, all of it and nothing else."""
    plan = dpvim.PrivacyPlan(
        num_examples=200, sampling_prob=0.1, num_steps=400, clip_norm=3.0, noise_multiplier=2.0
    )
    svi = svi_of(plan=plan)
    nothing = np.zeros_like(X)
    state = svi.init(jax.random.key(0), nothing, Y)
    releases = []
    for _ in range(400):
        state, info = svi.update(state, nothing, Y)
        releases.append(info.release)
    assert np.std(releases) == pytest.approx(2.0 * 3.0, rel=0.1)


def test_updates_stop_where_the_budget_ends():
    svi = svi_of()
    state = svi.run(jax.random.key(0), 30, X, Y, progress_bar=False).state
    with pytest.raises(dpvim.BudgetExceededError, match="pays for 30 in all"):
        svi.update(state, X, Y)
    assert svi.privacy(state, delta=1e-3).epsilon == svi.plan.epsilon(1e-3)


def test_every_step_on_data_is_counted_whichever_verb_took_it():
    """Ten runs and some updates from their beginnings claimed the cost of the updates alone."""
    svi = svi_of()
    start = svi.init(jax.random.key(0), X, Y)
    for _ in range(4):
        run = svi.run(jax.random.key(0), 5, X, Y, init_state=start, progress_bar=False)
    for _ in range(6):
        svi.update(start, X, Y)
    statement = svi.privacy(run.state, delta=1e-3)
    assert statement.steps_done == 26
    assert statement.epsilon == svi.plan.with_steps(26).epsilon(1e-3)
    with pytest.raises(dpvim.BudgetExceededError, match="26 of them were taken"):
        svi.run(jax.random.key(1), 5, X, Y, progress_bar=False)
    svi.run_many(jax.random.key(0), 3, 10, X, Y, progress_bar=False)
    statement = svi.privacy(run.state, delta=1e-3)
    assert statement.steps_done == 56
    assert statement.epsilon == svi.plan.with_steps(56).epsilon(1e-3) > svi.plan.epsilon(1e-3)
    assert "56 in several runs" in str(statement)
    with pytest.raises(dpvim.BudgetExceededError):
        svi.update(start, X, Y)


def test_steps_of_another_object_count_with_the_state_they_led_to():
    first = svi_of().run(jax.random.key(0), 10, X, Y, progress_bar=False)
    svi = svi_of()
    for _ in range(2):  # two ways on from one state: its ten steps, and five twice
        on = svi.run(jax.random.key(0), 5, X, Y, init_state=first.state, progress_bar=False)
    assert svi.privacy(on.state, delta=1e-3).steps_done == 20


def test_update_cannot_be_part_of_a_transformed_program():
    """Noise is drawn when a program is traced: all of its runs would release with the same."""
    svi = svi_of()
    state = svi.init(jax.random.key(0), X, Y)

    def released(params):
        return svi.update(state._replace(params=params), X, Y)[1].release

    def moved(shift):
        return released(state.params._replace(loc=state.params.loc + shift))

    def with_rate(rate):
        other = dpvim.DPSVI(linear_model, "mean_field", optax.adam(rate), svi.plan)
        return other.update(other.init(jax.random.key(0), X, Y), X, Y)[0].params.loc

    for transformed, argument in (
        (jax.vmap(moved), np.zeros(3, np.float32)),
        (jax.jit(moved), 0.0),
        (jax.jit(lambda _: svi.update(state, X, Y)[1]), 0.0),
        (jax.vmap(with_rate), np.ones(3, np.float32)),
        (jax.grad(lambda shift: moved(shift).sum()), 0.0),
    ):
        with pytest.raises(RuntimeError, match="cannot be part of a program"):
            transformed(argument)
    assert svi.privacy(state, delta=1e-3).steps_done <= 1


def test_what_led_to_a_state_is_part_of_its_statement():
    """Steps without noise, or with noise of a seed, do not become private by one that is."""

    def statement_elsewhere(state):
        other = svi_of()
        other.init(jax.random.key(0), X, Y)
        return other.privacy(state, delta=1e-3)

    steps = {"num_examples": 200, "sampling_prob": 0.1, "num_steps": 20}
    optimum = svi_of(plan=NonPrivatePlan(**steps)).run(
        jax.random.key(0), 20, X, Y, progress_bar=False
    )
    svi = svi_of()
    on = svi.run(jax.random.key(0), 5, X, Y, init_state=optimum.state, progress_bar=False)
    assert not svi.privacy(on.state, delta=1e-3).private
    assert not statement_elsewhere(on.state).private
    seeded = svi_of(seed=1).run(jax.random.key(0), 5, X, Y, progress_bar=False)
    assert not statement_elsewhere(seeded.state).private
    after, _ = svi_of().update(seeded.state, X, Y)
    assert not statement_elsewhere(after).private
    private = svi_of().run(jax.random.key(0), 5, X, Y, progress_bar=False)
    assert statement_elsewhere(private.state).private
    # A private state that a seeded object took further is seeded.
    on = svi_of(seed=1).run(
        jax.random.key(0), 5, X, Y, init_state=private.state, progress_bar=False
    )
    assert not statement_elsewhere(on.state).private


def test_plan_and_seed_are_those_of_the_steps():
    svi = svi_of()
    with pytest.raises(AttributeError):
        svi.plan = svi.plan.with_steps(10)
    with pytest.raises(AttributeError):
        svi.seed = 1


def test_threads_cannot_spend_the_same_steps(monkeypatch):
    """Sixteen at once, and a plan for four."""
    svi = svi_of(plan=svi_of().plan.with_steps(4))
    state = svi.init(jax.random.key(0), X, Y)
    svi.update(state, X, Y)  # compiled

    def spend(_):
        try:
            svi.update(state, X, Y)
        except dpvim.BudgetExceededError:
            return 0
        return 1

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(16) as threads:
            taken = sum(threads.map(spend, range(64)))
    finally:
        sys.setswitchinterval(before)
    assert taken == 3
    assert svi.privacy(state, delta=1e-3).steps_done == 4


def test_an_interrupted_run_is_charged_for_the_steps_it_took(monkeypatch, ctrl_c):
    monkeypatch.setattr("dpvim.inference.loop._LONGEST_CHUNK", 5)
    ctrl_c(2)
    svi = svi_of()
    result = svi.run(jax.random.key(0), 30, X, Y, progress_bar=False)
    assert result.interrupted
    done = int(result.state.step)
    assert svi.privacy(result.state, delta=1e-3).steps_done == done < 30
    svi.run(jax.random.key(0), 30 - done, X, Y, init_state=result.state, progress_bar=False)


def test_run_continues_from_a_state():
    svi = svi_of()
    first = svi.run(jax.random.key(0), 10, X, Y, progress_bar=False)
    assert svi.privacy(first.state, delta=1e-3).epsilon < svi.plan.epsilon(1e-3)
    second = svi.run(jax.random.key(0), 20, X, Y, init_state=first.state, progress_bar=False)
    assert int(second.state.step) == 30


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("mean_field", {"auto_loc", "auto_scale"}),
        ("full_rank", {"auto_loc", "auto_scale_tril"}),
        ("low_rank", {"auto_loc", "auto_cov_factor", "auto_scale"}),
        ("block_diagonal", {"auto_loc", "auto_scale_tril"}),
    ],
)
def test_parameters_have_numpyros_names(family, names):
    svi = svi_of(family=family)
    state = svi.init(jax.random.key(0), X, Y)
    assert svi.get_params(state).keys() == names


def test_a_plan_must_be_calibrated():
    plan = dpvim.PrivacyPlan(num_examples=200, sampling_prob=0.1, num_steps=30, clip_norm=1.0)
    with pytest.raises(ValueError, match="calibrate"):
        svi_of(plan=plan)


def test_data_must_match_the_plan():
    with pytest.raises(ValueError, match="200 records"):
        svi_of().init(jax.random.key(0), X[:100], Y[:100])


def test_before_init_there_is_no_family():
    with pytest.raises(RuntimeError, match="init"):
        _ = svi_of().family


def test_continuing_with_a_seed_never_uses_noise_twice(monkeypatch):
    places = []

    class Spy(SecretStreams):
        def __init__(self, seed=None, *, start_step=0, run=0):
            self.place = start_step, run
            super().__init__(seed, start_step=start_step, run=run)

        def generator(self, name):
            if name == "noise":
                places.append(self.place)
            return super().generator(name)

    for module in ("svi", "prepared"):
        monkeypatch.setattr(f"dpvim.{module}.SecretStreams", Spy)
    svi = svi_of(seed=1)
    first = svi.run(jax.random.key(0), 10, X, Y, progress_bar=False)
    second = svi.run(jax.random.key(0), 10, X, Y, init_state=first.state, progress_bar=False)
    svi.update(second.state, X, Y)
    assert places == [(0, 0), (10, 0), (20, 0)]
    svi.run_many(jax.random.key(0), 3, 5, X, Y, progress_bar=False)
    assert places[3:] == [(0, 0), (0, 1), (0, 2)]


def test_many_runs_have_noise_of_their_own():
    svi = svi_of(seed=1)
    runs = svi.run_many(jax.random.key(0), 3, 30, X, Y, progress_bar=False, trace_every=1)
    moves = [np.diff(one.trace.loc, axis=0)[-1] for one in runs]
    assert len(np.unique(np.round(moves, 6), axis=0)) == 3
    stacked = svi.run_many(
        jax.random.key(0),
        2,
        30,
        np.stack([X, X]),
        np.stack([Y, Y]),
        stacked=True,
        progress_bar=False,
        trace_every=1,
    )
    np.testing.assert_allclose(stacked[0].trace.loc, runs[0].trace.loc, rtol=1e-4, atol=1e-5)


def test_new_constants_are_not_taken_for_the_old_ones():
    def shifted(X, y, offset):
        return linear_model(X, y + offset)

    plan = svi_of().plan
    svi = dpvim.DPSVI(shifted, "mean_field", optax.adam(1e-2), plan, seed=1)
    runs = [svi.run(jax.random.key(0), 15, X, Y, offset, progress_bar=False) for offset in (0, 50)]
    assert not np.array_equal(runs[0].trace.loc, runs[1].trace.loc)


def test_records_are_arranged_with_a_public_number_of_rows():
    """A program for another number of rows could round the rows of others differently."""
    seen = []

    class Watched(Regression):
        def batch_of(self, X, y=None):
            seen.append(X.shape[0])
            return super().batch_of(X, y)

    X, y = np.ones((50, 2), np.float32), np.ones(50, np.float32)
    plan = dpvim.PrivacyPlan(
        num_examples=60,
        sampling_prob=0.5,
        num_steps=4,
        clip_norm=1.0,
        noise_multiplier=1.0,
        relation="add_or_remove",
    )
    svi = dpvim.DPSVI(Watched("logistic"), "mean_field", optax.adam(0.1), plan)
    state = svi.run(jax.random.key(0), 2, X, y, progress_bar=False).state
    svi.update(state, X, y)
    assert seen == [60]  # traced once, for both
