"""Folders and files that are complete or not there."""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

MOST_TEXT = 16 * 2**20
"""Bytes that a file of settings may have, json or TOML: far more than any has."""
PARTIAL = ".partial"
"""Ends the names of files and folders that are not complete."""


class FileError(ValueError):
    """The file is not one that can be read."""


def existing_file(
    path: str | os.PathLike[str],
    *,
    most: int | None = None,
    error: type[ValueError] = FileError,
) -> Path:
    """The path of a file to read, which is there and has not more than `most` bytes.

    Raises:
        FileNotFoundError: It is not there.
        error: It is no file (a folder, a device that never ends), or too large.
    """
    source = as_path("path", path)
    try:
        found = source.stat()
    except OSError as reason:
        if isinstance(reason, PermissionError):
            raise error(f"{source}: may not be read. Ask for the right to.") from None
        raise FileNotFoundError(f"{source}: there is no such file.") from None
    if not stat.S_ISREG(found.st_mode):
        raise error(f"{source}: expected a file, got a folder or something else.")
    if most is not None and found.st_size > most:
        raise error(
            f"{source}: expected at most {most / 2**20:,.0f} MB, got {found.st_size / 2**20:,.0f}. "
            "It is not read."
        )
    return source


def as_path(name: str, value: object) -> Path:
    """A path that a system could have."""
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{name}: expected the name of a file, got {type(value).__name__}.")
    text = os.fspath(value)
    # Addresses may hold passwords, which messages that quote a name would show.
    if isinstance(text, str) and text.startswith(("postgres:/", "postgresql:/", "spark:/")):
        raise ValueError(
            f"{name}: expected the name of a file, got the address of a database. Such tables are "
            "for dpvim.synthesize, dpvim.open_table and the commands synth, schema and ledger."
        )
    try:
        encoded = os.fsencode(text)
    except UnicodeEncodeError:  # half of a character
        encoded = b""
    too_long = len(encoded) > 4095 or any(len(part) > 255 for part in encoded.split(b"/"))
    if not isinstance(text, str) or not encoded or b"\0" in encoded or too_long:
        raise ValueError(f"{name}: expected the name of a file, got {text[:100]!r}.")
    return Path(text)


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A json file that holds an object, or a `FileError` that says what is wrong with it."""
    source = existing_file(path, most=MOST_TEXT)
    try:
        content = json.loads(source.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FileError(
            f"{source}: damaged: expected json ({type(error).__name__}). Copy or write it again."
        ) from error
    if not isinstance(content, dict):
        raise FileError(f"{source}: damaged: expected a json object. Copy or write it again.")
    return content


@contextmanager
def new_folder(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """A folder to write into, which gets its name when the block ends without an error.

    Raises:
        FileExistsError: At once, if the name is taken. If it was taken meanwhile: at the end, and
            says where the folder is, which is complete and may have cost privacy.
    """
    target = Path(folder)
    if _is_taken(target):
        raise FileExistsError(f"{target}: exists already. Choose another name, or remove it first.")
    target.parent.mkdir(parents=True, exist_ok=True)
    private = _private_folder(target)
    partial = private / target.name
    is_complete = False
    try:
        partial.mkdir()
        yield partial
        is_complete = True
        _rename(partial, target)
    finally:
        if not (is_complete and partial.exists()):
            shutil.rmtree(private, ignore_errors=True)


@contextmanager
def new_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path to write to; the file replaces one of the given name when the block ends."""
    target = Path(path)
    private = _private_folder(target)
    try:
        yield private / target.name
        os.replace(private / target.name, target)
    finally:
        shutil.rmtree(private, ignore_errors=True)


@contextmanager
def durable_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write to that its owner alone may read.

    When the block ends it is on the disk and has its name, in place of an older one; whatever
    happens before, the older one is as it was.
    """
    draft = path.with_name(path.name + PARTIAL)
    with suppress(FileNotFoundError):
        os.unlink(draft)
    handle = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
        _sync_folder(path.parent)
    except OSError:
        with suppress(OSError):
            os.unlink(draft)
        raise


def shred(path: Path) -> None:
    """Overwrite a file and remove it, if it is there. (Disks may keep older copies of blocks.)"""
    with suppress(FileNotFoundError):
        handle = os.open(path, os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0))
        with os.fdopen(handle, "wb") as file:
            file.write(bytes(os.stat(path).st_size))
            file.flush()
            os.fsync(file.fileno())
        os.unlink(path)
        _sync_folder(path.parent)


def is_ours_alone(path: Path) -> bool:
    """True if a file or folder belongs to this user, and nobody else may write it."""
    if not hasattr(os, "getuid"):  # a system whose accounts have folders of their own
        return True
    found = path.stat()
    return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _sync_folder(folder: Path) -> None:
    """Make names in a folder as durable as what they name, where the system can."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """A json file that people can read, too."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _private_folder(target: Path) -> Path:
    """A folder beside a path that nobody else has, can guess the name of, or may open.

    What is made in it has the permissions that it would have elsewhere, and keeps them.
    """
    prefix = f"{target.name[:32]}."
    return Path(tempfile.mkdtemp(prefix=prefix, suffix=PARTIAL, dir=target.parent))


def _rename(partial: Path, target: Path) -> None:
    taken = FileExistsError(
        f"{target}: expected a name that is free, but it was taken meanwhile. What was to have it "
        f"is complete: {partial}. Move it."
    )
    if _is_taken(target):  # an empty folder would be replaced without a word
        raise taken
    try:
        os.rename(partial, target)
    except OSError as error:
        if _is_taken(target):
            raise taken from error
        raise


def _is_taken(target: Path) -> bool:
    return os.path.lexists(target)  # also by a link that leads nowhere
