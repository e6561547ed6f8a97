"""The command line from a table to pooled results."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import dpvim
from dpvim.cli import app
from dpvim.cli.common import print_json
from dpvim.cli.options import command_line
from dpvim.models.mixture import Mixture
from dpvim.synthesis import fitting
from dpvim.synthesis import model as table_models
from dpvim.synthesis import twin as twin_module
from dpvim.synthesis.schema import Schema
from dpvim.synthesis.tables import read_table, write_table

QUICK = ["--engine", "dpvi", "--steps", "20", "--components", "2"]


@pytest.fixture
def call(tmp_path, monkeypatch):
    """Runs a command in an empty folder; the result has exit code, output and errors."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object):
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return run


@pytest.fixture
def folder(tmp_path, patients, schema) -> Path:
    """A folder with patients.csv and patients.toml."""
    write_table(patients, tmp_path / "patients.csv")
    schema.save(tmp_path / "patients.toml")
    return tmp_path


def synth(call, *more: object):
    """A small synthesis into the folder twin."""
    arguments = ["patients.csv", "--schema", "patients.toml", "--epsilon", 5, "-o", "twin"]
    return call("synth", *arguments, "--datasets", 3, "--rows", 150, *QUICK, *more)


def test_a_check_counts_rows_that_break_a_constraint(call, folder):
    path = folder / "patients.toml"
    schema = path.read_text()
    path.write_text(schema.replace("missing =", 'constraints = ["age > visits"]\nmissing =', 1))
    checked = call("schema", "check", "patients.toml", "patients.csv")
    assert checked.exit_code == 0
    assert checked.stdout.index("NOT FOR RELEASE") < checked.stdout.index("break a constraint")
    assert checked.stdout.splitlines()[-1].startswith("age > visits")
    path.write_text(schema.replace("missing =", 'constraints = ["age > 99"]\nmissing =', 1))
    refused = call("schema", "check", "patients.toml")
    assert refused.exit_code == 2
    assert "declared values can obey" in refused.stderr


@pytest.mark.long
def test_the_whole_story(call, folder):
    assert call("schema", "draft", "patients.csv", "-o", "draft.toml").exit_code == 0
    refused = call(
        "synth", "patients.csv", "--schema", "draft.toml", "--epsilon", 1, "-o", "twin", *QUICK
    )
    assert refused.exit_code == 2
    assert "reviewed" in refused.stderr
    assert not (folder / "twin").exists()

    checked = call("schema", "check", "patients.toml", "patients.csv")
    assert "NOT FOR RELEASE" in checked.stdout
    assert "5 columns, 0 not reviewed" in checked.stdout

    planned = call(
        "plan",
        "--schema",
        "patients.toml",
        "--rows",
        400,
        "--epsilon",
        5,
        "--json",
        "--check",
        *QUICK,
    )
    facts = json.loads(planned.stdout)
    assert facts["delta"] == 0.1 / 400
    assert facts["epsilon_by_dpvim"] == pytest.approx(facts["epsilon_by_dp_accounting"], rel=5e-3)

    made = synth(call, "--target", "visits")
    assert made.exit_code == 0, made.output
    assert "(5, 0.00025)-differential privacy" in made.stdout
    assert "Traceback" not in made.stderr
    privacy = json.loads((folder / "twin" / "privacy.json").read_text())
    assert privacy["private"]
    assert privacy["noise_multiplier"] == pytest.approx(facts["noise_multiplier"])
    names = sorted(path.name for path in (folder / "twin").iterdir())
    assert names == [
        "command.txt",
        "data",
        "posterior.npz",
        "privacy.json",
        "schema.toml",
        "twin.json",
    ]
    assert len(list((folder / "twin" / "data").iterdir())) == 3

    found = call("analyze", "twin", "visits ~ age + sex + code", "--family", "poisson", "--json")
    assert found.exit_code == 0, found.output
    content = json.loads(found.stdout)
    assert [row["term"] for row in content["terms"]] == [
        "Intercept",
        "sex[T.m]",
        "code[T.02]",
        "code[T.NA]",
        "age",
    ]
    assert content["num_datasets"] == 3
    binary = call("analyze", "twin", "sex ~ age", "--family", "logistic")
    assert binary.exit_code == 0, binary.output
    assert "3 synthetic data sets" in binary.stdout


