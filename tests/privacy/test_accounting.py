"""The accountant over its whole range, against computations that share no code with it."""

from __future__ import annotations

import csv
import functools
import itertools
import json
import math
import os
from pathlib import Path

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from dpvim import cache
from dpvim.privacy import accounting
from dpvim.privacy.plan import PrivacyPlan
from dpvim.types import Relation

# 100 settings that fill the box of the tests, see benchmarks/accounting_reference.py.
REFERENCE = Path(__file__).with_name("accounting_reference.csv")
RANGES = {
    "epsilon": (0.01, 100.0),
    "delta": (1e-12, 1e-2),
    "sampling_prob": (1e-5, 1.0),
    "num_steps": (1, 10**7),
}
USUAL = {"sampling_prob": 0.02, "num_steps": 2_000, "num_examples": 1, "max_batch_size": 1}


def reference_rows():
    with REFERENCE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [
        {key: value if key == "relation" else float(value) for key, value in row.items()}
        for row in rows
    ]


ROWS = reference_rows()


def facts_of(row):
    prob, steps = row["sampling_prob"], int(row["num_steps"])
    return USUAL | {"sampling_prob": prob, "num_steps": steps}


def cost(noise, *, delta=1e-6, relation="zero_out", **facts):
    event = accounting.dp_event(noise_multiplier=noise, **(USUAL | facts))
    return accounting.epsilon_of(event, delta=delta, relation=Relation(relation))


def calibrated(*, epsilon=1.0, delta=1e-6, relation="zero_out", **facts):
    return accounting.calibrate_noise(
        epsilon=epsilon, delta=delta, relation=Relation(relation), **(USUAL | facts)
    )


def test_the_reference_fills_the_box():
    assert len(ROWS) == 100
    assert {row["relation"] for row in ROWS} == {relation.value for relation in Relation}
    assert sum(not math.isnan(row["prv_low"]) for row in ROWS) >= 60
    for row in ROWS:
        # The reference values are good to 1e-5; prv-accountant brackets them.
        assert not row["tight"] < row["prv_low"] * (1 - 1e-5)
        assert not row["tight"] > row["prv_high"] * (1 + 1e-5)
    for name, key in [("delta", "delta"), ("sampling_prob",) * 2, ("num_steps",) * 2]:
        low, high = RANGES[name]
        values = [row[key] for row in ROWS]
        assert min(values) < 5 * low
        assert max(values) > high / 5


@pytest.mark.parametrize("row", ROWS, ids=range(len(ROWS)))
def test_an_upper_bound_within_half_a_percent(row):
    epsilon = cost(row["noise"], delta=row["delta"], relation=row["relation"], **facts_of(row))
    assert not epsilon < row["prv_low"]
    assert row["tight"] * (1 - 1e-5) <= epsilon <= row["tight"] * 1.005


@pytest.mark.parametrize("row", ROWS[::6], ids=range(len(ROWS[::6])))
def test_calibration_asks_for_half_a_percent_more_noise_at_most(row):
    noise = calibrated(
        epsilon=row["tight"], delta=row["delta"], relation=row["relation"], **facts_of(row)
    )
    assert row["noise"] * (1 - 1e-5) <= noise <= row["noise"] * 1.005


@pytest.mark.parametrize("row", [row for row in ROWS if row["relation"] != "replace_one"][::6])
def test_never_above_the_bound_by_renyi_divergences(row):
    rdp = RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    gaussian = dp_accounting.GaussianDpEvent(row["noise"])
    step = dp_accounting.PoissonSampledDpEvent(row["sampling_prob"], gaussian)
    rdp.compose(step, int(row["num_steps"]))
    epsilon = cost(row["noise"], delta=row["delta"], relation=row["relation"], **facts_of(row))
    assert epsilon <= rdp.get_epsilon(row["delta"])


