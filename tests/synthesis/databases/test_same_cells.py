"""Every engine gives the same integers as the encoder of this process, whatever a table holds."""

from __future__ import annotations

import datetime
import itertools
import math
from decimal import Context, Decimal

import numpy as np
import pyarrow as pa
import pytest
from engine_cases import counted, differing, expected, frame_of, in_parquet, in_postgres, in_spark

from dpvim.synthesis.databases.connection import open_table
from dpvim.synthesis.databases.looking import validation_counts_in
from dpvim.synthesis.encoding import validation_counts
from dpvim.synthesis.marginals.grids import grid_of
from dpvim.synthesis.schema import (
    Binary,
    Categorical,
    Count,
    Date,
    Integer,
    Ordinal,
    Real,
    Schema,
)

# Texts that are hard to read: blanks, signs, numbers of many forms, dates that are none.
NASTY = [
    *(None, "", " ", "\u3000", "NA", "null", "NaN", "nan", "-nan", "x", "X", "missing", "\t1\n"),
    *(
        "1",
        "+1",
        " 1",
        "1.0",
        "01",
        "1e0",
        "10e-1",
        ".1e1",
        "1.",
        "1_0",
        "1__0",
        "_1",
        "1_",
        "1_.5",
    ),
    *("0", "-0", "-0.0", "0x1", "1,5", "1 0", "--1", "1e", "e1", ".", "+", "1e+1_0", "1d", "1f"),
    *("inf", "-inf", "+Infinity", "INF", "iNfInItY", "infinit", "1e400", "-1e400", "1e-400"),
    *("1e99999", "-1e99999999999999999999", "1e-99999", "0e99999999", "0" * 1001, "9" * 1000),
    *("9" * 1001, "0." + "0" * 400 + "1e401", "2.4703282292062327e-324", "1" + "0" * 400),
    *("1.7976931348623158e308", "1.7976931348623159e308", "-9", "-9.0", "-9.00000000000000001"),
    *(
        "\uff12",
        "\u0663",
        "1\u0660",
        "\uff11.\uff15",
        "\U0001d7d7",
        "1\u00a0",
        "\x1c1\x1f",
        "0.5",
        "1.5",
        "2.5",
        "3.5",
        "-0.5",
    ),
    *("0.49999999999999994", "0.30000000000000004", "0.3", "99.5", "100.5", "100.4999", "120"),
    *("true", "TRUE", "False", "fALSE", "yes", "t", "\uff54rue", "1.00", "0.000"),
    *("a", "A", "a'b", 'a"b', "a\\b", "a;--", "%s", "{x}", "=1+1", "'=1+1", "-", "ä", "a\u0308"),
    *("ab", "abc", "abcd", "abc*", "abx", "b*", "bcd", "🦩", "🦩x", "a\u200d", "\uff42"),
    *("2020-01-31", "2020-02-30", "2020-02-29", "2019-02-29", "1900-02-29", "2000-02-29"),
    *("2020-1-31", "2020-01", "2020", "2020-13-01", "0000-01-01", "0001-01-01", "9999-12-31"),
    *("2020-01-31T10:11", "2020-01-31 10:11:12.999", "2020-01-31t10:11", "2020-01-31T24:00"),
    *(
        "2020-01-31T10:60",
        "2020-01-31T10:11:60",
        "2020-01-31T10:11Z",
        "2020-01-31T",
        "2020-01-31T1",
    ),
    *("2014-12-31", "2015-01-01", "2024-12-31", "2025-01-01", "2024-12-31T23:59:59.999999"),
    *("31.12.2020", "1.2.2020", "01.02.2020", "32.1.2020", "31.4.2020", "29.2.2021", " 1.2.2020 "),
    *("3\u0661.12.2020", "31.12.20", "31.12.2020 10:30", "31.12.2020  9:05", "31.12.2020T9:05"),
    *("31.12.2020\u00a09:5", "31.12.2020 24:00", "1.1.1970 0:00", "12:31.2020", "31.12.2020 9:61"),
    *("10h30 31/12/2020", "10H30 31/12/2020", "9h5 1/1/2021", "\uff110h30 31/12/2020", "aka"),
]

