"""Texts that spreadsheets would run: refused, quoted or allowed."""

from __future__ import annotations

import functools

import pandas as pd
import pytest
from typer.testing import CliRunner

from dpvim.cli import app, fit_command
from dpvim.synthesis import fitting
from dpvim.synthesis.encoding import encode, validation_counts
from dpvim.synthesis.fitting import synthesize
from dpvim.synthesis.formulas import FormulaError, check_schema, formulas_of, is_formula
from dpvim.synthesis.report.tables import count_tables
from dpvim.synthesis.schema import Binary, Categorical, Count, Integer, Schema
from dpvim.synthesis.tables import read_table, write_table
from dpvim.synthesis.twin import Twin

EVIL = '=HYPERLINK("http://evil")'
SCHEMA = Schema(
    (
        Count(name="visits", upper=9, reviewed=True),
        Categorical(name="=place", levels=("home", EVIL, "@work"), reviewed=True),
        Binary(name="sign", levels=("-", "+"), nullable=True, reviewed=True),
        Integer(name="-age", lower=-9, upper=99, nullable=True, reviewed=True),
    ),
    missing=("-unknown", ""),
)
FRAME = pd.DataFrame(
    {
        "visits": [0, 1, 2, 3, 4, 5] * 10,
        "=place": ["home", EVIL, "@work", "home", EVIL, "home"] * 10,
        "sign": pd.array(["-", "+", "-", "+", None, "-"] * 10, dtype="string"),
        "-age": pd.array([-9, None, 30, 40, 50, 60] * 10, dtype="Int64"),
    }
)


@functools.cache
def twin() -> Twin:
    return synthesize(FRAME, SCHEMA, epsilon=5.0, components=2, seed=0, progress=False)


@pytest.mark.parametrize(
    "text", ["=1", "==", "@a", "+a", "-a", "--1", "-1-1", "=", "\ta", "\ra", "-inf", "\uff1d1"]
)
def test_what_is_a_formula(text):
    assert is_formula(text) == (len(text) > 1)


@pytest.mark.parametrize("text", ["", "-", "-9", "+1.5", "-1e3", "-.5", "-5.", "a=b", "1-2", "'=1"])
def test_what_is_none(text):
    assert not is_formula(text)


def test_a_table_with_formulas_is_refused_unless_told(tmp_path):
    path = tmp_path / "a.csv"
    with pytest.raises(FormulaError) as error:
        write_table(FRAME, path, missing="-unknown")
    assert list(tmp_path.iterdir()) == []
    for part in ("the name '=place'", "values of '=place'", "the name '-age'", "values of 'sign'"):
        assert part in str(error.value)
    assert "evil" not in str(error.value)  # no values
    with pytest.raises(ValueError, match="Did you mean 'quote'"):
        write_table(FRAME, path, formulas="quoted")

    write_table(FRAME[:3], path, missing="-unknown", formulas="allow")
    assert path.read_text().splitlines()[:3] == [
        "visits,=place,sign,-age",
        "0,home,-,-9",
        '1,"=HYPERLINK(""http://evil"")",+,-unknown',
    ]
    write_table(FRAME[:3], path, missing="-unknown", formulas="quote")
    assert path.read_text().splitlines() == [
        "visits,'=place,sign,'-age",
        "0,home,-,-9",
        '1,"\'=HYPERLINK(""http://evil"")",+,\'-unknown',
        "2,'@work,-,30",
    ]


def test_tables_without_formulas_and_parquet_files_are_not_concerned(tmp_path):
    write_table(FRAME, tmp_path / "a.parquet", missing="-unknown")
    harmless = pd.DataFrame(
        {"a": ["-9", "+", None], "b": [-1.5, float("-inf"), 2.0], "c": [1, 2, 3]}
    )
    write_table(harmless, tmp_path / "a.csv")
    assert (tmp_path / "a.csv").read_text() == "a,b,c\n-9,-1.5,1\n+,-inf,2\n,2,3\n"
    write_table(harmless[:2], tmp_path / "b.csv", missing="-unknown")  # nothing is missing


def test_formulas_in_later_pieces_leave_nothing_behind(tmp_path):
    pieces = (
        FRAME[["visits"]].rename(columns={"visits": "a"}).astype(str),
        pd.DataFrame({"a": ["=1"]}),
    )
    with pytest.raises(FormulaError, match="values of 'a'"):
        write_table(pieces, tmp_path / "a.csv")
    assert list(tmp_path.iterdir()) == []


def test_a_schema_says_what_would_be_run():
    assert formulas_of(SCHEMA) == [
        "the name '=place'",
        "levels of '=place'",
        "the name '-age'",
        "the text for missing values, '-unknown'",
    ]
    with pytest.raises(FormulaError, match="levels of '=place'"):
        check_schema(SCHEMA, "refuse")
    check_schema(SCHEMA, "quote")
    check_schema(SCHEMA, "allow")
    # a marker that is not written is not concerned
    assert formulas_of(Schema((Count(name="a", upper=3),), missing=("-unknown",))) == []
    both = Schema((Binary(name="a", levels=("=x", "'=x")),))
    with pytest.raises(FormulaError, match="with and without it"):
        check_schema(both, "quote")
    check_schema(both, "allow")