@pytest.fixture
def saved(twin, tmp_path) -> Path:
    """The twin of all tests in the folder twin, without tables."""
    twin.save(tmp_path / "twin", not_for_release=True)
    return tmp_path


@pytest.mark.long
def test_more_tables_later(call, saved):
    first = call("sample", "twin", "-o", "more", "--datasets", 2, "--rows", 7, "--seed", 1)
    assert first.exit_code == 0, first.output
    call("sample", "twin", "-o", "again", "--datasets", 2, "--rows", 7, "--seed", 1)
    tables = [saved / name / "synthetic-001.csv" for name in ("more", "again")]
    assert len(read_table(tables[0])) == 7
    assert tables[0].read_bytes() == tables[1].read_bytes()
    header = tables[0].read_text().splitlines()[0]
    assert header == "visits,sex,code,age,dose"
    taken = call("sample", "twin", "-o", "more")
    assert taken.exit_code == 2
    assert "exists already" in taken.stderr


@pytest.mark.parametrize("suffix", ["csv", "csv.gz", "parquet"])
def test_every_format_can_be_analyzed(call, saved, suffix):
    drawn = ["--datasets", 3, "--rows", 150, "--format", suffix]
    assert call("sample", "twin", "-o", "twin/data", *drawn).exit_code == 0
    assert (saved / "twin" / "data" / f"synthetic-001.{suffix}").exists()
    found = call("analyze", "twin", "visits ~ age + code + dose", "--family", "poisson")
    assert found.exit_code == 0, found.output
    assert "code[T.NA]" in found.stdout  # a level, no missing value


def test_a_dry_run_spends_and_writes_nothing(call, folder, monkeypatch):
    monkeypatch.setattr(fitting, "fit_model", lambda *a, **k: pytest.fail("budget spent"))
    result = synth(call, "--dry-run")
    assert result.exit_code == 0
    assert "Nothing was spent" in result.stdout
    for wrong in (["--epsilon", -1], ["--sampling-prob", 3], ["--relation", "add_or_remove"]):
        assert synth(call, "--dry-run", *wrong).exit_code == 2
    assert not (folder / "twin").exists()


@pytest.mark.parametrize("command", ["synth", "fit"])
def test_a_checkpoint_is_gone_when_the_output_is_complete(call, folder, monkeypatch, command):
    arguments = [command, "patients.csv", "--schema", "patients.toml", "--epsilon", 5]
    arguments += ["--checkpoint", "run", "-o", "out"]
    if command == "fit":
        arguments += ["--model", "poisson", "--target", "visits", "--clip-norm", 1, "--steps", 20]
    else:
        arguments += ["--components", 2, "--datasets", 1, "--rows", 10]

    def no_space(*args: object, **more: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Schema, "save", no_space)
        failed = call(*arguments)
    assert failed.exit_code == 2
    assert "no space left" in failed.stderr
    # What was paid for is there, and nothing secret.
    assert [path.name for path in (folder / "run").iterdir()] == ["result.npz"]
    other = call(*arguments, "--delta", 1e-7)
    assert other.exit_code == 2
    assert "run with other plan" in other.stderr
    again = call(*arguments)
    assert again.exit_code == 0, again.stderr
    assert "nothing is spent" in again.stderr
    assert (folder / "out" / "posterior.npz").exists()
    assert not (folder / "run").exists()


def test_synth_builds_its_model_once(call, folder, monkeypatch):
    made = []

    def build(*args, **settings):
        made.append(Mixture(*args, **settings))
        return made[-1]

    def stop(model, *data, **options):
        assert [model] == made
        raise ValueError("the fit is reached")

    monkeypatch.setattr(table_models, "Mixture", build)
    monkeypatch.setattr(fitting, "fit_model", stop)
    result = synth(call)
    assert "the fit is reached" in result.stderr
    assert len(made) == 1


