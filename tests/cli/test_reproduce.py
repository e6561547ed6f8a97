"""``dpvim reproduce``: what it asks for, prints and keeps."""

from __future__ import annotations

import json

import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

from dpvim.cli import app
from dpvim.experiments import registry
from dpvim.experiments.experiment import CellResult, Experiment, Verdict, mean_and_error


@pytest.fixture
def asked(monkeypatch):
    """The scopes of an experiment that stands for all; set `asked.stop` to interrupt it."""

    class Asked(list):
        stop = False

    scopes = Asked()

    def cells(scope):
        scopes.append(scope)
        return [
            {"way": way, "seed": seed}
            for way in scope.ways
            for seed in scope.seeds(quick=2, full=3)
        ]

    def run(some):
        if scopes.stop:
            raise KeyboardInterrupt
        return [CellResult([{"error": 0.25}]) for _ in some]

    tiny = Experiment(
        name="ou",
        title="",
        paper="",
        repeats=3,
        cells=cells,
        run=run,
        summarise=lambda frame: mean_and_error(frame, ["way"], ["error"]),
        draw=lambda frame: Figure(),
        judge=lambda frame: [Verdict("It is small.", "0.25", "holds")],
        takes=frozenset({"ways", "epsilons"}),
    )
    monkeypatch.setattr("dpvim.cli.reproduce_command.find", lambda name: tiny)
    return scopes


def reproduce(*options, folder):
    return CliRunner().invoke(app, ["reproduce", *options, "-o", str(folder)])


def test_summary_verdicts_and_folder_are_printed(asked, tmp_path):
    result = reproduce("ou", folder=tmp_path)
    assert result.exit_code == 0, result.output
    assert "holds: 0.25" in result.stdout
    assert str(tmp_path / "ou") in result.stdout
    assert asked[0].quick
    assert asked[0].ways == ("as-published", "recommended")


def test_options_reach_the_experiment(asked, tmp_path):
    options = ["--full", "--recommended", "--seeds", "7", "--epsilons", "0.5,2,2"]
    assert reproduce("ou", *options, folder=tmp_path).exit_code == 0
    scope = asked[0]
    assert (scope.quick, scope.ways, scope.repeats) == (False, ("recommended",), 7)
    assert scope.epsilons == (0.5, 2.0)
    assert len((tmp_path / "cells" / "ou.jsonl").read_text().splitlines()) == 7


def test_json_is_for_scripts(asked, tmp_path):
    found = json.loads(reproduce("ou", "--json", folder=tmp_path).stdout)
    assert found["ou"]["summary"][0]["error"] == 0.25
    assert found["ou"]["verdicts"][0]["judgement"] == "holds"


def test_an_interruption_says_how_to_go_on(asked, tmp_path):
    asked.stop = True
    result = reproduce("ou", folder=tmp_path)
    assert result.exit_code == 130
    assert "the same command goes on" in result.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["ou", "--epsilons", "1;2"], "expected numbers such as 1,4"),
        (["ou", "--epsilons", "0"], "expected positive numbers"),
        (["ou", "--epsilons", "nan"], "expected positive numbers"),
        (["ou", "--table", "t.csv", "--schema", "t.toml"], "--table makes no difference"),
        (["ou", "--table", "t.csv"], "expected both or none"),
        (["ou", "--draw-only"], "no repeat is complete yet"),
        (["runtime"], "were run with --full"),
        (["census"], "'census' is not one of"),
        (["ou", "--epsilon", "1"], "No such option"),
    ],
)
def test_what_cannot_be_is_refused(asked, tmp_path, options, said):
    result = reproduce(*options, folder=tmp_path)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.replace("│", " ").split())


def test_every_name_of_the_issue_is_there():
    assert set(registry.NAMES) == {
        *("adult", "adult-noise", "ukb-init", "ukb-epochs", "ukb-average", "ukb-natural"),
        *("full-rank", "gradients", "variance", "ou", "runtime"),
    }
