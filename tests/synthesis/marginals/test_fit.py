"""Twins from noisy counts: from a table to a release, tables and files."""

from __future__ import annotations

import dataclasses
import itertools
import json

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import dpvim
from dpvim import archives
from dpvim.privacy.counts import CountMechanism
from dpvim.privacy.plan import PrivacyPlan
from dpvim.privacy.randomness import SecretStreams
from dpvim.synthesis.fitting import CountSynthesizer, synthesize
from dpvim.synthesis.marginals import fit as fit_module
from dpvim.synthesis.marginals.release import codes_of, design, noise_of_pairs, release
from dpvim.synthesis.schema import Binary, Integer, Schema
from dpvim.synthesis.tables import write_table
from dpvim.synthesis.twin import Twin
from dpvim.types import NotPrivateError


@pytest.fixture(scope="module")
def counted(patients, schema) -> Twin:
    """A twin of the patients, seeded."""
    with pytest.warns(dpvim.NotForReleaseWarning):
        return synthesize(patients, schema, epsilon=5.0, target="visits", components=4, seed=0)


def small_plan(rows: int, **more) -> PrivacyPlan:
    settings = {"num_examples": rows, "sampling_prob": 1.0, "num_steps": 1, "clip_norm": 1.0}
    return PrivacyPlan(**settings, noise_multiplier=2.0, **more)


def test_tables_have_names_order_types_and_domain_of_the_schema(counted, schema):
    for table in (*counted.datasets(2, 60, seed=1), counted.closest(60)):
        assert list(table.columns) == schema.names
        assert len(table) == 60
        assert table["visits"].between(0, 30).all()
        assert table["age"].between(18, 99).all()
        assert set(table["code"].dropna()) <= {"01", "02", "NA"}
        assert table["dose"].dropna().between(0.1, 100.0).all()
    assert counted.sample(30, seed=3).equals(counted.sample(30, seed=3))
    assert not counted.sample(30).equals(counted.sample(30))


def test_a_saved_twin_draws_the_same_without_data(counted, tmp_path):
    counted.save(tmp_path / "twin", not_for_release=True)
    with pytest.warns(dpvim.NotForReleaseWarning):
        again = Twin.load(tmp_path / "twin")
    assert again.sample(20, seed=5).equals(counted.sample(20, seed=5))
    assert again.closest(20, seed=5).equals(counted.closest(20, seed=5))
    assert json.loads((tmp_path / "twin" / "privacy.json").read_text()) == again.privacy.to_dict()
    assert again.privacy.mechanism == "counts"
    with pytest.raises(NotPrivateError):
        counted.save(tmp_path / "other")


def test_a_damaged_file_is_refused(counted, tmp_path):
    traits = counted.fit.traits
    broken = traits._replace(wide=traits.wide._replace(base=np.full(3, np.nan, np.float32)))
    damaged = dataclasses.replace(counted.fit, traits=broken)
    dataclasses.replace(counted, fit=damaged).save(tmp_path / "twin", not_for_release=True)
    with pytest.raises(dpvim.FileError, match="traits that are none"):
        Twin.load(tmp_path / "twin")


def _with_a_couple(
    counted: Twin, couple: tuple[int, int], shape: tuple[int, int], largest: float = 1.0
) -> Twin:
    odds = np.linspace(-largest, largest, shape[0] * shape[1], dtype=np.float32)
    together = (odds.reshape(shape),)
    traits = counted.fit.traits
    best, wide = (each._replace(together=together) for each in (traits.best, traits.wide))
    traits = traits._replace(couples=(couple,), best=best, wide=wide)
    return dataclasses.replace(counted, fit=dataclasses.replace(counted.fit, traits=traits))


def test_a_saved_twin_keeps_its_couples(counted, tmp_path):
    sizes = counted.fit.releases.counts.sizes
    twin = _with_a_couple(counted, (0, 2), (sizes[0], sizes[2]))
    twin.save(tmp_path / "twin", not_for_release=True)
    with pytest.warns(dpvim.NotForReleaseWarning):
        again = Twin.load(tmp_path / "twin")
    assert again.fit.traits.couples == ((0, 2),)
    assert again.sample(20, seed=5).equals(twin.sample(20, seed=5))
    assert again.closest(200, seed=5).equals(twin.closest(200, seed=5))
    assert not again.closest(200, seed=5).equals(counted.closest(200, seed=5))


@pytest.mark.parametrize(
    ("couple", "largest"),
    [((2, 0), 1), ((0, 99), 1), ((0, 1), 1), ((0, 2), 1e30), ((0, 2), np.nan)],
)
def test_couples_that_are_none_are_refused(counted, tmp_path, couple, largest):
    sizes = counted.fit.releases.counts.sizes
    twin = _with_a_couple(counted, couple, (sizes[0], sizes[2]), largest)
    twin.save(tmp_path / "twin", not_for_release=True)
    with pytest.raises(dpvim.FileError, match="traits that are none"):
        Twin.load(tmp_path / "twin")


def test_files_from_before_couples_load(counted, tmp_path):
    counted.save(tmp_path / "twin", not_for_release=True)
    path = tmp_path / "twin" / "posterior.npz"
    with archives.opened(path) as archive:
        meta, arrays = dict(archive.meta), archive.arrays(archive.names)
    assert meta.pop("couples") == []
    archives.write(path, meta | {"version": 1}, {k: v for k, v in arrays.items() if k != "meta"})
    with pytest.warns(dpvim.NotForReleaseWarning):
        again = Twin.load(tmp_path / "twin")
    assert again.closest(20, seed=5).equals(counted.closest(20, seed=5))


