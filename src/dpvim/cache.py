"""Noise multipliers that the accountant found before, kept on disk: public numbers only.

``DPVIM_CACHE`` names the folder; empty or ``off`` keeps nothing. Unset, it is the usual place for
caches of this system. A cache that cannot be read or written is as good as none.

No guarantee rests on a file. An answer is used only after the caller has checked it, and files and
folders that others could have written are not looked at.
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

from dpvim.files import is_ours_alone

_SWITCHED_OFF = ("", "off")


def remember(
    question: Mapping[str, str], compute: Callable[[], float], *, is_valid: Callable[[float], bool]
) -> float:
    """The answer to `question`: from disk if one is there and is valid, else from `compute`.

    The question names everything the answer depends on, versions of the code among them.
    """
    found = folder()
    if found is None:
        return compute()
    name = hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()
    path = found / f"{name}.json"
    known = _read(path, question)
    if known is not None and is_valid(known):
        return known
    value = compute()
    _write(path, question, value)
    return value


def is_switched_off(given: str | None) -> bool:
    """True if this value of ``DPVIM_CACHE`` says that nothing is to be kept."""
    return given is not None and given.strip().lower() in _SWITCHED_OFF


def folder() -> Path | None:
    """The folder of the answers, which nobody else can write; None without one."""
    given = os.environ.get("DPVIM_CACHE")
    if is_switched_off(given):
        return None
    base = Path(given or platformdirs.user_cache_dir("dpvim", appauthor=False))
    if given is None and not base.is_absolute():  # an account without a home
        return None
    with contextlib.suppress(OSError):
        base.parent.mkdir(parents=True, exist_ok=True)
        answers = base / "accounting"
        for own in (base, answers):
            own.mkdir(mode=0o700, exist_ok=True)
            if not is_ours_alone(own):
                return None
        return answers
    return None


def _read(path: Path, question: Mapping[str, str]) -> float | None:
    try:
        if not is_ours_alone(path):
            return None
        entry = json.loads(path.read_text(encoding="utf-8"))
        answer = entry["answer"]
        # A file that was cut off, moved or edited does not answer this question.
        sane = entry["question"] == dict(question) and isinstance(answer, float)
        return answer if sane and math.isfinite(answer) and answer > 0 else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _write(path: Path, question: Mapping[str, str], answer: float) -> None:
    """Write a file that a reader sees all of or nothing, whoever else writes at the same time."""
    with contextlib.suppress(OSError):
        handle, draft = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with open(handle, "w", encoding="utf-8") as file:
                json.dump({"question": dict(question), "answer": answer}, file)
            os.replace(draft, path)
        except OSError:
            os.unlink(draft)
