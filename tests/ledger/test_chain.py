"""Every change of a ledger's file is found, and its line is named."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledgers import lines_of, some_entries

from dpvim.ledger import chain
from dpvim.ledger.book import Ledger
from dpvim.ledger.entries import LedgerError


@pytest.fixture
def ledger(tmp_path):
    return some_entries(tmp_path)


def found_in(ledger):
    """Numbers of the lines with problems, and what is said; such a ledger cannot be opened."""
    problems = ledger.check()
    with pytest.raises(LedgerError, match="the ledger is damaged: line") as refused:
        Ledger(ledger.path)
    assert str(problems[0]) in str(refused.value)
    assert "dpvim ledger check" in str(refused.value)
    return [problem.line for problem in problems], "; ".join(map(str, problems))


def test_a_ledger_as_it_was_written_has_no_problems(ledger):
    assert ledger.check() == []
    assert len(lines_of(ledger)) == 5


def test_lines_can_be_read_by_people_and_by_json(ledger):
    first, second, *_ = (json.loads(line) for line in lines_of(ledger))
    assert (first["entry"], first["name"], first["epsilon"]) == ("declared", "people", 1.0)
    assert (second["entry"], second["purpose"]) == ("booked", "first")
    assert second["plan"]["noise_multiplier"] == 40.0
    assert second["after"] == first["hash"]


@pytest.mark.parametrize("line", range(1, 6))
def test_a_number_edited_by_hand(ledger, line):
    lines = lines_of(ledger)
    text = lines[line - 1].decode()
    name = '"steps": 3' if line == 5 else '"epsilon": '
    other = '"steps": 2' if line == 5 else '"epsilon": 0'
    assert name in text
    lines[line - 1] = text.replace(name, other, 1).encode()
    ledger.path.write_bytes(b"".join(lines))
    numbers, text = found_in(ledger)
    assert numbers[0] == line
    assert f"line {line}: does not have the hash" in text


def test_an_edit_with_a_new_hash_is_found_by_the_line_after_it(ledger):
    lines = lines_of(ledger)
    fields = json.loads(lines[1])
    after = fields.pop("after")
    del fields["hash"]
    fields["epsilon"] = 1e-6
    lines[1] = chain.linked(json.dumps(fields), after).encode() + b"\n"
    ledger.path.write_bytes(b"".join(lines))
    numbers, text = found_in(ledger)
    assert numbers == [3]
    assert "removed, moved or replaced" in text


def test_an_edit_of_the_last_line_with_a_new_hash_is_found_by_the_head(ledger):
    lines = lines_of(ledger)
    fields = json.loads(lines[-1])
    after = fields.pop("after")
    del fields["hash"]
    fields["steps"] = 0
    lines[-1] = chain.linked(json.dumps(fields), after).encode() + b"\n"
    ledger.path.write_bytes(b"".join(lines))
    numbers, text = found_in(ledger)
    assert numbers == [5]
    assert "people.ledger.head knows: it was replaced" in text


@pytest.mark.parametrize("line", range(1, 5))
def test_a_removed_line(ledger, line):
    lines = lines_of(ledger)
    del lines[line - 1]
    ledger.path.write_bytes(b"".join(lines))
    numbers, text = found_in(ledger)
    assert numbers[0] == line
    assert f"line {line}: was written after a line that is not before it" in text


@pytest.mark.parametrize("kept", range(5))
def test_an_end_that_was_removed(ledger, kept):
    ledger.path.write_bytes(b"".join(lines_of(ledger)[:kept]))
    numbers, text = found_in(ledger)
    assert numbers[0] == kept + 1
    assert f"entries were removed: {5 - kept} of 5 are missing" in text


@pytest.mark.parametrize("line", range(1, 5))
def test_two_lines_that_changed_places(ledger, line):
    lines = lines_of(ledger)
    lines[line - 1], lines[line] = lines[line], lines[line - 1]
    ledger.path.write_bytes(b"".join(lines))
    numbers, text = found_in(ledger)
    assert numbers[0] == line
    assert "moved" in text


def test_a_line_that_was_copied(ledger):
    lines = lines_of(ledger)
    ledger.path.write_bytes(b"".join([*lines[:3], lines[2], *lines[3:]]))
    numbers, text = found_in(ledger)
    assert numbers[0] == 4
    assert "was written after line 2" in text


@pytest.mark.parametrize("missing", [1, 2, 40])
def test_an_end_that_was_cut_off(ledger, missing):
    content = ledger.path.read_bytes()
    ledger.path.write_bytes(content[:-missing])
    if missing == 1:  # the end of the line alone: nothing is lost
        assert ledger.check() == []
        return
    numbers, text = found_in(ledger)
    assert numbers == [5]
    assert "cut short or damaged: 1 of 5" in text


def test_a_head_that_is_missing_or_damaged(ledger):
    head = ledger.path.with_name("people.ledger.head")
    head.write_text("{}")
    assert "people.ledger.head: cannot be read" in found_in(ledger)[1]
    head.unlink()
    assert "people.ledger.head: is missing" in found_in(ledger)[1]


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    return some_entries(tmp_path_factory.mktemp("ledger")).path.read_bytes()


@settings(max_examples=300)
@given(data=st.data())
def test_any_byte_that_is_changed_is_found(content, data):
    """All but the newline at the very end, which is no part of a line."""
    at = data.draw(st.integers(0, len(content) - 2))
    byte = data.draw(st.integers(0, 255).filter(lambda value: value != content[at]))
    changed = content[:at] + bytes([byte]) + content[at + 1 :]
    found = chain.read(changed)
    line = content[:at].count(b"\n") + 1
    assert found.problems
    assert found.problems[0].line == line
    assert len(found.links) < 5 or found.problems


@settings(max_examples=50)
@given(fields=st.dictionaries(st.text(), st.text() | st.integers() | st.floats(allow_nan=False)))
def test_what_is_linked_is_read_again(fields):
    fields = {"entry": "x", **fields}
    fields.pop("after", None)
    fields.pop("hash", None)
    first = chain.linked(json.dumps(fields), chain.START)
    second = chain.linked(json.dumps(fields), chain.hash_of(first))
    found = chain.read(f"{first}\n{second}\n".encode())
    assert found.problems == []
    assert [link.fields for link in found.links] == [fields, fields]
