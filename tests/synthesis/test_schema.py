from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dpvim.synthesis
from dpvim.synthesis.constrained import check_possible
from dpvim.synthesis.draft import draft
from dpvim.synthesis.schema import (
    Binary,
    Categorical,
    Count,
    Integer,
    NotReviewedError,
    Ordinal,
    Real,
    Schema,
    SchemaError,
)
from dpvim.synthesis.schema.columns import KINDS

PATIENTS = """
dpvim_schema = 1
missing = ["", "NA"]

[[columns]]
name = "age"
kind = "integer"
lower = 16
upper = 100
not_a_number = 50
reviewed = true

[[columns]]
name = "sex"
kind = "categorical"
levels = ["Female", "Male", "Other"]
outside = "Other"

[[columns]]
name = "severity"
kind = "ordinal"
levels = [1, 2, 3]
nullable = true

[[columns]]
name = "infected"
kind = "binary"
levels = [false, true]

[[columns]]
name = "visits"
kind = "count"
upper = 50

[[columns]]
name = "crp"
kind = "real"
lower = 0.1
upper = 500
scale = "log"
decimals = 1
nullable = true
outside = "missing"
"""


def entry(**keys):
    return {"dpvim_schema": 1, "columns": [keys]}


def level_entry(**keys):
    return entry(**{"name": "sex", "kind": "categorical", "levels": ["f", "m"], **keys})


def real_entry(**keys):
    return entry(**{"name": "crp", "kind": "real", "lower": 0.5, "upper": 9, **keys})


def integer_entry(**keys):
    return entry(**{"name": "age", "kind": "integer", "lower": 0, "upper": 9, **keys})


def test_a_file_becomes_columns_in_order(tmp_path):
    path = tmp_path / "patients.toml"
    path.write_text(PATIENTS)
    schema = Schema.load(path)
    assert schema.missing == ("", "NA")
    assert schema.columns == (
        Integer(name="age", lower=16, upper=100, not_a_number=50, reviewed=True),
        Categorical(name="sex", levels=("Female", "Male", "Other"), outside="Other"),
        Ordinal(name="severity", levels=(1, 2, 3), nullable=True),
        Binary(name="infected", levels=(False, True)),
        Count(name="visits", upper=50),
        Real(
            name="crp",
            lower=0.1,
            upper=500.0,
            scale="log",
            decimals=1,
            nullable=True,
            outside="missing",
        ),
    )
    assert schema.column("visits").upper == 50
    assert schema.unreviewed == ["sex", "severity", "infected", "visits", "crp"]


def test_rules_that_are_not_declared_have_documented_defaults():
    schema = Schema.from_dict(tomllib.loads(PATIENTS))
    assert schema.column("infected").outside is False
    assert schema.column("severity").outside == "missing"
    assert schema.column("visits").outside == "clamp"
    assert schema.column("visits").not_a_number == 0
    assert schema.column("crp").not_a_number is None


def test_saving_and_loading_again(tmp_path):
    schema = Schema.from_dict(tomllib.loads(PATIENTS))
    schema.save(tmp_path / "again.toml")
    assert Schema.load(tmp_path / "again.toml") == schema


def test_a_file_from_windows_is_read(tmp_path):
    path = tmp_path / "patients.toml"
    path.write_text(PATIENTS.replace("\n", "\r\n"), encoding="utf-8-sig", newline="")
    assert Schema.load(path).names[0] == "age"


def test_the_documented_example_is_a_reviewed_schema():
    page = (Path(__file__).parents[2] / "docs" / "schema.md").read_text()
    schema = Schema.from_dict(tomllib.loads(page.split("```toml\n")[1].split("```")[0]))
    schema.check_reviewed()
    kinds = ["integer", "categorical", "ordinal", "binary", "count", "real"]
    assert [column.kind for column in schema.columns] == [*kinds, "integer", "date", "categorical"]
    assert {*kinds, "date"} == set(KINDS)
    assert len(schema.rules) == 2
    assert any(getattr(column, "groups", None) for column in schema.columns)
    check_possible(schema)


TEXTS = st.text(st.characters(exclude_categories=["Cs"])).map(str.strip)