@pytest.mark.parametrize("num_steps", [1, 10**7])
@pytest.mark.parametrize("relation", list(Relation))
def test_full_batches_are_the_gaussian_mechanism(relation, num_steps):
    """Its delta has a closed form (Balle and Wang 2018)."""
    sensitivity = 2.0 if relation is Relation.REPLACE_ONE else 1.0
    for delta, scaled in itertools.product([1e-12, 1e-9, 1e-5, 1e-2], [0.15, 1.0, 8.0, 300.0]):
        exact = dp_accounting.get_epsilon_gaussian(scaled, delta)
        noise = scaled * sensitivity * math.sqrt(num_steps)
        facts = {"sampling_prob": 1.0, "num_steps": num_steps}
        epsilon = cost(noise, delta=delta, relation=relation, **facts)
        assert exact - 1e-12 <= epsilon <= max(exact * 1.005, 5e-5)


def with_cap(row, num_examples):
    """Facts of a plan for so many records: most of its batches can be cut to size."""
    facts = facts_of(row) | {"num_examples": num_examples}
    plan = PrivacyPlan(
        num_examples=num_examples,
        sampling_prob=facts["sampling_prob"],
        num_steps=facts["num_steps"],
        clip_norm=1.0,
    )
    return facts | {"max_batch_size": plan.max_batch_size}


@pytest.mark.parametrize("num_examples", [40, 10**4, 10**7])
@pytest.mark.parametrize("row", ROWS[::5], ids=range(len(ROWS[::5])))
def test_a_plan_with_a_cap_is_within_half_a_percent(row, num_examples):
    """If all others are zero the cap does nothing but leave the record out, at a rate of 1e-17.

    So the tight value without a cap is, but for that, a lower bound on the tight value with one.
    """
    facts = with_cap(row, num_examples)
    epsilon = cost(row["noise"], delta=row["delta"], relation=row["relation"], **facts)
    assert row["tight"] * (1 - 1e-5) <= epsilon <= row["tight"] * 1.005


@pytest.mark.parametrize("seed", range(24))
def test_random_plans_with_caps_over_the_whole_box(seed):
    rng = np.random.default_rng([seed, 2])
    epsilon, delta, prob, num_steps = (
        math.exp(rng.uniform(math.log(low), math.log(high))) for low, high in RANGES.values()
    )
    num_steps, num_examples = round(num_steps), round(10 ** rng.uniform(1, 7))
    if delta >= -math.expm1(num_steps * math.log1p(-prob)):
        delta = prob * 1e-2  # above the probability of being in a batch no noise is needed
    budget = {"delta": delta, "relation": list(Relation)[seed % 3]}
    row = {"sampling_prob": prob, "num_steps": num_steps}
    facts = with_cap(row, num_examples)
    noise = calibrated(epsilon=epsilon, **budget, **facts)
    here = cost(noise, **budget, **facts)
    assert 0.99 * epsilon <= here <= epsilon
    assert here == pytest.approx(cost(noise, **budget, **facts_of(row)), rel=1e-3)

    more = with_cap(row | {"sampling_prob": min(1, 1.05 * prob)}, num_examples)
    assert cost(noise * 1.01, **budget, **facts) < here
    assert cost(noise, **(budget | {"delta": 1.05 * delta}), **facts) < here
    assert cost(noise, **budget, **(facts | {"num_steps": math.ceil(1.05 * num_steps)})) > here
    assert cost(noise, **budget, **more) > here


@pytest.mark.parametrize("relation", list(Relation))
@pytest.mark.parametrize("spread", [5.5, 7, None])
def test_truncation_costs_no_less_than_dp_accounting_says(spread, relation):
    """Their analysis is finer where batches are often cut to size, and takes minutes elsewhere."""
    row = {"sampling_prob": 0.01, "num_steps": 300}
    facts = with_cap(row, 2_000)
    if spread is not None:
        facts["max_batch_size"] = math.ceil(20 + spread * math.sqrt(20))
    event = accounting.dp_event(noise_multiplier=1.5, **facts)
    theirs = PLDAccountant(accounting_relation(relation), 3e-4)
    theirs.compose(event)
    ratio = accounting.epsilon_of(event, delta=1e-5, relation=relation) / theirs.get_epsilon(1e-5)
    assert 0.997 < ratio < (1.05 if spread == 5.5 else 1.003)


