"""Levels that are groups of many values: a public rule, and nothing of a value but its group."""

from __future__ import annotations

import tomllib

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpvim.synthesis.encoding import EncodedTable, decode, encode, validation_counts
from dpvim.synthesis.report.text import describe_values
from dpvim.synthesis.schema import Binary, Categorical, Ordinal, Schema, SchemaError

CODES = Categorical(name="x", levels=("A", "B", "other"), prefix=1, outside="other")
CHAPTERS = Categorical(
    name="x",
    levels=("heart", "high pressure", "other"),
    outside="other",
    groups={"heart": ["I*", "Q21"], "high pressure": ["I10", "I11*"]},
)


def levels_of(column, values, **options):
    schema = Schema((column,), **options)
    return decode(encode(pd.DataFrame({"x": values}), schema), schema)["x"].tolist()


def test_a_prefix_names_the_group():
    values = ["A01.2", "A", "B99", "C10", " B1 ", "a1", "other", "AB"]
    expected = ["A", "A", "B", "other", "B", "other", "other", "A"]
    assert levels_of(CODES, values) == expected


def test_listed_values_and_beginnings_have_groups_and_the_longest_counts():
    values = ["I50", "I10", "I10.9", "I11.9", "I", "Q21", "Q21.1", "heart", "J45"]
    high = "high pressure"
    assert levels_of(CHAPTERS, values) == [
        *("heart", high, "heart", high, "heart", "heart", "other", "heart", "other")
    ]
    everything = Binary(name="x", levels=("yes", "no"), groups={"yes": ["1", "y*"], "no": ["*"]})
    assert levels_of(everything, ["1", "yeah", "2", "no", "yes"]) == [
        "yes",
        "yes",
        "no",
        "no",
        "yes",
    ]


def test_what_has_no_group_follows_the_rule_for_what_is_outside():
    gaps = Ordinal(name="x", levels=("low", "high"), groups={"low": ["1"]}, nullable=True)
    assert levels_of(gaps, ["1", "2", "", "high"], missing=("",))[0::3] == ["low", "high"]
    schema = Schema((gaps,), missing=("",))
    counts = validation_counts(pd.DataFrame({"x": ["1", "2", "", "high"]}), schema)
    assert counts.loc["x"].tolist() == [2, 1, 0, 1]


VALUES = st.one_of(st.text("ABIQ012*'", max_size=4), st.text(max_size=6))


@given(st.lists(VALUES, min_size=1, max_size=9))
def test_a_value_is_read_by_itself_and_only_its_group_is_left(values):
    for column in (CODES, CHAPTERS):
        together = levels_of(column, values, missing=("none",))
        assert together == [levels_of(column, [v], missing=("none",))[0] for v in values]
        assert set(together) <= set(column.levels)


@pytest.mark.parametrize("column", [CODES, CHAPTERS], ids=["prefix", "groups"])
def test_groups_survive_toml_and_their_own_tables(column):
    schema = Schema((column, Categorical(name="y", levels=("a", "b"))))
    assert Schema.from_dict(tomllib.loads(schema.to_toml())) == schema
    hash(schema)
    codes = np.arange(3)
    table = EncodedTable({"x": codes, "y": codes % 2}, {})
    assert encode(decode(table, schema), schema).values["x"].tolist() == [0, 1, 2]
    assert describe_values(column).startswith("groups of values: ")


@given(
    st.dictionaries(
        st.sampled_from(["a", "b", "c d", '"', "\n.\x7f"]),
        st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=2).map(str.strip)),
        min_size=1,
    )
)
def test_any_table_of_groups_survives_toml_or_is_refused(groups):
    levels = ("a", "b", "c d", '"', "\n.\x7f".strip())
    try:
        column = Categorical(name="x", levels=levels, groups=groups)
        schema = Schema((column,), missing=("none",))
    except SchemaError:
        return
    assert Schema.from_dict(tomllib.loads(schema.to_toml())) == schema


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"prefix": 0}, "prefix: expected a positive integer, got 0"),
        ({"prefix": True}, "prefix: expected a positive integer, got True"),
        ({"prefix": "1"}, "prefix: expected a positive integer"),
        ({"prefix": 7}, "prefix: expected levels of 7 characters, got 'none'"),
        ({"prefix": 1, "groups": {"A": ["x"]}}, "prefix: expected no groups beside it"),
        ({"prefix": 1, "levels": [1, 2]}, "prefix: expected levels that are texts, got 'int'"),
        ({"groups": {"AA": ["x"]}}, "groups: expected declared levels, got 'AA'"),
        ({"groups": {"A": ["x"], "B": ["x"]}}, r"groups: expected every value once, got \['x'\]"),
        ({"groups": {"A": ["B"]}}, "groups: expected no other level in 'A'"),
        ({"groups": {"A": [" x"]}}, "groups: expected no blanks"),
        ({"groups": {"A": "x"}}, "groups: expected a table"),
        ({"groups": {"A": [1]}}, "groups: expected a table"),
        ({"groups": {}}, "groups: expected a table"),
        ({"groups": ["A"]}, "groups: expected a table"),
        ({"groups": {"A": ["NA"]}}, r"none that stands for a missing value, got \['NA'\]"),
    ],
)
def test_what_a_grouping_rule_must_not_say(keys, message):
    entry = {"name": "x", "kind": "categorical", "levels": ["A", "B"]} | keys
    with pytest.raises(SchemaError, match=f"^schema: (?s:.*){message}"):
        Schema.from_dict({"dpvim_schema": 1, "columns": [entry]})