TEXTS = Schema(
    (
        Integer(name="integer", lower=0, upper=100),
        Integer(name="far", lower=-(2**31) + 1, upper=2**31 - 1, nullable=True),
        Integer(name="dropped", lower=1, upper=3, nullable=True, outside="missing"),
        Count(name="count", upper=5000, not_a_number=7),
        Real(name="real", lower=0.0, upper=3.0, nullable=True),
        Real(name="decimals", lower=0.0, upper=5.0, decimals=1, not_a_number=0.3),
        Real(name="log", lower=0.1, upper=500.0, scale="log", nullable=True, outside="missing"),
        Categorical(name="level", levels=("a", "a'b", 'a"b', "a\\b", "=1+1", "a;--", "ä", "1")),
        Categorical(name="few", levels=("x", "1.0", "%s"), nullable=True),
        Ordinal(name="whole", levels=(0, 1, 10, -1), nullable=True),
        Binary(name="boolean", levels=(False, True), outside=True),
        Binary(name="turned", levels=(True, False), nullable=True),
        Categorical(name="prefix", levels=("ab", "🦩", "b", "other"), prefix=2, outside="other"),
        Categorical(
            name="groups",
            levels=("one", "two", "rest"),
            groups={"one": ["a*", "abc*", "1"], "two": ["ab*", "b*", "abcd"]},
            outside="rest",
        ),
        Categorical(
            name="all", levels=("one", "two"), groups={"one": ["a"], "two": ["*"]}, nullable=True
        ),
        Date(name="day", lower="2015-01-01", upper="2024-12-31", not_a_number="2020-01-01"),
        Date(name="month", lower="0001-01", upper="9999-12", resolution="month", nullable=True),
        Date(name="year", lower="2000", upper="2024", resolution="year", nullable=True),
        Date(
            name="second",
            lower="2020-01-01",
            upper="2020-12-31",
            resolution="second",
            nullable=True,
            outside="missing",
        ),
        Date(
            name="written",
            lower="2015-01-01",
            upper="2024-12-31",
            format="%d.%m.%Y",
            nullable=True,
        ),
        Date(
            name="timed",
            lower="1970-01-01",
            upper="2024-12-31",
            format="%d.%m.%Y %H:%M",
            resolution="minute",
            nullable=True,
        ),
        Date(name="french", lower="2020-01-01", upper="2021-12-31", format="%Hh%M %d/%m/%Y"),
    ),
    missing=("NA", "-9", "null", "2020-02-29", "=1+1x"),
)
ENGINES = ("duckdb", "postgres", "spark")


def address_in(engine, table, request, folder):
    if engine == "duckdb":
        return in_parquet(folder, table)
    if engine == "spark":
        request.getfixturevalue("spark")  # whose machine is shared
        return in_spark(folder, table)
    return in_postgres(request.getfixturevalue("postgres"), table)


def check(engine, table, schema, request, folder, intervals=20, with_statuses=False):
    frame = frame_of(table)
    with open_table(address_in(engine, table, request, folder)) as opened:
        found, wanted = counted(opened, schema, intervals), expected(frame, schema, intervals)
        assert differing(schema, found, wanted) == []
        if with_statuses:
            found = validation_counts_in(opened, schema)
            assert found.equals(validation_counts(frame, schema))


def text_table() -> pa.Table:
    """Every nasty text in every column, beside others in each."""
    columns = {}
    for place, name in enumerate(TEXTS.names):
        columns[name] = pa.array(NASTY[place:] + NASTY[:place], "string")
    return pa.table(columns)