def test_the_release_costs_what_the_plan_says(counted):
    assert counted.privacy.epsilon <= 5.0
    assert counted.privacy.plan.epsilon(counted.privacy.delta) <= 5.0
    assert counted.privacy.plan.noise_multiplier == pytest.approx(
        CountSynthesizer(counted.schema).plan(400, epsilon=5.0).noise_multiplier
    )


def test_all_that_is_counted_has_norm_one(schema):
    """Squares of what a record counts for, over both rounds, sum to one."""
    plan = small_plan(400)
    wanted = design(schema, plan, target="visits")
    of_pairs = sum((plan.noise_stddev / noise) ** 2 for noise in noise_of_pairs(plan, wanted))
    assert wanted.shares[0] > 0
    assert wanted.shares[0] + of_pairs == pytest.approx(1.0, abs=1e-8)
    assert of_pairs == pytest.approx(wanted.shares[1])


def test_pieces_of_a_file_give_the_counts_of_the_whole(patients, schema, tmp_path, monkeypatch):
    write_table(patients, tmp_path / "patients.parquet")
    monkeypatch.setattr("dpvim.synthesis.tables._PIECE_ROWS", 37)
    whole, pieces = (
        synthesize(source, schema, epsilon=5.0, components=2, seed=0)
        for source in (patients, tmp_path / "patients.parquet")
    )
    for a, b in zip(whole.fit.releases.noisy, pieces.fit.releases.noisy, strict=True):
        np.testing.assert_array_equal(a.counts, b.counts)


def test_a_private_number_of_rows_is_estimated_from_the_counts(patients, schema):
    made = synthesize(
        patients,
        schema,
        epsilon=20.0,
        components=2,
        relation="add_or_remove",
        num_examples=1000,
        seed=0,
    )
    assert made.num_rows == 1000
    assert made.fit.releases.num_rows == pytest.approx(400, abs=40)
    assert made.fit.releases.num_rows != 400


def test_what_is_asked_depends_on_releases_alone(patients, schema, monkeypatch):
    """Other data, the same answers: the same groups."""
    plan = small_plan(400)
    wanted = design(schema, plan)
    asked = []

    def answer(self, cells, marginals, *, share):
        asked.append((cells, tuple(marginals), share))
        shapes = [tuple(cells.sizes[c] for c in marginal.columns) for marginal in marginals]
        fixed = np.random.default_rng(0)
        return [
            fit_module.NoisyMarginal(m.columns, fixed.integers(0, 50, shape), 4.0)
            for m, shape in zip(marginals, shapes, strict=True)
        ]

    monkeypatch.setattr(CountMechanism, "release", answer)
    for frame in (patients, patients.iloc[::-1].assign(age=40)):
        table = dpvim.synthesis.encoding.encode(frame, schema)
        codes = codes_of(table, schema, wanted.grids)
        release(CountMechanism(plan, SecretStreams(0), lambda codes=codes: [codes]), wanted)
    (first, second), (again, pairs) = asked[:2], asked[2:]
    for one, other in ((first, again), (second, pairs)):
        assert one[1:] == other[1:]
        for a, b in zip(one[0].of_code, other[0].of_code, strict=True):
            np.testing.assert_array_equal(a, b)


def test_one_column_is_a_table_too():
    schema = Schema((Binary(name="ill", levels=("no", "yes"), reviewed=True),))
    frame = pd.DataFrame({"ill": ["yes"] * 300 + ["no"] * 700})
    made = synthesize(frame, schema, epsilon=2.0, seed=0)
    # Enough rows that every point of the traits has some: these are even, then.
    assert (made.closest(20_000)["ill"] == "yes").mean() == pytest.approx(0.3, abs=0.02)


@pytest.mark.long
def test_intervals_of_shares_and_differences_hold():
    """Many tables of three columns with a known truth, with defaults."""
    schema = Schema(tuple(Binary(name=name, levels=("no", "yes"), reviewed=True) for name in "abc"))
    joint = np.random.default_rng(0).dirichlet(np.ones(8)).reshape(2, 2, 2)
    cells = list(itertools.product((0, 1), repeat=3))
    truth_mean = joint[1].sum()
    held = []
    for seed in range(30):
        rng = np.random.default_rng(seed)
        rows = np.array(cells)[rng.choice(8, 2000, p=joint.ravel())]
        frame = pd.DataFrame(np.where(rows == 1, "yes", "no"), columns=list("abc"))
        made = synthesize(frame, schema, epsilon=0.5, components=8, seed=seed)
        shares = [(t["a"] == "yes").mean() for t in made.datasets(20, 20_000, seed=seed)]
        within = np.mean([p * (1 - p) / 20_000 for p in shares])
        total = (1 + 1 / 20) * np.var(shares, ddof=1) - within
        half = stats.t.ppf(0.975, 19) * np.sqrt(max(total, 0))
        held.append(abs(np.mean(shares) - truth_mean) <= half)
    assert np.mean(held) >= 0.83  # 95 % with 30 tables: below 83 % once in a thousand


def test_more_rows_have_more_groups():
    schema = Schema(tuple(Integer(name=name, lower=0, upper=999, reviewed=True) for name in "ab"))
    sizes = []
    for rows in (400, 10_000, 100_000):
        plan = small_plan(rows)
        table = np.random.default_rng(0).integers(0, 240, size=(rows, 2))
        mechanism = CountMechanism(plan, SecretStreams(0), lambda table=table: [table])
        found = release(mechanism, design(schema, plan))
        sizes.append(found.groups[0].size)
    assert sizes[0] <= 26
    assert 20 < sizes[1] < 36 < sizes[2] < 50
