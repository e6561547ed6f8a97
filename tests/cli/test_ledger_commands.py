"""``dpvim ledger``, and the commands that book in one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dpvim.cli import app
from dpvim.ledger.book import Ledger
from dpvim.privacy.plan import PrivacyPlan
from dpvim.synthesis.tables import write_table

FIT = ["fit", "patients.csv", "--schema", "patients.toml", "--model", "logistic", "--target", "sex"]
FIT += ["--ledger", "a.ledger", "--steps", 20, "--clip-norm", 1, "--learning-rate", 0.01]


@pytest.fixture
def call(tmp_path, monkeypatch, patients, schema):
    """Runs a command in a folder with a table, its schema and its ledger, a.ledger."""
    monkeypatch.chdir(tmp_path)
    write_table(patients, tmp_path / "patients.csv")
    schema.save(tmp_path / "patients.toml")

    def run(*arguments: object):
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    options = ["--name", "patients 2026", "--epsilon", 1, "--delta", 1e-4]
    made = run("ledger", "init", "a.ledger", *options, "--table", "patients.csv")
    assert made.exit_code == 0, made.output
    assert "a.ledger.key is secret" in made.stdout
    return run


def book(num: int = 1, noise: float = 20.0, **settings: object) -> None:
    plan = PrivacyPlan(
        num_examples=400, sampling_prob=1.0, num_steps=9, clip_norm=1.0, noise_multiplier=noise
    )
    for i in range(num):
        Ledger("a.ledger", allow_seeds=True).book(plan, purpose=f"look [{i}]", **settings)  # type: ignore[arg-type]


def test_what_was_spent_is_shown(call):
    book(2, noise=60.0)
    Ledger("a.ledger").booking(Ledger("a.ledger").releases[0].booked.id).settle(4)
    book(noise=90.0, seeded=True)
    shown = call("ledger", "show", "a.ledger", "--picture", "a.svg")
    assert shown.exit_code == 0, shown.output
    for text in ("look [0]", "4 of 9", "stopped", "open (seeded)", "of a budget of (1, 0.0001)"):
        assert text in shown.stdout
    assert "nothing of them may be published" in shown.stdout
    assert Path("a.svg").read_text().startswith("<?xml")
    facts = json.loads(call("ledger", "show", "a.ledger", "--json").stdout)
    assert [each["state"] for each in facts["releases"]] == ["stopped", "open", "open"]
    assert facts["spent"] == Ledger("a.ledger").spent()
    assert facts["budget"]["unit"] == "record"
    assert [each["entry"] for each in facts["entries"]][:3] == ["declared", "bound", "booked"]


def test_damage_is_named_with_its_line(call, tmp_path):
    assert "all as they were written" in call("ledger", "check", "a.ledger").stdout
    book()
    path = tmp_path / "a.ledger"
    path.write_text(path.read_text().replace('"runs": 1', '"runs": 0'))
    checked = call("ledger", "check", "a.ledger")
    assert checked.exit_code == 1
    assert "a.ledger, line 3: does not have the hash" in checked.stdout
    refused = call("ledger", "show", "a.ledger")
    assert refused.exit_code == 2
    assert "restore it from a copy" in refused.stderr
    missing = call("ledger", "check", "none.ledger")
    assert missing.exit_code == 2
    assert "dpvim ledger init" in missing.stderr


def test_a_line_that_a_crash_cut_short_is_said_to_be_harmless(call, tmp_path):
    with (tmp_path / "a.ledger").open("a") as file:
        file.write('{"entry": "boo')
    checked = call("ledger", "check", "a.ledger")
    assert checked.exit_code == 0
    assert "cut short by a crash" in checked.stdout


def test_what_could_be_afforded(call):
    book(noise=40.0)
    planned = call("ledger", "plan", "a.ledger")
    assert planned.exit_code == 0, planned.output
    assert "12 equal releases, each of" in planned.stdout
    facts = json.loads(call("ledger", "plan", "a.ledger", "--json").stdout)
    left = [facts["left"][str(count)] for count in (1, 2, 4, 12, 52)]
    assert left == sorted(left, reverse=True)
    # Costs grow with the root of the number: two releases have far more than half each.
    assert 0.6 * left[0] < left[1] < left[0]
    small = json.loads(call("ledger", "plan", "a.ledger", "--epsilon", 0.2, "--json").stdout)
    assert small["affordable"]
    assert small["releases_left"] > 4
    large = call("ledger", "plan", "a.ledger", "--epsilon", 2)
    assert "is more than is left" in large.stdout
    assert "with noise multiplier" in large.stdout
    sampled = ["--epsilon", 0.3, "--sampling-prob", 0.1, "--steps", 50]
    assert "--rows: expected" in call("ledger", "plan", "a.ledger", *sampled).stderr
    assert "could be afforded" in call("ledger", "plan", "a.ledger", *sampled, "--rows", 400).stdout
    assert len(Ledger("a.ledger").releases) == 1


def test_a_fit_is_booked_and_one_beyond_the_budget_refused(call, tmp_path):
    made = call(*FIT, "--epsilon", 0.5, "--delta", 1e-4, "--purpose", "who is it", "-o", "first")
    assert made.exit_code == 0, made.output
    (release,) = Ledger("a.ledger").releases
    assert (release.booked.purpose, release.state) == ("who is it", "done")
    for more in ([], ["--dry-run"]):
        refused = call(*FIT, "--epsilon", 0.95, "--delta", 1e-4, "-o", "second", *more)
        assert refused.exit_code == 2
        assert "What is left would buy" in refused.stderr
        assert not (tmp_path / "second").exists()
    assert len(Ledger("a.ledger").releases) == 1


def test_another_table_is_refused_unless_it_is_bound(call, tmp_path, patients):
    write_table(patients.iloc[1:], tmp_path / "patients.csv")
    options = ["--epsilon", 0.5, "--delta", 1e-4, "-o", "first", "--dry-run"]
    refused = call(*FIT, *options)
    assert refused.exit_code == 2
    assert "another fingerprint" in refused.stderr
    bound = call("ledger", "bind", "a.ledger", "patients.csv", "--note", "without the first")
    assert bound.exit_code == 0, bound.output
    allowed = call(*FIT, *options)
    assert allowed.exit_code == 0, allowed.output
    assert "Nothing was spent" in allowed.stdout


def test_a_twin_beyond_the_budget_is_refused(call, tmp_path):
    arguments = ["patients.csv", "--schema", "patients.toml", "--epsilon", 3, "--delta", 1e-4]
    for more in (
        [],
        ["--dry-run"],
        ["--engine", "dpvi", "--steps", 20, "--components", 2, "--dry-run"],
    ):
        refused = call("synth", *arguments, "--ledger", "a.ledger", "-o", "twin", *more)
        assert refused.exit_code == 2
        assert "Nothing was released" in refused.stderr
        assert not (tmp_path / "twin").exists()
    alone = call("synth", *arguments, "--purpose", "none", "-o", "twin")
    assert "purpose: expected with a ledger" in alone.stderr
    assert Ledger("a.ledger").releases == ()


def test_reproductions_are_booked_for_real_tables_alone(call):
    refused = call("reproduce", "ou", "--ledger", "a.ledger")
    assert refused.exit_code == 2
    assert "--ledger: expected with --table" in refused.stderr
