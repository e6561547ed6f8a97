"""Commands and methods that need an extra say so; the rest does without."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

import dpvim
from dpvim._extras import EXTRAS, MissingExtraError, require
from dpvim.cli import app

PACKAGES = [name for extra in EXTRAS.values() for name in extra.modules]
ROOT = Path(dpvim.__file__).parents[2]


def absent(monkeypatch, package: str) -> None:
    """Make a package look as if it were not installed, and forget what has imported it."""
    for name in list(sys.modules):
        uses = name in ("dpvim.plots", "dpvim.synthesis.analysis.glm", "dpvim.experiments")
        if uses or name.startswith(
            ("dpvim.synthesis.report.", "dpvim.experiments.", "dpvim.serve.")
        ):
            monkeypatch.delitem(sys.modules, name)
        elif name.startswith(f"{package}."):
            monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, package, None)


@pytest.fixture
def folder(tmp_path, patients, schema, twin, monkeypatch) -> Path:
    schema.save(tmp_path / "s.toml")
    patients.to_csv(tmp_path / "t.csv", index=False)
    twin.save(tmp_path / "twin", not_for_release=True)
    (tmp_path / "twin" / "data").mkdir()
    for number in (1, 2):
        twin.sample(50, seed=number).to_csv(tmp_path / f"twin/data/synthetic-{number}.csv")
    monkeypatch.chdir(tmp_path)
    return tmp_path


COMMANDS = [
    ("pyarrow", "tables", "schema draft t.csv -o d.toml"),
    ("pyarrow", "tables", "schema check s.toml t.csv"),
    ("pyarrow", "tables", "synth t.csv --schema s.toml --epsilon 1 -o new"),
    ("pyarrow", "tables", "fit t.csv --schema s.toml --model linear --target age --epsilon 1 -o o"),
    ("pyarrow", "tables", "sample twin --datasets 1 --rows 5 -o more"),
    ("ibis", "databases", "schema check s.toml duckdb:t.csv"),
    ("duckdb", "databases", "schema draft duckdb:t.csv -o d.toml"),
    ("pyspark", "spark", "schema check s.toml spark:t.csv"),
    ("statsmodels", "analysis", "analyze twin age~visits"),
    ("patsy", "analysis", "analyze twin age~visits"),
    ("jinja2", "report", "report twin"),
    ("matplotlib", "report", "report twin"),
    ("PIL", "report", "report twin"),
    ("jinja2", "serve", "serve t.csv --no-browser"),
    ("jax_privacy", "audit", "audit --quick"),
    ("matplotlib", "reproduce", "reproduce ou"),
]


@pytest.mark.parametrize(("package", "extra", "command"), COMMANDS)
def test_commands_name_the_extra_that_is_missing(folder, monkeypatch, package, extra, command):
    before = {path.name for path in folder.iterdir()}
    absent(monkeypatch, package)
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == 2
    assert f"{package} is not installed: pip install 'dpvim[{extra}]'" in result.stderr
    assert {path.name for path in folder.iterdir()} == before


def test_methods_name_the_extra_that_is_missing(twin, monkeypatch):
    absent(monkeypatch, "arviz")
    with pytest.raises(MissingExtraError, match=r"arviz is not .*'dpvim\[arviz\]'"):
        twin.fit.averaged.to_arviz()
    absent(monkeypatch, "matplotlib")
    with pytest.raises(MissingExtraError, match=r"matplotlib is not .*'dpvim\[plots\]'"):
        twin.fit.plot_trace()


def test_modules_of_the_package_that_are_missing_are_no_matter_of_extras():
    with pytest.raises(ModuleNotFoundError, match=r"dpvim\.nothing"):
        require("dpvim.nothing", extra="report")


def test_without_any_extra_help_plans_and_public_names_work(tmp_path, schema):
    schema.save(tmp_path / "s.toml")
    code = f"""
import sys
sys.modules.update(dict.fromkeys({PACKAGES}))
import dpvim
[getattr(dpvim, name) for name in dpvim.__all__]
from dpvim.cli import app
for command in (["--help"], ["synth", "--help"],
                ["plan", "--schema", "s.toml", "--rows", "300", "--epsilon", "1"]):
    assert app(command, standalone_mode=False) in (0, None)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "noise multiplier" in done.stdout


def test_extras_are_those_of_the_project_file():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = project["optional-dependencies"]
    assert set(EXTRAS) | {"all", "dev", "docs"} == set(declared)
    assert "dpvim[all,docs]" in declared["dev"]
    named = {"PIL": "pillow", "jax_privacy": "jax-privacy"}
    for extra, (packages, _) in EXTRAS.items():
        for package in packages:
            assert any(d.startswith(named.get(package, package)) for d in declared[extra])
            assert not any(d.startswith(package) for d in project["dependencies"])