@given(
    name=TEXTS.filter(bool),
    levels=st.one_of(
        st.lists(TEXTS, min_size=2, max_size=60, unique=True),
        st.lists(st.integers(-(2**53), 2**53), min_size=2, max_size=60, unique=True),
    ),
    comment=st.text(),
)
def test_any_name_level_and_comment_survives_toml(name, levels, comment):
    schema = Schema((Categorical(name=name, levels=tuple(levels)),), missing=("no such level",))
    text = schema.to_toml(header=comment, comments={name: comment})
    assert Schema.from_dict(tomllib.loads(text)) == schema


BOUNDS = st.floats(-1e300, 1e300)


@given(st.tuples(BOUNDS, BOUNDS).filter(lambda pair: pair[0] < pair[1]), st.booleans())
def test_any_bounds_survive_toml(bounds, nullable):
    schema = Schema((Real(name="x", lower=bounds[0], upper=bounds[1], nullable=nullable),))
    assert Schema.from_dict(tomllib.loads(schema.to_toml())) == schema


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, r"dpvim_schema: expected 1, got None. Start the file with dpvim_schema = 1"),
        ({"dpvim_schema": 2}, "expected 1, got 2.*newer dpvim"),
        ({"dpvim_schema": True}, "expected 1, got True"),
        ({"dpvim_schema": 1, "columms": []}, "unknown key 'columms'. Did you mean 'columns'?"),
        ({"dpvim_schema": 1}, r"columns: expected a list of tables, got None.*\[\[columns\]\]"),
        ({"dpvim_schema": 1, "columns": {}}, r"expected a list of tables"),
        ({"dpvim_schema": 1, "columns": []}, "expected at least one column"),
        ({**level_entry(), "missing": "NA"}, "missing: expected a list of texts.*got 'NA'"),
        ({**level_entry(), "missing": []}, "missing: expected a list of texts.*at least one"),
        ({**level_entry(), "missing": [" NA"]}, "without blanks"),
        (
            {**level_entry(levels=[1, 2]), "missing": ["1.0"]},
            r"expected none that stands for a missing value, got \[1\]",
        ),
        (
            {**level_entry(kind="binary", levels=[False, True]), "missing": ["", "true"]},
            r"expected none that stands for a missing value, got \[True\]",
        ),
        ({**level_entry(), "missing": ["m"]}, r"'sex': levels: expected none that stands for.*m"),
        (entry(kind="count", upper=3), "column 1: expected name, upper.*got no name"),
        (entry(name="a"), "column 'a': kind: expected one of 'categorical'.*got None"),
        (entry(name="a", kind="catgorical"), "Did you mean 'categorical'?"),
        (entry(name="a", kind=["real"]), "kind: expected one of"),
        (entry(name="a", kind="categorical"), "expected name, levels.*got no levels. Add it"),
        (entry(name="a", kind="integer", lower=1), "got no upper"),
        (entry(name=" ", kind="count", upper=3), "name: expected a text that is not blank"),
        (entry(name=3, kind="count", upper=3), "name: expected a text"),
        (level_entry(nullabel=True), "'sex': unknown key 'nullabel'. Did you mean 'nullable'?"),
        (level_entry(upper=3), "unknown key 'upper'. Known here: kind, name"),
        (level_entry(nullable="yes"), "nullable: expected true or false, got 'yes'"),
        (level_entry(reviewed=1), "reviewed: expected true or false, got 1"),
        (level_entry(levels="f"), "levels: expected a list, got 'f'"),
        (level_entry(levels=["f"]), "levels: expected 2 to 1000 levels, got 1"),
        (level_entry(levels=list(range(1001))), "expected 2 to 1000 levels, got 1001"),
        (level_entry(levels=["f", 1]), "only texts.*got int, str"),
        (level_entry(levels=[0.5, 1.5]), "only texts.*got float.*quotes"),
        (level_entry(levels=[["f"], ["m"]]), "got list"),
        (level_entry(levels=[True, 1]), "got bool, int"),
        (level_entry(levels=["f", "m", "f"]), r"every level once, got \['f'\]"),
        (level_entry(levels=["f", "m "]), r"no blanks around a level, got \['m '\]"),
        (level_entry(levels=[1, 2**60]), r"at most 2\^53.*as texts"),
        (level_entry(outside="n"), """a declared level, or "missing", got 'n'"""),
        (level_entry(outside="missing"), "Name a level, or set nullable = true"),
        (level_entry(levels=["female", "male"], outside="femal"), "Did you mean 'female'?"),
        (level_entry(levels=[0, 1], outside=True), "a declared level.*got True"),
        (level_entry(kind="binary", levels=["a", "b", "c"]), "two levels, got 3.*categorical"),
        (integer_entry(lower=9), "'age': upper: expected more than the lower bound 9, got 9"),
        (integer_entry(lower=1.0), "lower: expected an integer, got 1.0"),
        (integer_entry(upper="9"), "upper: expected an integer, got '9'. Write it without quotes"),
        (integer_entry(upper=True), "upper: expected an integer, got True"),
        (integer_entry(upper=2**31), "at most 2147483647 in size.*real"),
        (integer_entry(outside="clip"), """expected "clamp", or "missing" if nullable, got 'cl"""),
        (integer_entry(outside="missing"), "set nullable = true"),
        (integer_entry(not_a_number=10), "not_a_number: expected a number from 0 to 9, got 10"),
        (integer_entry(not_a_number=1.5), "not_a_number: expected an integer"),
        (integer_entry(not_a_number=1, nullable=True), "not_a_number: expected nothing, got 1"),
        (entry(name="n", kind="count", upper=0), "more than the lower bound 0, got 0"),
        (entry(name="n", kind="count", lower=1, upper=3), "unknown key 'lower'"),
        (real_entry(lower="a"), "lower: expected a number, got 'a'"),
        (real_entry(lower=True), "lower: expected a number, got True"),
        (real_entry(upper=float("inf")), "upper: expected a finite number, got inf"),
        (real_entry(upper=float("nan")), "upper: expected a finite number, got nan"),
        (real_entry(scale="log2"), "scale: expected .*got 'log2'. Did you mean 'log'?"),
        (real_entry(scale="log", lower=0), "lower: expected more than 0 on a log scale, got 0.0"),
        (real_entry(scale="log", lower=1e300, upper=np.nextafter(1e300, 0)), "upper: expected"),
        (real_entry(scale="log", lower=np.nextafter(9e299, 0), upper=9e299), "well above"),
        (real_entry(decimals=-1), "decimals: expected an integer from 0 to 15, got -1"),
        (real_entry(decimals=True), "decimals: expected an integer"),
        (real_entry(decimals=0), "lower: expected at most 0 decimals, got 0.5"),
        (real_entry(decimals=1, not_a_number=0.55), "not_a_number: expected at most 1 decimals"),
    ],
)
def test_what_a_schema_must_not_say(content, message):
    with pytest.raises(SchemaError, match=f"^patients.toml: (?s:.*){message}"):
        Schema.from_dict(content, source="patients.toml")


