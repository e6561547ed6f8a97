"""Checkpoints: a folder from which a private run goes on after a crash, as if there had been none.

The folder holds at most three files, which its owner alone may read:

* ``begin.npz``: the secret that all noise of the run comes from, and what the run was asked for.
  It is on the disk before the first release, and is never written again.
* ``state.npz``: the newest progress; its position in the streams of noise is secret, too.
* ``result.npz``: the end of the run: releases alone. When it is on the disk the others go.

**Why the same noise again costs nothing.** Steps that were taken after the newest progress was kept
are taken again. Batches and noise are a function of the secret and the step's number, the sum a
function of the data: the step releases the same vector, bit for bit, and whoever has seen it twice
has seen it once. With other noise the two would be two releases. With the same noise and *other
data* their difference would be the difference of the data, without any noise. So a checkpoint is
bound to its data (a keyed fingerprint), its plan, options and program, the software that computes
it, and to its place: a copy or a restored one is refused.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import re
import secrets
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dpvim import archives
from dpvim.archives import FileError
from dpvim.files import PARTIAL, as_path, durable_file, is_ours_alone, shred
from dpvim.fingerprint import keyed_fingerprint
from dpvim.privacy.randomness import SECRET_BYTES, SecretStreams

try:
    import fcntl
except ImportError:  # a system without locks that end with their process
    fcntl = None  # type: ignore[assignment]

FORMAT, VERSION = "dpvim checkpoint", 1
BEGIN, STATE, RESULT = "begin.npz", "state.npz", "result.npz"

# Progress is kept so often, and less often where that would take more than this share of the time.
SECONDS_BETWEEN = 10.0
MOST_OVERHEAD = 0.01

# What is not in the file of a result. A fingerprint of the data beside its key would be a test of
# guesses about them.
_SECRETS = ("secret", "data_key", "data")
_HEX = re.compile(f"[0-9a-f]{{{2 * SECRET_BYTES}}}")
_SOFTWARE = ("dpvim", "jax", "jaxlib", "numpy", "numpyro", "pandas", "pyarrow", "randomgen")


class Checkpoint:
    """A run's folder, locked by this process; made by `opened`.

    Attributes:
        folder: The folder.
        id: Random, the same for all processes that continue the run, and the name of its booking
            in a ledger. Public.
        start: 64 random bits for whatever protects no privacy: starting values, say.
        is_finished: True if the run ended before, and `load` has its result.
    """

    def __init__(self, folder: Path, facts: dict[str, Any], *, is_finished: bool) -> None:
        self.folder, self.is_finished = folder, is_finished
        self._facts = facts
        self._kept_at = time.monotonic()
        self._last_cost = 0.0

    @property
    def id(self) -> str:
        return str(self._facts["id"])

    @property
    def start(self) -> int:
        return int(self._facts["start"])

    def streams(self, seed: int | None = None) -> SecretStreams:
        """Randomness of the run, from its start; with a seed it is the seed's."""
        if seed is not None or self.is_finished:  # the secret is gone, and no step is left to take
            return SecretStreams(seed)
        return SecretStreams(secret=bytes.fromhex(self._facts["secret"]))

    def load(self) -> dict[str, np.ndarray] | None:
        """The newest progress, or the result; None if there is none yet.

        Raises:
            FileError: If the file cannot be read, or belongs to another run.
        """
        path = self.folder / (RESULT if self.is_finished else STATE)
        if not path.exists():
            return None
        advice = (
            f"Remove {path.name}, and the run starts at its first step, with the same noise: it "
            "costs time, no privacy."
        )
        if self.is_finished:
            advice = "What it held is lost; remove the folder, and a new run costs its budget anew."
        facts, arrays = _read(path, advice)
        if facts.get("id") != self.id:
            raise FileError(f"{path}: the progress of another run. {advice}")
        return arrays

    def is_due(self) -> bool:
        """True if progress was not kept for a while."""
        wait = max(SECONDS_BETWEEN, self._last_cost / MOST_OVERHEAD)
        return time.monotonic() - self._kept_at >= wait

    def save(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Keep progress. If that fails, what was kept before stays, and the run goes on."""
        began = time.monotonic()
        with self._going_on("the progress could not be kept", "An older one is there."):
            _write(self.folder / STATE, {"id": self.id}, arrays)
        self._kept_at = time.monotonic()
        self._last_cost = self._kept_at - began

    def finish(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Keep the result, which holds no secret, and remove all that is secret."""
        if self.is_finished:
            return
        public = {name: value for name, value in self._facts.items() if name not in _SECRETS}
        with self._going_on("the result could not be kept", "Save it yourself."):
            _write(self.folder / RESULT, public, arrays)
            self.is_finished = True
            _remove_secrets(self.folder)

    @contextlib.contextmanager
    def _going_on(self, problem: str, advice: str) -> Iterator[None]:
        """An error of the disk is no reason to lose what was paid for."""
        try:
            yield
        except OSError as error:
            warnings.warn(
                f"{self.folder}: {problem} ({error.strerror or error}). {advice}", stacklevel=5
            )

    def __reduce__(self) -> Any:
        raise TypeError("a checkpoint is not copied or stored: its noise would be used twice.")

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.folder)!r})"


