"""Hostile and broken files: a right result, or an error of ours; little memory in any case."""

import gzip
import io
import tracemalloc

import file_doors
import hostile_values
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fuzz_harness import (
    MOST_MEGABYTES,
    Harness,
    WrongOutcomeError,
    explore,
    outcome_of,
    why_not_ours,
)
from hypothesis import strategies as st

import dpvim
from dpvim.files import MOST_TEXT, existing_file, read_json
from dpvim.ledger import chain, storage
from dpvim.ledger.entries import LedgerError
from dpvim.synthesis import tables
from dpvim.synthesis.schema import Schema, SchemaError
from dpvim.synthesis.tables import TableError, read_pieces, read_table

CASES = 25  # at a door with a share of one: five hundred at all doors together


@pytest.fixture(scope="module", autouse=True)
def _scratch():
    yield
    file_doors.remove_scratch()


DOORS = file_doors.harnesses()


@pytest.mark.parametrize("harness", DOORS, ids=[door.name for door in DOORS])
def test_files(harness):
    assert sum(explore(harness, round(CASES * harness.share)).values()) >= CASES / 2


class TestHarness:
    """It must be able to fail."""

    def test_sees_an_error_from_the_depths(self):
        def run(case):
            {}[case]

        with pytest.raises(WrongOutcomeError, match="KeyError got through"):
            explore(Harness("depths", st.integers(), run), 5)

    def test_sees_a_plain_error_that_nobody_raised(self):
        with pytest.raises(WrongOutcomeError, match=r"names anything|not by us|on purpose"):
            outcome_of(Harness("plain", None, lambda case: float("a: long enough")), None)

    def test_knows_an_error_of_ours(self, tmp_path):
        (tmp_path / "a.npz").write_bytes(b"nothing")
        with pytest.raises(dpvim.FileError) as found:
            dpvim.load(tmp_path / "a.npz")
        assert why_not_ours(found.value) == ""


class TestBombs:
    @pytest.mark.parametrize("name", file_doors.BOMBS)
    def test_are_refused_before_they_are_read(self, name, tmp_path):
        suffix, content = file_doors.bomb_of(name)
        path = tmp_path / f"bomb{suffix}"
        path.write_bytes(content)
        tracemalloc.start()
        try:
            with pytest.raises((dpvim.FileError, TableError), match=r"unfold|too large"):
                (dpvim.load if suffix == ".npz" else read_table)(path)
            peak = tracemalloc.get_traced_memory()[1] / 2**20
        finally:
            tracemalloc.stop()
        assert peak < MOST_MEGABYTES / 10  # a few blocks, whatever the bomb holds

    def test_of_parquet_runs_of_equal_values(self, tmp_path, monkeypatch):
        monkeypatch.setattr(tables, "_ALWAYS_READ", 2**20)
        path = tmp_path / "bomb.parquet"
        same = pa.array(np.zeros(500_000, np.int8))
        pq.write_table(pa.table({f"c{i}": same for i in range(10)}), path)
        assert path.stat().st_size < 25_000  # for 5 MB
        before = pa.total_allocated_bytes()
        for read in (read_table, lambda path: next(read_pieces(path))):
            with pytest.raises(TableError, match="unfolds"):
                read(path)
        assert pa.total_allocated_bytes() - before < 2**20

    def test_a_table_that_compresses_well_is_read(self, tmp_path):
        path = tmp_path / "a.csv.gz"
        path.write_bytes(gzip.compress(b"a\n" + b"1\n" * 500_000))
        assert len(read_table(path)) == 500_000

    def test_a_size_that_lies_is_found_out(self, tmp_path):
        content = hostile_values.bomb("meta.json", 100)
        path = tmp_path / "a.npz"
        path.write_bytes(hostile_values.understated(content, "meta.json", 10))
        with pytest.raises(dpvim.FileError):
            dpvim.load(path)

    def test_giant_header_of_an_array(self, tmp_path):
        header = b"\x93NUMPY\x02\x00" + (2**31).to_bytes(4, "little") + b"{" * 100
        path = tmp_path / "a.npz"
        path.write_bytes(hostile_values.zipped([("meta.json", b"{}"), ("steps.npy", header)]))
        with pytest.raises(dpvim.FileError):
            dpvim.load(path)


class TestSizes:
    """Files of settings have a size beyond which they are not read; sparse ones cost nothing."""

    @staticmethod
    def sparse(path, size):
        with open(path, "wb") as file:
            file.truncate(size)
        return path

    def test_json_and_toml(self, tmp_path):
        path = self.sparse(tmp_path / "a.toml", MOST_TEXT + 1)
        with pytest.raises(dpvim.FileError, match="not read"):
            read_json(path)
        with pytest.raises(SchemaError, match="not read"):
            Schema.load(path)

    def test_ledger(self, tmp_path):
        path = self.sparse(tmp_path / "a.ledger", storage._MOST_BYTES + 1)
        with pytest.raises(LedgerError, match="not read"):
            dpvim.Ledger(path)

    def test_devices_and_folders_are_no_files(self, tmp_path):
        for path in ("/dev/zero", tmp_path):
            with pytest.raises(dpvim.FileError, match="expected a file"):
                existing_file(path)


def test_statement_that_is_no_number_claims_nothing(tmp_path):
    """A comparison with NaN is false: it must not pass for an epsilon that is large enough."""
    import whole_files

    files = dict(whole_files.twin_of_counts())
    text = files["privacy.json"].decode()
    epsilon = text.split('"epsilon": ')[1].split(",")[0]
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    for claim in ("NaN", '"1"', "null", "[]", "0.1"):
        changed = text.replace(f'"epsilon": {epsilon}', f'"epsilon": {claim}')
        (tmp_path / "privacy.json").write_text(changed)
        with pytest.raises(dpvim.FileError, match="privacy statement"):
            dpvim.Twin.load(tmp_path)


def test_arrays_of_objects_are_never_unpickled(tmp_path):
    buffer = io.BytesIO()
    np.save(buffer, np.array([print], object), allow_pickle=True)
    members = hostile_values.read_archive(file_doors.whole_files.saved_fit())
    members["loc.npy"] = buffer.getvalue()
    path = tmp_path / "a.npz"
    path.write_bytes(hostile_values.zipped([*members.items()]))
    with pytest.raises(dpvim.FileError):
        dpvim.load(path)


def test_a_line_of_a_ledger_that_is_too_deep_is_no_entry():
    """Its hash is right, so that it is parsed."""
    line = chain.linked('{"entry": ' + "[" * 100_000 + "]" * 100_000 + "}", chain.START)
    (problem,) = chain.read(f"{line}\n".encode()).problems
    assert problem.text == "is no json"
