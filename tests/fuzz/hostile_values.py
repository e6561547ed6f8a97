"""Strategies of hostile input: values, trees of json, bytes, arrays in files, archives."""

from __future__ import annotations

import copy
import io
import json
import math
import warnings
import zipfile
from typing import Any

import numpy as np
from hypothesis import strategies as st

DEEP = "@deep@"  # stands for a tree that is deeper than any stack
_DEEP_JSON = "[" * 100_000 + "]" * 100_000

VALUES = (
    *(None, True, False, 0, 1, -1, 2, 3.5, 2**31, 2**63, -(2**63), 10**30, 10**400),
    *(1e308, -1e308, 1e-320, -0.0, math.nan, math.inf, -math.inf),
    *("", " ", "a", "nan", "1", "\x00", "\ud800", "\u202eabc", "é" * 1000, "x" * 100_000, DEEP),
    *([], [[]], [0], [-1], [10**9], [10**9, 10**9], [None], ["a", "a"], {}, {"a": 1}),
)
values = st.sampled_from(VALUES)
numbers = st.sampled_from([v for v in VALUES if isinstance(v, int | float)])


# -- trees ----------------------------------------------------------------------------------------


def paths_of(tree: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where values are in a tree; the root first."""
    found = [prefix]
    items: Any = tree.items() if isinstance(tree, dict) else ()
    items = enumerate(tree) if isinstance(tree, list) else items
    for key, value in items:
        found += paths_of(value, (*prefix, key))
    return found


@st.composite
def trees(draw: Any, base: Any) -> Any:
    """A tree with values that were replaced, removed or added."""
    tree = copy.deepcopy(base)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(paths_of(tree)))
        deed = draw(st.sampled_from(["replace", "replace", "replace", "remove", "add"]))
        if not path:
            if deed == "replace" and draw(st.integers(0, 4)) == 0:
                tree = copy.deepcopy(draw(values))
            continue
        *before, last = path
        parent = tree
        for key in before:
            parent = parent[key]
        if deed == "remove":
            del parent[last]
        elif deed == "add" and isinstance(parent, dict):
            parent[draw(st.sampled_from(["extra", "", "name"]))] = copy.deepcopy(draw(values))
        else:
            parent[last] = copy.deepcopy(draw(values))
    return tree


def json_text(tree: Any) -> str:
    """A tree as json, with trees too deep for the encoder."""
    return json.dumps(tree).replace(f'"{DEEP}"', _DEEP_JSON)


# -- bytes ----------------------------------------------------------------------------------------


@st.composite
def damaged(draw: Any, base: bytes) -> bytes:
    """Bytes that were flipped, cut, doubled or filled with something else."""
    deed = draw(st.sampled_from(["flip", "cut", "insert", "double", "other", "remove"]))
    if not base or deed == "other":
        return draw(st.binary(max_size=300))
    place = draw(st.integers(0, len(base) - 1))
    if deed == "cut":
        return base[:place]
    if deed == "insert":
        return base[:place] + draw(st.binary(min_size=1, max_size=20)) + base[place:]
    size = draw(st.integers(1, 64))
    if deed == "double":
        return base[: place + size] + base[place:]
    if deed == "remove":
        return base[:place] + base[place + size :]
    content = bytearray(base)
    for _ in range(draw(st.integers(1, 8))):
        content[draw(st.integers(0, len(base) - 1))] = draw(st.integers(0, 255))
    return bytes(content)


def damaged_text(base: str) -> st.SearchStrategy[bytes]:
    """A text whose bytes were damaged, or in another encoding."""
    encoded = st.sampled_from(["utf-8-sig", "utf-16", "utf-32", "cp500"]).map(base.encode)
    return damaged(base.encode()) | damaged(base.encode()) | encoded


# -- arrays in files ------------------------------------------------------------------------------


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def _npy_of(header: str, content: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    text = header.encode("latin-1", "replace") + b"\n"
    size = len(text).to_bytes(2 if version == b"\x01\x00" else 4, "little", signed=False)
    return b"\x93NUMPY" + version + size + text + content


@st.composite
def hostile_npy(draw: Any) -> bytes:
    """An array's file with a header that lies, or with what no fit has."""
    shape = draw(
        st.sampled_from(
            [
                *("()", "(0,)", "(1,)", "(-1,)", "(-2, -2)", "(10**12,)", "(1000000000000,)"),
                *("(4294967296, 4294967296)", "(1,)*9999", "('a',)", "(1.5,)", "(True,)", "None"),
            ]
        )
    )
    kinds = ["<f4", "<f8", "<i4", "|O", "|V0", "<U0", "<U9", "|b1", "<c8", "<M8[s]", "x", ""]
    kind = draw(st.sampled_from(kinds))
    header = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}"
    deed = draw(st.sampled_from(["plain", "plain", "long", "deep", "bare", "call"]))
    if deed == "long":
        header += " " * draw(st.sampled_from([60_000, 3_000_000]))
    header = {"deep": "(" * 5000 + ")" * 5000, "bare": "", "call": "__import__('os')"}.get(
        deed, header
    )
    version = draw(st.sampled_from([b"\x01\x00", b"\x02\x00", b"\x03\x00", b"\xff\xff"]))
    if len(header) > 65_000:
        version = b"\x02\x00"
    return _npy_of(header, draw(st.sampled_from([b"", b"\0" * 4, b"\0" * 16])), version)


