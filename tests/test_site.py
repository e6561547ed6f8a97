"""The documentation site: public names and their examples, pages that are run, pictures."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

import executed_pages
import pictures
import pytest
import shown_arguments

import dpvim

ROOT = Path(__file__).parents[1]

REFERENCE = [path.read_text() for path in sorted((ROOT / "docs" / "reference").glob("*.md"))]
# Modules and registries have their pages; errors need no examples.
THINGS = {name: getattr(dpvim, name) for name in dpvim.__all__}
DOCUMENTED = {n: t for n, t in THINGS.items() if inspect.isclass(t) or inspect.isfunction(t)}
SHOWN = {
    name: thing
    for name, thing in DOCUMENTED.items()
    if not (inspect.isclass(thing) and issubclass(thing, Exception))
}


def paths_in_reference() -> set[str]:
    """What the pages show: an object, or some members of a module."""
    found = set()
    for page in REFERENCE:
        for path, rest in re.findall(r"^::: ([\w.]+)\n((?:    .*\n)*)", page, re.MULTILINE):
            members = re.findall(r"^        - (\w+)$", rest, re.MULTILINE)
            found |= {f"{path}.{member}" for member in members} or {path}
    return found


def test_every_public_name_has_its_place_in_the_reference():
    there = paths_in_reference()
    missing = []
    for name, thing in THINGS.items():
        home = f"{getattr(thing, '__module__', '')}.{name}"
        if not there & {f"dpvim.{name}", home} and name != "audit":
            missing.append(name)
    assert missing == []
    assert "dpvim.audit.run" in there


@pytest.mark.parametrize("name", sorted(SHOWN))
def test_every_public_name_has_an_example(name):
    """In its docstring, in that of its module, or in one that it names."""
    named = re.search(r"`dpvim\.(\w+)` has an example", SHOWN[name].__doc__ or "")
    thing = SHOWN[named[1]] if named else SHOWN[name]
    texts = thing.__doc__ or "", sys.modules[thing.__module__].__doc__ or ""
    assert any(">>>" in text for text in texts)


def run(*blocks: str) -> executed_pages.Outputs:
    return executed_pages.run("page", "\n\n".join(blocks), cache=None)


def test_blocks_of_a_page_share_names_and_a_folder_and_show_what_they_print():
    page = [
        "```python\nx = 2\nprint('two')\nx + 1\n```",
        "```text file=a.txt\nhello\n```",
        "```sh\ncat a.txt\n```",
        "```python hide\ny = 1\n```",
        "```python raises\nraise ValueError(f'no {x}')\n```",
        "```python skip\nnot python\n```",
    ]
    outputs = run(*page)
    text = executed_pages.render("\n\n".join(page), outputs)
    for shown in ("two", "<code>3</code>", "hello", "ValueError: no 2", "not python"):
        assert shown in text
    assert "y = 1" not in text
    assert "```python raises" not in text


@pytest.mark.parametrize(
    "block",
    [
        "```python\n1 / 0\n```",
        "```python raises\n1\n```",
        "```sh\nfalse\n```",
        "```sh raises\ntrue\n```",
        "```python mispelt\n1\n```",
    ],
)
def test_a_block_that_does_not_do_as_it_should_stops_the_build(block):
    with pytest.raises(executed_pages.PageError):
        run(block)


def test_pictures_are_as_they_are_drawn_from_the_measurements():
    for name, draw in pictures.DRAWN.items():
        assert (pictures.PICTURES / f"{name}.svg").read_text() == draw()


def test_arguments_are_shown_one_by_one_and_examples_as_code():
    long = "Words that say what both are. " * 5
    docstring = f"Do it.\n\nArgs:\n    a, b: Short.\n    c, d: {long}\n\n>>> 1\n1\n\nMore."
    text = shown_arguments.fenced(shown_arguments.one_by_one(docstring))
    for line in ("    a: Short.", "    b: Short.", "    d: See `c`."):
        assert line in text.splitlines()
    assert "```pycon\n>>> 1\n1\n```\n\nMore." in text
