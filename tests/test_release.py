"""A release: one version everywhere, and archives that can be installed and that work."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import dpvim

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_version_is_the_same_everywhere():
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited is not None
    assert cited[1] == dpvim.__version__
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert re.fullmatch(re.escape(dpvim.__version__) + r" \(\d{4}-\d\d-\d\d\)", headings[1])


def test_the_pythons_that_are_promised_are_tried():
    promised = [
        text.rpartition(" ")[2] for text in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", text)
    ]
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    tried = re.search(r"python: \[(.*)\]", workflow)
    assert tried is not None
    assert tried[1].replace('"', "").split(", ") == promised
    assert PROJECT["requires-python"] == f">={promised[0]}"


def test_targets_that_workflows_make_are_there():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    used = {
        target
        for path in (ROOT / ".github/workflows").glob("*.yml")
        if path.name != "docs.yml" or (ROOT / "mkdocs.yml").exists()
        for target in re.findall(r"make ([a-z-]+)", path.read_text())
    }
    assert {"lint", "test", "test-oldest", "dist"} <= used <= targets


def test_publishing_needs_no_secret_and_one_right():
    workflow = (ROOT / ".github/workflows/publish.yml").read_text()
    assert "secrets." not in workflow
    assert workflow.count("id-token: write") == 1
    assert "pypa/gh-action-pypi-publish" in workflow.partition("id-token: write")[2]


@pytest.fixture(scope="module")
def archives(tmp_path_factory) -> dict[str, Path]:
    """The source archive, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return {path.suffix: path for path in folder.iterdir()}


def run(*command: object, **options: object) -> str:
    """What a command says, without the settings of this process."""
    own = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "XLA_FLAGS")
    env = {name: value for name, value in os.environ.items() if name not in own}
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, env=env, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


USE = """
import dpvim, numpy as np, numpyro, numpyro.distributions as dist
def model(x=None):
    m = numpyro.sample("m", dist.Normal(0, 1))
    with numpyro.plate("records", len(x)):
        numpyro.sample("x", dist.Normal(m, 1), obs=x)
x = np.ones(200, np.float32)
fit = dpvim.fit(model, x, epsilon=1.0, delta=1e-4, num_steps=16, clip_norm=1.0)
print(dpvim.__file__, fit.privacy.epsilon <= 1.0, sep="\\n")
"""


@pytest.mark.long
def test_the_archives_hold_what_they_should(archives):
    assert set(archives) == {".gz", ".whl"}
    with zipfile.ZipFile(archives[".whl"]) as wheel:
        names = set(wheel.namelist())
    assert {"dpvim/py.typed", "dpvim/synthesis/report/templates/report.html"} <= names
    sources = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in names if ".dist-info/" not in name} == sources
    with tarfile.open(archives[".gz"]) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "SECURITY.md", "tests/test_release.py", "docs/privacy.md"} <= files
    roots = {name.partition("/")[0] for name in files}
    assert not roots & {".venv", "data", "dist", "benchmarks", ".pytest_cache"}


@pytest.mark.long
def test_the_wheel_works_in_a_clean_environment(archives, tmp_path, schema):
    # Without pip, and with the packages that are here already: nothing is downloaded.
    clean = tmp_path / "clean"
    venv.create(clean, symlinks=True)
    python = clean / "bin" / "python"
    install = ["install", "--no-deps", "--no-index", "--quiet"]
    run(sys.executable, "-m", "pip", "--python", python, *install, archives[".whl"])
    inner = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    (Path(inner) / "here.pth").write_text(sysconfig.get_path("purelib"))

    file, within_budget = run(python, "-c", USE, cwd=tmp_path).splitlines()[-2:]
    assert Path(file).is_relative_to(clean)
    assert within_budget == "True"
    command = clean / "bin" / "dpvim"
    assert run(command, "--version") == f"dpvim {dpvim.__version__}\n"
    schema.save(tmp_path / "s.toml")
    plan = ["plan", "--schema", tmp_path / "s.toml", "--rows", 300, "--epsilon", 1, "--json"]
    assert json.loads(run(command, *plan))["engine"] == "marginals"
    found = json.loads(run(command, "doctor", "--json"))
    assert Path(found["folder"]).is_relative_to(clean)
    assert found["dpvim"] == dpvim.__version__
