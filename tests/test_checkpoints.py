"""The folder of a checkpoint: what is kept, what is secret, what is refused."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import pickle
import shutil
import stat
import subprocess
import sys
import zipfile

import numpy as np
import pytest
from crashing_disk import Killed, install

from dpvim import archives, checkpoints, files
from dpvim.archives import FileError
from dpvim.checkpoints import BEGIN, RESULT, STATE, forget, opened

QUESTION = {"plan": "one", "model": "first"}
DATA = b"digest of some data"
SECRET = bytes(range(32))
PROGRESS = {"position": np.arange(4), "sums": np.array([0.1, np.pi])}


@pytest.fixture(autouse=True)
def known_secret(monkeypatch):
    """A secret that can be looked for in files."""
    monkeypatch.setattr(checkpoints, "fresh_secret", lambda: SECRET)


def run(folder, *, steps=3, question=None, data=DATA):
    """A run whose progress is the sum of its noise; every step is kept."""
    with opened(folder, {**QUESTION, **(question or {})}, data) as checkpoint:
        kept = checkpoint.load()
        noise = checkpoint.streams().generator("noise").standard_normal(steps)
        sums = kept["sums"] if kept else np.zeros(0)
        for step in range(len(sums), steps):
            sums = np.append(sums, noise[step])
            if step < steps - 1:
                checkpoint.save({"sums": sums, "position": np.array(step)})
        checkpoint.finish({"sums": sums})
        return checkpoint.id, sums


def begin(folder, **changes):
    """A run that was killed after it had kept some progress."""
    with opened(folder, {**QUESTION, **changes}, DATA) as checkpoint:
        checkpoint.save(PROGRESS)
        return checkpoint.id


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_run_goes_on_with_its_id_its_secret_its_start_and_its_progress(tmp_path):
    folder = tmp_path / "some" / "run"
    with opened(folder, QUESTION, DATA) as first:
        assert first.load() is None
        first.save(PROGRESS)
    with opened(folder, QUESTION, DATA) as again:
        assert (again.id, again.start, again.is_finished) == (first.id, first.start, False)
        kept = again.load()
        assert {name: array.tobytes() for name, array in kept.items()} == {
            name: array.tobytes() for name, array in PROGRESS.items()
        }
        draws = [each.streams().generator("noise").standard_normal(4) for each in (first, again)]
    np.testing.assert_array_equal(*draws)
    assert first.id not in repr(first)


def test_files_are_the_owners_alone_whatever_the_umask(tmp_path):
    previous = os.umask(0)
    try:
        begin(tmp_path / "run")
        assert mode(tmp_path / "run") == 0o700
        assert [mode(tmp_path / "run" / name) for name in (BEGIN, STATE)] == [0o600] * 2
        with opened(tmp_path / "run", QUESTION, DATA) as checkpoint:
            checkpoint.finish({"sums": np.zeros(3)})
        assert mode(tmp_path / "run" / RESULT) == 0o600
    finally:
        os.umask(previous)


def test_the_secret_is_on_the_disk_before_the_run_gets_it_and_gone_after_the_end(
    tmp_path, monkeypatch
):
    shredded = []
    monkeypatch.setattr(
        checkpoints, "shred", lambda path: (shredded.append(path.name), files.shred(path))
    )
    with opened(tmp_path, QUESTION, DATA) as checkpoint:
        assert SECRET.hex().encode() in (tmp_path / BEGIN).read_bytes()
        checkpoint.save(PROGRESS)
        assert SECRET.hex().encode() not in (tmp_path / STATE).read_bytes()
        shredded.clear()
        checkpoint.finish({"sums": np.zeros(3)})
        assert names(tmp_path) == [RESULT]
    assert shredded == [STATE, BEGIN]
    with archives.opened(tmp_path / RESULT) as archive:
        assert "secret" not in archive.meta
        assert archive.names == ["sums"]


def test_what_is_removed_is_overwritten_first(tmp_path, monkeypatch):
    seen = []
    path = tmp_path / "secret"
    path.write_bytes(b"secret" * 1000)
    monkeypatch.setattr(files.os, "unlink", lambda path: seen.append(path.read_bytes()))
    files.shred(path)
    assert seen == [bytes(6000)]


def test_a_run_that_ended_gives_its_result_again(tmp_path):
    with opened(tmp_path, QUESTION, DATA) as first:
        first.finish({"sums": np.array([1.0])})
    with contextlib.ExitStack() as stack:
        with pytest.warns(UserWarning, match="ended before.*nothing is spent"):
            again = stack.enter_context(opened(tmp_path, QUESTION, DATA))
        assert (again.id, again.start, again.is_finished) == (first.id, first.start, True)
        assert again.load()["sums"] == 1.0
        again.finish({"sums": np.array([2.0])})  # nothing new is written
        assert again.load()["sums"] == 1.0
    forget(tmp_path)
    assert not tmp_path.exists()


def test_a_run_that_has_not_ended_is_not_forgotten(tmp_path):
    begin(tmp_path)
    forget(tmp_path)
    assert names(tmp_path) == [BEGIN, STATE]


def test_the_name_of_a_booking_is_that_of_the_run(tmp_path):
    with opened(tmp_path, QUESTION, DATA) as checkpoint:
        pass
    with opened(tmp_path, QUESTION, DATA) as again:
        assert again.id == checkpoint.id
        again.finish({})
    with (
        pytest.warns(UserWarning, match="ended before"),
        opened(tmp_path, QUESTION, DATA) as ended,
    ):
        assert ended.id == checkpoint.id


def test_a_result_has_no_fingerprint_of_the_data(tmp_path):
    """Beside its key it would be a test of guesses. No noise is left to be used twice."""
    with opened(tmp_path, QUESTION, DATA) as checkpoint:
        key, fingerprint = (checkpoint._facts[name] for name in ("data_key", "data"))
        checkpoint.finish({})
    with zipfile.ZipFile(tmp_path / RESULT) as archive:
        content = b"".join(archive.read(name) for name in archive.namelist()).decode()
    assert key not in content
    assert fingerprint not in content
    with (
        pytest.warns(UserWarning, match="whatever the data are"),
        opened(tmp_path, QUESTION, b"other") as ended,
    ):
        assert ended.is_finished


def test_other_data_are_refused(tmp_path):
    begin(tmp_path)
    with (
        pytest.raises(FileError, match="other data:"),
        opened(tmp_path, QUESTION, b"other"),
    ):
        pass


# -- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize(
    ("question", "data", "what"),
    [
        ({"plan": "other"}, DATA, "other plan:"),
        ({"model": "other"}, DATA, "other model:"),
        ({"extra": "1"}, DATA, "other extra:"),
        ({"plan": "other"}, b"other", "other plan"),
    ],
)
def test_another_run_is_refused_and_changes_nothing(tmp_path, ended, question, data, what):
    begin(tmp_path)
    if ended:
        with opened(tmp_path, QUESTION, DATA) as checkpoint:
            checkpoint.finish({})
    before = {name: (tmp_path / name).read_bytes() for name in names(tmp_path)}
    with (
        pytest.raises(FileError, match=what),
        opened(tmp_path, {**QUESTION, **question}, data),
    ):
        pass
    assert {name: (tmp_path / name).read_bytes() for name in names(tmp_path)} == before


def test_other_software_is_refused_by_name(tmp_path, monkeypatch):
    begin(tmp_path)
    monkeypatch.setattr(checkpoints, "software", lambda: "jax 99")
    with (
        pytest.raises(FileError, match=r"other software.*begun with dpvim .*; here are jax 99"),
        opened(tmp_path, QUESTION, DATA),
    ):
        pass


def refused(folder, match):
    with pytest.raises(FileError, match=match), opened(folder, QUESTION, DATA):
        pass


def test_a_copy_is_refused_and_the_original_goes_on(tmp_path):
    begin(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    refused(tmp_path / "copy", "copied or restored")
    run(tmp_path / "run")


def test_a_restored_checkpoint_is_refused(tmp_path):
    """Also where the files have the numbers that the old ones had, as ext4 gives them."""
    folder, backup = tmp_path / "run", tmp_path / "backup"
    begin(folder)
    shutil.copytree(folder, backup)
    run(folder)
    shutil.rmtree(folder)
    shutil.copytree(backup, folder)
    refused(folder, "copied or restored")


def test_the_time_of_birth_tells_files_with_one_number_apart(tmp_path, monkeypatch):
    born = iter([1, 1, 2])
    monkeypatch.setattr(checkpoints, "_birth_time", lambda file: next(born))
    begin(tmp_path)
    begin(tmp_path)
    refused(tmp_path, "copied or restored")


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's statx, and its command")
def test_the_time_of_birth_is_the_systems(tmp_path):
    path = tmp_path / "file"
    path.write_text("")
    said = subprocess.run(["stat", "-c", "%W", path], capture_output=True, text=True, check=True)
    seconds = int(said.stdout.strip().replace("-", "0"))  # neither: the file system has none
    with open(path) as file:
        found = {checkpoints._birth_time(path), checkpoints._birth_time(file.fileno())}
    assert len(found) == 1
    assert ({None} if seconds == 0 else {each // 10**9 for each in found}) == {seconds or None}


def test_a_begin_that_was_put_back_is_refused(tmp_path):
    begin(tmp_path)
    backup = (tmp_path / BEGIN).read_bytes()
    (tmp_path / "new").write_bytes(backup)
    os.replace(tmp_path / "new", tmp_path / BEGIN)
    refused(tmp_path, "copied or restored")


def test_another_machine_is_refused(tmp_path, monkeypatch):
    begin(tmp_path)
    monkeypatch.setattr(checkpoints, "_machine", lambda: "another")
    refused(tmp_path, "copied or restored")


def test_a_moved_folder_is_sent_back(tmp_path):
    begin(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "moved")
    refused(tmp_path / "moved", f"of a run in {tmp_path / 'run'}. Move it back")
    (tmp_path / "moved").rename(tmp_path / "run")
    run(tmp_path / "run")


def test_older_progress_put_back_does_no_harm(tmp_path):
    """Noise is a function of the secret and the step: the run ends where it would have."""
    wanted = run(tmp_path / "whole", steps=5)[1]
    folder = tmp_path / "run"
    with opened(folder, QUESTION, DATA) as checkpoint:
        noise = checkpoint.streams().generator("noise").standard_normal(5)
        checkpoint.save({"sums": noise[:1]})
        older = (folder / STATE).read_bytes()
        checkpoint.save({"sums": noise[:3]})
    (folder / STATE).write_bytes(older)
    np.testing.assert_array_equal(run(folder, steps=5)[1], wanted)


def hold(folder, ready, done):
    with opened(folder, QUESTION, DATA):
        ready.set()
        done.wait(60)


def test_one_process_at_a_time(tmp_path):
    context = multiprocessing.get_context("spawn")
    ready, done = context.Event(), context.Event()
    other = context.Process(target=hold, args=(tmp_path, ready, done))
    other.start()
    try:
        assert ready.wait(60)
        refused(tmp_path, "another process is at work")
    finally:
        done.set()
        other.join()
    run(tmp_path)


def test_a_lock_of_this_process_counts_too(tmp_path):
    with opened(tmp_path, QUESTION, DATA):
        refused(tmp_path, "another process is at work")


@pytest.mark.parametrize("name", [BEGIN, STATE, RESULT])
@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "other"])
def test_damaged_files_are_refused_with_advice(tmp_path, name, damage):
    folder = tmp_path / "run"
    with opened(folder, QUESTION, DATA) as checkpoint:
        checkpoint.save(PROGRESS)
        if name == RESULT:
            checkpoint.finish(PROGRESS)
    path = folder / name
    content = bytearray(path.read_bytes())
    if damage == "flipped":
        content[len(content) // 3] ^= 1
    elif damage == "other":
        archives.write(tmp_path / "other", {"format": "dpvim fit", "version": 1}, {})
        content = (tmp_path / "other").read_bytes()
        (tmp_path / "other").unlink()
    else:
        content = content[: len(content) // 2 if damage == "cut" else 0]
    with open(path, "r+b") as file:  # the same file
        file.truncate(0)
        file.write(content)
    with pytest.raises(FileError, match=r"[Rr]emove"), opened(folder, QUESTION, DATA) as found:
        found.load()
    if name == STATE:
        path.unlink()
        np.testing.assert_array_equal(run(folder)[1], run(tmp_path / "whole")[1])


def test_a_newer_format_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "VERSION", 2)
    begin(tmp_path)
    monkeypatch.undo()
    refused(tmp_path, "version 2 of the format, this dpvim reads up to 1. Install a newer dpvim")


def test_progress_of_another_run_is_refused(tmp_path):
    begin(tmp_path / "other")
    begin(tmp_path / "run")
    shutil.copy(tmp_path / "other" / STATE, tmp_path / "run" / STATE)
    with (
        opened(tmp_path / "run", QUESTION, DATA) as checkpoint,
        pytest.raises(FileError, match="progress of another run"),
    ):
        checkpoint.load()


def test_progress_without_its_secret_is_refused(tmp_path):
    begin(tmp_path)
    (tmp_path / BEGIN).unlink()
    refused(tmp_path, "the secret that the noise comes from")


def test_folders_of_others_are_left_alone(tmp_path):
    (tmp_path / "thesis").write_text("ten years of work")
    refused(tmp_path, "with 'thesis' in it")
    assert names(tmp_path) == ["thesis"]


def test_folders_that_others_may_write_are_refused(tmp_path):
    tmp_path.chmod(0o770)
    refused(tmp_path, "nobody else may write")


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "run").write_text("")
    refused(tmp_path / "run", "cannot be kept there.*Nothing was spent")


def test_it_is_not_copied_or_stored(tmp_path):
    with opened(tmp_path, QUESTION, DATA) as checkpoint, pytest.raises(TypeError, match="twice"):
        pickle.dumps(checkpoint)


# -- disks that fail ---------------------------------------------------------------------------


class FullDisk:
    """Stands for `os` in `dpvim.files`: one operation fails."""

    def __init__(self, operation, code):
        self.operation, self.code = operation, code

    def __getattr__(self, name):
        return self._fail if name == self.operation else getattr(os, name)

    def _fail(self, *args, **kwargs):
        raise OSError(self.code, os.strerror(self.code))


FAILURES = [("fsync", errno.ENOSPC), ("open", errno.EROFS), ("replace", errno.EIO)]


@pytest.mark.parametrize(("operation", "code"), FAILURES)
def test_a_disk_that_fails_at_the_beginning_is_an_error_before_anything_is_spent(
    tmp_path, monkeypatch, operation, code
):
    monkeypatch.setattr(files, "os", FullDisk(operation, code))
    refused(tmp_path, rf"{os.strerror(code)}.*Nothing was spent")
    assert names(tmp_path) == []


@pytest.mark.parametrize(("operation", "code"), FAILURES)
def test_a_disk_that_fails_later_costs_nothing(tmp_path, monkeypatch, operation, code):
    with opened(tmp_path, QUESTION, DATA) as checkpoint:
        checkpoint.save({"sums": np.array([1.0])})
        monkeypatch.setattr(files, "os", FullDisk(operation, code))
        with pytest.warns(UserWarning, match="could not be kept.*An older one is there"):
            checkpoint.save({"sums": np.array([2.0])})
        with pytest.warns(UserWarning, match="result could not be kept"):
            checkpoint.finish({"sums": np.array([3.0])})
        monkeypatch.setattr(files, "os", os)
        assert names(tmp_path) == [BEGIN, STATE]
    with opened(tmp_path, QUESTION, DATA) as again:
        assert again.load()["sums"] == 1.0
        again.finish({"sums": np.array([3.0])})
    assert names(tmp_path) == [RESULT]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounts a file system")
def test_a_file_system_that_is_full_in_fact(tmp_path):
    options = ["-t", "tmpfs", "-o", "size=64k,mode=0700", "tmpfs", str(tmp_path)]
    if subprocess.run(["mount", *options], capture_output=True).returncode:
        pytest.skip("mount is not allowed")
    try:
        with opened(tmp_path, QUESTION, DATA) as checkpoint:
            checkpoint.save(PROGRESS)
            with pytest.warns(UserWarning, match="No space left"):
                checkpoint.save({"sums": np.zeros(10_000)})
        with opened(tmp_path, QUESTION, DATA) as again:
            np.testing.assert_array_equal(again.load()["sums"], PROGRESS["sums"])
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path)], check=True)
        with (
            opened(tmp_path, QUESTION, DATA) as read_only,
            pytest.warns(UserWarning, match="Read-only file system"),
        ):
            read_only.save(PROGRESS)
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


# -- crashes -----------------------------------------------------------------------------------


def test_a_crash_at_any_boundary_of_a_file_operation_loses_nothing(tmp_path, monkeypatch):
    """The run is begun, keeps its progress twice, and ends; it is killed at each operation."""
    wanted = run(tmp_path / "whole")[1]
    disk = install(monkeypatch)
    run(tmp_path / "counted")
    assert {"open", "write", "fsync", "replace", "unlink"} <= set(disk.log)
    for crash_at in range(disk.done):
        folder = tmp_path / str(crash_at)
        install(monkeypatch, crash_at)
        with pytest.raises(Killed):
            run(folder)
        monkeypatch.setattr(files, "os", os)
        for path in folder.iterdir():
            assert mode(path) == 0o600, (crash_at, path)
        ended = (folder / RESULT).exists()
        warned = pytest.warns(UserWarning, match="ended before")
        with warned if ended else contextlib.nullcontext():
            np.testing.assert_array_equal(run(folder)[1], wanted)
        assert names(folder) == [RESULT], crash_at


def test_progress_is_kept_now_and_then(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(checkpoints.time, "monotonic", lambda: now[0])
    with opened(tmp_path, QUESTION, DATA) as checkpoint:
        now[0] += 9.9
        assert not checkpoint.is_due()
        now[0] += 0.2
        assert checkpoint.is_due()

        def slow(*args):
            now[0] += 2.0

        monkeypatch.setattr(checkpoints, "_write", slow)
        checkpoint.save({})
        now[0] += 199  # what takes two seconds is done every two hundred
        assert not checkpoint.is_due()
        now[0] += 2
        assert checkpoint.is_due()
