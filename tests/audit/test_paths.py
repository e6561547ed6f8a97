"""The paths are those that they say they are, and their rows are what an adversary needs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpvim._compile import single_precision
from dpvim.audit.canaries import extreme_rows, fuzzed_rows
from dpvim.audit.paths import CANARY, OPPOSITE, PATHS, ReferenceGradients, clipped
from dpvim.audit.target import make_target
from dpvim.bridge import gather_gradients
from dpvim.privacy import clipping
from dpvim.privacy.plan import PrivacyPlan


@single_precision
def traced_sum(name: str) -> None:
    """Trace the clipped sum of a path on two ordinary rows."""
    path = PATHS[name]()
    rows = [jnp.asarray(leaf[:2]) for leaf in path.ordinary]

    batch = path.problem.arrange(rows)

    def total(latent: jax.Array) -> jax.Array:
        is_padding = jnp.zeros(2, bool)
        return path.problem.likelihood.clipped_sum(latent, None, batch, is_padding, 1.0)

    jax.eval_shape(total, jnp.asarray(path.loc))


@pytest.mark.parametrize(("name", "found"), [("look_ups", {"probs"}), ("autodiff", set())])
def test_gathers_are_found_where_they_should_be(monkeypatch, name, found) -> None:
    seen: list[set[str]] = []
    original = gather_gradients._find_gathers

    def spy(*args):
        gathers = original(*args)
        seen.append(set(gathers))
        return gathers

    monkeypatch.setattr(gather_gradients, "_find_gathers", spy)
    traced_sum(name)
    assert seen or not found
    assert all(each == found for each in seen)


@pytest.mark.parametrize("name", PATHS)
def test_ready_made_models_have_sums_of_their_own(monkeypatch, name) -> None:
    general = []
    original = clipping.clipped_sum
    monkeypatch.setattr(clipping, "clipped_sum", lambda *args: general.append(1) or original(*args))
    traced_sum(name)
    assert bool(general) == (name in ("gradients", "autodiff", "persons", "look_ups"))


@pytest.mark.parametrize("name", PATHS)
def test_canaries_are_clipped_and_point_away_from_their_opposites(name) -> None:
    path = PATHS[name]()
    plan = PrivacyPlan(
        num_examples=9, sampling_prob=0.2, num_steps=4, clip_norm=path.clip_norm, noise_multiplier=1
    )
    target = make_target(path, ReferenceGradients(path.problem), plan, scale=path.scale)
    canary, opposite = (target.shares()[:, path.row_number(name)] for name in (CANARY, OPPOSITE))
    lengths = np.linalg.norm(canary, axis=1)
    np.testing.assert_allclose(lengths, path.clip_norm, rtol=1e-6)
    assert np.all(np.sum(canary * opposite, axis=1) < 0)


def test_clipped_rows() -> None:
    rows = np.array([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0], [np.inf, 0.0]])
    expected = np.array([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0]])
    np.testing.assert_allclose(clipped(rows, 1.0)[:3], expected)
    assert np.isnan(clipped(rows, 1.0)[3]).any()


def test_extreme_rows_change_numbers_of_their_kind() -> None:
    row = [np.array([1], np.int32), np.ones((1, 2), np.float32), np.array([True])]
    rows = extreme_rows(row)
    assert np.isnan(rows["nan"][1]).all()
    assert rows["nan"][0] == 1
    assert rows["codes of -1"][0] == -1
    assert np.isnan(rows["one nan"][1]).sum() == 1
    assert all(leaf.dtype == old.dtype for leaf, old in zip(rows["inf"], row, strict=True))
    assert np.all(row[1] == 1)


def test_fuzzed_rows_hold_numbers_of_all_sizes() -> None:
    ordinary = [np.ones((3, 2), np.float32), np.ones(3, np.int32), np.ones(3, bool)]
    floats, integers, coins = fuzzed_rows(ordinary, 1000)
    finite = np.abs(floats[np.isfinite(floats)])
    assert finite.max() > 1e37
    assert finite.min() < 1e-37
    assert np.isnan(floats).any()
    assert np.isinf(floats).any()
    assert np.mean(floats == 1) > 0.2
    assert integers.max() > 2**30
    assert integers.min() < -(2**30)
    assert not coins.all()