@st.composite
def hostile_arrays(draw: Any, base: np.ndarray) -> bytes:
    """An array of another shape or type, or with odd numbers; or no array at all."""
    deed = draw(st.sampled_from(["npy", "npy", "type", "shape", "numbers", "damage"]))
    if deed == "npy":
        return draw(hostile_npy())
    if deed == "damage":
        return draw(damaged(npy(base)))
    if deed == "type":
        kind = draw(st.sampled_from(["<f2", "<f8", "<i8", "<u1", "|b1", "<c16", "<U3", "|S2"]))
        with np.errstate(all="ignore"):
            return npy(base.astype(kind))
    if deed == "shape":
        shapes = [base[..., None], base[None], base[:0], np.ravel(base)[:1], np.zeros(())]
        return npy(shapes[draw(st.integers(0, 4))] if base.ndim else np.zeros((0, 3)))
    changed = np.array(base)
    if changed.size and changed.dtype.kind == "f":
        odd = draw(st.sampled_from([np.nan, np.inf, -np.inf, 1e38, -1.0, 0.0]))
        changed.flat[draw(st.integers(0, changed.size - 1))] = odd
    elif changed.size:
        changed.flat[draw(st.integers(0, changed.size - 1))] = draw(
            st.sampled_from([0, -1, 2**31 - 1])
        )
    return npy(changed)


# -- archives -------------------------------------------------------------------------------------


def read_archive(content: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def zipped(members: list[tuple[str, bytes]], kind: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "w") as archive:
        warnings.simplefilter("ignore")  # on names that are there twice
        for name, content in members:
            archive.writestr(zipfile.ZipInfo(name), content, kind)
    return buffer.getvalue()


def bomb(name: str, megabytes: int) -> bytes:
    """An archive of a few kilobytes that unfolds to so much."""
    return zipped([(name, b" " * (megabytes * 2**20))], zipfile.ZIP_DEFLATED)


def understated(content: bytes, name: str, size: int) -> bytes:
    """The archive whose directory says of a member that it unfolds to so few bytes."""
    changed = bytearray(content)
    at = content.rfind(b"PK\x01\x02")
    while at >= 0 and content[at + 46 : at + 46 + len(name)] != name.encode():
        at = content.rfind(b"PK\x01\x02", 0, at)
    if at >= 0:
        changed[at + 24 : at + 28] = size.to_bytes(4, "little")
    return bytes(changed)


_DAMAGE = ["bytes", "meta", "meta", "meta", "array", "array", "drop", "double", "rename", "lie"]


@st.composite
def archives(draw: Any, base: bytes) -> bytes:
    """An archive of ours in which something is wrong."""
    members = read_archive(base)
    meta = json.loads(members["meta.json"])
    names = sorted(members)
    deed = draw(st.sampled_from(_DAMAGE))
    if deed == "bytes":
        return draw(damaged(base))
    chosen = draw(st.sampled_from(names))
    entries = list(members.items())
    if deed == "meta":
        text = json_text(draw(trees(meta)))
        entries = [(n, text.encode() if n == "meta.json" else c) for n, c in entries]
    elif deed == "array":
        arrays = [name for name in names if name.endswith(".npy")] or names
        chosen = draw(st.sampled_from(arrays))
        old = np.load(io.BytesIO(members[chosen])) if chosen.endswith(".npy") else np.zeros(2)
        new = draw(hostile_arrays(old))
        entries = [(n, new if n == chosen else c) for n, c in entries]
    elif deed == "drop":
        entries = [(n, c) for n, c in entries if n != chosen]
    elif deed == "double":
        entries.append((chosen, draw(damaged(members[chosen]))))
    elif deed == "rename":
        entries.append((draw(st.sampled_from(["../x.npy", "", "a" * 3000, "x.npy"])), b"x"))
    kinds = [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]
    content = zipped(entries, draw(st.sampled_from(kinds)))
    if deed == "lie":
        content = understated(content, chosen, draw(st.sampled_from([0, 1, 2**31, 2**32 - 1])))
        content = draw(st.just(content) | damaged(content))
    return content
