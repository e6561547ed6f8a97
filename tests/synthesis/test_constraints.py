"""Constraints between columns: a small grammar that is read, checked and never run."""

from __future__ import annotations

import operator
import tomllib

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpvim.synthesis.encoding import broken_counts, encode, obey
from dpvim.synthesis.schema import (
    Binary,
    Categorical,
    Count,
    Date,
    Integer,
    Ordinal,
    Real,
    Schema,
    SchemaError,
)
from dpvim.synthesis.schema.constraints import parse_constraint

COLUMNS = (
    Integer(name="age", lower=0, upper=99),
    Count(name="years_married", upper=80, nullable=True),
    Categorical(name="sex", levels=("female", "male", "other"), nullable=True),
    Binary(name="pregnant", levels=(False, True)),
    Ordinal(name="before", levels=("mild", "severe", "critical")),
    Ordinal(name="after", levels=("mild", "severe", "critical")),
    Categorical(name="grade", levels=(3, 1, 2)),
    Real(name="dose", lower=0, upper=10, decimals=1),
    Date(name="start", lower="2020-01-01", upper="2020-12-31"),
    Date(name="end", lower="2019-01-01", upper="2021-12-31", resolution="hour"),
    Integer(name="age at entry", lower=0, upper=99),
)
ROWS = pd.DataFrame(
    {
        "age": ["40", "20", "30"],
        "years_married": ["10", "30", ""],
        "sex": ["male", "female", ""],
        "pregnant": ["false", "true", "true"],
        "before": ["severe", "mild", "critical"],
        "after": ["mild", "severe", "critical"],
        "grade": ["1", "2", "3"],
        "dose": ["0.3", "9.9", "5"],
        "start": ["2020-03-01", "2020-03-01", "2020-12-31"],
        "end": ["2020-03-01T00:00", "2020-02-29T23:00", "2021-12-31T10:00"],
        "age at entry": ["40", "21", "1"],
    }
)


def held(*texts):
    schema = Schema(COLUMNS, constraints=texts)
    return obey(encode(ROWS, schema), schema).astype(int).tolist()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("age >= years_married", [1, 0, 1]),
        ("years_married <= age", [1, 0, 1]),
        ("age - years_married >= 15", [1, 0, 1]),
        ("not (sex == 'male' and pregnant == true)", [1, 1, 1]),
        ("not (sex == 'female' and pregnant == True)", [1, 0, 1]),
        ("pregnant != false or sex in ('male', 'other')", [1, 1, 1]),
        ("sex not in ['male']", [0, 1, 1]),
        ("after >= before", [0, 1, 1]),
        ("before < 'critical'", [1, 1, 0]),
        ("'mild' < after", [0, 1, 1]),
        ("before == after", [0, 0, 1]),
        ("grade >= 2", [0, 1, 1]),
        ("grade in (1, 2)", [1, 1, 0]),
        ("dose == 0.3", [1, 0, 0]),
        ("0 < dose < 9.9", [1, 0, 1]),
        ("-dose <= -0.3", [1, 1, 1]),
        ("end >= start", [1, 0, 1]),
        ("end - start < 365", [1, 1, 0]),
        ("end - start >= -1 + 23 - 22", [1, 0, 1]),
        ("end <= start + 300 and start < '2020-06-01'", [1, 1, 0]),
        ("1 + start > end", [1, 1, 0]),
        ("365 - (end - start) > 0", [1, 1, 0]),
        ("Q('age at entry') <= age", [1, 0, 1]),
    ],
)
def test_rows_that_obey(text, expected):
    assert held(text) == [expected]


def test_a_constraint_with_a_missing_value_holds():
    # The last row has no number of years: also a rule that nobody obeys holds for it.
    assert (
        held("years_married < 0", "not years_married >= 0", "sex == 'other' and age > 90")
        == [[0, 0, 1]] * 3
    )


