"""Hostile arguments: refused by an error of ours before anything is compiled or booked."""

import argument_doors
import pytest
from fuzz_harness import Harness, WrongOutcomeError, explore, outcome_of

CASES = 25  # at a door with a share of one: five hundred at all doors together


@pytest.fixture(scope="module", autouse=True)
def _scratch():
    yield
    argument_doors.remove_scratch()


DOORS = argument_doors.harnesses()


@pytest.mark.parametrize("harness", DOORS, ids=[door.name for door in DOORS])
def test_arguments(harness):
    assert explore(harness, max(4, round(CASES * harness.share)))


def test_a_call_that_books_and_then_fails_is_seen():
    """The watch over the ledger must be able to fail."""

    def run(case):
        with argument_doors._ledger_watched() as path:
            path.write_bytes(path.read_bytes() + b"\n")
            raise ValueError("refused: too late")

    with pytest.raises(WrongOutcomeError, match="changed the ledger"):
        outcome_of(Harness("late", None, run), None)


def test_a_call_without_faults_is_booked_and_reaches_its_first_step():
    with argument_doors._ledger_watched() as path:
        before = path.read_bytes()
        argument_doors._fit({**argument_doors._FIT, "ledger": path})
        assert path.read_bytes() != before
