"""Folders that are complete or not there."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def new_folder(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """A folder to write into, which gets its name when the block ends without an error.

    Raises:
        FileExistsError: At once, if the name is taken.
    """
    target = Path(folder)
    if target.exists():
        raise FileExistsError(f"{target}: exists already. Choose another name, or remove it first.")
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # from a run that was killed
    partial.mkdir(parents=True)
    try:
        yield partial
        os.replace(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """A json file that people can read, too."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