@pytest.mark.parametrize("relation", list(Relation))
@pytest.mark.parametrize(
    ("cap", "prob", "noise", "num_steps", "delta"),
    [
        (4, 0.05, 0.7, 2, 1e-4),
        (4, 0.3, 1.0, 2, 0.05),
        (3, 0.1, 0.4, 1, 1e-3),
        (2, 0.3, 1.0, 1, 0.2),
    ],
)
def test_what_is_promised_of_cut_batches_is_so(cap, prob, noise, num_steps, delta, relation):
    facts = {"sampling_prob": prob, "num_steps": num_steps, "num_examples": 5}
    epsilon = cost(noise, delta=delta, relation=relation, max_batch_size=cap, **facts)
    assert exact_delta(epsilon, relation, 5, cap, prob, noise, num_steps) <= delta


@pytest.mark.parametrize(
    ("num_examples", "cap", "prob", "noise", "num_steps", "delta", "refused"),
    [
        (2, 1, 0.05, 1.0, 2, 0.01, False),
        (6, 2, 0.9, 0.7, 1, 1e-6, True),
        (4, 1, 0.9, 0.7, 2, 1e-6, True),
    ],
)
def test_cut_batches_cost_more_than_others(
    num_examples, cap, prob, noise, num_steps, delta, refused
):
    """The others are pushed out by the record, or their number tells that it is there."""
    relation = Relation.ADD_OR_REMOVE
    exact = functools.partial(
        exact_delta,
        relation=relation,
        num_examples=num_examples,
        cap=cap,
        prob=prob,
        noise=noise,
        num_steps=num_steps,
    )
    facts = {"sampling_prob": prob, "num_steps": num_steps, "num_examples": num_examples}
    ask = functools.partial(cost, noise, delta=delta, relation=relation, **facts)
    assert exact(ask(max_batch_size=num_examples)) > delta
    if refused:
        with pytest.raises(ValueError, match="cut to size"):
            ask(max_batch_size=cap)
    else:
        assert exact(ask(max_batch_size=cap)) <= delta


def exact_delta(epsilon, relation, num_examples, cap, prob, noise, num_steps):
    """From all batches there are, and all ways to cut them."""
    others = [-1.0] * (num_examples - 1)  # a record in the place of one of them moves a sum by 2
    instead = {Relation.ZERO_OUT: [0.0], Relation.ADD_OR_REMOVE: [], Relation.REPLACE_ONE: [-1.0]}
    y = np.linspace(-num_examples - 7 * noise, num_examples + 7 * noise, 501)
    p, q = (
        mass_of_releases(y, values + others, prob, cap, noise, num_steps)
        for values in ([1.0], instead[relation])
    )
    return max(np.sum(np.maximum(0, a - math.exp(epsilon) * b)) for a, b in [(p, q), (q, p)])


def mass_of_releases(y, values, prob, cap, noise, num_steps):
    density = np.zeros_like(y)
    for coins in itertools.product([False, True], repeat=len(values)):
        drawn = list(itertools.compress(values, coins))
        chance = prob ** len(drawn) * (1 - prob) ** (len(values) - len(drawn))
        kept = list(itertools.combinations(drawn, min(cap, len(drawn))))
        for batch in kept:
            density += chance / len(kept) * np.exp(-(((y - sum(batch)) / noise) ** 2) / 2)
    mass = density * (y[1] - y[0]) / (noise * math.sqrt(2 * math.pi))
    assert np.sum(mass) == pytest.approx(1, abs=1e-9)
    return mass if num_steps == 1 else np.outer(mass, mass)


def test_a_delta_below_the_cost_of_the_cap_is_refused():
    facts = {"num_examples": 10_000, "max_batch_size": 250}
    spent = 2_000 * accounting.cut_prob(sampling_prob=0.02, num_examples=10_000, max_batch_size=250)
    assert 1e-5 < spent < 1e-1
    for ask in (functools.partial(cost, 3.0), calibrated):
        with pytest.raises(ValueError, match="delta: expected more than"):
            ask(delta=spent, **facts)
        assert ask(delta=1.5 * spent, **facts) > 0


