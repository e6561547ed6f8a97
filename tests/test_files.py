"""Folders and files that are complete or not there, and leave those of others alone."""

from __future__ import annotations

import os
import stat

import pandas as pd
import pytest

from dpvim.files import new_file, new_folder
from dpvim.synthesis.tables import write_table


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def umask():
    """The permissions that new folders and files have, set for a test."""
    previous = os.umask(0o027)
    yield
    os.umask(previous)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def write_half(target, error):
    with new_folder(target) as folder:
        (folder / "file").write_text("half")
        raise error


def test_a_crash_leaves_nothing_half_written(tmp_path):
    with pytest.raises(RuntimeError, match="power cut"):
        write_half(tmp_path / "twin", RuntimeError("power cut"))
    with pytest.raises(KeyboardInterrupt):
        write_half(tmp_path / "twin", KeyboardInterrupt())
    assert names(tmp_path) == []


def test_a_folder_gets_its_name_at_the_end_and_its_parents_at_once(tmp_path):
    with new_folder(tmp_path / "some" / "where" / "twin") as folder:
        (folder / "file").write_text("whole")
        assert not (tmp_path / "some" / "where" / "twin").exists()
    assert names(tmp_path / "some" / "where") == ["twin"]
    assert names(tmp_path / "some" / "where" / "twin") == ["file"]


def test_folders_of_others_are_left_alone(tmp_path):
    mine = tmp_path / "twin.partial"
    mine.mkdir()
    (mine / "thesis").write_text("ten years of work")
    with new_folder(tmp_path / "twin") as folder:
        (folder / "file").write_text("whole")
    with pytest.raises(RuntimeError):
        write_half(tmp_path / "other", RuntimeError())
    assert names(tmp_path) == ["twin", "twin.partial"]
    assert (mine / "thesis").read_text() == "ten years of work"


@pytest.mark.usefixtures("umask")
def test_work_in_progress_is_nobody_elses_and_permissions_are_the_usual_ones(tmp_path):
    with new_folder(tmp_path / "twin") as folder:
        (folder / "file").write_text("whole")
        assert mode(folder.parent) == 0o700
        assert folder.parent.parent == tmp_path
    assert mode(tmp_path / "twin") == 0o750
    assert mode(tmp_path / "twin" / "file") == 0o640
    write_table(pd.DataFrame({"a": [1]}), tmp_path / "a.csv")
    assert mode(tmp_path / "a.csv") == 0o640


def test_a_name_that_is_taken_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "nowhere").symlink_to(tmp_path / "no such thing")
    for name in ("file", "nowhere"):
        with pytest.raises(FileExistsError, match="exists already"), new_folder(tmp_path / name):
            pytest.fail("began to work")
    assert names(tmp_path) == ["file", "nowhere"]


@pytest.mark.parametrize("taken_by", ["empty folder", "full folder", "file", "link"])
def test_a_name_that_is_taken_meanwhile(tmp_path, taken_by):
    target = tmp_path / "twin"

    def write():
        with new_folder(target) as folder:
            (folder / "file").write_text("whole")
            if taken_by == "file":
                target.write_text("theirs")
            elif taken_by == "link":
                (tmp_path / "elsewhere").mkdir()
                target.symlink_to(tmp_path / "elsewhere")
            else:
                target.mkdir()
            if taken_by == "full folder":
                (target / "theirs").touch()

    with pytest.raises(FileExistsError, match="taken meanwhile") as error:
        write()
    if taken_by == "file":
        assert target.read_text() == "theirs"
    else:
        assert names(target) == (["theirs"] if taken_by == "full folder" else [])
    # What is complete may have cost privacy: it is kept, and the error says where.
    (kept,) = tmp_path.glob("twin.*.partial")
    assert str(kept / "twin") in str(error.value)
    assert (kept / "twin" / "file").read_text() == "whole"


def test_files_of_others_are_left_alone(tmp_path):
    mine, precious = tmp_path / "a.csv.partial", tmp_path / "precious"
    mine.write_text("mine")
    precious.write_text("precious")
    (tmp_path / "b.csv.partial").symlink_to(precious)
    for name in ("a.csv", "b.csv"):
        write_table(pd.DataFrame({"a": [1]}), tmp_path / name)
        assert (tmp_path / name).read_text() == "a\n1\n"
    assert mine.read_text() == "mine"
    assert precious.read_text() == "precious"
    assert names(tmp_path) == ["a.csv", "a.csv.partial", "b.csv", "b.csv.partial", "precious"]


def test_a_file_is_replaced_by_a_complete_one_or_not_at_all(tmp_path):
    target = tmp_path / "page"
    target.write_text("old")

    def write_half():
        with new_file(target) as path:
            path.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_half()
    assert target.read_text() == "old"
    with new_file(target) as path:
        path.write_text("new")
    assert target.read_text() == "new"
    assert names(tmp_path) == ["page"]