@pytest.mark.long
@pytest.mark.parametrize("suffix", ["csv", "csv.gz"])
def test_tables_of_a_twin(tmp_path, suffix):
    write = functools.partial(twin().write_datasets, count=2, num_rows=40, seed=0, progress=False)
    with pytest.raises(FormulaError, match="levels of '=place'"):
        write(tmp_path / "no", suffix=suffix)
    assert list(tmp_path.iterdir()) == []
    write(tmp_path / "plain", suffix="parquet")
    for rule in ("quote", "allow"):
        write(tmp_path / rule, suffix=suffix, formulas=rule)
    # They are read as what they were, however they were written.
    files = [
        *(tmp_path / rule / f"synthetic-001.{suffix}" for rule in ("quote", "allow")),
        tmp_path / "plain" / "synthetic-001.parquet",
    ]
    counts = [validation_counts(read_table(file, columns=SCHEMA.names), SCHEMA) for file in files]
    assert counts[0].equals(counts[1])
    assert counts[0].equals(counts[2])
    assert counts[0]["outside"].sum() == 0
    tables = [encode(read_table(file, columns=SCHEMA.names), SCHEMA) for file in files]
    for name in SCHEMA.names:
        assert tables[0].values[name].tolist() == tables[1].values[name].tolist()
    shares = [count_tables([file], SCHEMA).shares for file in files]
    for name in SCHEMA.names:
        assert shares[0][name].tolist() == shares[1][name].tolist()


# The command line


@pytest.fixture
def call(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    SCHEMA.save(tmp_path / "schema.toml")

    def run(*arguments: object):
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return run


def test_synth_refuses_before_the_table_is_read(call, tmp_path, monkeypatch):
    monkeypatch.setattr(fitting, "read_pieces", lambda *a, **k: pytest.fail("data were read"))
    result = call("synth", "a.csv", "--schema", "schema.toml", "--epsilon", 1, "-o", "twin")
    assert result.exit_code == 2, result.output
    assert "levels of '=place'" in result.stderr
    assert "--formulas" in result.stderr
    assert not (tmp_path / "twin").exists()


@pytest.mark.long
@pytest.mark.parametrize("options", [["--formulas", "quote"], ["--formulas", "allow"]])
def test_synth_sample_and_analyze(call, tmp_path, options):
    write_table(FRAME, tmp_path / "a.csv", missing="-unknown", formulas="allow")
    made = call(
        *("synth", "a.csv", "--schema", "schema.toml", "--epsilon", 5, "-o", "twin"),
        *("--components", 2, "--datasets", 4, "--rows", 200, *options),
    )
    assert made.exit_code == 0, made.output
    header = (tmp_path / "twin" / "data" / "synthetic-001.csv").read_text().splitlines()[0]
    assert header == (
        "visits,'=place,sign,'-age" if "quote" in options else "visits,=place,sign,-age"
    )
    assert call("sample", "twin", "-o", "more").exit_code == 2
    assert call("sample", "twin", "-o", "more", "--datasets", 2, *options).exit_code == 0
    assert call("sample", "twin", "-o", "same", "--format", "parquet").exit_code == 0
    found = call("analyze", "twin", "visits ~ Q('=place') + Q('-age')")
    assert found.exit_code == 0, found.output
    assert f"[T.{EVIL}]" in found.stdout


def test_names_of_coefficients(call, tmp_path, monkeypatch):
    write_table(FRAME, tmp_path / "a.csv", missing="-unknown", formulas="allow")
    arguments = [
        *("fit", "a.csv", "--schema", "schema.toml", "--model", "poisson", "--target", "visits"),
        *("--epsilon", 5, "--steps", 5, "-o", "fit"),
    ]
    with monkeypatch.context() as patch:
        patch.setattr(fit_command, "read_table", lambda *a, **k: pytest.fail("data were read"))
        refused = call(*arguments)
    assert refused.exit_code == 2, refused.output
    assert "the coefficient '-age'" in refused.stderr
    assert not (tmp_path / "fit").exists()
    assert call(*arguments, "--formulas", "quote").exit_code == 0
    names = read_table(tmp_path / "fit" / "summary.csv")["parameter"].tolist()
    assert "'-age" in names
    assert "'=place=@work" in names
    assert not any(map(is_formula, names))


def test_names_of_ones_own_parameters_are_never_run(call, tmp_path):
    Schema(SCHEMA.columns[:1]).save(tmp_path / "visits.toml")
    write_table(FRAME[["visits"]], tmp_path / "a.csv")
    (tmp_path / "mine.py").write_text(
        "import numpyro, numpyro.distributions as dist\n"
        "def model(values=None, missing=None, num_rows=None):\n"
        "    rate = numpyro.sample('=rate', dist.LogNormal(0, 1))\n"
        "    with numpyro.plate('records', len(values['visits'])):\n"
        "        numpyro.sample('visits', dist.Poisson(rate), obs=values['visits'])\n"
    )
    made = call(
        *("fit", "a.csv", "--schema", "visits.toml", "--model", "mine.py", "--epsilon", 5),
        *("--steps", 5, "-o", "fit"),
    )
    assert made.exit_code == 0, made.output
    assert read_table(tmp_path / "fit" / "summary.csv")["parameter"].tolist() == ["'=rate"]


def test_schema_check_warns(call):
    checked = call("schema", "check", "schema.toml")
    assert checked.exit_code == 0
    assert "Warning: spreadsheets" in checked.stderr
    assert "levels of '=place'" in checked.stderr
