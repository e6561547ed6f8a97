"""Arrays that stay on the disk: rows are read when a batch takes them.

>>> import tempfile
>>> file = tempfile.NamedTemporaryFile()
>>> on_disk = np.memmap(file.name, mode="w+", dtype=np.float64, shape=(1000, 2))
>>> is_on_disk(on_disk), is_on_disk(on_disk[:10]), is_on_disk(np.zeros(3))
(True, True, False)
>>> rows = MappedArray(on_disk)
>>> rows.shape, rows.dtype, rows[[3, 5]].dtype
((1000, 2), dtype('float32'), dtype('float32'))
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

# Arrays that are read whole are read so many bytes at a time.
_PIECE_BYTES = 2**26
_HELD_AS = {"f": np.float32, "i": np.int32, "u": np.int32, "b": np.bool_}


class MappedArray:
    """An array on the disk, in the precision that fits work in; slices of it are in memory."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array
        self.shape = array.shape
        self.dtype = np.dtype(_HELD_AS[array.dtype.kind])

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> np.ndarray:
        """Rows, read from the disk."""
        # A number too large becomes infinite, as in arrays that are in memory (`bridge.data`).
        with np.errstate(over="ignore"):
            return np.asarray(self._array[rows]).astype(self.dtype)

    def pieces(self) -> Iterator[np.ndarray]:
        """All rows, one piece after the other."""
        return (piece.astype(self.dtype) for piece in pieces_of(self._array))


def is_on_disk(array: Any) -> bool:
    """True for a memory map of NumPy, a view of one, and arrays of Arrow that were not copied."""
    while isinstance(array, np.ndarray):
        if isinstance(array, np.memmap):
            return True
        array = array.base
    # Whether Arrow's memory is a file cannot be known; it is treated as if it were.
    return isinstance(array, mmap.mmap) or type(array).__module__.startswith("pyarrow")


def pieces_of(array: np.ndarray) -> Iterator[np.ndarray]:
    """The rows of an array, a piece at a time."""
    row_bytes = max(1, array.dtype.itemsize * int(np.prod(array.shape[1:])))
    rows = max(1, _PIECE_BYTES // row_bytes)
    return (array[first : first + rows] for first in range(0, len(array), rows))


def are_mapped(records: Any) -> bool:
    """True if any array among the records is on the disk."""
    return any(isinstance(leaf, MappedArray) for leaf in jax.tree.leaves(records))
