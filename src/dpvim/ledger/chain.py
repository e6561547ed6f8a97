r"""A chain of lines: each holds the hash of the line before it, and its own.

A line is a json object whose last two fields are ``after``, the hash of the line before, and
``hash``, the SHA-256 of the line's own text up to there. So a line that was edited does not have
its hash, and where lines were removed, added or moved the next one comes after another. Nothing
secret is in a hash: whoever writes a whole new chain is not found out.

A crash can cut the last line short. It stays where it is, and the next line says so (`Repaired`):
nothing in the file is ever changed.

>>> first = linked('{"entry": "a"}', START)
>>> second = linked('{"entry": "b"}', hash_of(first))
>>> read(f"{first}\n{second}\n".encode()).problems
[]
>>> read(f"{first}\n{second}\n".replace('"b"', '"c"').encode()).problems[0].line
2
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any, NamedTuple

START = "0" * 64
_LINKED = re.compile(r'(\{.*), "after": "([0-9a-f]{64})", "hash": "([0-9a-f]{64})"\}', re.DOTALL)


class Problem(NamedTuple):
    """Something that is wrong with a line, which is counted from 1."""

    line: int
    text: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.text}"


class Link(NamedTuple):
    """A line that is as it was written: its number in the file, its fields and its hash."""

    line: int
    fields: dict[str, Any]
    hash: str


class Chain(NamedTuple):
    """A file's lines.

    Attributes:
        links: Those that are as they were written.
        torn: A last line that was cut short, empty if there is none.
        ends_open: Whether the last line has no end, so that the next must begin with one.
        problems: All that is wrong, line by line.
    """

    links: list[Link]
    torn: bytes
    ends_open: bool
    problems: list[Problem]

    @property
    def last_hash(self) -> str:
        """The hash that the next line comes after."""
        return self.links[-1].hash if self.links else START


def linked(text: str, after: str) -> str:
    """The line of a json object that follows the line with this hash."""
    body = f'{text[:-1]}, "after": "{after}"'
    return f'{body}, "hash": "{_sha(body.encode())}"}}'


def hash_of(line: str) -> str:
    """The hash that a line says it has."""
    found = _LINKED.fullmatch(line)
    assert found is not None
    return found[3]


def torn_hash(torn: bytes) -> str:
    """The name of a line that was cut short, for the entry that repairs it."""
    return _sha(torn)


def read(content: bytes) -> Chain:
    """Read the lines of a file, and find what is wrong with them."""
    lines = content.split(b"\n")
    ends_open = lines[-1] != b""
    lines = lines if ends_open else lines[:-1]
    links: list[Link] = []
    problems: list[Problem] = []
    seen: dict[str, int] = {}
    last, torn = START, b""
    for number, raw in enumerate(lines, 1):
        parsed = _parse(raw)
        if isinstance(parsed, str):
            if number == len(lines) and ends_open:
                torn = raw
            elif not (number < len(lines) and _repairs(lines[number], raw, last)):
                problems.append(Problem(number, parsed))
                # What follows is judged by what this line says of itself, if it says anything.
                last = _claimed_hash(raw) or last
            continue
        fields, after, own = parsed
        if after != last:
            problems.append(Problem(number, _out_of_place(after, seen)))
        links.append(Link(number, fields, own))
        last = own
        seen[own] = number
    return Chain(links, torn, ends_open, problems)


def _parse(raw: bytes) -> tuple[dict[str, Any], str, str] | str:
    """Fields, the hash before and the line's own; or what is wrong with it."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return "is no text: it was damaged"
    found = _LINKED.fullmatch(text)
    if found is None:
        return "is no entry with its hash: it was cut short, damaged or edited"
    body = text[: -len(f', "hash": "{found[3]}"}}')]
    if _sha(body.encode()) != found[3]:
        return "does not have the hash that it was written with: it was edited or damaged"
    try:
        fields = json.loads(found[1] + "}")
    except (ValueError, RecursionError):
        return "is no json"
    if not isinstance(fields, dict):
        return "is no json object"
    return fields, found[2], found[3]


def _claimed_hash(raw: bytes) -> str | None:
    found = _LINKED.fullmatch(raw.decode("utf-8", "replace"))
    return None if found is None else found[3]


def _repairs(following: bytes, torn: bytes, last: str) -> bool:
    """True if the next line says that this one was cut short, and comes after the one before."""
    parsed = _parse(following)
    if isinstance(parsed, str):
        return False
    fields, after, _ = parsed
    is_note = fields.get("entry") == "repaired" and fields.get("torn") == torn_hash(torn)
    return is_note and after == last


def _out_of_place(after: str, seen: dict[str, int]) -> str:
    if after in seen:
        return (
            f"was written after line {seen[after]}, not after the one before it: lines were added "
            "or moved"
        )
    if after == START:
        return "was written as the first line: lines were added or moved"
    return "was written after a line that is not before it: lines were removed, moved or replaced"


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
