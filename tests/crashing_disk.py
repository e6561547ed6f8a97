"""Crashes at every boundary of a file operation: a process that is killed does nothing more."""

from __future__ import annotations

import os

from dpvim import files

OPERATIONS = ("open", "fsync", "replace", "unlink", "fdopen")


class Killed(BaseException):
    """As kill -9: no handler for errors catches it."""


class CrashingDisk:
    """Stands for `os` in `dpvim.files`; the operation number `crash_at` is not done, nor any later.

    A write that crashes is half done. Without `crash_at` operations are counted.
    """

    def __init__(self, crash_at=None):
        self.crash_at, self.done, self.log = crash_at, 0, []

    def __getattr__(self, name):
        real = getattr(os, name)
        return self._guarded(name, real) if name in OPERATIONS else real

    def _guarded(self, name, real):
        def call(*args, **kwargs):
            self.count(name)
            found = real(*args, **kwargs)
            return CrashingFile(found, self) if name == "fdopen" else found

        return call

    def count(self, name):
        if self.crash_at is not None and self.done >= self.crash_at:
            raise Killed
        self.done += 1
        self.log.append(name)


class CrashingFile:
    def __init__(self, file, disk):
        self._file, self._disk = file, disk

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if error[0] is Killed:  # what was buffered is lost with the process
            os.close(os.dup(self._file.fileno()))
            self._file.detach().close()
        else:
            self._file.close()

    def write(self, content):
        try:
            self._disk.count("write")
        except Killed:
            self._file.write(content[: len(content) // 2])
            self._file.flush()
            raise
        return self._file.write(content)


def install(monkeypatch, crash_at=None):
    """Put such a disk in the place of the real one."""
    disk = CrashingDisk(crash_at)
    monkeypatch.setattr(files, "os", disk)
    return disk
