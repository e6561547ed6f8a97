"""The audit bites in databases, too: every fault that is planted there is caught."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import Any

import pyarrow.parquet as pq
import pytest
import spark_session
from planting import patch

from dpvim.audit.counts.databases import database_checks
from dpvim.privacy.counts import CountMechanism
from dpvim.synthesis.databases import counting, reading
from dpvim.synthesis.databases.connection import CountedByQueries


def _rows(change: Any) -> Any:
    """Rows of the table are other ones before they are counted."""

    def make(old: Any) -> Any:
        return lambda table, readers: change(old(table, readers))

    return patch(counting, "layers", make)


def _without_guards() -> Any:
    """Numbers of records are not compared: by the source of counts, or by the mechanism."""

    def make(old: Any) -> Any:
        def faulty(self: CountedByQueries, cells: Any, marginals: Any) -> Any:
            table = self._table
            found: list[Any] = []
            asked = counting.queries(table.expression, self._readers, self._grids, cells, marginals)
            for query in asked:
                found += query.arrays(table.query(query.expression))
            return found

        return faulty

    return patch(CountedByQueries, "count", make)


def _twice() -> Any:
    """A join with a table in which missing values have two rows."""
    return _rows(lambda t: t.union(t.filter(t.v0 == reading._GAP)))


def _gaps_left_out() -> Any:
    """A comparison with NULL is neither true nor false, and rows are lost."""
    return _rows(lambda t: t.filter(t.v1 >= 0))


def _unknown_left_out() -> Any:
    """Records with a level that was not declared are no records."""
    return _rows(lambda t: t.filter(t.v0 != reading._OUTSIDE))


def _gaps_elsewhere() -> Any:
    """NaN is the largest number for engines, and not missing."""
    return patch(reading, "_is_nan", lambda old: lambda value: value.isnull() & False)


def _no_noise() -> Any:
    def make(old: Any) -> Any:
        def faulty(self: CountMechanism, marginal: Any, exact: Any, weight: float) -> Any:
            noisy = old(self, marginal, exact, weight)
            from_database = isinstance(self._source, CountedByQueries)
            return noisy._replace(counts=exact) if from_database else noisy

        return faulty

    return patch(CountMechanism, "_noisy", make)


FAULTS = {
    "a record counted twice by a join": _twice,
    "records with gaps left out": _gaps_left_out,
    "unknown levels left out": _unknown_left_out,
    "not a number is a number": _gaps_elsewhere,
    "counts of databases without noise": _no_noise,
}


@contextmanager
def planted(name: str, guards: bool) -> Any:
    with ExitStack() as stack:
        stack.enter_context(FAULTS[name]())
        if not guards:
            stack.enter_context(_without_guards())
        yield


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_in_databases_is_caught(name):
    """Also without the comparison of numbers of records, which finds most of them before."""
    with planted(name, guards=False):
        assert min(finding.p_value for finding in database_checks()) == 0, name


def test_records_that_are_lost_or_doubled_stop_a_run():
    with planted("a record counted twice by a join", guards=True):
        first = next(iter(database_checks()))
    assert first.p_value == 0
    assert first.observed == "InterruptedReadError"


def test_the_library_passes():
    found = list(database_checks())
    assert [finding.p_value for finding in found] == [1, 1], found


def test_without_an_engine_there_is_nothing_to_attack(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert list(database_checks()) == []


# -- Spark ----------------------------------------------------------------------------------------


@pytest.fixture
def put(spark, tmp_path):
    """Puts a table into the session of the tests."""

    @contextmanager
    def in_folder(table: Any) -> Any:
        (tmp_path / "people").mkdir(exist_ok=True)
        pq.write_table(table, tmp_path / "people" / "a.parquet")
        yield spark_session.address(tmp_path / "people")

    return in_folder


@pytest.mark.long
@pytest.mark.parametrize("name", ["a record counted twice by a join", "records with gaps left out"])
def test_faults_in_spark_are_caught(put, name):
    """That NaN is a number is no fault there: Ibis tells Spark that it is missing."""
    with planted(name, guards=False):
        assert min(finding.p_value for finding in database_checks(put)) == 0, name


@pytest.mark.long
def test_the_library_passes_in_spark(put):
    found = list(database_checks(put))
    assert [finding.p_value for finding in found] == [1, 1], found