def test_columns_that_occur_twice():
    column = Count(name="a", upper=3)
    with pytest.raises(SchemaError, match=r"every name once, got \['a'\]"):
        Schema((column, column))


def test_a_column_that_is_not_there():
    with pytest.raises(SchemaError, match=r"declared column, got 'aeg'\. Did you mean 'age'"):
        Schema((Count(name="age", upper=3),)).column("aeg")


def test_files_that_are_no_schema(tmp_path):
    path = tmp_path / "a.toml"
    with pytest.raises(FileNotFoundError, match=r"a.toml: there is no such file"):
        Schema.load(path)
    path.write_text("levels = [a]")
    with pytest.raises(SchemaError, match=r"a.toml: expected TOML.*line 1"):
        Schema.load(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(SchemaError, match=r"a.toml: expected UTF-8"):
        Schema.load(path)


def test_only_a_reviewed_schema_may_be_used():
    guessed = Schema((Count(name="a", upper=3), Count(name="b", upper=3, reviewed=True)))
    with pytest.raises(NotReviewedError, match=r"got false for 'a'\. .*reviewed = true"):
        guessed.check_reviewed()
    Schema((Count(name="a", upper=3, reviewed=True),)).check_reviewed()


def test_the_schema_needs_no_jax_and_no_other_layer():
    folder = Path(dpvim.synthesis.__file__).parent
    names = ("tables", "encoding", "draft", "values", "formulas")
    for path in [*(folder / "schema").glob("*.py"), *(folder / f"{name}.py" for name in names)]:
        for node in ast.walk(ast.parse(path.read_text())):
            module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            if module.startswith("dpvim"):
                ground = {"dpvim.files", "dpvim._extras", "dpvim._html", "dpvim._validate"}
                assert module.startswith("dpvim.synthesis.") or module in ground
            if isinstance(node, ast.Import):
                assert not any(alias.name.startswith("jax") for alias in node.names)


# Drafts


@pytest.fixture
def patients():
    rng = np.random.default_rng(0)
    n = 200
    return pd.DataFrame(
        {
            "id": np.arange(1000, 1000 + n).astype(str),
            "age": rng.integers(17, 98, n).astype(str),
            "sex": rng.choice(["Female", "Male", "Other"], n),
            "infected": rng.choice(["0", "1"], n),
            "grade": rng.choice(["1", "2", "3", ""], n),
            "code": rng.choice(["01", "02", "10"], n),
            "visits": rng.negative_binomial(1, 0.1, n).astype(str),
            "bmi": rng.normal(25, 4, n).round(1).astype(str),
            "crp": np.exp(rng.normal(1, 3, n)).astype(str),
            "note": [f"text {i}" for i in range(n)],
            "country": "FI",
            "empty": "",
            "weight": ["unknown", *rng.integers(40, 120, n - 1).astype(str)],
            "admitted": pd.Timestamp("2020-01-01"),
            "alive": rng.random(n) < 0.5,
            "year": [None, *rng.integers(1950, 2000, n - 1).astype(float)],
        }
    )


def test_a_draft_has_a_sensible_kind_for_each_column(patients):
    guess = draft(patients)
    schema = guess.schema
    assert schema.column("age") == Integer(name="age", lower=10, upper=100)
    assert schema.column("sex") == Categorical(name="sex", levels=("Female", "Male", "Other"))
    assert schema.column("infected") == Binary(name="infected", levels=(0, 1))
    assert schema.column("grade") == Categorical(name="grade", levels=(1, 2, 3), nullable=True)
    assert schema.column("code") == Categorical(name="code", levels=("01", "02", "10"))
    assert schema.column("visits").kind == "count"
    assert schema.column("bmi") == Real(name="bmi", lower=10.0, upper=40.0, decimals=1)
    assert schema.column("crp").scale == "log"
    assert schema.column("weight") == Integer(name="weight", lower=40, upper=120)
    assert "not numbers" in guess.comments["weight"]
    assert schema.column("alive") == Binary(name="alive", levels=(False, True))
    assert schema.column("year") == Integer(name="year", lower=1950, upper=2000, nullable=True)
    assert set(guess.left_out) == {"id", "note", "country", "empty", "admitted"}


def test_nothing_in_a_draft_is_reviewed_and_it_says_so(patients):
    guess = draft(patients)
    text = guess.to_toml()
    assert Schema.from_dict(tomllib.loads(text)) == guess.schema
    assert guess.schema.unreviewed == guess.schema.names
    assert text.startswith("# A draft of a schema, read off the data. It is as private as they")
    assert text.count("reviewed = false") == len(guess.schema.columns)
    assert "#   'note': many different texts" in text
    with pytest.raises(NotReviewedError):
        guess.schema.check_reviewed()


def test_very_large_integers_are_drafted_as_reals():
    values = [*range(11), 10**12] * 3
    column = draft(pd.DataFrame({"x": values})).schema.column("x")
    assert column == Real(name="x", lower=0, upper=10**12, decimals=0)


def test_a_table_that_cannot_be_drafted():
    with pytest.raises(SchemaError, match=r"got none\. 'a': the same value in every row"):
        draft(pd.DataFrame({"a": ["x", "x"]}))


MIXED = st.one_of(st.none(), st.integers(), st.floats(), st.text(max_size=4), st.booleans())


@given(st.lists(MIXED, min_size=1, max_size=40))
def test_any_column_can_be_looked_at_for_a_draft(values):
    values = [*values, None, None]
    known = ["a", "b"] * len(values)
    frame = pd.DataFrame({"x": pd.Series(values, dtype=object), "y": known[: len(values)]})
    guess = draft(frame)
    assert Schema.from_dict(tomllib.loads(guess.to_toml())) == guess.schema


def test_a_draft_knows_missing_values_however_they_are_written():
    frame = pd.DataFrame({"a": ["1", "2", "-9"] * 10, "b": [1.0, 2.0, -9.0] * 10})
    for column in draft(frame, missing=("", "-9.0")).schema.columns:
        assert column.levels == (1, 2)
        assert column.nullable
