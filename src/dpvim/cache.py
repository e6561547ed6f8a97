"""Answers of the accountant, kept on disk: they depend on public numbers only.

``DPVIM_CACHE`` names the folder; empty or ``off`` keeps nothing. Unset, it is the usual place for
caches of this system. A cache that cannot be read or written is as good as none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import platformdirs

_SWITCHED_OFF = ("", "off")


def remember(question: Mapping[str, str], answer: Callable[[], float]) -> float:
    """The answer to `question`: from disk if it was asked before, else from `answer`.

    The question names everything the answer depends on, versions of the code among them.
    """
    path = _path_of(question)
    if path is None:
        return answer()
    known = _read(path, question)
    if known is not None:
        return known
    value = answer()
    _write(path, question, value)
    return value


def _path_of(question: Mapping[str, str]) -> Path | None:
    folder = os.environ.get("DPVIM_CACHE")
    if folder is None:
        folder = platformdirs.user_cache_dir("dpvim", appauthor=False)
    if folder.strip().lower() in _SWITCHED_OFF:
        return None
    name = hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()
    return Path(folder) / "accounting" / f"{name}.json"


def _read(path: Path, question: Mapping[str, str]) -> float | None:
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))
        answer = entry["answer"]
        # A file that was cut off, moved or edited does not answer this question.
        sane = entry["question"] == dict(question) and isinstance(answer, float)
        return answer if sane and math.isfinite(answer) and answer >= 0 else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, question: Mapping[str, str], answer: float) -> None:
    """A reader sees all of the file or none of it, whoever else writes at the same time."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with open(handle, "w", encoding="utf-8") as file:
                json.dump({"question": dict(question), "answer": answer}, file)
            os.replace(draft, path)
        except OSError:
            os.unlink(draft)