@contextlib.contextmanager
def opened(
    folder: str | os.PathLike[str], question: Mapping[str, str], data_digest: bytes
) -> Iterator[Checkpoint]:
    """A new checkpoint, or the one in the folder if it is of the same run; locked meanwhile.

    Args:
        folder: Made if it is not there.
        question: All that the run depends on beside the data, by name.
        data_digest: See `dpvim.fingerprint`. It is not kept; a keyed fingerprint of it is.

    Raises:
        FileError: Before anything is spent, if the folder cannot be used.
    """
    target = as_path("checkpoint", folder)
    question = {**question, "software": software()}
    with _clear_errors(target, "Nothing was spent."):
        target.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(target), contextlib.ExitStack() as errors:
        errors.enter_context(_clear_errors(target, "Nothing was spent."))
        _check_folder(target)
        for name in (BEGIN, STATE, RESULT):
            shred(target / (name + PARTIAL))
        found = _existing(target)
        if found is None:
            found = Checkpoint(target, _new_facts(question, data_digest), is_finished=False)
            _write_begin(target, found._facts)
        else:
            _check_question(found, question, data_digest)
        if found.is_finished:
            _remove_secrets(target)  # killed before they were
            warnings.warn(
                f"{target}: this run ended before. Its result is returned, whatever the data are "
                "now, and nothing is spent. For a new run remove the folder.",
                stacklevel=4,
            )
        errors.close()
        yield found


def forget(folder: str | os.PathLike[str]) -> None:
    """Remove a result that is saved elsewhere, and its folder. A run that has not ended stays."""
    target = Path(folder)
    with _locked(target):
        if (target / RESULT).exists() and not (target / BEGIN).exists():
            (target / RESULT).unlink()
            with contextlib.suppress(OSError):  # somebody else's files
                target.rmdir()


def software() -> str:
    """Versions of what computes a run: others may round differently."""
    versions = (f"{name} {_version(name)}" for name in _SOFTWARE)
    python = f"python {sys.version_info.major}.{sys.version_info.minor}"
    flags = os.environ.get("XLA_FLAGS", "")
    return ", ".join([*versions, python, f"{os.cpu_count()} processors", f"XLA_FLAGS={flags!r}"])


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "of unknown version"


# -- what is in a folder ----------------------------------------------------------------------


def _check_folder(folder: Path) -> None:
    if not is_ours_alone(folder):
        raise FileError(
            f"{folder}: expected a folder that nobody else may write to: secrets are kept in it. "
            f"Use chmod go-w {folder}, or another folder."
        )
    known = {name + end for name in (BEGIN, STATE, RESULT) for end in ("", PARTIAL)}
    if others := sorted({path.name for path in folder.iterdir()} - known):
        raise FileError(
            f"{folder}: expected a folder for one checkpoint alone, got one with {others[0]!r} in "
            "it. Choose another folder."
        )


