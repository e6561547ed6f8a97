"""Columns of dates and times: how they are read, counted and written."""

from __future__ import annotations

import dataclasses
import tomllib
from datetime import UTC, date, datetime, timedelta

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpvim.synthesis.analysis.contingency import bin_table
from dpvim.synthesis.analysis.glm import fit_table
from dpvim.synthesis.draft import draft
from dpvim.synthesis.encoding import EncodedTable, decode, encode, in_file, validation_counts
from dpvim.synthesis.schema import Count, Date, Schema, SchemaError
from dpvim.synthesis.schema.moments import UNITS, read_moment, units_of, write_moment
from dpvim.synthesis.tables import TableError, read_table, write_table

DAYS = Date(name="x", lower="2020-01-01", upper="2020-12-31", nullable=True, outside="missing")


def one(column, values, **options):
    table = encode(pd.DataFrame({column.name: values}), Schema((column,), **options))
    return table.values[column.name].tolist(), table.missing.get(column.name, np.array([])).tolist()


MOMENTS = st.datetimes(datetime(1, 1, 1), datetime(9999, 12, 31)).map(
    lambda moment: moment.replace(microsecond=0)
)


@given(MOMENTS, st.sampled_from([*UNITS]))
def test_what_is_written_is_read_at_every_resolution(moment, resolution):
    units = units_of(moment, resolution)
    text = write_moment(units, resolution)
    assert units_of(read_moment(text, resolution), resolution) == units
    # and a text that is finer is cut to the same unit
    assert units_of(read_moment(moment.isoformat(), resolution), resolution) == units
    assert units_of(read_moment(str(moment), resolution), resolution) == units


FORMATS = {
    "day": ["%d.%m.%Y", "%m/%d/%Y", "%Y%m%d", "%j of %Y", "%Y-%m-%dT%H:%M:%SZ", "%d.%m.%y"],
    "minute": ["%d.%m.%Y %H:%M", "%H.%M %d %m %Y", "%Y%m%d%H%M%S.%f"],
    "month": ["%m/%Y", "100%% %Y-%m"],
}


@pytest.mark.parametrize(
    ("resolution", "format"), [(key, each) for key, all_ in FORMATS.items() for each in all_]
)
@given(bounds=st.tuples(*[st.datetimes(datetime(1969, 1, 2), datetime(2068, 12, 30))] * 2))
@settings(max_examples=25)
def test_any_date_survives_any_format(resolution, format, bounds):
    lower, upper = min(bounds).isoformat()[:19], (max(bounds) + timedelta(40)).isoformat()[:19]
    upper = min(upper, "2068-12-31T00:00:00")
    column = Date(name="x", lower=lower, upper=upper, resolution=resolution, format=format)
    schema = Schema((column,))
    assert Schema.from_dict(tomllib.loads(schema.to_toml())) == schema
    units = np.unique(np.linspace(*column.bounds, 7).astype(np.int32))
    frame = decode(EncodedTable({"x": units}, {}), schema)
    assert encode(in_file(frame, schema, as_text=True), schema).values["x"].tolist() == [*units]
    assert encode(in_file(frame, schema, as_text=False), schema).values["x"].tolist() == [*units]
    assert encode(frame, schema).values["x"].tolist() == [*units]


def test_a_date_means_the_same_in_every_type_of_column():
    days = ["2020-01-31", "2020-02-01", None]
    expected = ([30, 31, 0], [False, False, True])
    moments = pd.to_datetime(pd.Series(days))
    arrow = pa.array([date(2020, 1, 31), date(2020, 2, 1), None])
    assert one(DAYS, days) == expected
    assert one(DAYS, moments) == expected
    assert one(DAYS, moments.astype("datetime64[s]")) == expected
    assert one(DAYS, moments.astype("category")) == expected
    assert one(DAYS, moments.astype(object)) == expected
    assert one(DAYS, [date(2020, 1, 31), " 2020-02-01T13:45:10.5 ", pd.NaT]) == expected
    for kind in (pa.date32(), pa.date64(), pa.timestamp("s"), pa.timestamp("ns")):
        assert one(DAYS, pd.arrays.ArrowExtensionArray(arrow.cast(kind))) == expected


def test_moments_before_1970_are_cut_downwards():
    column = Date(name="x", lower="1960-01-01", upper="1969-12-31")
    last = pd.Series(np.array(["1969-12-31T23:59:59.999999999"], "datetime64[ns]"))
    assert one(column, last)[0] == one(column, ["1969-12-31T23:59:59.9"])[0] == [3652]


