"""Fingerprints of data: to tell whether data are the same without keeping them.

A plain hash of data would let anybody who sees it test a guess of all the data. So what is kept is
keyed: whoever lacks the key learns nothing from it.
"""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from dpvim.files import existing_file
from dpvim.mapped import MappedArray

_BLOCK = 2**20


@runtime_checkable
class HasDigest(Protocol):
    """Data that are elsewhere, such as a table in a database, and know a digest of themselves."""

    def digest(self) -> bytes:
        """A digest of all that the data are. Secret, as `data_digest`."""
        ...


def data_digest(*data: Any) -> bytes:
    """SHA-256 of arrays, data frames and plain values, in dicts, lists and tuples as you like.

    It depends on values, types, shapes and names, not on how they lie in memory. Secret: it is a
    function of private data.

    >>> data_digest(np.arange(3)) == data_digest(np.arange(6)[:3])
    True
    >>> data_digest(np.arange(3)) == data_digest(np.arange(3.0))
    False
    """
    found = hashlib.sha256()
    _add(found, data)
    return found.digest()


def file_digest(path: str | Path) -> bytes:
    """SHA-256 of what a file holds. Secret, as `data_digest`."""
    with open(existing_file(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def keyed_fingerprint(key: bytes, digest: bytes) -> str:
    """The fingerprint to keep: HMAC-SHA256 of a digest, under a key that is random and secret.

    >>> keyed_fingerprint(b"one key", b"data") == keyed_fingerprint(b"another", b"data")
    False
    """
    return hmac.new(key, digest, hashlib.sha256).hexdigest()


def _add(found: Any, value: Any) -> None:
    """Add a value, with its type and length first, so that no two values run into each other."""
    if isinstance(value, dict):
        _head(found, "dict", len(value))
        for name, part in value.items():
            _add(found, name)
            _add(found, part)
    elif isinstance(value, list | tuple):
        _head(found, "list", len(value))
        for part in value:
            _add(found, part)
    elif hasattr(value, "columns") and hasattr(value, "items"):  # a data frame, column by column
        columns = list(value.items())
        _head(found, "frame", len(columns))
        for name, column in columns:
            _add(found, name)
            _add(found, column.to_numpy())
    elif value is None or isinstance(value, bool | int | float | str | bytes):
        content = value if isinstance(value, bytes) else repr(value).encode()
        _head(found, type(value).__name__, len(content))
        found.update(content)
    else:
        _add_array(found, value)


def _add_array(found: Any, value: Any) -> None:
    if isinstance(value, MappedArray):  # as if it were in memory, a piece at a time
        _head(found, f"array {value.dtype.str} {value.shape}", value.size)
        for piece in value.pieces():
            found.update(np.ascontiguousarray(piece).tobytes())
        return
    array = np.asarray(value)
    _head(found, f"array {array.dtype.str} {array.shape}", array.size)
    if array.dtype.hasobject:  # texts, and what is missing among them
        for part in array.flat:
            _head(found, type(part).__name__, len(content := repr(part).encode()))
            found.update(content)
        return
    flat = np.ascontiguousarray(array).reshape(-1)
    rows = max(1, _BLOCK // max(1, array.itemsize))
    for first in range(0, len(flat), rows):
        found.update(flat[first : first + rows].tobytes())


def _head(found: Any, kind: str, length: int) -> None:
    found.update(f"{kind}:{length};".encode())