def test_an_existing_folder_is_refused_before_the_budget_is_spent(call, folder, monkeypatch):
    monkeypatch.setattr(fitting, "fit_model", lambda *a, **k: pytest.fail("budget spent"))
    (folder / "twin").mkdir()
    result = synth(call)
    assert result.exit_code == 2
    assert "exists already" in result.stderr


@pytest.mark.long
def test_a_failure_after_the_fit_keeps_what_was_paid_for(call, folder, monkeypatch):
    def no_space(*args: object, **more: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(twin_module, "write_table", no_space)
    result = synth(call)
    assert result.exit_code == 2
    assert "no space left" in result.stderr
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    missing = call("analyze", "twin", "visits ~ age")
    assert "dpvim sample twin" in missing.stderr
    assert call("sample", "twin", "-o", "twin/data", "--datasets", 2).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "visit"], "Did you mean 'visits'"),
        (["--epsilon", "-1"], "epsilon"),
        (["--componentz", "3"], "No such option"),
        (["--delimiter", ";"], "comma"),
        (["--datasets", "0"], "datasets"),
        (["--clip-norm", "0"], "clip_norm"),
        (["--num-examples", "0"], "num_examples"),
        (["--model", "nowhere.py"], "there is none"),
    ],
)
def test_misuse_is_a_sentence_and_leaves_nothing(call, folder, arguments, message):
    result = synth(call, *arguments)
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert "Traceback" not in result.output
    assert not (folder / "twin").exists()


@pytest.mark.usefixtures("folder")
def test_a_plan_for_no_rows_is_refused(call):
    result = call("plan", "--schema", "patients.toml", "--rows", 0, "--epsilon", 1)
    assert result.exit_code == 2, result.output
    assert "rows: expected a positive integer" in result.output


def test_json_has_no_numbers_that_are_none(capsys):
    print_json({"terms": [{"lower": -math.inf, "upper": math.nan, "df": 2.0}]})
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found == {"terms": [{"lower": None, "upper": None, "df": 2.0}]}


@pytest.mark.long
@pytest.mark.usefixtures("model_file")
def test_a_twin_by_a_model_of_ones_own(call, folder):
    text = (folder / "patients.toml").read_text()
    blocks = text.split("[[columns]]")
    kept = [block for block in blocks[1:] if '"visits"' in block or '"sex"' in block]
    (folder / "patients.toml").write_text("[[columns]]".join([blocks[0], *kept]))
    made = call(
        *("synth", "patients.csv", "--schema", "patients.toml", "--epsilon", 5, "-o", "twin"),
        *("--model", "mine.py", "--steps", 20, "--datasets", 2),
    )
    assert made.exit_code == 0, made.output
    refused = call("sample", "twin", "-o", "more")
    assert "the model that this twin was made with" in refused.stderr
    assert call("sample", "twin", "-o", "more", "--model", "mine.py").exit_code == 0

    fitted = call(
        *("fit", "patients.csv", "--schema", "patients.toml", "--model", "mine.py"),
        *("--epsilon", 5, "--steps", 20, "-o", "mine", "--json"),
    )
    assert fitted.exit_code == 0, fitted.output
    assert [row["parameter"] for row in json.loads(fitted.stdout)["parameters"]] == [
        "share",
        "rate",
    ]


@pytest.mark.long
def test_a_regression(call, folder):
    arguments = ["fit", "patients.csv", "--schema", "patients.toml", "--epsilon", 50, "-o", "fit"]
    made = call(
        *arguments, "--model", "poisson", "--target", "visits", "--steps", 3000, "--seed", 0
    )
    assert made.exit_code == 0, made.output
    assert "age" in made.stdout
    loaded = dpvim.load(folder / "fit" / "posterior.npz")
    coefficients = loaded.posterior.mean["coefficients"]
    assert coefficients[4] > 0.2  # of age: the simulated effect is 0.4 in these units
    assert np.abs(coefficients[0]) < 0.3
    for options, message in [
        (["--model", "poisson"], "--target"),
        (["--model", "poison", "--target", "visits"], "expected logistic"),
        (["--model", "linear", "--target", "visits"], "suits poisson"),
    ]:
        refused = call(*arguments[:-1], "other", *options)
        assert refused.exit_code == 2
        assert message in refused.stderr