def test_constraints_are_part_of_the_schema():
    schema = Schema(COLUMNS, constraints=["age >= years_married"])
    assert Schema.from_dict(tomllib.loads(schema.to_toml())) == schema
    assert schema.constraints == ("age >= years_married",)
    assert Schema(COLUMNS).constraints == ()
    counts = broken_counts(ROWS, Schema(COLUMNS, constraints=("end >= start", "dose > 1")))
    assert counts.to_dict() == {"end >= start": 1, "dose > 1": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a condition such as"),
        ("age >=", "expected a condition such as"),
        ("age", "expected a comparison, got 'age'"),
        ("1 < 2", "expected a condition on columns"),
        ("aeg > 1", "expected one that is declared, got 'aeg'. Did you mean 'age'"),
        ("sex == male", "got 'male'.*texts in them"),
        ("sex == 'Male'", "a level of 'sex'.*Did you mean 'male'"),
        ("sex > 'male'", "== or != for levels without an order"),
        ("sex == 1", "not level and number"),
        ("age == '1'", "not number and constant"),
        ("age == true", "not number and constant"),
        ("pregnant == 1", "not level and number"),
        ("sex == before", "the same levels"),
        ("'a' == 'b'", "not constant and constant"),
        ("age > start", "not number and date"),
        ("start > 'soon'", "a day in ISO 8601, got 'soon'"),
        ("start + end > start", "numbers and dates in sums"),
        ("age - start > 1", "numbers and dates in sums"),
        ("age * 2 > 1", "a sum or difference"),
        ("age ** 9 ** 9 ** 9 > 1", "a sum or difference"),
        ("sex + 'a' == 'b'", "numbers and dates in sums"),
        ("age in years_married", "a list of constants after in"),
        ("age in []", "a list of constants after in"),
        ("age is 1", "expected ==, !="),
        ("age > 1e999", "a number, a text"),
        ("age > 1j", "a number, a text"),
        ("age > None", "a number, a text"),
        ("age > b'1'", "a number, a text"),
        ("age > 1" + "0" * 400, "a number, a text"),
        ("print(age) > 1", "a column, a constant"),
        ("Q(age) > 1", "a column, a constant"),
        ("Q('age', 1) > 1", "a column, a constant"),
        ("__import__('os').system('true') == 0", "a column, a constant"),
        ("age.real > 1", "a column, a constant"),
        ("[a for a in age] == 1", "a column, a constant"),
        ("(x := age) > 1", "a column, a constant"),
        ("lambda: age", "expected a comparison"),
        ("f'{age}' == 'a'", "a column, a constant"),
        ("age > 1; age < 2", "expected a condition such as"),
        ("age > 1\x00", "expected a condition such as"),
        ("(" * 300 + "age > 1" + ")" * 300, "expected a condition such as"),
        ("not " * 240 + "age", "expected a comparison"),
        ("age > " + "-" * 900 + "1", ""),
        ("age > 1 or " * 200 + "age > 1", "at most 1000 characters"),
    ],
)
def test_what_is_no_constraint(text, message):
    if not message:  # whatever Python's parser makes of it, it is no crash
        parse_or_refuse(text)
        return
    with pytest.raises(SchemaError, match=f"^mine: constraints: (?s:.*){message}"):
        Schema(COLUMNS, source="mine", constraints=(text,))


def test_constraints_are_a_list_of_texts():
    for given_ in ("age > 1", [1], {"a": "b"}):
        content = {"dpvim_schema": 1, "columns": [], "constraints": given_}
        content["columns"] = [{"name": "age", "kind": "count", "upper": 3}]
        with pytest.raises(SchemaError, match="constraints: expected a list of texts"):
            Schema.from_dict(content)


def parse_or_refuse(text, columns=COLUMNS):
    """The constraint, or None if it is refused by an error of ours; any other one is a failure."""
    refused = None
    try:
        return parse_constraint(text, columns)
    except SchemaError as error:
        refused = str(error)
    assert refused.startswith("constraints: ")
    return None


TOKENS = [
    *("age", "sex", "start", "end", "before", "grade", "dose", "pregnant", "Q", "x", "true"),
    *("'male'", "'2020-01-01'", "1", "0.5", "1e400", "'", '"', "\\", "\n", "\0", "#", ":="),
    *("==", "!=", "<", "<=", "in", "not", "and", "or", "is", "+", "-", "*", "**", "/", "%"),
    *("(", ")", "[", "]", "{", "}", ",", ".", ":", "lambda", "if", "else", "await", "*age", "f'{"),
]


@given(st.one_of(st.text(max_size=40), st.lists(st.sampled_from(TOKENS)).map(" ".join)))
def test_hostile_texts_are_errors_of_ours(text):
    rule = parse_or_refuse(text)
    if rule is not None:  # what is accepted works, on any rows
        values = {column.name: np.zeros(2, int) for column in COLUMNS}
        assert rule.holds(values, {}).shape == (2,)


NUMBERS = {"a": Integer(name="a", lower=-9, upper=9), "b": Integer(name="b", lower=-9, upper=9)}
TERMS = st.recursive(
    st.one_of(st.sampled_from(["a", "b"]), st.integers(0, 9).map(str)),
    lambda inner: st.tuples(inner, st.sampled_from("+-"), inner).map(lambda t: f"({' '.join(t)})"),
    max_leaves=4,
)
COMPARISONS = st.tuples(TERMS, st.sampled_from(["==", "!=", "<", "<=", ">", ">="]), TERMS)
CONDITIONS = st.recursive(
    COMPARISONS.map(" ".join),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(lambda t: f"({' '.join(t)})"),
        inner.map("(not {})".format),
    ),
    max_leaves=4,
)
ROW = st.tuples(st.integers(-9, 9), st.integers(-9, 9))


@given(CONDITIONS, st.lists(ROW, min_size=1, max_size=5))
def test_conditions_mean_what_they_mean_in_python(text, rows):
    rule = parse_or_refuse(text, tuple(NUMBERS.values()))
    assert (rule is None) == (not {"a", "b"} & set(text.replace("and", "")))
    if rule is None:  # it is about no column
        return
    a, b = np.array(rows).T
    expected = [eval(text, {"__builtins__": {}}, {"a": x, "b": y}) for x, y in rows]
    assert rule.holds({"a": a, "b": b}, {}).tolist() == expected


@given(st.sampled_from(["<", "<=", "==", ">"]), ROW)
def test_a_row_with_a_gap_always_obeys(op, row):
    rule = parse_constraint(f"a {op} b", tuple(NUMBERS.values()))
    values = {"a": np.array([row[0]] * 2), "b": np.array([row[1]] * 2)}
    named = {"<": operator.lt, "<=": operator.le, "==": operator.eq, ">": operator.gt}
    found = rule.holds(values, {"b": np.array([False, True])})
    assert found.tolist() == [named[op](*row), True]
