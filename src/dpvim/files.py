"""Folders and files that are complete or not there."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


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


def write_json(path: Path, content: dict[str, Any]) -> None:
    """A json file that people can read, too."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _private_folder(target: Path) -> Path:
    """A folder beside a path that nobody else has, can guess the name of, or may open.

    What is made in it has the permissions that it would have elsewhere, and keeps them.
    """
    prefix = f"{target.name[:32]}."
    return Path(tempfile.mkdtemp(prefix=prefix, suffix=".partial", dir=target.parent))


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