def _existing(folder: Path) -> Checkpoint | None:
    """The checkpoint in a folder, if there is one that may be continued."""
    if (folder / RESULT).exists():
        advice = "What it held is lost; remove the folder, and a new run costs its budget anew."
        facts, _ = _read(folder / RESULT, advice)
        _check_facts(folder / RESULT, facts, advice)
        return Checkpoint(folder, facts, is_finished=True)
    if not (folder / BEGIN).exists():
        if (folder / STATE).exists():
            raise FileError(
                f"{folder}: {BEGIN} is missing, and with it the secret that the noise comes from. "
                "Put it back if it was moved (mv, not cp). Else remove the folder: a new run costs "
                "its budget anew."
            )
        return None
    advice = (
        "Without the secret in it the run cannot go on. Remove the folder: a new run costs its "
        "budget anew."
    )
    facts, _ = _read(folder / BEGIN, advice)
    _check_facts(folder / BEGIN, facts, advice, with_secret=True)
    _check_place(folder, facts)
    return Checkpoint(folder, facts, is_finished=False)


def _new_facts(question: Mapping[str, str], data_digest: bytes) -> dict[str, Any]:
    key = fresh_secret()
    return {
        "id": secrets.token_hex(16),
        "question": dict(question),
        "data_key": key.hex(),
        "data": keyed_fingerprint(key, data_digest),
        "start": int.from_bytes(fresh_secret()[:8], "little"),
        "secret": fresh_secret().hex(),
    }


def _check_facts(
    path: Path, facts: Mapping[str, Any], advice: str, *, with_secret: bool = False
) -> None:
    """Refuse facts that are not those of a run."""
    texts, question, start = [facts.get("id")], facts.get("question"), facts.get("start")
    keys = [facts.get(name) for name in _SECRETS] if with_secret else []
    ok = isinstance(question, dict) and isinstance(start, int) and 0 <= start < 2**64
    if with_secret:
        ok = ok and isinstance(facts.get("place"), dict)
    ok = ok and all(isinstance(text, str) and text for text in [*texts, *(question or {}).values()])
    if not (ok and all(isinstance(key, str) and _HEX.fullmatch(key) for key in keys)):
        raise FileError(f"{path}: damaged: the facts of its run are not in it. {advice}")


def fresh_secret() -> bytes:
    """256 bits from the operating system."""
    return secrets.token_bytes(SECRET_BYTES)


def _check_question(found: Checkpoint, question: Mapping[str, str], data_digest: bytes) -> None:
    """Refuse to go on with anything but the very same run."""
    facts, folder = found._facts, found.folder
    kept = facts["question"]
    differing = [name for name in {**kept, **question} if kept.get(name) != question.get(name)]
    # A result has no fingerprint of its data any more: no noise is left to be used twice.
    if not found.is_finished and facts["data"] != keyed_fingerprint(
        bytes.fromhex(facts["data_key"]), data_digest
    ):
        differing.append("data")
    if not differing:
        return
    what = " and ".join(dict.fromkeys(differing))
    more = ""
    if "software" in differing:
        more = f" It was begun with {kept.get('software')}; here are {question['software']}."
    raise FileError(
        f"{folder}: the checkpoint of a run with other {what}: the same noise must not be used for "
        f"both.{more} Call with what the run began with, or choose another folder for this one. "
        "Nothing was spent."
    )


# -- the place --------------------------------------------------------------------------------


def _place_of(folder: Path, file: int | Path) -> dict[str, Any]:
    """The place of a file, as far as a copy of it has another."""
    found = os.stat(file)
    born = getattr(found, "st_birthtime_ns", None)
    return {
        "path": str(folder.resolve()),
        "machine": _machine(),
        "folder": os.stat(folder).st_ino,
        "file": found.st_ino,
        # A number of a file is given again when it is free; the time of its birth is not.
        "born": _birth_time(file) if born is None else born,
    }