def accounting_relation(relation):
    names = dp_accounting.NeighboringRelation
    return {
        Relation.ZERO_OUT: names.REPLACE_SPECIAL,
        Relation.ADD_OR_REMOVE: names.ADD_OR_REMOVE_ONE,
        Relation.REPLACE_ONE: names.REPLACE_ONE,
    }[relation]


MONOTONE = [
    {"noise": 1.2, "delta": 1e-6},
    {"noise": 30.0, "delta": 1e-12, "sampling_prob": 0.3, "num_steps": 10**5},
    {"noise": 0.7, "delta": 1e-9, "sampling_prob": 1e-4, "num_steps": 10**4},
    {"noise": 2.0, "delta": 1e-3, "sampling_prob": 0.9, "num_steps": 20},
]


@pytest.mark.parametrize("setting", MONOTONE)
@pytest.mark.parametrize("relation", list(Relation))
@pytest.mark.parametrize("factor", [1.01, 1.1])
def test_epsilon_is_monotone_in_each_argument(setting, relation, factor):
    facts = {"relation": relation} | USUAL | setting
    here = cost(**facts)
    assert cost(**(facts | {"noise": facts["noise"] * factor})) < here
    assert cost(**(facts | {"delta": facts["delta"] * factor**3})) < here
    assert cost(**(facts | {"sampling_prob": min(1, facts["sampling_prob"] * factor)})) > here
    assert cost(**(facts | {"num_steps": math.ceil(facts["num_steps"] * factor**2)})) > here


@pytest.mark.parametrize("relation", list(Relation))
def test_noise_is_monotone_in_each_argument(relation):
    here = calibrated(relation=relation)
    assert calibrated(relation=relation, epsilon=1.01) < here
    assert calibrated(relation=relation, delta=1.1e-6) < here
    assert calibrated(relation=relation, sampling_prob=0.0202) > here
    assert calibrated(relation=relation, num_steps=2_040) > here


@pytest.mark.parametrize("relation", list(Relation))
@pytest.mark.parametrize("corner", list(itertools.product(*RANGES.values())), ids=str)
def test_corners_of_the_box(corner, relation):
    epsilon, delta, prob, num_steps = corner
    budget = {"delta": delta, "relation": relation}
    facts = {"sampling_prob": prob, "num_steps": num_steps}
    if delta > prob * num_steps:
        with pytest.raises(ValueError, match="in any batch at all"):
            calibrated(epsilon=epsilon, **budget, **facts)
        assert cost(1.0, **budget, **facts) == 0
        return
    noise = calibrated(epsilon=epsilon, **budget, **facts)
    assert 0.99 * epsilon <= cost(noise, **budget, **facts) <= epsilon


@pytest.mark.parametrize("relation", list(Relation))
def test_far_outside_of_the_box(relation):
    assert cost(1e9, relation=relation) == 0
    assert cost(1e-3, relation=relation, num_steps=1) > 1e4
    assert math.isfinite(cost(0.01, relation=relation, num_steps=10**8))


def test_a_record_may_come_or_go():
    """Neither direction is known to be the worse one in general: both are accounted for."""
    step = accounting.dp_event(noise_multiplier=2.0, **USUAL).event
    for relation in (Relation.ZERO_OUT, Relation.ADD_OR_REMOVE):
        directions = accounting._directions(step, relation)
        assert [(pair.p, pair.r, pair.shift) for pair in directions] == [
            (0.02, 0.0, 0.5),
            (0.0, 0.02, 0.5),
        ]


PAIRS = [(1e-5, 0.0), (0.0, 1e-5), (0.3, 0.0), (0.0, 0.3), (0.02, 0.02), (1.0, 0.0), (1.0, 1.0)]


