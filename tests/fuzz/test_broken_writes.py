"""Writers on a disk that fails: what was there before is there, or what is new is whole."""

import errno
import os
import warnings
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
import whole_files
from hypothesis import given, settings
from hypothesis import strategies as st

import dpvim
from dpvim import checkpoints
from dpvim.ledger.book import Ledger
from dpvim.synthesis.tables import read_table, write_table
from dpvim.synthesis.twin import Twin


class FailingDisk:
    """The disk is full at one of its operations, and at all that follow: nothing more is kept.

    Python's `open` for writing, renames and syncs are counted; a write of a file that is open is
    cut in its middle when it is flushed.
    """

    def __init__(self, at):
        self.left = at

    def __call__(self, real, name):
        def guarded(*args, **kwargs):
            writes = name != "open" or any(
                letter in str(args[1:2] or kwargs.get("mode", "r")) for letter in "wax+"
            )
            if writes:
                self.left -= 1
                if self.left < 0:
                    if name == "write":  # half of it arrives
                        real(args[0], bytes(args[1])[: len(args[1]) // 2])
                    raise OSError(errno.ENOSPC, "No space left on device")
            return real(*args, **kwargs)

        return guarded

    @contextmanager
    def in_place(self):
        with (
            mock.patch.multiple(
                os,
                replace=self(os.replace, "replace"),
                rename=self(os.rename, "rename"),
                fsync=self(os.fsync, "fsync"),
                write=self(os.write, "write"),
            ),
            mock.patch("builtins.open", self(open, "open")),
            mock.patch("io.open", self(open, "open")),
        ):
            yield


def _fit():
    with _file(whole_files.saved_fit()) as path:
        return dpvim.load(path)


@contextmanager
def _file(content):
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_bytes(content)
        yield path


def _twin():
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, content in whole_files.twin_of_counts().items():
            (Path(folder) / name).write_bytes(content)
        return Twin.load(folder)


FILES = {
    "fit": (lambda path: _FIT.save(path), lambda path: dpvim.load(path)),
    "schema": (
        lambda path: whole_files.schema().save(path),
        lambda path: dpvim.Schema.load(path),
    ),
    "table.csv": (lambda path: write_table(whole_files.table(), path), read_table),
    "table.csv.gz": (lambda path: write_table(whole_files.table(), path), read_table),
    "table.parquet": (lambda path: write_table(whole_files.table(), path), read_table),
}
FOLDERS = {
    "twin": (lambda path: _TWIN.save(path, not_for_release=True), Twin.load),
    "datasets": (
        lambda path: _TWIN.write_datasets(path, 2, 5, seed=0, progress=False),
        lambda path: [read_table(each) for each in sorted(path.iterdir())],
    ),
}
_FIT, _TWIN = _fit(), _twin()
FEW = settings(max_examples=12, derandomize=True, database=None)


def _attempt(write, path, at):
    """True if the disk failed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with FailingDisk(at).in_place():
                write(path)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            return True
    return False


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_the_old_one_or_the_new_one(name, tmp_path):
    write, read = FILES[name]
    path = tmp_path / name
    failed = []

    @FEW
    @given(at=st.integers(0, 5), exists=st.booleans())
    def check(at, exists):
        path.unlink(missing_ok=True)
        if exists:
            path.write_bytes(b"the old one")
        failed.append(_attempt(write, path, at))
        if failed[-1]:
            assert path.read_bytes() == b"the old one" if exists else not path.exists()
        else:
            read(path)
        assert {each.name for each in tmp_path.iterdir()} <= {name}  # and no drafts

    check()
    assert set(failed) == {True, False}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_is_whole_or_absent(name, tmp_path):
    write, read = FOLDERS[name]
    failed = []

    @FEW
    @given(at=st.integers(0, 12))
    def check(at):
        path = tmp_path / f"new{len(failed)}"
        failed.append(_attempt(write, path, at))
        if failed[-1]:
            assert not path.exists()
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                read(path)

    check()
    assert set(failed) == {True, False}


def test_a_booking_is_on_the_disk_or_counts_for_nothing(tmp_path):
    failed = []

    @FEW
    @given(at=st.integers(0, 6))
    def check(at):
        folder = tmp_path / str(len(failed))
        folder.mkdir()
        for name, content in whole_files.ledger().items():
            (folder / name).write_bytes(content)
        (folder / "a.ledger.key").chmod(0o600)
        path = folder / "a.ledger"
        before = Ledger(path).spent()
        plan = whole_files.PLAN.with_steps(1)
        failed.append(_attempt(lambda path: Ledger(path).book(plan, purpose="more"), path, at))
        now = Ledger(path)  # it can be read in any case
        assert now.check() == []
        assert now.spent() >= before
        if not failed[-1]:
            assert len(now.releases) == 3
        now.book(plan, purpose="after the repair")

    check()
    assert set(failed) == {True, False}


def test_progress_that_cannot_be_kept_leaves_the_older_one(tmp_path):
    kept = []

    @FEW
    @given(at=st.integers(0, 6))
    def check(at):
        folder = tmp_path / str(len(kept))
        with checkpoints.opened(folder, whole_files.QUESTION, whole_files.DIGEST) as made:
            made.save({"step": np.array([1])})
            with warnings.catch_warnings(), FailingDisk(at).in_place():
                warnings.simplefilter("ignore")
                made.save({"step": np.array([2])})
        with checkpoints.opened(folder, whole_files.QUESTION, whole_files.DIGEST) as found:
            kept.append(int(found.load()["step"][0]))

    check()
    assert set(kept) == {1, 2}
