"""Archives: arrays and a page of json in one file, no code.

Nothing in a file is ever executed: arrays are read without pickle, and a file cannot unfold to far
more than it is.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from dpvim.files import MOST_TEXT, FileError, existing_file, new_file

__all__ = ["Archive", "FileError", "opened", "write", "write_into"]

# A small file could unfold to more than the memory. Traces are noise, which hardly gets smaller
# when it is compressed; files up to the first number are read whatever they hold.
_ALWAYS_READ = 64 * 2**20
_MOST_EXPANSION = 50
_META = "meta.json"


class Archive:
    """A file that is being read.

    Attributes:
        meta: The page of json.
    """

    def __init__(self, source: Path, archive: zipfile.ZipFile) -> None:
        self._source, self._archive = source, archive
        _check_size(source, archive)
        if _META not in archive.namelist():
            raise FileError(f"{source}: not a fit saved by dpvim (an archive of another kind).")
        if archive.getinfo(_META).file_size > MOST_TEXT:
            raise FileError(f"{source}: not a fit saved by dpvim (its page of json is too large).")
        self.meta: Any = json.loads(archive.read(_META))

    def check_version(self, kind: str, newest: int) -> None:
        """Refuse a file of another kind, or one that a newer dpvim wrote."""
        meta = self.meta
        if not isinstance(meta, dict) or meta.get("format") != kind:
            raise FileError(
                f"{self._source}: not a fit saved by dpvim (an archive of another kind)."
            )
        if not isinstance(meta.get("version"), int) or meta["version"] > newest:
            raise FileError(
                f"{self._source}: written in version {meta.get('version')!s:.50} of the format, "
                f"this dpvim reads up to {newest}. Install a newer dpvim."
            )

    def __contains__(self, name: str) -> bool:
        return f"{name}.npy" in self._archive.namelist()

    @property
    def num_bytes(self) -> int:
        """Bytes that it unfolds to: nothing in it describes more numbers than these hold."""
        return sum(member.file_size for member in self._archive.infolist())

    @property
    def names(self) -> list[str]:
        """Names of the arrays."""
        members = self._archive.namelist()
        return [name.removesuffix(".npy") for name in members if name.endswith(".npy")]

    def arrays(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Arrays by their names."""
        return {name: _array(name, self._archive.read(f"{name}.npy")) for name in names}


def write(path: str | Path, meta: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
    """Write a file; an existing one is replaced only when the new one is complete."""
    with new_file(path) as partial, open(partial, "wb") as file:
        write_into(file, meta, arrays)


def write_into(
    file: IO[bytes], meta: Mapping[str, Any], arrays: Mapping[str, Any], *, compressed: bool = True
) -> None:
    """Write an archive into an open file."""
    kind = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
    with zipfile.ZipFile(file, "w") as archive:
        _add(archive, _META, json.dumps(meta, indent=1).encode(), kind)
        for name, array in arrays.items():
            buffer = io.BytesIO()
            np.save(buffer, np.asarray(array), allow_pickle=False)
            _add(archive, f"{name}.npy", buffer.getvalue(), kind)


@contextlib.contextmanager
def opened(path: str | Path) -> Iterator[Archive]:
    """A file to be read; whatever is wrong with what it holds is a `FileError`."""
    source = existing_file(path)
    try:
        with zipfile.ZipFile(source) as archive:
            yield Archive(source, archive)
    except FileError:
        raise
    except zipfile.BadZipFile as error:
        raise FileError(
            f"{source}: not a fit saved by dpvim, or cut short. Copy or save it again."
        ) from error
    except Exception as error:  # of zip, of compression, of arrays: nobody can list them all
        raise FileError(
            f"{source}: damaged or not written by dpvim ({type(error).__name__}: {error!s:.300})."
        ) from error


def _add(archive: zipfile.ZipFile, name: str, content: bytes, kind: int) -> None:
    """Add a member without the time of day: how long a run took is not released."""
    member = zipfile.ZipInfo(name)
    member.external_attr = 0o644 << 16
    archive.writestr(member, content, kind)


def _check_size(source: Path, archive: zipfile.ZipFile) -> None:
    """Refuse a file that would unfold to far more than it is. No member unfolds to more than the
    archive says."""
    total = sum(member.file_size for member in archive.infolist())
    if total > max(_ALWAYS_READ, _MOST_EXPANSION * source.stat().st_size):
        raise FileError(
            f"{source}: not a fit saved by dpvim (it would unfold to {total / 2**20:,.0f} MB)."
        )


def _array(name: str, content: bytes) -> np.ndarray:
    """The array in a file of NumPy's, which must be as long as its header says."""
    buffer = io.BytesIO(content)
    read_header = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }[np.lib.format.read_magic(buffer)]
    shape, _, dtype = read_header(buffer)
    if math.prod(shape) * dtype.itemsize != len(content) - buffer.tell():
        raise ValueError(f"the array {name!r} is not as long as its header says")
    return np.load(io.BytesIO(content), allow_pickle=False)
