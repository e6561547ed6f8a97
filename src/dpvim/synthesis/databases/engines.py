"""Expressions that engines spell differently: blanks, numbers in texts, hashes."""

from __future__ import annotations

import functools
import sys
import unicodedata
from collections.abc import Callable
from decimal import Decimal, localcontext
from typing import TYPE_CHECKING, Any

from dpvim._extras import LazyModule
from dpvim.synthesis.tables import TableError
from dpvim.synthesis.values import LONGEST_NUMBER

if TYPE_CHECKING:
    import ibis
else:
    ibis = LazyModule("ibis", extra="databases")

DUCKDB, POSTGRES, SPARK = "duckdb", "postgres", "pyspark"
ENGINES = (DUCKDB, POSTGRES, SPARK)

_DIGITS = "[0-9]+(_[0-9]+)*"
# Numbers as Python's float has them; the word for "not a number" is none.
_NUMBER = rf"^[+-]?({_DIGITS}(\.({_DIGITS})?)?|\.{_DIGITS})([eE][+-]?{_DIGITS})?$"
_INFINITE = "^[+-]?[iI][nN][fF]([iI][nN][iI][tT][yY])?$"
_LARGE_EXPONENT = "[eE][+-]?0*[1-9][0-9]{4,}$"
_ALL_ZEROS = "^[+-]?[0.]*[eE]"
# The first number that rounds to infinity, and the last one that rounds to zero.
_INFINITE_FROM = 2**1024 - 2**970
_ZERO_TO = -1075  # as a power of 2


@functools.cache
def blanks() -> str:
    """All characters that Python strips from a text."""
    return "".join(filter(str.isspace, map(chr, range(sys.maxunicode + 1))))


@functools.cache
def _digits() -> tuple[str, str]:
    """All characters beyond ASCII that Python's float takes for digits, and what they stand for."""
    found = [c for c in map(chr, range(128, sys.maxunicode + 1)) if c.isdecimal()]
    return "".join(found), "".join(str(unicodedata.decimal(c)) for c in found)


@functools.cache
def _function(name: str, arguments: tuple[str, ...], returns: str) -> Any:
    """A function of an engine's that Ibis has no name for, by the types of its arguments."""
    stubs: dict[int, Callable[..., Any]] = {
        1: lambda text: text,
        2: lambda text, more: text,
        3: lambda text, more, most: text,
    }
    builtin = ibis.udf.scalar.builtin
    return builtin(stubs[len(arguments)], name=name, signature=(arguments, returns))


def stripped(engine: str, text: Any) -> Any:
    """A text without blanks around it, as `str.strip` has it."""
    name = "trim" if engine == DUCKDB else "btrim"
    return _function(name, ("string", "string"), "string")(text, blanks())


def with_plain_digits(text: Any) -> Any:
    """A text with digits of ASCII alone, whatever script they are from."""
    return text.re_search("[^ -~]").ifelse(text.translate(*_digits()), text)


def number_of_text(engine: str, text: Any) -> Any:
    """The number that a text stands for, by the rules of `to_number`; NULL if none.

    Args:
        engine: That computes it.
        text: Stripped, with plain digits.
    """
    is_short = text.length() <= LONGEST_NUMBER
    plain = text.replace("_", "")
    return ibis.cases(
        (is_short & text.re_search(_NUMBER), _double(engine, plain)),
        (is_short & text.re_search(_INFINITE), _infinity(text.startswith("-"))),
        else_=ibis.null("float64"),
    )


def number_of_decimal(engine: str, value: Any) -> Any:
    """The nearest double of a decimal; NULL for what is no number."""
    text = value.cast("string")
    if engine != POSTGRES:  # DuckDB's own way from decimals to doubles rounds twice
        return text.try_cast("float64")
    return ibis.cases((text == "NaN", ibis.null("float64")), else_=_rounded(value, text))


def _double(engine: str, text: Any) -> Any:
    """A text that is known to be a number, as the nearest double."""
    if engine != POSTGRES:
        return text.try_cast("float64")
    # PostgreSQL refuses what is too large or too small for a double: no record may be an error.
    is_zero = text.re_search(_ALL_ZEROS) | text.re_search("[eE]-")
    beyond = is_zero.ifelse(number(0.0), _infinity(text.startswith("-")))
    return text.re_search(_LARGE_EXPONENT).ifelse(beyond, _rounded(text.cast("decimal"), text))


def _rounded(exact: Any, text: Any) -> Any:
    with localcontext() as context:
        context.prec = 1200  # so that the power is exact
        tiny = str(Decimal(2) ** _ZERO_TO)
    return ibis.cases(
        (exact.abs() >= ibis.literal(str(_INFINITE_FROM)).cast("decimal"), _infinity(exact < 0)),
        (exact.abs() <= ibis.literal(tiny).cast("decimal"), number(0.0)),
        else_=text.cast("float64"),
    )


def _infinity(is_negative: Any) -> Any:
    return is_negative.ifelse(number(float("-inf")), number(float("inf")))


def number(value: float) -> Any:
    """A double, to the last bit: engines take digits with a point for decimals."""
    return ibis.literal(repr(value)).cast("float64")


def told(engine: str, value: Any, dtype: Any) -> Any:
    """A value as a text that no other value of the type has."""
    if engine != SPARK or dtype.is_string():
        return value if dtype.is_string() else value.cast("string")
    if dtype.is_floating():  # Java's machines differ in how they write numbers, but not in this
        written = _function("format_string", ("string", "float64"), "string")
        return written("%a", value.cast("float64"))
    if dtype.is_binary():
        return _function("hex", ("binary",), "string")(value)
    if dtype.is_nested() or dtype.is_unknown():
        raise TableError(f"a column of type {dtype} is not known by its values.")
    return value.cast("string")


def row_hashes(engine: str, text: Any) -> list[Any]:
    """Two hashes of a text, of 64 bits each."""
    if engine == DUCKDB:
        halves = ("md5_number_lower", "md5_number_upper")
        return [_function(name, ("string",), "uint64")(text) for name in halves]
    if engine == SPARK:
        hashed = text.hexdigest("md5")
        numbers = _function("conv", ("string", "int32", "int32"), "string")
        return [numbers(hashed.substr(start, 16), 16, 10) for start in (0, 16)]
    hashed = _function("hashtextextended", ("string", "int64"), "int64")
    return [hashed(text, seed) for seed in (0, 1)]
