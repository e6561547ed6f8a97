"""Texts of dates inside of an engine: seconds since 1970 by integers alone.

Engines' own functions for dates stop at a text that is none. Here a text is matched by a pattern
first, its parts are cut out, and what they make is computed, as `read_moment` would have it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from dpvim._extras import LazyModule
from dpvim.synthesis.databases.engines import blanks
from dpvim.synthesis.schema import Date
from dpvim.synthesis.schema.moments import UNITS
from dpvim.synthesis.tables import TableError

if TYPE_CHECKING:
    import ibis
else:
    ibis = LazyModule("ibis", extra="databases")

_TWO = "[0-9][0-9]"
_ISO_PARTS = ("([0-9]{4})", f"(-({_TWO}))", f"(-({_TWO}))")
_ISO_TIME = rf"([T ]({_TWO}):({_TWO})(:({_TWO})([.][0-9]+)?)?)?"
# From the first character of each part on: year, month, day, hour, minute, second.
_ISO_PLACES = ((0, 4), (5, 2), (8, 2), (11, 2), (14, 2), (17, 2))
# As `datetime.strptime` has them. Digits are those of ASCII alone (`read_moment`).
_DIRECTIVES = {
    "Y": "[0-9]{4}",
    "m": "1[0-2]|0[1-9]|[1-9]",
    "d": "3[0-1]|[1-2][0-9]|0[1-9]|[1-9]| [1-9]",
    "H": "2[0-3]|[0-1][0-9]|[0-9]",
    "M": "[0-5][0-9]|[0-9]",
    "S": "6[0-1]|[0-5][0-9]|[0-9]",
    "f": "[0-9]{1,6}",
}
_PARTS = "YmdHMS"
_FIRST = (1, 1, 1, 0, 0, 0)
# Characters that Python takes for a letter whatever the case, beside the letter in both.
_ALSO = {"s": "\u017f", "k": "\u212a", "i": "\u0130\u0131"}
_SECONDS_OF_A_DAY = 86_400


def seconds_of_text(column: Date, text: Any) -> Any:
    """Seconds from 1970 to the moment that a stripped text stands for; NULL if for none."""
    if column.format is None:
        pattern, parts = _iso(column, text)
    else:
        pattern, parts = _by_format(column, column.format, text)
    year, month, day, hour, minute, second = parts
    days_of_month = ibis.cases(
        (month.isin([4, 6, 9, 11]), 30),
        (month != 2, 31),
        ((year % 4 == 0) & ((year % 100 != 0) | (year % 400 == 0)), 29),
        else_=28,
    )
    is_moment = (
        (year >= 1)
        & month.between(1, 12)
        & (day >= 1)
        & (day <= days_of_month)
        & (hour <= 23)
        & (minute <= 59)
        & (second <= 59)
    )
    seconds = (
        _days(year, month, day) * ibis.literal(_SECONDS_OF_A_DAY, "int64")
        + hour * 3600
        + minute * 60
        + second
    )
    return ibis.cases(
        (text.re_search(pattern), is_moment.ifelse(seconds, ibis.null("int64"))),
        else_=ibis.null("int64"),
    )


def _days(year: Any, month: Any, day: Any) -> Any:
    """Days from 1970 to a date of the Gregorian calendar, years being positive.

    Years begin in March here, so that the day that is sometimes there is the last.
    """
    years = year - (month <= 2).ifelse(1, 0) + 400  # so that nothing is negative
    months = month + (month > 2).ifelse(-3, 9)
    in_year = (153 * months + 2) // 5 + day - 1
    in_years = years * 365 + years // 4 - years // 100 + years // 400
    return in_years + in_year - 719_468 - 146_097


def _iso(column: Date, text: Any) -> tuple[str, list[Any]]:
    needed = min(3, 1 + [*UNITS].index(column.resolution))
    pattern = _ISO_TIME
    for place in (2, 1, 0):
        pattern = _ISO_PARTS[place] + pattern
        if place >= needed:
            pattern = f"({pattern})?"
    parts = [
        _whole(text.substr(start, length), first)
        for (start, length), first in zip(_ISO_PLACES, _FIRST, strict=True)
    ]
    return f"^{pattern}$", parts


def _by_format(column: Date, format: str, text: Any) -> tuple[str, list[Any]]:
    pattern, groups = _pattern(column, format)
    parts = [
        _whole(text.re_extract(pattern, groups[letter]), first)
        if letter in groups
        else ibis.literal(first)
        for letter, first in zip(_PARTS, _FIRST, strict=True)
    ]
    return pattern, parts


def _whole(digits: Any, otherwise: int) -> Any:
    """Digits as a number; a part that is not there is the first one."""
    digits = digits.strip()
    return (digits.length() > 0).ifelse(digits.try_cast("int64"), otherwise).fill_null(otherwise)


def _pattern(column: Date, format: str) -> tuple[str, dict[str, int]]:
    """A pattern for texts in a format, and the numbers of its groups."""
    tokens = re.findall(r"%.|\s+|.", format, re.DOTALL)
    pattern, after_digits = "", False
    groups: dict[str, int] = {}
    for token in tokens:
        is_directive = token[0] == "%" and token != "%%"
        literal = token[-1]
        if is_directive:
            known = literal in _DIRECTIVES and literal not in groups
            # Beside each other, where one ends and the next begins is a question of engines.
            if not known or after_digits:
                raise _refusal(column, format)
            groups[literal] = len(groups) + 1
            pattern += f"({_DIRECTIVES[literal]})"
        elif token.isspace():
            pattern += f"[{blanks()}]+"
        else:
            if literal.isdigit() or (literal.isalpha() and not literal.isascii()):
                raise _refusal(column, format)
            pattern += _either_case(literal)
        after_digits = is_directive
    return f"^{pattern}$", groups


def _either_case(letter: str) -> str:
    if not letter.isalpha():
        return re.escape(letter) if letter.isascii() else letter
    both = letter.lower() + letter.upper() + _ALSO.get(letter.lower(), "")
    return f"[{both}]"


def _refusal(column: Date, format: str) -> TableError:
    return TableError(
        f"column {column.name!r}: expected dates, or texts in ISO 8601 or in a format of "
        f"%Y %m %d %H %M %S %f with signs between them, got texts in the format {format!r}, which "
        "cannot be read inside of a database. Make a view that has it as a date, or read the table "
        "from a file."
    )
