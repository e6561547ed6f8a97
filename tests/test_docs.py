"""Documentation: paths and names that it mentions exist; docstrings say what things are."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Paths are written relative to one of these.
BASES = (ROOT, ROOT / "src" / "dpvim", ROOT / "tests")
USERS_FILES = {"my_model.py"}
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
IS_PATH = re.compile(r"[\w./-]+\.(py|md)|(tests|benchmarks|docs|examples|src)/[\w./-]*")
# `path.py`: `name`, `Class.name`
NAMES_IN_FILE = re.compile(r"`([\w/]+\.py)`: ((?:`[\w.]+`(?:, )?)+)")


def paths_in(text: str) -> set[str]:
    """Words in backticks that look like paths, with or without ``::test``."""
    words = {word for code in INLINE.findall(FENCED.sub("", text)) for word in code.split()}
    paths = {word for word in words if IS_PATH.fullmatch(word.partition("::")[0])}
    return paths - USERS_FILES


def resolve(path: str, bases: tuple[Path, ...] = BASES) -> Path | None:
    return next((base / path for base in bases if (base / path).exists()), None)


def is_there(mention: str) -> bool:
    path, _, test = mention.partition("::")
    file = resolve(path)
    return file is not None and (not test or f"def {test}(" in file.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_exist(page):
    assert [path for path in sorted(paths_in(page.read_text())) if not is_there(path)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = FENCED.sub("", page.read_text())
    targets = {link for link in LINK.findall(text) if "://" not in link}
    assert [link for link in sorted(targets) if not resolve(link, (page.parent,))] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_are_in_the_files_that_they_are_said_to_be_in(page):
    for path, names in NAMES_IN_FILE.findall(page.read_text()):
        file = resolve(path)
        assert file is not None, path
        words = set(re.findall(r"\w+", file.read_text()))
        assert set(re.findall(r"\w+", names)) <= words, (path, names)


def test_stale_paths_are_caught():
    text = "`models/bridge.py`, `tests/privacy/test_gone.py`, `bridge/model.py`, `tests/privacy`"
    stale = {path for path in paths_in(text) if not is_there(path)}
    assert stale == {"models/bridge.py", "tests/privacy/test_gone.py"}
    assert not is_there("tests/test_docs.py::test_gone")
    assert is_there("tests/test_docs.py::test_stale_paths_are_caught")


MODULES = [path.relative_to(ROOT) for path in sorted((ROOT / "src").rglob("*.py"))]


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_docstrings_begin_with_what_a_thing_is_or_does(path):
    """A noun phrase or an imperative, which is what a reader who skims looks for."""
    tree = ast.parse((ROOT / path).read_text())
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    texts = [ast.get_docstring(n) for n in ast.walk(tree) if isinstance(n, documented)]
    riddles = ("What", "Where", "Whether", "How", "Who", "Which", "Why", "When")
    assert [text for text in texts if text and text.split()[0] in riddles] == []


def test_the_page_on_the_reproduction_says_what_was_measured():
    command = [sys.executable, "benchmarks/reproduction_page.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