def _check_place(folder: Path, facts: Mapping[str, Any]) -> None:
    here, kept = _place_of(folder, folder / BEGIN), facts["place"]
    if here == kept:
        return
    if here | {"path": kept.get("path")} == kept:
        raise FileError(
            f"{folder}: the checkpoint of a run in {kept['path']}. Move it back there, and call "
            "with that folder. Nothing was spent."
        )
    raise FileError(
        f"{folder}: a copied or restored checkpoint. Its original may have gone on, and the same "
        "noise would be used twice. Go on with the original, or remove this folder: a new run "
        "costs its budget anew. Nothing was spent."
    )


def _machine() -> str:
    """Something that another machine does not have; hashed, as its manual asks for."""
    with contextlib.suppress(OSError):
        return hashlib.sha256(b"dpvim" + Path("/etc/machine-id").read_bytes()).hexdigest()
    return ""


def _birth_time(file: int | Path) -> int | None:
    """Time of a file's birth in nanoseconds, which nobody can set: Linux's statx; else None."""
    empty_path, here, wanted = 0x1000, -100, 0x800
    buffer = ctypes.create_string_buffer(256)
    try:
        statx = ctypes.CDLL(None, use_errno=True).statx
    except (OSError, AttributeError, TypeError):
        return None
    if isinstance(file, int):
        failed = statx(file, b"", empty_path, wanted, buffer)
    else:
        failed = statx(here, os.fsencode(file), 0, wanted, buffer)
    if failed or not int.from_bytes(buffer.raw[0:4], sys.byteorder) & wanted:
        return None
    seconds = int.from_bytes(buffer.raw[80:88], sys.byteorder, signed=True)
    return seconds * 10**9 + int.from_bytes(buffer.raw[88:92], sys.byteorder)


# -- files ------------------------------------------------------------------------------------


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """A lock that ends with this process, however that ends."""
    if fcntl is None:
        raise FileError(f"{folder}: checkpoints need a system with file locks (Linux, macOS).")
    with _clear_errors(folder, "Nothing was spent."):
        handle = os.open(folder, os.O_RDONLY)
    try:
        with _clear_errors(folder, "Nothing was spent."):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(handle).st_ino != os.stat(folder).st_ino:  # removed and made meanwhile
                raise BlockingIOError
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def _clear_errors(folder: Path, advice: str) -> Iterator[None]:
    try:
        yield
    except BlockingIOError as error:
        raise FileError(
            f"{folder}: another process is at work on this checkpoint. Wait for it, or choose "
            "another folder."
        ) from error
    except OSError as error:
        raise FileError(
            f"{folder}: a checkpoint cannot be kept there ({error.strerror or error}). Choose a "
            f"folder on a disk with space that you may write to. {advice}"
        ) from error


def _write_begin(folder: Path, facts: dict[str, Any]) -> None:
    with durable_file(folder / BEGIN) as file:
        # The file knows its own number: it keeps it when it gets its name.
        facts["place"] = _place_of(folder, file.fileno())
        _write_archive(file, facts, {})


def _write(path: Path, facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    with durable_file(path) as file:
        _write_archive(file, facts, arrays)


def _write_archive(
    file: BinaryIO, facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> None:
    meta = {**facts, "format": FORMAT, "version": VERSION}
    archives.write_into(file, meta, arrays, compressed=False)


def _read(path: Path, advice: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    try:
        with archives.opened(path) as archive:
            meta = archive.meta
            if not isinstance(meta, dict) or meta.get("format") != FORMAT:
                raise ValueError("no checkpoint")
            archive.check_version(FORMAT, VERSION)
            return dict(meta), archive.arrays(archive.names)
    except FileError as error:
        newer = "Install a newer dpvim" in str(error)
        raise FileError(str(error) if newer else f"{error} {advice}") from error


def _remove_secrets(folder: Path) -> None:
    shred(folder / STATE)
    shred(folder / BEGIN)
