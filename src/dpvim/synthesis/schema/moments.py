"""Dates and times as texts, as moments, and as whole numbers of units of a resolution.

Moments are without a time zone: what a clock on a wall shows. A text with an offset is no date,
unless a declared format has that offset in it, letter by letter.

>>> read_moment("2020-02-29T13:45", "hour"), read_moment("2020-02-30", "day")
(datetime.datetime(2020, 2, 29, 13, 45), None)
>>> write_moment(units_of(read_moment("29.2.20", "day", "%d.%m.%y"), "day"), "day")
'2020-02-29'
"""

from __future__ import annotations

import re
from datetime import datetime

import numpy as np

UNITS = {"year": "Y", "month": "M", "day": "D", "hour": "h", "minute": "m", "second": "s"}
"""Resolutions, from coarse to fine, and their letters in NumPy."""
_ISO = {
    "year": "%Y",
    "month": "%Y-%m",
    "day": "%Y-%m-%d",
    "hour": "%Y-%m-%dT%H:%M",
    "minute": "%Y-%m-%dT%H:%M",
    "second": "%Y-%m-%dT%H:%M:%S",
}
_ISO_TEXT = re.compile(
    r"(\d{4})(?:-(\d\d)(?:-(\d\d)(?:[T ](\d\d):(\d\d)(?::(\d\d)(?:\.\d+)?)?)?)?)?", re.ASCII
)
_FIRST = (1, 1, 1, 0, 0, 0)
# What a format may have: numbers only, since names of months depend on the machine's language.
_WRITTEN = {
    "Y": "{:%Y}",
    "y": "{:%y}",
    "m": "{:%m}",
    "d": "{:%d}",
    "j": "{:%j}",
    "H": "{:%H}",
    "M": "{:%M}",
    "S": "{:%S}",
    "f": "{:%f}",
}
DIRECTIVES = ", ".join(f"%{letter}" for letter in [*_WRITTEN, "%"])
_DIRECTIVE = re.compile(r"%(.?)", re.DOTALL)
# What a format must have, one of each, for a resolution and those that are coarser.
_NEEDED = {"year": "Yy", "month": "mj", "day": "dj", "hour": "H", "minute": "M", "second": "S"}


def read_moment(text: str, resolution: str, format: str | None = None) -> datetime | None:
    """The moment that a text stands for, to the second; None if none.

    Args:
        text: Without blanks around it.
        resolution: Texts that are coarser stand for no moment: 2020-02 is no day.
        format: How dates are written, as for `datetime.strptime`; ISO 8601 if None.
    """
    try:
        if format is not None:
            if not text.isascii() and any(c.isdecimal() and not c.isascii() for c in text):
                return None  # digits of other scripts, which only some engines read
            return datetime.strptime(text, format).replace(microsecond=0)
        found = _ISO_TEXT.fullmatch(text)
        if found is None:
            return None
        numbers = [int(group) for group in found.groups() if group is not None]
        if len(numbers) < min(3, 1 + [*UNITS].index(resolution)):
            return None
        year, month, day, hour, minute, second = [*numbers, *_FIRST[len(numbers) :]]
        return datetime(year, month, day, hour, minute, second)
    except (ValueError, OverflowError, re.error):
        return None


def units_of(moment: datetime, resolution: str) -> int:
    """Whole units from 1970 to a moment."""
    return int(np.datetime64(moment, "s").astype(f"datetime64[{UNITS[resolution]}]").astype(int))


def write_moment(units: int, resolution: str, format: str | None = None) -> str:
    """The text of a moment that is so many units after 1970."""
    moment = (
        np.array(units).astype(f"datetime64[{UNITS[resolution]}]").astype("datetime64[s]").item()
    )

    def written(found: re.Match[str]) -> str:
        if found[1] == "Y":
            return f"{moment.year:04}"  # the platform's strftime writes 999, which is not read
        return "%" if found[1] == "%" else _WRITTEN[found[1]].format(moment)

    return _DIRECTIVE.sub(written, format or iso_format(resolution))


def iso_format(resolution: str) -> str:
    """The format that dates are written in if no other one is declared."""
    return _ISO[resolution]


def unknown_directives(format: str) -> list[str]:
    """Directives of a format that it must not have."""
    return [
        f"%{letter}"
        for letter in _DIRECTIVE.findall(format)
        if letter not in _WRITTEN and letter != "%"
    ]


def missing_units(format: str, resolution: str) -> list[str]:
    """Units that a format does not tell, and would have to for the resolution."""
    letters = set(_DIRECTIVE.findall(format))
    names = [*UNITS][: 1 + [*UNITS].index(resolution)]
    return [name for name in names if not letters & set(_NEEDED[name])]