def test_dates_that_do_not_fit_follow_the_rules():
    texts = ["2019-12-31", "2021-01-01", "2020-02-30", "soon", "2020-02", "2020-01-01T10:00Z"]
    assert one(DAYS, texts) == ([0] * 6, [True] * 6)
    clamped = Date(name="x", lower="2020-01-01", upper="2020-12-31", not_a_number="2020-01-03")
    assert one(clamped, [*texts, None])[0] == [0, 365, 2, 2, 2, 2, 2]
    counts = validation_counts(pd.DataFrame({"x": [*texts, "2020-03-01", ""]}), Schema((DAYS,)))
    assert counts.loc["x"].tolist() == [1, 2, 4, 1]


def test_a_marker_is_a_date_however_it_is_written():
    options = {"missing": ("", "9999-12-31")}
    column = Date(name="x", lower="2020-01-01", upper="2020-12-31", nullable=True)
    never = datetime(9999, 12, 31)
    for values in (["9999-12-31"], ["9999-12-31 00:00:00"], [never], np.array([never], "M8[s]")):
        assert one(column, values, **options) == ([0], [True])
    # but it is that moment alone, also where years are counted
    years = Date(name="x", lower="1890", upper="1990", resolution="year", nullable=True)
    assert one(years, ["1900-01-01", "1900-01-02"], missing=("1900-01-01",))[1] == [True, False]


def test_columns_that_are_no_dates_are_refused_as_a_whole():
    zone = pd.to_datetime(pd.Series(["2020-01-01"])).dt.tz_localize("UTC")
    arrow = pd.arrays.ArrowExtensionArray(pa.array([0], pa.timestamp("s", tz="Europe/Helsinki")))
    for values in (zone, arrow):
        with pytest.raises(TableError, match=r"without a time zone.*tz_convert"):
            one(DAYS, values)
    for numbers in ([20200131], [20200131.0], [True]):
        with pytest.raises(TableError, match="expected texts or dates, got a column of type"):
            one(DAYS, numbers)
    with pytest.raises(TableError, match="some values are numbers or other objects"):
        one(DAYS, pd.Series(["2020-01-01", 20200102], dtype=object))
    # An object with a time zone is a record's own affair.
    mixed = pd.Series([datetime(2020, 1, 2, tzinfo=UTC), date(2020, 1, 2)], dtype=object)
    assert one(DAYS, mixed) == ([0, 1], [True, False])
    with pytest.raises(TableError, match='Declare kind = "date"'):
        one(Count(name="x", upper=3), pd.to_datetime(pd.Series(["2020-01-01"])))


LOOKS = ["2020-02-29", "2020-02-29 10:00", "9999-12-31", "2020-02-29T10:00Z", "29.2.2020", "2020"]
ANYTHING = st.one_of(
    st.none(),
    st.text(max_size=5),
    st.binary(max_size=3),
    st.text("0123456789-T:. Z", max_size=19),
    st.dates(),
    st.datetimes(timezones=st.none() | st.just(UTC)),
    st.sampled_from([pd.NaT, *LOOKS]),
)


@given(st.lists(ANYTHING, min_size=1, max_size=8), st.sampled_from([None, "%d.%m.%Y"]))
def test_no_record_is_an_error_and_each_is_read_by_itself(values, format):
    column = dataclasses.replace(DAYS, format=format)
    series = pd.Series([*values, None], dtype=object)
    together = one(column, series)
    alone = [one(column, series[i : i + 1]) for i in range(len(series))]
    assert together[0] == [units for part, _ in alone for units in part]
    assert together[1] == [gap for _, part in alone for gap in part]
    assert all(0 <= units <= 365 for units in together[0])


def entry(**keys):
    base = {"name": "x", "kind": "date", "lower": "2020-01-01", "upper": "2020-12-31"}
    return {"dpvim_schema": 1, "columns": [base | keys]}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"lower": "1.1.2020"}, "lower: expected a day in ISO 8601.*'1.1.2020'"),
        ({"lower": 2020}, "lower: expected a day in ISO 8601"),
        ({"lower": datetime(2020, 1, 1, tzinfo=UTC)}, "without a time zone"),
        ({"upper": "2019-12-31"}, "more than the lower bound 2020-01-01, got '2019-12-31'"),
        ({"not_a_number": "2021-01-01"}, "a date from 2020-01-01 to 2020-12-31"),
        ({"resolution": "days"}, "resolution: expected one of 'year'.*Did you mean 'day'"),
        ({"resolution": ["day"]}, "resolution: expected one of"),
        ({"lower": "0001-01-01", "resolution": "second"}, "2147483647 seconds.*coarser"),
        ({"format": "%d %B %Y"}, r"format: expected only %Y.*got \['%B'\]"),
        ({"format": "%Y-%m-%d%z"}, r"\['%z'\].*time zones"),
        ({"format": "%Y-%m-%d%"}, r"format: expected only %Y"),
        ({"format": "%m.%Y"}, "format: expected one that tells days.*Add day"),
        ({"format": "=%Y-%m-%d"}, "begins with %, a letter or a digit"),
        ({"format": ""}, "begins with %, a letter or a digit"),
        ({"format": 3}, "format: expected a text"),
        ({"format": "%Y-%Y-%m-%d"}, "format: expected one that lower can be read from"),
        ({"lower": "1920-01-01", "format": "%d.%m.%y"}, "lower can be read.*four digits"),
    ],
)
def test_what_a_date_must_not_say(keys, message):
    with pytest.raises(SchemaError, match=f"^schema: (?s:.*){message}"):
        Schema.from_dict(entry(**keys))