@pytest.mark.parametrize("engine", ENGINES)
def test_texts(engine, request, tmp_path):
    check(engine, text_table(), TEXTS, request, tmp_path / "t", with_statuses=engine == "duckdb")


def edges(column, intervals) -> list[float]:
    """Numbers on the edges of a column's cells, and next to them."""
    grid = grid_of(column, intervals)
    first = np.asarray(grid.first, float)
    if isinstance(column, Real):
        lower, upper = column.bounds
        if grid.steps is not None:
            first = (first + 0.5) / grid.steps
        if column.scale == "log":
            first = np.exp((1 - first) * math.log(lower) + first * math.log(upper))
        else:
            first = lower + first * (upper - lower)
    near = [first, first - 0.5, np.nextafter(first, -np.inf), np.nextafter(first, np.inf)]
    return np.concatenate([*near, first * (1 + 1e-7), first * (1 - 1e-7)]).tolist()


NUMBERS = Schema(
    (
        Integer(name="integer", lower=-5, upper=100, nullable=True, outside="missing"),
        Count(name="count", upper=100_000),
        Real(name="real", lower=-0.3, upper=0.1 + 0.2, nullable=True),
        Real(name="decimals", lower=0.0, upper=5.0, decimals=1),
        Real(name="log", lower=1e-5, upper=7e20, scale="log", nullable=True),
        Ordinal(name="levels", levels=(0, 1, 2**53, -(2**53)), nullable=True),
        Binary(name="boolean", levels=(False, True), nullable=True),
    ),
    missing=("", "-9", "0.1"),
)
ODD = [
    *(None, 0.0, -0.0, 1.0, -1.0, math.nan, math.inf, -math.inf, 5e-324, -5e-324, 1e308, -1e308),
    *(-9.0, 0.1, 0.1 + 0.2, 0.5, 1.5, 2.5, 2.0**53, 2.0**53 + 2, 2.0**31, -(2.0**63), 1e-5),
]


def number_table(kind: pa.DataType) -> pa.Table:
    columns = {}
    for column in NUMBERS.columns:
        values = [*ODD, *edges_of(column, 240 if kind == pa.float64() else 20)]
        columns[column.name] = values
    rows = max(map(len, columns.values()))
    arrays = {n: list(itertools.islice(itertools.cycle(v), rows)) for n, v in columns.items()}
    if pa.types.is_floating(kind):
        single = kind == pa.float32()
        with np.errstate(over="ignore"):
            arrays = {
                n: [None if e is None else float(np.float32(e)) if single else e for e in v]
                for n, v in arrays.items()
            }
    elif pa.types.is_integer(kind):
        arrays = {
            n: [None if e is None or math.isnan(e) else _within(e, 2**63 - 1) for e in v]
            for n, v in arrays.items()
        }
    else:  # decimals, as long as they can be
        arrays = {
            n: [
                None
                if e is None or not math.isfinite(e) or abs(e) > 1e19
                else Context(prec=60).quantize(Decimal(e), Decimal(1).scaleb(-18))
                for e in v
            ]
            for n, v in arrays.items()
        }
    return pa.table({n: pa.array(v, kind) for n, v in arrays.items()})


def edges_of(column, intervals):
    return [0.0, 1.0] if isinstance(column, Ordinal | Binary) else edges(column, intervals)


def _within(number: float, most: int) -> int:
    return most if number > most else -most - 1 if number < -most - 1 else int(number)


@pytest.mark.parametrize(
    "kind", [pa.float64(), pa.float32(), pa.int64(), pa.decimal128(38, 18)], ids=str
)
@pytest.mark.parametrize("engine", ENGINES)
def test_numbers(engine, kind, request, tmp_path):
    finest = kind == pa.float64() and engine == "duckdb"
    table = number_table(kind)
    options = {"intervals": 240 if finest else 20, "with_statuses": finest}
    check(engine, table, NUMBERS, request, tmp_path / "t", **options)


