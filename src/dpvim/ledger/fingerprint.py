"""Keyed fingerprints: whether data are those of a ledger, for those who hold data and key.

A fingerprint is HMAC-SHA256 of the data under a random key of 256 bits that lies in a file of its
own, readable by its owner alone. Without the key it looks random, whatever is guessed about the
data; with key and data it tells whether they are the same, and nothing else.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dpvim.fingerprint import HasDigest, data_digest, file_digest, keyed_fingerprint
from dpvim.ledger.entries import LedgerError
from dpvim.mapped import MappedArray
from dpvim.types import PrivacyWarning

_KEY_BYTES = 32


def digest_of(data: Any) -> bytes:
    """A digest of data; private, since guesses can be tried on it.

    Args:
        data: A file (a path), by its bytes; a table, by its columns; or arrays, in dicts, lists
            and tuples as `dpvim.fit` takes them, by their values in single precision; or a table
            in a database, by what it says.
    """
    if isinstance(data, HasDigest):
        return data.digest()
    if isinstance(data, str | os.PathLike):
        return file_digest(Path(data))
    leaves = [leaf if hasattr(leaf, "columns") else _plain(leaf) for leaf in jax.tree.leaves(data)]
    return data_digest(leaves)


def _plain(leaf: Any) -> np.ndarray | MappedArray:
    """Numbers as fits hold them, so that the same ones in another precision are the same."""
    if isinstance(leaf, MappedArray):
        return leaf
    array = np.asarray(leaf)
    kinds = {"f": np.float32, "i": np.int32, "u": np.int32, "b": np.bool_}
    if array.dtype.kind not in kinds:
        return array
    with np.errstate(over="ignore"):
        return array.astype(kinds[array.dtype.kind])


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
        return keyed_fingerprint(self._secret, b"dpvim ledger data" + digest)

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
