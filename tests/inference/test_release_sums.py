"""Sums of releases: of their windows, however a run was cut, in files."""

from __future__ import annotations

import time

import jax
import numpy as np
import optax
import pytest
from conftest import linear_model
from release_cases import H3, STEPS, X, Y, fit_linear, linear_fit, plan_of, quadratic_sums, sums_of

import dpvim
from dpvim.inference import loop
from dpvim.inference.release_sums import LARGEST_FULL_DIM, NUM_WINDOWS


def test_sums_are_those_of_their_windows():
    plan = plan_of()
    sums, points, gradients = quadratic_sums(h=H3, g_at_zero=np.ones(3), plan=plan)
    part = slice(STEPS // NUM_WINDOWS, 2 * STEPS // NUM_WINDOWS)
    x, g = points[part], gradients[part]
    assert sums.steps.sum() == STEPS
    np.testing.assert_allclose(sums.point[1], x.sum(axis=0))
    np.testing.assert_allclose(sums.gradient[1], g.sum(axis=0))
    np.testing.assert_allclose(sums.point_point[1], x.T @ x)
    np.testing.assert_allclose(sums.point_gradient[1], x.T @ g)
    np.testing.assert_allclose(sums.gradient_squared[1], (g**2).sum(axis=0))


def test_large_latents_keep_diagonals():
    dim = LARGEST_FULL_DIM + 1
    x, g = np.random.default_rng(0).normal(size=(2, 20, dim))
    sums = sums_of(x, g, plan_of(num_steps=20))
    assert not sums.is_full
    np.testing.assert_allclose(sums.point_gradient.sum(axis=0), (x * g).sum(axis=0))


@pytest.mark.parametrize("steps", [STEPS, 1000, 777, 10])
def test_sums_do_not_depend_on_how_a_run_was_cut(steps):
    """To the last bit: the pace of a run follows the clock, which knows about the data."""
    plan = plan_of(num_steps=steps)
    rng = np.random.default_rng(0)
    points, gradients = rng.normal(size=(2, steps, 3)) * np.array([1.0, 1e3, 1e-3])
    whole = sums_of(points, gradients, plan)
    assert whole.steps.sum() == steps
    for longest in (1, 7, 300):
        chunks = []
        while sum(chunks) < steps:
            chunks.append(min(int(rng.integers(1, longest + 1)), steps - sum(chunks)))
        for one, other in zip(whole, sums_of(points, gradients, plan, chunks), strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_saved_fit_does_not_tell_the_pace_of_the_run(monkeypatch, tmp_path):
    """A record that makes the model slow must not show: the same releases, the same bytes."""
    files = {}
    for pace, seconds in {"slow": 100.0, "fast": 1e-9}.items():
        record = loop._Pace.record
        with monkeypatch.context() as patched:
            patched.setattr(
                loop._Pace,
                "record",
                lambda self, length, _, s=seconds, record=record: record(self, length, s),
            )
            patched.setattr(time, "localtime", lambda *_, s=seconds: time.gmtime(1e9 + 1e9 * s))
            patched.setattr(time, "time", lambda s=seconds: 1e9 + 1e6 * s)
            fit = fit_linear()
            fit.save(tmp_path / pace, not_for_release=True)
        files[pace] = (tmp_path / pace).read_bytes()
    assert fit.releases.steps.sum() == 1000
    assert files["slow"] == files["fast"]


def test_sums_of_a_run_are_those_of_its_steps():
    """Step by step, with the same seed, by hand."""
    fit = linear_fit(num_steps=64)
    plan, optimizer = fit.plan, fit.session.prepared.options.optimizer
    by_hand = dpvim.DPSVI(linear_model, "mean_field", optimizer, plan, seed=0, probe_width="auto")
    state = by_hand.init(jax.random.key(0), X, Y)
    point, gradient = np.zeros(3), np.zeros(3)
    for _ in range(64):
        state, info = by_hand.update(state, X, Y)
        point += np.asarray(info.point)
        gradient += np.asarray(info.release, float) / plan.sampling_prob
    np.testing.assert_allclose(fit.releases.point.sum(axis=0), point, rtol=1e-5)
    np.testing.assert_allclose(fit.releases.gradient.sum(axis=0), gradient, rtol=1e-4)


def test_vectorised_runs_have_their_own_sums():
    plan = plan_of(num_steps=100)
    svi = dpvim.DPSVI(linear_model, "mean_field", optax.adam(1e-2), plan, seed=0)
    runs = svi.run_many(jax.random.key(0), 2, 100, X, Y, progress_bar=False)
    first, second = (run.releases for run in runs)
    assert first.steps.sum() == second.steps.sum() == 100
    assert not np.allclose(first.gradient, second.gradient)


def test_other_variants_keep_no_sums_and_say_what_works():
    fit = linear_fit(variant="vanilla", num_steps=64)
    assert fit.releases is None
    with pytest.raises(ValueError, match="aligned"):
        fit.posterior_at(noise_aware="releases")


def test_sums_survive_a_file_and_old_files_say_that_they_have_none(tmp_path):
    fit = linear_fit()
    fit.save(tmp_path / "fit.npz", not_for_release=True)
    again = dpvim.load(tmp_path / "fit.npz")
    for before, after in zip(fit.releases, again.releases, strict=True):
        np.testing.assert_array_equal(after, before)
    here, there = (f.posterior_at(noise_aware="releases") for f in (fit, again))
    np.testing.assert_allclose(there.loc, here.loc)
    old = dpvim.Fit(fit.plan, fit.privacy, fit.trace, fit.space, fit.family)
    old.save(tmp_path / "old.npz", not_for_release=True)
    with pytest.raises(ValueError, match="this version"):
        dpvim.load(tmp_path / "old.npz").posterior_at(noise_aware="releases")