@pytest.mark.parametrize("engine", ENGINES)
def test_zeros_among_many_markers(engine, request, tmp_path):
    """Engines may look values up in a set, in which the zeros are not the same."""
    column = Integer(name="x", lower=-1, upper=30, nullable=True)
    schema = Schema((column,), missing=tuple(map(str, range(16))))
    table = pa.table({"x": [0.0, -0.0, 15.0, 16.0, -1.0, 20.0]})
    check(engine, table, schema, request, tmp_path / "t")


MOMENTS = Schema(
    (
        Date(name="day", lower="1969-12-30", upper="2024-12-31", nullable=True, outside="missing"),
        Date(name="last", lower="1900-01-01", upper="9999-12-31", nullable=True, outside="missing"),
        Date(name="hour", lower="1969-12-31", upper="1970-01-02", resolution="hour"),
        Date(name="month", lower="1969-11", upper="2024-12", resolution="month", nullable=True),
    ),
    missing=("", "1970-01-01", "2000-01-01T10:00:00"),
)


@pytest.mark.parametrize("kind", [pa.date32(), pa.timestamp("us")], ids=str)
@pytest.mark.parametrize("engine", ENGINES)
def test_moments(engine, kind, request, tmp_path):
    at = datetime.datetime
    values = [
        *(None, at(1, 1, 1), at(9999, 12, 31, 23, 59, 59, 999999), at(1969, 12, 30)),
        *(at(1969, 12, 31, 23, 59, 59, 999999), at(1969, 12, 29, 23, 59, 59, 999999)),
        *(at(1970, 1, 1), at(1970, 1, 1, 0, 0, 0, 999999), at(1970, 1, 1, 0, 0, 1)),
        *(
            at(2000, 1, 1, 10),
            at(2000, 1, 1, 10, 0, 0, 5),
            at(2000, 1, 1, 10, 0, 1),
            at(2025, 1, 1),
        ),
        *(
            at(2024, 12, 31, 23, 59, 59),
            at(1969, 11, 1),
            at(1969, 10, 31, 23),
            at(1970, 1, 2, 0, 30),
        ),
    ]
    if kind == pa.date32():
        values = [None if each is None else each.date() for each in values]
    columns = {n: pa.array(values[i:] + values[:i], kind) for i, n in enumerate(MOMENTS.names)}
    check(engine, pa.table(columns), MOMENTS, request, tmp_path / "t", with_statuses=True)


@pytest.mark.parametrize("engine", ENGINES)
def test_booleans(engine, request, tmp_path):
    schema = Schema(
        (
            Binary(name="plain", levels=(False, True)),
            Binary(name="turned", levels=(True, False), nullable=True),
        )
    )
    values = [True, False, None, True, True]
    table = pa.table({n: pa.array(values[i:] + values[:i]) for i, n in enumerate(schema.names)})
    check(engine, table, schema, request, tmp_path / "t")


HOSTILE = ['a"b', "a'b;DROP TABLE records;--", "select", "Ä {x}", "%s\\", "v1", "a`b", "${user}"]


@pytest.mark.parametrize("engine", ENGINES)
def test_hostile_names_and_levels(engine, request, tmp_path):
    levels = tuple(HOSTILE)
    columns = tuple(Categorical(name=name, levels=levels) for name in HOSTILE)
    rng = np.random.default_rng(1)
    values = {name: pa.array(list(rng.choice(HOSTILE, 40)), "string") for name in HOSTILE}
    check(engine, pa.table(values), Schema(columns), request, tmp_path / "t")


def test_a_hostile_name_of_a_table(postgres):
    table = pa.table({"x": pa.array(["a", "b", "b"])})
    schema = Schema((Categorical(name="x", levels=("a", "b")),))
    for name in ('re"cords', "re.cords", "re;DROP TABLE x", "100%"):
        with open_table(in_postgres(postgres, table, name)) as opened:
            assert counted(opened, schema)[0].tolist() == [1, 2]
