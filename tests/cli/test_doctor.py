"""``dpvim doctor`` says what is there, what is missing and what to type."""

from __future__ import annotations

import json
import sys

import jax
import pytest
from typer.testing import CliRunner

import dpvim
from dpvim._extras import EXTRAS
from dpvim.cli import app, doctor_command
from dpvim.cli.doctor_command import Package, suits


def found(*options: str):
    return CliRunner().invoke(app, ["doctor", *options])


@pytest.fixture
def healthy(monkeypatch, tmp_path):
    """A machine on which nothing is wrong, whatever the one is that runs the tests."""
    monkeypatch.setenv("DPVIM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("DPVIM_DATA", raising=False)
    monkeypatch.setattr(
        doctor_command, "required_packages", lambda: [Package("jax", "0.9", ">=0.8")]
    )


@pytest.mark.usefixtures("healthy")
def test_a_healthy_machine(monkeypatch, tmp_path):
    (tmp_path / "data" / "adult").mkdir(parents=True)
    monkeypatch.setenv("DPVIM_DATA", str(tmp_path / "data"))
    shown = found()
    assert shown.exit_code == 0, shown.output
    assert "All is well." in shown.stdout
    facts = json.loads(found("--json").stdout)
    assert facts["dpvim"] == dpvim.__version__
    assert facts["data"]["found"] == ["adult"]
    assert facts["cache"]["folder"].startswith(str(tmp_path))
    assert set(facts["extras"]) == set(EXTRAS)
    assert facts["compute"]["usable_cores"] >= 1
    assert facts["problems"] == []


@pytest.mark.usefixtures("healthy")
def test_a_missing_extra_is_no_problem(monkeypatch):
    monkeypatch.setitem(sys.modules, "statsmodels", None)
    result = found()
    assert result.exit_code == 0
    assert "missing: pip install 'dpvim[analysis]'" in result.stdout
    assert json.loads(found("--json").stdout)["extras"]["analysis"]["missing"] == ["statsmodels"]


@pytest.mark.usefixtures("healthy")
def test_what_is_wrong_ends_with_1(monkeypatch, tmp_path):
    monkeypatch.setenv("DPVIM_DATA", str(tmp_path / "nowhere"))
    result = found()
    assert result.exit_code == 1
    assert "Problem: DPVIM_DATA: expected a folder" in result.stdout
    monkeypatch.delenv("DPVIM_DATA")
    packages = [Package("jax", "0.7.1", "<0.11,>=0.8"), Package("optax", None, ">=0.2")]
    monkeypatch.setattr(doctor_command, "required_packages", lambda: packages)
    problems = json.loads(found("--json").stdout)["problems"]
    assert [text.split(". Type: ")[1] for text in problems] == [
        "pip install 'jax<0.11,>=0.8'",
        "pip install 'optax>=0.2'",
    ]
    monkeypatch.setattr(doctor_command, "required_packages", list)
    (tmp_path / "file").touch()
    monkeypatch.setenv("DPVIM_CACHE", str(tmp_path / "file"))
    assert "DPVIM_CACHE" in json.loads(found("--json").stdout)["problems"][0]
    monkeypatch.setenv("DPVIM_CACHE", "off")
    assert found().exit_code == 0


def test_the_packages_that_dpvim_needs_are_known():
    packages = {each.name: each for each in doctor_command.required_packages()}
    assert {"jax", "numpyro", "typer", "dp-accounting"} <= set(packages)
    assert "pyarrow" not in packages
    assert packages["jax"].found == jax.__version__


@pytest.mark.parametrize(
    ("version", "limits", "expected"),
    [
        ("2.0.0", ">=2.0,<3", True),
        ("2", ">=2.0.0", True),
        ("3.0", ">=2,<3", False),
        ("0.10.1.post2", ">=0.9,<0.11", True),
        ("1.9", ">=1.13", False),
        ("5", "", True),
    ],
)
def test_versions_within_limits(version, limits, expected):
    assert suits(version, limits) is expected
