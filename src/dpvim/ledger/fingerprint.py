"""Keyed fingerprints: whether data are those of a ledger, for those who hold data and key.

A fingerprint is HMAC-SHA256 of the data under a random key of 256 bits that lies in a file of its
own, readable by its owner alone. Without the key it looks random, whatever is guessed about the
data; with key and data it tells whether they are the same, and nothing else.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dpvim.ledger.entries import LedgerError
from dpvim.types import PrivacyWarning

_KEY_BYTES = 32
_FILE_PIECE = 2**20


def digest_of(data: Any) -> bytes:
    """A digest of data; private, since guesses can be tried on it.

    Args:
        data: A file (a path), by its bytes; a table, by its columns; or arrays, in dicts, lists
            and tuples as `dpvim.fit` takes them, by their values in single precision.
    """
    if isinstance(data, str | os.PathLike):
        return _of_file(Path(data))
    total = hashlib.sha256(b"arrays")
    for leaf in jax.tree.leaves(data):
        total.update(_of_table(leaf) if hasattr(leaf, "columns") else _of_array(leaf))
    return total.digest()


def _of_file(path: Path) -> bytes:
    total = hashlib.sha256(b"file")
    with path.open("rb") as file:
        while piece := file.read(_FILE_PIECE):
            total.update(piece)
    return total.digest()


def _of_array(leaf: Any) -> bytes:
    array = np.asarray(leaf)
    kinds = {"f": np.float32, "i": np.int32, "u": np.int32, "b": np.bool_}
    if array.dtype.kind in kinds:
        # As fits hold them, so that the same numbers in another precision are the same.
        with np.errstate(over="ignore"):
            return _of_values(array.astype(kinds[array.dtype.kind]))
    return _of_values(array)


def _of_table(table: Any) -> bytes:
    total = hashlib.sha256(b"table")
    for name in table.columns:
        total.update(hashlib.sha256(str(name).encode("utf-8", "backslashreplace")).digest())
        column = np.asarray(table[name])
        total.update(_of_values(column))
    return total.digest()


def _of_values(array: np.ndarray) -> bytes:
    """Type, shape and values; those that are no numbers by how they are written."""
    if array.dtype.kind not in "biufM":
        texts = [
            repr(value).encode("utf-8", "backslashreplace") for value in array.ravel().tolist()
        ]
        content = b"".join(len(text).to_bytes(8, "little") + text for text in texts)
        kind = "text"
    else:
        content = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<")).tobytes()
        kind = array.dtype.newbyteorder("<").str
    head = f"{kind} {array.shape} ".encode()
    return hashlib.sha256(head + content).digest()


class Key:
    """The secret of a ledger's fingerprints."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    @property
    def name(self) -> str:
        """A public name of the key, by which it is recognised: of 256 random bits it says none."""
        return hashlib.sha256(b"dpvim ledger key" + self._secret).hexdigest()[:16]

    def fingerprint(self, digest: bytes) -> str:
        """The fingerprint of data with this digest."""
        return hmac.new(self._secret, b"dpvim ledger data" + digest, hashlib.sha256).hexdigest()

    def __repr__(self) -> str:
        return f"Key({self.name!r})"


def key_path(ledger: Path) -> Path:
    """The file of a ledger's key."""
    return ledger.with_name(f"{ledger.name}.key")


def make_key(ledger: Path) -> Key:
    """A new key, in a file that only its owner may read."""
    secret = secrets.token_bytes(_KEY_BYTES)
    handle = os.open(key_path(ledger), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(handle, "w", encoding="ascii") as file:
        file.write(secret.hex() + "\n")
        file.flush()
        os.fsync(file.fileno())
    return Key(secret)


def read_key(ledger: Path) -> Key | None:
    """The key of a ledger; None if its file is not there."""
    path = key_path(ledger)
    try:
        mode, text = path.stat().st_mode, path.read_text(encoding="ascii")
        secret = bytes.fromhex(text.strip())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise LedgerError(f"{path}: expected a key of a ledger, got something else.") from error
    if len(secret) != _KEY_BYTES:
        raise LedgerError(f"{path}: expected a key of {_KEY_BYTES} bytes, got {len(secret)}.")
    if hasattr(os, "getuid") and mode & (stat.S_IRWXG | stat.S_IRWXO):
        warnings.warn(
            f"{path}: others may read the key of the ledger's fingerprints, and could try guesses "
            "about the data on them. Take the right away: chmod 600.",
            PrivacyWarning,
            stacklevel=2,
        )
    return Key(secret)
