"""Entries of a schema as forms."""

from __future__ import annotations

import pytest

from dpvim.serve.forms import changed, entries_of, fields_of, schema_of
from dpvim.synthesis.schema import SchemaError

TICKED = {"reviewed": "on"}
NUMBER = {
    "name": "age",
    "kind": "integer",
    "lower": 23,
    "upper": 87,
    "outside": "clamp",
    "not_a_number": 23,
    "reviewed": False,
}
LEVELS = {
    "name": "code",
    "kind": "categorical",
    "levels": ["a", "b", "c"],
    "outside": "a",
    "reviewed": False,
}


def test_a_form_that_nobody_touched_changes_nothing(schema):
    entries = entries_of(schema)
    for entry in entries:
        fields = fields_of(entry)
        form = {key: fields[key] for key in ("kind", "levels", "lower", "upper") if fields[key]}
        ticked = [key for key in ("nullable", "reviewed") if fields[key]]
        new = changed(entry, {**form, **dict.fromkeys(ticked, "on")}, schema)
        assert schema_of([new], schema).columns == schema_of([entry], schema).columns


def test_bounds():
    new = changed(NUMBER, {"kind": "integer", "lower": "0", "upper": " 120 ", **TICKED})
    assert (new["lower"], new["upper"], new["reviewed"]) == (0, 120, True)
    assert "not_a_number" not in new
    assert "nullable" not in NUMBER
    as_count = changed(NUMBER, {"kind": "count", "lower": "0", "upper": "120"})
    assert (as_count["kind"], "lower" in as_count) == ("count", False)
    as_real = changed(NUMBER, {"kind": "real", "lower": "0.5", "upper": "1e2", "nullable": "on"})
    assert (as_real["lower"], as_real["upper"], as_real["nullable"]) == (0.5, 100.0, True)


def test_levels():
    new = changed(LEVELS, {"levels": "x\r\n\r\n y \r\n", **TICKED})
    assert (new["levels"], new["kind"], "outside" in new) == (["x", "y"], "binary", False)
    assert changed(LEVELS, {"levels": "a\nd\ne"})["outside"] == "a"
    numbers = {**LEVELS, "levels": [1, 2, 3], "outside": 1}
    assert changed(numbers, {"levels": "1\n2\n3\n4"})["levels"] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("entry", "form"),
    [
        (NUMBER, {"lower": "120", "upper": "0"}),
        (NUMBER, {"lower": "", "upper": "9"}),
        (NUMBER, {"kind": "categorical", "lower": "0", "upper": "9"}),
        (NUMBER, {"kind": "real", "lower": "nan", "upper": "inf"}),
        (NUMBER, {"kind": "count", "lower": "3", "upper": "9"}),
        (LEVELS, {"levels": ""}),
        (LEVELS, {"levels": "a\na"}),
        (LEVELS, {"kind": "ordinal"}),
        ({**LEVELS, "levels": [1, 2, 3], "outside": 1}, {"levels": "1\nx"}),
    ],
)
def test_what_no_schema_could_have_is_refused(entry, form):
    with pytest.raises(SchemaError):
        changed(entry, form)
