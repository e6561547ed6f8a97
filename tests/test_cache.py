"""Answers on disk: only what this user alone can write is read, and only what is whole."""

from __future__ import annotations

import os

import pytest

from dpvim import cache


def remembered(answer):
    return cache.remember({"a": "b"}, lambda: answer, is_valid=lambda found: True)


@pytest.mark.parametrize("which", ["base", "accounting", "file"])
@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_what_others_can_write_is_not_looked_at(monkeypatch, tmp_path, which, mode):
    monkeypatch.setenv("DPVIM_CACHE", str(tmp_path / "base"))
    remembered(1.5)
    (file,) = tmp_path.rglob("*.json")
    assert remembered(2.5) == 1.5
    {"base": file.parent.parent, "accounting": file.parent, "file": file}[which].chmod(mode)
    assert remembered(2.5) == 2.5


def test_what_belongs_to_others_is_not_looked_at(monkeypatch, tmp_path):
    monkeypatch.setenv("DPVIM_CACHE", str(tmp_path))
    remembered(1.5)
    user = os.getuid()
    monkeypatch.setattr(cache.os, "getuid", lambda: user + 1)
    assert remembered(2.5) == 2.5


def test_folders_and_files_are_the_users_alone_whatever_the_umask(monkeypatch, tmp_path):
    monkeypatch.setenv("DPVIM_CACHE", str(tmp_path / "base"))
    before = os.umask(0)
    try:
        remembered(1.5)
    finally:
        os.umask(before)
    made = [tmp_path / "base", *(tmp_path / "base").rglob("*")]
    assert len(made) == 3
    assert [path.stat().st_mode & 0o077 for path in made] == [0, 0, 0]
    assert remembered(2.5) == 1.5


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b"[" * 100_000,
        b'{"question": {}, "answer": 1.0}',
        b'{"question": {"a": "b"}, "answer": -1.0}',
        b'{"question": {"a": "b"}, "answer": NaN}',
        b'{"question": {"a": "b"}, "answer": Infinity}',
        b'{"question": {"a": "b"}, "answer": "1.0"}',
    ],
)
def test_a_damaged_entry_is_computed_anew(monkeypatch, tmp_path, content):
    monkeypatch.setenv("DPVIM_CACHE", str(tmp_path))
    assert remembered(1.5) == 1.5
    (entry,) = tmp_path.rglob("*.json")
    assert remembered(2.5) == 1.5
    entry.write_bytes(content)
    assert remembered(2.5) == 2.5
    assert remembered(3.5) == 2.5
    assert list(tmp_path.rglob("*.tmp")) == []


@pytest.mark.parametrize("switch", ["", "off", "OFF"])
def test_the_cache_can_be_switched_off(monkeypatch, tmp_path, switch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DPVIM_CACHE", switch)
    assert remembered(1.5) == 1.5
    assert remembered(2.5) == 2.5
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_no_cache(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("DPVIM_CACHE", str(tmp_path / "file"))
    assert remembered(1.5) == 1.5
    assert remembered(2.5) == 2.5


def test_the_usual_folder_is_the_users(monkeypatch, tmp_path):
    monkeypatch.delenv("DPVIM_CACHE")
    monkeypatch.setattr(
        cache.platformdirs, "user_cache_dir", lambda *a, **k: str(tmp_path / "dpvim")
    )
    assert remembered(1.5) == 1.5
    assert remembered(2.5) == 1.5


def test_an_account_without_a_home_has_no_cache(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DPVIM_CACHE")
    monkeypatch.setattr(cache.platformdirs, "user_cache_dir", lambda *a, **k: "~/.cache/dpvim")
    assert remembered(1.5) == 1.5
    assert remembered(2.5) == 2.5
    assert list(tmp_path.iterdir()) == []
