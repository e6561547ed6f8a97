"""Help that tells the story, json of every command, and errors that say what to type next."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from dpvim.cli import app
from dpvim.cli.next_command import next_command
from dpvim.ledger.entries import LedgerError
from dpvim.synthesis.schema import NotReviewedError, SchemaError
from dpvim.synthesis.tables import write_table
from dpvim.types import BudgetExceededError


@pytest.fixture
def call(tmp_path, monkeypatch, patients, schema):
    """Runs a command in a folder with patients.csv and patients.toml."""
    monkeypatch.chdir(tmp_path)
    write_table(patients, tmp_path / "patients.csv")
    schema.save(tmp_path / "patients.toml")

    def run(*arguments: object):
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return run


def leaves(command, name=""):
    """All commands, groups opened, by what is typed."""
    if not hasattr(command, "commands"):
        return {name.strip(): command}
    found = {}
    for each, inner in command.commands.items():
        found |= leaves(inner, f"{name} {each}")
    return found


COMMANDS = leaves(typer.main.get_command(app))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_json_and_an_example(name):
    command = COMMANDS[name]
    assert any("--json" in parameter.opts for parameter in command.params)
    assert f"dpvim {name}" in command.help


def test_help_tells_the_story_in_a_screen():
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80", "TERM": "dumb"}).stdout
    assert len(shown.splitlines()) <= 50
    # The first commands, in order, are commands that exist, with options that exist.
    typed = re.findall(r"^\s+dpvim ((?:[a-z]+ )+)(.*)$", shown, re.MULTILINE)
    assert [name.strip() for name, _ in typed] == ["schema draft", "plan", "synth"]
    for name, rest in typed:
        command = COMMANDS[name.strip()]
        known = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in rest.split() if word.startswith("-")} <= known
    # Every command is there, in one of the groups; that of schemas comes first.
    names = re.findall(r"^│ ([a-z]+) ", shown, re.MULTILINE)
    assert set(names) == {name.split()[0] for name in COMMANDS}
    assert names[0] == "schema"
    assert "--install-completion" in shown


def test_completion_is_on():
    result = CliRunner().invoke(
        app,
        [],
        prog_name="dpvim",
        env={"_DPVIM_COMPLETE": "complete_bash", "COMP_WORDS": "dpvim s", "COMP_CWORD": "1"},
    )
    assert {"schema", "synth", "sample"} <= set(result.stdout.split())


def test_schemas_as_json(call, patients):
    made = call("schema", "draft", "patients.csv", "-o", "draft.toml", "--json")
    drafted = json.loads(made.stdout)
    assert {"name": "sex", "kind": "binary"} in drafted["columns"]
    assert "name" in drafted["left_out"]
    checked = json.loads(call("schema", "check", "draft.toml", "--json").stdout)
    assert checked["columns"] == checked["not_reviewed"] == [c["name"] for c in drafted["columns"]]
    counted = json.loads(call("schema", "check", "patients.toml", "patients.csv", "--json").stdout)
    assert counted["for_release"] is False
    assert counted["not_reviewed"] == []
    assert sum(counted["counts"]["age"].values()) == len(patients)


def test_ledgers_as_json(call):
    options = ["--name", "patients", "--epsilon", 1, "--delta", 1e-4, "--json"]
    made = json.loads(call("ledger", "init", "a.ledger", *options).stdout)
    assert made["budget"] == {"epsilon": 1, "delta": 1e-4, "relation": "zero_out", "unit": "record"}
    bound = call("ledger", "bind", "a.ledger", "patients.csv", "--note", "as csv", "--json")
    assert json.loads(bound.stdout)["note"] == "as csv"
    checked = call("ledger", "check", "a.ledger", "--json")
    assert (checked.exit_code, json.loads(checked.stdout)["problems"]) == (0, [])
    text = Path("a.ledger").read_text().replace("as csv", "as CSV")
    Path("a.ledger").write_text(text)
    found = call("ledger", "check", "a.ledger", "--json")
    assert found.exit_code == 1
    assert [each["line"] for each in json.loads(found.stdout)["problems"]]


SYNTH = ["synth", "patients.csv", "--schema", "patients.toml", "--epsilon", 5, "--datasets", 2]
SYNTH += ["--rows", 30, "--engine", "dpvi", "--steps", 20, "--components", 2]


def test_a_dry_run_as_json(call):
    dry = json.loads(call(*SYNTH[:8], "-o", "twin", "--dry-run", "--json").stdout)
    assert dry["dry_run"] is True
    assert dry["engine"] == "marginals"


@pytest.mark.long
def test_a_synthesis_and_its_report_as_json(call):
    made = call(*SYNTH, "-o", "twin", "--json")
    facts = json.loads(made.stdout)
    assert facts["privacy"]["private"] is True
    assert (facts["datasets"], facts["rows"], facts["closest"]) == (2, 30, None)
    assert "the fit is saved" in made.stderr
    drawn = call("sample", "twin", "-o", "more", "--datasets", 2, "--rows", 40, "--json")
    expected = {"folder": "more", "datasets": 2, "rows": 40, "closest": False}
    assert json.loads(drawn.stdout) == expected
    report = json.loads(call("report", "twin", "--json").stdout)
    assert Path(report["report"]).is_file()
    assert report["for_release"] is True


def test_errors_say_what_to_type_next(call):
    missing = call("synth", "patients.csv", "--schema", "no.toml", "--epsilon", 1, "-o", "twin")
    assert missing.exit_code == 2
    assert missing.stdout == ""
    assert missing.stderr.splitlines()[-1] == "Next: dpvim schema draft patients.csv -o no.toml"
    assert call(*missing.stderr.splitlines()[-1].split()[2:]).exit_code == 0
    draft = call("synth", "patients.csv", "--schema", "no.toml", "--epsilon", 1, "-o", "twin")
    assert draft.stderr.splitlines()[-1] == "Next: dpvim schema check no.toml patients.csv"
    assert call(*draft.stderr.splitlines()[-1].split()[2:]).exit_code == 0
    Path("twin").mkdir()
    taken = call(*SYNTH, "-o", "twin")
    assert "with -o twin-2" in taken.stderr
    wrong = call(*SYNTH, "-o", "other", "--target", "agee")
    assert "Next: dpvim synth --help" in wrong.stderr


@pytest.mark.parametrize(
    ("error", "command", "expected"),
    [
        (BudgetExceededError("too much"), "fit", "dpvim ledger plan a.ledger"),
        (LedgerError("damaged"), "fit", "dpvim ledger check a.ledger"),
        (LedgerError("damaged"), "ledger check", "dpvim ledger check --help"),
        (LedgerError("see dpvim ledger check"), "fit", None),
        (NotReviewedError("s.toml"), "fit", "dpvim schema check s.toml t.csv"),
        (SchemaError("s.toml"), "plan", "dpvim schema check s.toml"),
        (SchemaError("s.toml"), "schema check", "dpvim schema check --help"),
        (OSError("no space left"), "fit", None),
    ],
)
def test_what_to_type_next(tmp_path, monkeypatch, error, command, expected):
    monkeypatch.chdir(tmp_path)
    files = {name: Path(path) for name, path in [("schema", "s.toml"), ("ledger", "a.ledger")]}
    assert next_command(error, command, {**files, "table": Path("t.csv")}) == expected