def test_bounds_may_be_dates_of_toml():
    written = entry(lower=date(2020, 1, 1), upper=datetime(2020, 12, 31, 12))
    assert Schema.from_dict(written) == Schema.from_dict(entry())


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_files_have_dates_as_declared(tmp_path, suffix):
    columns = (
        Date(name="day", lower="2020-01-01", upper="2020-12-31", format="%d.%m.%Y"),
        Date(name="time", lower="2020-01-01", upper="2020-01-02", resolution="hour", nullable=True),
    )
    schema = Schema(columns, missing=("NA",))
    table = EncodedTable({"day": np.array([0, 59]), "time": np.array([13, 0])}, {})
    table.missing["time"] = np.array([False, True])
    path = tmp_path / f"twin.{suffix}"
    frame = decode(table, schema)
    assert [str(kind) for kind in frame.dtypes] == ["datetime64[s]"] * 2
    write_table(in_file(frame, schema, as_text=suffix == "csv"), path, missing="NA")
    if suffix == "csv":
        assert path.read_text() == "day,time\n01.01.2020,2020-01-01T13:00\n29.02.2020,NA\n"
    else:
        assert str(read_table(path)["day"].dtype) == "date32[day][pyarrow]"
    again = encode(read_table(path), schema)
    assert again.values["day"].tolist() == [0, 59]
    assert again.values["time"].tolist() == [13, 0]
    assert again.missing["time"].tolist() == [False, True]


@pytest.mark.parametrize("suffix", ["csv", "parquet", None])
def test_dates_are_days_in_formulas(tmp_path, suffix):
    """However they are stored: the slope is that of a day, the intercept that of the first one."""
    column = Date(name="day", lower="2020-01-01", upper="2020-12-31", format="%d.%m.%Y")
    schema = Schema((column, Count(name="y", upper=1000)))
    days = np.arange(0, 300, 7)
    table = EncodedTable({"day": days, "y": 5 + 2 * days}, {})
    frame = decode(table, schema)
    source = frame
    if suffix is not None:
        source = str(tmp_path / f"twin.{suffix}")
        write_table(in_file(frame, schema, as_text=suffix == "csv"), source)
    layout = {"levels": {}, "dates": schema.dates, "missing": list(schema.missing)}
    found = fit_table(source, "y ~ day", "gaussian", layout)
    assert not found["failure"]
    np.testing.assert_allclose(found["params"], [5, 2], atol=1e-6)
    if suffix is None:  # without a schema, days from 1970 on
        found = fit_table(source, "y ~ day", "gaussian", layout | {"dates": {}})
        np.testing.assert_allclose(found["params"], [5 - 2 * 18262, 2], atol=1e-3)


def test_groups_of_dates_are_named_by_dates():
    table = bin_table(pd.DataFrame({"x": ["2020-01-01", "2020-12-31", ""]}), Schema((DAYS,)))
    bins = table.bins["x"]
    assert bins.labels[0] == "2020-01-01 to 2020-01-19"
    assert bins.starts[1] == "2020-01-20"
    assert table.counts("x").tolist() == [1, *[0] * (bins.size - 3), 1, 1]


def test_a_draft_knows_dates_by_their_type_or_their_look():
    days = pd.date_range("2019-03-05", periods=60, freq="5D")
    frame = pd.DataFrame(
        {
            "typed": days,
            "iso": days.strftime("%Y-%m-%d"),
            "german": [*days[:-1].strftime("%d.%m.%Y"), ""],
            "english": days.strftime("%m/%d/%Y"),
            "seen": (days + pd.Timedelta(minutes=75)).strftime("%Y-%m-%d %H:%M"),
            "zone": days.tz_localize("UTC"),
        }
    )
    guess = draft(frame)
    bounds = {"lower": "2019-01-01", "upper": "2019-12-31"}
    assert guess.schema.columns == (
        Date(name="typed", **bounds),
        Date(name="iso", **bounds),
        Date(name="german", **bounds, format="%d.%m.%Y", nullable=True),
        Date(name="english", **bounds, format="%m/%d/%Y"),
        Date(name="seen", lower="2019-01-01", upper="2019-12-31T23:59", resolution="minute"),
    )
    assert "is the day where it says %d" in guess.comments["german"]
    assert "without a time zone" in guess.left_out["zone"]
    assert guess.schema.unreviewed == guess.schema.names
