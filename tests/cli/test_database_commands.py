"""Commands on tables in databases: the same words as for files, and no passwords."""

from __future__ import annotations

import sys

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import spark_session
from typer.testing import CliRunner

from dpvim.cli import app
from dpvim.ledger.book import Ledger
from dpvim.synthesis.schema import Binary, Categorical, Schema

SCHEMA = Schema(
    (
        Categorical(name="region", levels=("north", "south"), nullable=True, reviewed=True),
        Binary(name="ill", levels=(False, True), reviewed=True),
    ),
    constraints=("not (region == 'north' and ill == true)",),
)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder of Parquet files with a table of 200 rows, a schema, and that folder to work in."""
    rng = np.random.default_rng(0)
    (tmp_path / "parts").mkdir()
    for name in ("a", "b"):
        table = pa.table({"region": rng.choice(["north", "x"], 100), "ill": rng.random(100) < 0.5})
        pq.write_table(table, tmp_path / "parts" / f"{name}.parquet")
    SCHEMA.save(tmp_path / "s.toml")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(monkeypatch, *command: str):
    monkeypatch.setattr(sys, "argv", ["dpvim", *command])
    return CliRunner().invoke(app, command)


def test_check_draft_and_dry_run(place, monkeypatch):
    checked = run(monkeypatch, "schema", "check", "s.toml", "parts")
    assert checked.exit_code == 0, checked.output
    assert "NOT FOR RELEASE" in checked.stdout
    assert "are not counted in a database" in checked.stdout
    drafted = run(monkeypatch, "schema", "draft", "parts", "-o", "d.toml")
    assert drafted.exit_code == 0, drafted.output
    assert Schema.load("d.toml").names == ["region", "ill"]
    options = ("--schema", "s.toml", "--epsilon", "1", "-o", "twin")
    dry = run(monkeypatch, "synth", "parts", *options, "--dry-run")
    assert dry.exit_code == 0, dry.output
    assert "Nothing was spent or written" in dry.stdout
    refused = run(monkeypatch, "synth", "parts", *options, "--engine", "dpvi")
    assert refused.exit_code == 2
    assert "table in a database" in refused.stderr
    assert not (place / "twin").exists()


def test_errors_show_no_password(place, monkeypatch):
    address = "postgresql://me:s3cret@127.0.0.1:1/d#t"
    budget = ("--name", "x", "--epsilon", "1", "--delta", "1e-5")
    options = ("--schema", "s.toml", "--epsilon", "1", "-o", "twin")
    for command in (
        ("synth", address, *options),
        ("schema", "check", "s.toml", address),
        ("ledger", "init", "l", *budget, "--table", address),
        ("fit", address, *options, "--model", "logistic", "--target", "ill"),
    ):
        result = run(monkeypatch, *command)
        assert result.exit_code == 2, (command, result.output)
        assert "s3cret" not in result.output, command
    assert not (place / "l").exists()


@pytest.mark.long
def test_a_twin_of_a_table_in_postgres(place, postgres, monkeypatch):
    with psycopg.connect(postgres, autocommit=True) as owner:
        owner.execute("DROP TABLE IF EXISTS people; CREATE TABLE people (region text, ill bool)")
        owner.execute(
            "INSERT INTO people SELECT CASE WHEN i % 3 = 0 THEN 'south' ELSE 'north' END, "
            "i % 3 = 0 FROM generate_series(1, 3000) AS i"
        )
    address = f"{postgres}#people"
    budget = ("--name", "people", "--epsilon", "3", "--delta", "1e-5")
    made = run(monkeypatch, "ledger", "init", "l", *budget, "--table", address)
    assert made.exit_code == 0, made.output
    options = ("--schema", "s.toml", "--epsilon", "1", "--delta", "1e-6", "-o", "twin")
    done = run(monkeypatch, "synth", address, *options, "--datasets", "1", "--ledger", "l")
    assert done.exit_code == 0, done.output
    assert [release.state for release in Ledger("l").releases] == ["done"]
    written = [path.read_bytes() for path in (place / "twin").rglob("*") if path.is_file()]
    written += [(place / "l").read_bytes(), done.output.encode()]
    assert not any(b"s3cret" in each for each in written)
    assert b"owner:***@127.0.0.1" in (place / "twin" / "command.txt").read_bytes()


# Ibis asks for an option that pandas will drop; Spark leaves sockets to Python.
@pytest.mark.filterwarnings("ignore:The 'future.infer_string' option is deprecated")
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@pytest.mark.long
def test_a_twin_of_a_table_in_spark(place, spark, monkeypatch):
    before = {path.name for path in place.iterdir()}
    address = spark_session.address(place / "parts")
    checked = run(monkeypatch, "schema", "check", "s.toml", address)
    assert checked.exit_code == 0, checked.output
    budget = ("--name", "people", "--epsilon", "3", "--delta", "1e-5")
    made = run(monkeypatch, "ledger", "init", "l", *budget, "--table", address)
    assert made.exit_code == 0, made.output
    options = ("--schema", "s.toml", "--epsilon", "1", "--delta", "1e-6", "-o", "twin")
    done = run(monkeypatch, "synth", address, *options, "--datasets", "1", "--ledger", "l")
    assert done.exit_code == 0, done.output
    assert [release.state for release in Ledger("l").releases] == ["done"]
    assert {path.name for path in place.iterdir()} - before == {"l", "l.head", "l.key", "twin"}
    assert {path.name for path in (place / "parts").iterdir()} == {"a.parquet", "b.parquet"}
