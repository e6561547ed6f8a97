"""The file of a ledger: locked, read as a whole, appended to, and on the disk when that returns.

Beside it lies ``<ledger>.head``: how many lines were written, and the hash of the last. The chain
tells of every change but one, a whole end that is missing; the head tells of that. It is replaced
after the lines are on the disk, so a crash may leave it behind them, never ahead of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from dpvim.files import new_file, read_json
from dpvim.ledger import chain
from dpvim.ledger.chain import Chain, Problem
from dpvim.ledger.entries import Entry, LedgerError, Repaired, as_text, from_fields, now

# A booking is a line of about a kilobyte: no ledger has as many.
_MOST_BYTES = 256 * 2**20
_REPAIRED = (
    "the line before was cut short by a crash while it was written. Its booking had not returned, "
    "so that nothing was released under it: it counts for nothing."
)


class Head(NamedTuple):
    """Number of entries that were written, and the hash of the last one."""

    entries: int
    hash: str


class Contents(NamedTuple):
    """A ledger's file as it was read.

    Attributes:
        chain: Its lines.
        entries: The entries, with the numbers of their lines.
        problems: All that is wrong.
    """

    chain: Chain
    entries: list[tuple[int, Entry]]
    problems: list[Problem]


class OpenFile:
    """The file while it is locked."""

    def __init__(self, path: Path, handle: int) -> None:
        self._path, self._handle = path, handle
        self.contents = _read(path, handle)

    def append(self, entries: list[Entry]) -> None:
        """Write entries behind the last; they are on the disk when this returns."""
        before = self.contents.chain
        text = "\n" * before.ends_open
        if before.torn:
            # A torn line is one whose write did not return: the head does not count it (`_read`
            # refuses it otherwise). Whoever booked it was never told that it is booked, and
            # releases come after that. So it may count for nothing.
            note = Repaired(torn=chain.torn_hash(before.torn), note=_REPAIRED, time=now())
            entries = [note, *entries]
        last = before.last_hash
        for entry in entries:
            line = chain.linked(as_text(entry), last)
            last = chain.hash_of(line)
            text += f"{line}\n"
        _write_all(self._handle, text.encode())
        os.fsync(self._handle)
        _write_head(self._path, Head(len(before.links) + len(entries), last))
        self.contents = _read(self._path, self._handle)


def create(path: Path, first: Entry) -> None:
    """A new file with its first entry.

    Raises:
        FileExistsError: The name is taken.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: expected a folder {path.parent} for it, there is none.")
    for taken in (path, head_path(path)):
        if os.path.lexists(taken):
            raise FileExistsError(
                f"{taken}: exists already. A ledger is kept for as long as the data set is; open "
                "it, or choose another name."
            )
    # The head first, so that a ledger without one is always one that lost it.
    _write_head(path, Head(0, chain.START))
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        with _flock(handle, exclusive=True):
            OpenFile(path, handle).append([first])
    finally:
        os.close(handle)
    _sync_folder(path)


@contextmanager
def opened(path: Path, *, write: bool = False) -> Iterator[OpenFile]:
    """The file, locked: for readers together, or for one writer alone.

    Raises:
        OSError: It is not there, or cannot be written to.
    """
    flags = os.O_RDWR | os.O_APPEND if write else os.O_RDONLY
    try:
        handle = os.open(path, flags)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{path}: there is no such ledger. Make one: dpvim ledger init, or Ledger.create."
        ) from error
    except OSError as error:
        raise OSError(
            f"{path}: the ledger cannot be {'written to' if write else 'read'} "
            f"({error.strerror}), so nothing can be booked in it. Nothing was released."
        ) from error
    try:
        with _flock(handle, exclusive=write):
            yield OpenFile(path, handle)
    finally:
        os.close(handle)


def head_path(path: Path) -> Path:
    """The small file beside a ledger that says how long it is."""
    return path.with_name(f"{path.name}.head")


def _read(path: Path, handle: int) -> Contents:
    size = os.fstat(handle).st_size
    if size > _MOST_BYTES or not stat.S_ISREG(os.fstat(handle).st_mode):
        raise LedgerError(
            f"{path}: expected a ledger, got a folder, a device or a file of more than "
            f"{_MOST_BYTES / 2**20:.0f} MB. It is not read."
        )
    found = chain.read(os.pread(handle, size, 0))
    problems, entries = list(found.problems), []
    for link in found.links:
        try:
            entries.append((link.line, from_fields(link.fields)))
        except (ValueError, TypeError, KeyError) as error:
            problems.append(Problem(link.line, f"is no entry: {error!s:.300}"))
    problems += _compare_with_head(path, found)
    return Contents(found, entries, sorted(problems))


def _compare_with_head(path: Path, found: Chain) -> list[Problem]:
    head = _read_head(path)
    end = found.links[-1].line + 1 if found.links else 1
    if isinstance(head, str):
        return [Problem(end, f"{head_path(path).name}: {head}")]
    if head.entries > len(found.links):
        missing = head.entries - len(found.links)
        cut = "cut short or damaged" if found.torn or found.problems else "removed"
        return [Problem(end, f"entries were {cut}: {missing} of {head.entries} are missing")]
    if head.entries and found.links[head.entries - 1].hash != head.hash:
        line = found.links[head.entries - 1].line
        return [
            Problem(line, f"is not the line that {head_path(path).name} knows: it was replaced")
        ]
    return []


def _read_head(path: Path) -> Head | str:
    try:
        fields: Any = read_json(head_path(path))
        entries, last = fields["entries"], fields["hash"]
        if type(entries) is not int or entries < 0 or not isinstance(last, str):
            raise ValueError("no number of entries, or no hash")
        return Head(entries, last)
    except FileNotFoundError:
        return "is missing, so that nobody can tell if entries were removed; restore it"
    except (OSError, ValueError, KeyError) as error:
        return f"cannot be read ({type(error).__name__}); restore it"


def _write_head(path: Path, head: Head) -> None:
    with new_file(head_path(path)) as partial:
        partial.write_text(json.dumps(head._asdict()) + "\n", encoding="utf-8")
        with partial.open("rb") as file:
            os.fsync(file.fileno())
    _sync_folder(path)


def _write_all(handle: int, content: bytes) -> None:
    while content:
        content = content[os.write(handle, content) :]


def _sync_folder(path: Path) -> None:
    """Names of new files are on the disk, too; not every system has that."""
    with contextlib.suppress(OSError):
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextmanager
def _flock(handle: int, *, exclusive: bool) -> Iterator[None]:
    """A lock that the system takes away when the process ends, however it ends."""
    flock, kinds = _locking()
    flock(handle, kinds[0] if exclusive else kinds[1])
    try:
        yield
    finally:
        flock(handle, kinds[2])


def _locking() -> tuple[Callable[[int, int], None], tuple[int, int, int]]:
    try:
        import fcntl
    except ImportError as error:
        raise LedgerError(
            "a ledger needs a system with file locks (flock): Linux, macOS or another Unix. "
            "Without them two processes could spend the same budget."
        ) from error
    return fcntl.flock, (fcntl.LOCK_EX, fcntl.LOCK_SH, fcntl.LOCK_UN)