def test_a_command_with_names_that_are_no_text_can_be_kept(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["dpvim", "synth", "pat\udcffients.csv"])
    (tmp_path / "command.txt").write_text(command_line(), encoding="utf-8")
    assert (tmp_path / "command.txt").read_text(
        encoding="utf-8"
    ) == r"dpvim synth 'pat\udcffients.csv'"


@pytest.mark.usefixtures("folder")
def test_a_draft_replaces_no_file(call, tmp_path):
    (tmp_path / "draft.toml").symlink_to(tmp_path / "elsewhere.toml")
    refused = call("schema", "draft", "patients.csv", "-o", "draft.toml")
    assert refused.exit_code == 2
    assert not (tmp_path / "elsewhere.toml").exists()


def test_the_plan_of_a_regression_says_what_will_be_done(call, folder):
    arguments = ["--schema", "patients.toml", "--rows", 5000, "--epsilon", 1, "--model", "poisson"]
    shown = call("plan", *arguments, "--target", "visits")
    assert shown.exit_code == 0, shown.output
    assert "whitened: the run follows its releases" in shown.stdout
    assert "differential privacy for one record, zero_out" in shown.stdout
    facts = json.loads(call("plan", *arguments, "--target", "visits", "--json").stdout)
    assert facts["num_examples"] == 5000
    assert facts["why_not_steered"] is None
    without = call("plan", *arguments)
    assert without.exit_code == 2
    assert "--target" in without.stderr


def test_persons_on_the_command_line(call, folder, patients):
    write_table(patients.assign(patient=np.arange(len(patients)) % 90), folder / "visits.csv")
    fit = ["fit", "visits.csv", "--schema", "patients.toml", "--epsilon", 5, "-o", "fit"]
    fit += ["--model", "poisson", "--target", "visits"]
    people = ["--person", "patient", "--max-rows", 3]
    shown = call(*fit, *people, "--dry-run")
    assert shown.exit_code == 0, shown.output
    assert "90 persons, at most 3 rows of each" in shown.stdout
    made = call(*fit, *people, "--steps", 30, "--clip-norm", 1, "--seed", 0)
    assert made.exit_code == 0, made.output
    assert "protects   one person" in made.stdout
    assert json.loads((folder / "fit" / "privacy.json").read_text())["unit"] == "person"
    for options, message in [
        (people[:2], "--max-rows: expected with --person"),
        (people[2:], "--person: expected with --max-rows"),
        (["--person", "age", "--max-rows", 3], "not in the schema"),
    ]:
        refused = call(*fit[:-5], "other", *fit[-4:], *options)
        assert refused.exit_code == 2
        assert message in refused.stderr
    twin = ["synth", "visits.csv", "--schema", "patients.toml", "--epsilon", 5, "-o", "twin"]
    for engine in ([], QUICK):
        shown = call(*twin, "--person", "patient", "--dry-run", *engine)
        assert shown.exit_code == 0, shown.output
        assert "person" in shown.stdout


def test_plans_say_the_unit(call, folder):
    plan = ["plan", "--schema", "patients.toml", "--rows", 5000, "--epsilon", 1, "--json"]
    regression = ["--model", "poisson", "--target", "visits"]
    persons = ["--person", "patient"]
    for options, unit in [
        ([], "record"),
        (persons, "person"),
        (regression, "record"),
        ([*regression, *persons, "--max-rows", 4], "person"),
    ]:
        shown = call(*plan, *options)
        assert shown.exit_code == 0, shown.output
        assert json.loads(shown.stdout)["unit"] == unit
    assert call(*plan, *regression, *persons).exit_code == 2