@pytest.mark.parametrize(("p", "r"), PAIRS)
@pytest.mark.parametrize("shift", [1e-6, 0.1, 1.0, 3.0])
def test_the_grid_keeps_both_masses_and_never_lowers_a_loss(p, r, shift):
    pair = accounting._Pair(p, r, shift)
    step = accounting._cut_to_pieces(pair, 1e-25)
    assert step.lost < 1e-24
    spread = math.sqrt(np.cov(step.mean, aweights=step.mass))
    for width in (0.01 * spread, spread):
        grid = accounting._grid(step, 1.0, width)
        assert np.sum(grid.mass) == pytest.approx(1, abs=1e-14)
        other_mass = np.sum(step.mass * np.exp(-step.mean))
        assert np.sum(grid.mass * np.exp(-grid.loss)) == pytest.approx(other_mass, abs=1e-13)
        for loss in np.linspace(-3, 3, 13) * spread:
            exact = np.sum(step.mass * np.maximum(0, -np.expm1(loss - step.mean)))
            grown = np.sum(grid.mass * np.maximum(0, -np.expm1(loss - grid.loss)))
            assert exact * (1 - 1e-9) - 1e-16 <= grown


@pytest.mark.parametrize("largest", [0.1, 0.97])
@pytest.mark.parametrize("size", [40, 4])
def test_composition_is_convolution_modulo_the_size(largest, size):
    rest = np.random.default_rng(0).dirichlet(np.ones(9)) * (1 - largest)
    weights = np.insert(rest, 6, largest)
    index = np.arange(-4, 6)
    masses, error = accounting._composed(index, weights, 3, size)
    expected = np.zeros(size)
    convolved = np.convolve(np.convolve(weights, weights), weights)
    np.add.at(expected, (np.arange(len(convolved)) - 12) % size, convolved)
    np.testing.assert_allclose(masses, expected, rtol=0, atol=3e-14)
    assert 0 < error < 1e-14


@pytest.fixture
def forgetful():
    """Nothing that was computed before in this process is known."""
    accounting._epsilon_in_memory.cache_clear()
    yield accounting._epsilon_in_memory.cache_clear
    accounting._epsilon_in_memory.cache_clear()


def count_searches(monkeypatch):
    """How often noise was searched for, rather than read and checked."""
    searches = []
    search = accounting._bracketed_root
    monkeypatch.setattr(
        accounting, "_bracketed_root", lambda *args: (searches.append(args), search(*args))[1]
    )
    return searches


def test_a_second_search_is_answered_from_disk(monkeypatch, tmp_path):
    monkeypatch.setenv("DPVIM_CACHE", str(tmp_path / "new" / "folder"))
    noise = calibrated()
    searches = count_searches(monkeypatch)
    assert calibrated() == noise
    assert not searches
    changes = ({"delta": 2e-6}, {"relation": "replace_one"}, {"num_steps": 2_001}, {"epsilon": 2.0})
    for number, change in enumerate(changes, start=1):
        calibrated(**change)
        assert len(searches) == number


def test_epsilon_is_never_read_from_disk(monkeypatch, tmp_path, forgetful):
    """Statements claim it: a file must not be able to say what it is."""
    monkeypatch.setenv("DPVIM_CACHE", str(tmp_path))
    calibrated(), cost(3.0)
    forgetful()
    monkeypatch.setattr(accounting, "_epsilon", lambda *args, **kwargs: 42.0)
    assert cost(3.0) == 42.0


@pytest.mark.parametrize("factor", [0.01, 0.9, 0.999, 1.2, 1e6, 1e-300])
def test_an_edited_answer_is_not_believed(monkeypatch, tmp_path, forgetful, factor):
    """Less noise would break the promise, far more would waste the data."""
    monkeypatch.setenv("DPVIM_CACHE", str(tmp_path))
    noise = calibrated()
    for file in tmp_path.rglob("*.json"):
        entry = json.loads(file.read_text())
        file.write_text(json.dumps(entry | {"answer": noise * factor}))
    forgetful()
    assert calibrated() == noise


