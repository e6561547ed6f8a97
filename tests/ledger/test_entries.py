"""Entries: what is written is what is read, and what is no entry is refused."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledgers import plan_of

from dpvim.ledger.entries import (
    Booked,
    BookedSelection,
    Bound,
    Declared,
    Repaired,
    Settled,
    as_text,
    from_fields,
    to_fields,
)

TEXT = st.text(max_size=20)
NUMBER = st.floats(0, 1e6)
NOISE = st.floats(0.1, 100.0)
DELTA = st.floats(1e-12, 0.5)
ENTRIES = st.one_of(
    st.builds(
        Declared,
        name=TEXT,
        epsilon=st.floats(1e-6, 1e6),
        delta=DELTA,
        relation=st.sampled_from(["zero_out", "replace_one"]),
        unit=st.sampled_from(["record", "person"]),
        time=TEXT,
        format=st.just("dpvim ledger"),
        version=st.just(1),
    ),
    st.builds(Bound, fingerprint=TEXT, key=TEXT, note=TEXT, time=TEXT),
    st.builds(
        Booked,
        id=TEXT,
        purpose=TEXT,
        mechanism=TEXT,
        plan=st.builds(
            lambda noise, steps: dataclasses.asdict(plan_of(noise, num_steps=steps)),
            NOISE,
            st.integers(1, 10**6),
        ),
        runs=st.integers(1, 100),
        epsilon=NUMBER,
        delta=DELTA,
        total=NUMBER,
        seeded=st.booleans(),
        time=TEXT,
    ),
    st.builds(
        BookedSelection,
        id=TEXT,
        purpose=TEXT,
        trial=st.lists(
            st.builds(lambda noise: dataclasses.asdict(plan_of(noise)), NOISE), min_size=1
        ),
        mean=st.floats(1.5, 100.0),
        shape=st.floats(0, 5),
        epsilon=NUMBER,
        delta=DELTA,
        total=NUMBER,
        seeded=st.booleans(),
        time=TEXT,
    ),
    st.builds(Settled, id=TEXT, steps=st.integers(0, 100), epsilon=NUMBER, total=NUMBER),
    st.builds(Repaired, torn=TEXT, note=TEXT, time=TEXT),
)


@given(entry=ENTRIES)
def test_what_is_written_is_what_is_read(entry):
    text = as_text(entry)
    assert "\n" not in text
    assert from_fields(json.loads(text)) == entry


@given(entry=ENTRIES, name=st.text(min_size=1, max_size=5))
def test_entries_with_other_fields_are_refused(entry, name):
    fields = to_fields(entry)
    changed = dict(fields)
    changed.pop(name, None)
    changed = changed if changed != fields else {**fields, name: 1}
    with pytest.raises(ValueError, match="newer dpvim"):
        from_fields(changed)


def test_entries_of_newer_versions_and_plans_that_are_none_are_refused():
    declared = Declared(
        name="x", epsilon=1.0, delta=0.1, relation="zero_out", unit="record", time="", version=9
    )
    with pytest.raises(ValueError, match="version 9"):
        from_fields(to_fields(declared))
    booked = Booked(
        id="a",
        purpose="b",
        mechanism="counts",
        plan={**dataclasses.asdict(plan_of()), "num_steps": 0},
        runs=1,
        epsilon=1.0,
        delta=0.1,
        total=1.0,
        seeded=False,
        time="",
    )
    with pytest.raises(ValueError, match="num_steps"):
        from_fields(to_fields(booked))


@pytest.mark.parametrize(
    ("changed", "match"),
    [({"trial": []}, "at least one"), ({"trial": [3]}, "plans"), ({"mean": 0.5}, "mean")],
)
def test_selections_that_are_none_are_refused(changed, match):
    booked = BookedSelection(
        id="a",
        purpose="b",
        **({"trial": [dataclasses.asdict(plan_of())], "mean": 4.0} | changed),
        shape=1.0,
        epsilon=1.0,
        delta=0.1,
        total=1.0,
        seeded=False,
        time="",
    )
    with pytest.raises(ValueError, match=match):
        from_fields(to_fields(booked))
