"""Drawn rows obey the constraints, whatever the model; dates and groups go all the way through."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
import pytest

import dpvim
from dpvim.synthesis import constrained
from dpvim.synthesis.analysis.pooling import analyze
from dpvim.synthesis.constrained import (
    ConstraintError,
    broken_shares,
    check_possible,
    given_constraints,
)
from dpvim.synthesis.encoding import EncodedTable, encode, obey
from dpvim.synthesis.fitting import make_synthesizer, synthesize
from dpvim.synthesis.schema import (
    Binary,
    Categorical,
    Count,
    Date,
    Integer,
    Schema,
    SchemaError,
)
from dpvim.synthesis.tables import read_table
from dpvim.synthesis.twin import Twin

SIZE = 10
PAIR = Schema(
    (
        Integer(name="a", lower=0, upper=SIZE - 1),
        Integer(name="b", lower=0, upper=SIZE - 1, nullable=True),
    ),
    constraints=("a > b",),
)


def rows_from(rng, a_from=0, gaps=0.0):
    """A model without any relation of its columns."""

    def rows(num_rows):
        a, b = rng.integers(a_from, SIZE, num_rows), rng.integers(0, SIZE, num_rows)
        return EncodedTable({"a": a, "b": b}, {"b": rng.random(num_rows) < gaps})

    return rows


def test_what_is_left_is_the_model_given_the_constraint():
    """Every allowed pair of values is as frequent as every other one."""
    drawn = given_constraints(rows_from(np.random.default_rng(0)), PAIR)(90_000)
    a, b = drawn.values["a"], drawn.values["b"]
    assert (a > b).all()
    counts = np.bincount(a * SIZE + b, minlength=SIZE**2).reshape(SIZE, SIZE)
    allowed = counts[np.tril_indices(SIZE, -1)]
    np.testing.assert_allclose(allowed, 2000, atol=5 * np.sqrt(2000))


def test_gaps_are_no_break():
    drawn = given_constraints(rows_from(np.random.default_rng(0), gaps=0.5), PAIR)(2000)
    gap = drawn.missing["b"]
    assert obey(drawn, PAIR).all()
    assert (drawn.values["a"] <= drawn.values["b"])[gap].any()
    # 0.5 of all rows have a gap and stay; of the others 45 in 100 do.
    assert 0.64 < gap.mean() < 0.74
    shares = broken_shares(rows_from(np.random.default_rng(0), gaps=0.5), PAIR, 10_000)
    assert 0.25 < shares["a > b"] < 0.3


def test_rows_that_are_hardly_ever_found_are_repeated(monkeypatch):
    monkeypatch.setattr(constrained, "_ROUNDS", 2)
    rare = dataclasses.replace(PAIR, constraints=("a == 9 and b == 0",))
    drawn = given_constraints(rows_from(np.random.default_rng(0)), rare)(4000)
    assert set(drawn.values["a"]) == {9}
    assert set(drawn.values["b"]) == {0}
    assert drawn.num_rows == 4000


def test_a_constraint_that_no_row_obeys_is_said(monkeypatch):
    monkeypatch.setattr(constrained, "_ROUNDS", 2)
    never = dataclasses.replace(PAIR, constraints=("a > b", "b > a"))
    with pytest.raises(ConstraintError, match="'a > b', 'b > a', which none of many rows obeys"):
        given_constraints(rows_from(np.random.default_rng(0)), never)(10)


def test_a_schema_without_constraints_changes_nothing():
    rows = rows_from(np.random.default_rng(0))
    assert given_constraints(rows, Schema(PAIR.columns)) is rows


def test_impossible_constraints_are_refused_before_a_table_is_read():
    never = dataclasses.replace(PAIR, constraints=("a > b", "a > 9"))
    with pytest.raises(
        SchemaError, match="expected ones that declared values can obey, got 'a > 9"
    ):
        make_synthesizer(never)
    check_possible(PAIR)
    check_possible(Schema(PAIR.columns))


# Twins

STAYS = Schema(
    (
        Integer(name="age", lower=0, upper=99, reviewed=True),
        Count(name="years_married", upper=80, reviewed=True),
        Date(name="start", lower="2020-01-01", upper="2020-12-31", reviewed=True),
        Date(
            name="end",
            lower="2020-01-01",
            upper="2021-12-31",
            format="%d.%m.%Y",
            nullable=True,
            reviewed=True,
        ),
        Categorical(
            name="code", levels=("A", "B", "other"), prefix=1, outside="other", reviewed=True
        ),
        Binary(name="ill", levels=("no", "yes"), reviewed=True),
    ),
    constraints=("age >= years_married", "end >= start", "not (code == 'A' and ill == 'yes')"),
)


def stays(rows=300):
    rng = np.random.default_rng(0)
    age = rng.integers(0, 100, rows)
    start = np.datetime64("2020-01-01") + rng.integers(0, 366, rows)
    end = pd.Series(start + rng.geometric(0.1, rows) - 1).dt.strftime("%d.%m.%Y")
    code = rng.choice(["A01", "B99.1", "Z"], rows)
    return pd.DataFrame(
        {
            "age": age,
            "years_married": (age * rng.random(rows)).astype(int),
            "start": start,
            "end": end.where(rng.random(rows) < 0.9, ""),
            "code": code,
            "ill": np.where((rng.random(rows) < 0.4) & (code != "A01"), "yes", "no"),
        }
    )


@pytest.fixture(scope="module")
def counted():
    return synthesize(stays(), STAYS, epsilon=5.0, components=4, seed=0, progress=False)


def check(table, rows):
    assert len(table) == rows
    assert (table["age"] >= table["years_married"]).all()
    assert not (table["end"] < table["start"]).any()
    assert not ((table["code"] == "A") & (table["ill"] == "yes")).any()
    assert set(table["code"]) <= {"A", "B", "other"}
    assert str(table["start"].dtype) == "datetime64[s]"
    assert table["start"].dt.year.eq(2020).all()


def test_all_tables_from_counts_obey(counted):
    for table in (*counted.datasets(2, 200, seed=1), counted.closest(200, seed=1)):
        check(table, 200)
    assert counted.sample(50, seed=2).equals(counted.sample(50, seed=2))
    shares = counted.broken_shares()
    assert list(shares) == list(STAYS.constraints)
    # With so few points of the traits the model itself does break them.
    assert all(0 < share < 0.5 for share in shares.values())


def test_all_tables_by_dpvi_obey():
    twin = synthesize(
        stays(), STAYS, epsilon=5.0, engine="dpvi", num_steps=20, components=2, seed=0
    )
    check(twin.sample(100, seed=1), 100)
    assert set(twin.broken_shares(1000)) == set(STAYS.constraints)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
# Three small tables: by chance they may vary less between than within.
@pytest.mark.filterwarnings("ignore:The total variance")
def test_files_obey_have_dates_as_declared_and_can_be_analysed(counted, tmp_path, suffix):
    counted.save(tmp_path / "twin", not_for_release=True)
    with pytest.warns(dpvim.NotForReleaseWarning):
        again = Twin.load(tmp_path / "twin")
    assert again.schema == STAYS
    again.write_datasets(tmp_path / "data", 3, 150, suffix=suffix, seed=1, progress=False)
    again.write_closest(tmp_path / "data", 150, suffix=suffix)
    paths = sorted((tmp_path / "data").iterdir())
    for path in paths:
        frame = read_table(path)
        assert obey(encode(frame, STAYS), STAYS).all()
        if suffix == "csv":
            assert frame["end"].str.fullmatch(r"(\d\d\.\d\d\.202\d)?").all()
            assert frame["start"].str.fullmatch(r"2020-\d\d-\d\d").all()
    levels = {"code": ("A", "B", "other"), "ill": ("no", "yes")}
    found = analyze(
        [path for path in paths if "synthetic" in path.name],
        "age ~ start + end",
        levels=levels,
        dates=STAYS.dates,
        missing=STAYS.missing,
        num_rows=300,
        workers=1,
        progress=False,
    )
    assert found.combined.names == ("Intercept", "start", "end")


def test_records_that_break_a_constraint_count_as_they_are():
    """No record is an error, and constraints change nothing of what is counted."""
    broken = stays()
    broken.loc[:100, "years_married"] = 80
    broken.loc[50:150, "end"] = "01.01.2020"
    free = dataclasses.replace(STAYS, constraints=())
    assert (~obey(encode(broken, free), STAYS)).any(axis=1)[:2].all()
    first, second = (
        synthesize(broken, schema, epsilon=5.0, components=4, seed=0, progress=False)
        for schema in (STAYS, free)
    )
    for one, other in zip(first.fit.releases.noisy, second.fit.releases.noisy, strict=True):
        np.testing.assert_array_equal(one.counts, other.counts)
    check(first.sample(50, seed=1), 50)


def test_the_report_says_what_the_constraints_do(counted, tmp_path):
    counted.report(tmp_path / "report.html", [counted.sample(100, seed=1)])
    page = (tmp_path / "report.html").read_text()
    assert "<code>age &gt;= years_married</code>: the model by itself would break it in" in page
    assert "2020-01-01 to 2020-12-31, by the day" in page
    assert "groups of values: A, B, other" in page