@pytest.mark.parametrize("which", ["base", "accounting", "file"])
@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_what_others_can_write_is_not_looked_at(monkeypatch, tmp_path, which, mode):
    monkeypatch.setenv("DPVIM_CACHE", str(tmp_path / "base"))
    remembered(1.5)
    (file,) = tmp_path.rglob("*.json")
    assert remembered(2.5) == 1.5
    {"base": file.parent.parent, "accounting": file.parent, "file": file}[which].chmod(mode)
    assert remembered(2.5) == 2.5


def test_what_belongs_to_others_is_not_looked_at(monkeypatch, tmp_path):
    monkeypatch.setenv("DPVIM_CACHE", str(tmp_path))
    remembered(1.5)
    user = os.getuid()
    monkeypatch.setattr(cache.os, "getuid", lambda: user + 1)
    assert remembered(2.5) == 2.5


def test_folders_and_files_are_the_users_alone_whatever_the_umask(monkeypatch, tmp_path):
    monkeypatch.setenv("DPVIM_CACHE", str(tmp_path / "base"))
    before = os.umask(0)
    try:
        remembered(1.5)
    finally:
        os.umask(before)
    made = [tmp_path / "base", *(tmp_path / "base").rglob("*")]
    assert len(made) == 3
    assert [path.stat().st_mode & 0o077 for path in made] == [0, 0, 0]
    assert remembered(2.5) == 1.5


def test_answers_of_other_versions_are_not_read(monkeypatch, tmp_path):
    monkeypatch.setenv("DPVIM_CACHE", str(tmp_path))
    calibrated()
    searches = count_searches(monkeypatch)
    with monkeypatch.context() as other:
        other.setattr(accounting, "_ALGORITHM", -1)
        calibrated()
        assert len(searches) == 1
    version = accounting.importlib.metadata.version
    for number, package in enumerate(("dpvim", "dp-accounting"), start=2):
        with monkeypatch.context() as other:
            other.setattr(
                accounting.importlib.metadata,
                "version",
                lambda name, package=package: "other" if name == package else version(name),
            )
            calibrated()
            assert len(searches) == number


def remembered(answer):
    return cache.remember({"a": "b"}, lambda: answer, is_right=lambda found: True)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b"[" * 100_000,
        b'{"question": {}, "answer": 1.0}',
        b'{"question": {"a": "b"}, "answer": -1.0}',
        b'{"question": {"a": "b"}, "answer": NaN}',
        b'{"question": {"a": "b"}, "answer": Infinity}',
        b'{"question": {"a": "b"}, "answer": "1.0"}',
    ],
)
def test_a_damaged_entry_is_computed_anew(monkeypatch, tmp_path, content):
    monkeypatch.setenv("DPVIM_CACHE", str(tmp_path))
    assert remembered(1.5) == 1.5
    (entry,) = tmp_path.rglob("*.json")
    assert remembered(2.5) == 1.5
    entry.write_bytes(content)
    assert remembered(2.5) == 2.5
    assert remembered(3.5) == 2.5
    assert list(tmp_path.rglob("*.tmp")) == []


@pytest.mark.parametrize("switch", ["", "off", "OFF"])
def test_the_cache_can_be_switched_off(monkeypatch, tmp_path, switch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DPVIM_CACHE", switch)
    assert remembered(1.5) == 1.5
    assert remembered(2.5) == 2.5
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_no_cache(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("DPVIM_CACHE", str(tmp_path / "file"))
    assert remembered(1.5) == 1.5
    assert remembered(2.5) == 2.5


def test_the_usual_folder_is_the_users(monkeypatch, tmp_path):
    monkeypatch.delenv("DPVIM_CACHE")
    monkeypatch.setattr(
        cache.platformdirs, "user_cache_dir", lambda *a, **k: str(tmp_path / "dpvim")
    )
    assert remembered(1.5) == 1.5
    assert remembered(2.5) == 1.5


def test_an_account_without_a_home_has_no_cache(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DPVIM_CACHE")
    monkeypatch.setattr(cache.platformdirs, "user_cache_dir", lambda *a, **k: "~/.cache/dpvim")
    assert remembered(1.5) == 1.5
    assert remembered(2.5) == 2.5
    assert list(tmp_path.iterdir()) == []
