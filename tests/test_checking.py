"""Checks at a price: right on average, sensitive to what is wrong, and one cell a record."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import stats

import dpvim
from dpvim.bridge.data import prepare
from dpvim.checking import density
from dpvim.checking.questions import PIECE_ROWS
from dpvim.privacy.counts import Cells, Marginal, count_cells

pytestmark = pytest.mark.filterwarnings("ignore::dpvim.ConvergenceWarning")
BUDGET = {"epsilon": 1.0, "delta": 1e-5}
# Few steps of an optimiser: what is checked here is the check.
FIT = {**BUDGET, "epsilon": 8.0, "num_steps": 400, "learning_rate": 0.05, "clip_norm": 4.0}


def poisson_model(x, y):
    a = numpyro.sample("a", dist.Normal(0, 1))
    b = numpyro.sample("b", dist.Normal(0, 1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(a + b * x)), obs=y)


def normal_model(x, y):
    a = numpyro.sample("a", dist.Normal(0, 1))
    b = numpyro.sample("b", dist.Normal(0, 1))
    s = numpyro.sample("s", dist.LogNormal(0, 1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal(a + b * x, s), obs=y)


def make_data(n, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=n).astype(np.float32)
    return x, rng.poisson(np.exp(0.5 + 0.4 * x)).astype(np.float32)


TRAIN, OTHER = make_data(3000, 0), make_data(3000, 1)


@pytest.fixture(scope="module")
def fits():
    with pytest.warns(dpvim.PrivacyWarning):
        return [
            dpvim.fit(model, *TRAIN, **FIT, seed=i)
            for i, model in enumerate((poisson_model, normal_model))
        ]


def asked(function, *args, **options):
    with pytest.warns(dpvim.PrivacyWarning, match="seed"):
        return function(*args, **BUDGET, **options)


def test_the_held_out_density_is_right_within_its_error(fits):
    mean = fits[0].posterior.mean
    x, y = OTHER
    exact = stats.poisson.logpmf(y, np.exp(mean["a"] + mean["b"] * x)).mean()
    for seed in range(3):
        score = asked(dpvim.held_out, fits[0], *OTHER, seed=seed)
        assert abs(score.mean - exact) < 4 * score.noise + 0.02
        assert score.noise < 0.1
        assert 0.005 < score.sampling < 0.03
        assert score.privacy.epsilon <= 1.0
        assert not score.privacy.private


def test_a_difference_is_sharper_than_two_scores(fits):
    alone = [asked(dpvim.held_out, each, *OTHER, seed=0) for each in fits]
    paired = asked(dpvim.held_out, fits[0], *OTHER, against=fits[1], seed=0)
    assert paired.mean > 5 * paired.stderr
    assert paired.stderr < 0.8 * np.hypot(alone[0].stderr, alone[1].stderr)
    difference = alone[0].mean - alone[1].mean
    assert abs(paired.mean - difference) < 4 * np.hypot(alone[0].stderr, alone[1].stderr)


def test_ranks_are_even_for_the_right_model_and_uneven_for_a_wrong_one(fits):
    right = asked(dpvim.predictive_check, fits[0], *OTHER, seed=3).ranks["y"]
    assert right.p_value > 0.01
    assert right.excess < 0.05
    statistics = {"itself": lambda sites: sites["y"], "negative": lambda sites: sites["y"] < 0}
    wrong = asked(dpvim.predictive_check, fits[1], *OTHER, statistics=statistics, seed=3)
    assert wrong.ranks["itself"].p_value < 1e-4
    assert wrong.ranks["itself"].excess > 0.05
    assert "unlike" in str(wrong)


def test_a_record_is_in_one_cell_of_each_question(fits):
    """Replacing one record, by whatever, moves two counts of a question by one."""
    x, y = (array[:200] for array in OTHER)
    seen = []
    for other in (1.0, 50.0, 1e30, -1e30):
        inputs = prepare((np.r_[x[:-1], np.float32(other)], y), {})
        of_records = density.log_density(fits[0], inputs, 8, 0)
        codes = density.magnitude_codes(of_records(inputs.records))[:, None]
        assert codes.min() >= 0
        assert codes.max() < density.NUM_CODES
        cells = Cells((np.arange(density.NUM_CODES),))
        seen += count_cells([codes], cells, [Marginal((0,))])
    assert {int(np.abs(each - seen[0]).sum()) for each in seen} <= {0, 2}
    assert all(each.sum() == 200 for each in seen)


def test_codes_are_in_order_and_near_what_they_stand_for():
    numbers = np.r_[-np.geomspace(1e9, 1e-6, 400), 0.0, np.geomspace(1e-6, 1e9, 400)]
    codes = density.magnitude_codes(numbers)
    assert (np.diff(codes) >= 0).all()
    inside = np.abs(numbers) < 1e8
    back = density.magnitudes()[codes[inside]]
    np.testing.assert_allclose(back, numbers[inside], rtol=0.006, atol=0.0013)
    lowest = density.magnitude_codes(np.array([np.nan, -np.inf, -1e8]))
    assert len(set(lowest)) == 1


def test_far_outliers_are_cut_off_and_do_not_widen_the_noise(fits):
    """The first round finds where records are; a few that are elsewhere do not stand out."""
    x, y = OTHER
    spoilt = y.copy()
    spoilt[:3] = 1e6
    plain = asked(dpvim.held_out, fits[0], x, y, seed=1)
    score = asked(dpvim.held_out, fits[0], x, spoilt, seed=1)
    assert score.noise < 3 * plain.noise
    assert abs(score.mean - plain.mean) < 0.2


def test_bad_questions_are_refused_before_anything_is_spent(fits):
    x, y = OTHER
    with pytest.raises(ValueError, match="Only the number of records"):
        dpvim.held_out(fits[0], np.c_[x, x], y, **BUDGET)
    with pytest.raises(ValueError, match="public bound"):
        dpvim.held_out(fits[0], x, y, **BUDGET, relation="add_or_remove")
    with pytest.raises(dpvim.ModelError, match="one number for a record"):
        asked(
            dpvim.predictive_check,
            fits[0],
            *OTHER,
            statistics={"two": lambda sites: jnp.ones(2)},
            seed=0,
        )
    with pytest.raises(ValueError, match="made in this session"):
        dpvim.held_out(dataclasses.replace(fits[0], session=None), x, y, **BUDGET)


def test_under_add_or_remove_the_number_of_records_is_released_too(fits):
    score = asked(
        dpvim.held_out, fits[0], *OTHER, relation="add_or_remove", num_examples=4000, seed=2
    )
    assert score.num_records != 3000
    assert abs(score.num_records - 3000) < 200


def test_records_are_computed_in_one_public_shape(fits, monkeypatch):
    """Under add_or_remove the number of records is private, and roundings go with shapes."""
    shapes = []
    really = density.magnitude_codes
    monkeypatch.setattr(
        density,
        "magnitude_codes",
        lambda numbers: (shapes.append(len(numbers)), really(numbers))[1],
    )
    for rows in (2999, 3000):
        part = tuple(array[:rows] for array in OTHER)
        relation = {"relation": "add_or_remove", "num_examples": 4000}
        asked(dpvim.held_out, fits[0], *part, **relation, seed=2)
    assert set(shapes) == {PIECE_ROWS}
