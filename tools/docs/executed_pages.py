"""Pages whose code is run when the site is built, and shown with what it really printed.

A page with ``execute: true`` in its front matter is run from the top, in a folder of its own, in a
process of its own. Blocks of ``python`` and ``sh`` are run; a word behind the language says more:

    ```python hide          run, not shown
    ```python quiet         run, output not shown
    ```python raises        must end with an error, whose message is shown
    ```python skip          shown, not run
    ```toml file=a.toml     written to a file, and shown

Whoever writes a page runs it by itself: python tools/docs/executed_pages.py PAGE
"""

from __future__ import annotations

import hashlib
import html
import importlib.metadata
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
RUNNER = Path(__file__).with_name("run_blocks.py")
CACHE = ROOT / "build" / "pages"
FENCE = re.compile(r"^```(\w+)?([^\n]*)\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)
RUN_BY_DEFAULT = ("python", "sh")
OPTIONS = {"hide", "quiet", "raises", "skip", "file"}
# Outputs depend on these, and on the code of the library.
PACKAGES = ("jax", "numpyro", "numpy", "pandas", "statsmodels", "matplotlib")


class PageError(Exception):
    """A page did not run to its end."""


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    options: dict[str, str]
    code: str

    @property
    def is_run(self) -> bool:
        """True for what the runner is given."""
        wanted = self.language in RUN_BY_DEFAULT or "file" in self.options
        return wanted and "skip" not in self.options


class Outputs(NamedTuple):
    """What the blocks that are run have shown, and the time they took."""

    blocks: list[list[dict[str, str]]]
    cpu_seconds: float


def block_of(match: re.Match[str]) -> Block:
    """A match of `FENCE` as a block."""
    language, words, code = match.groups()
    options = {}
    for word in words.split():
        name, _, value = word.partition("=")
        if name not in OPTIONS:
            raise PageError(f"```{language}{words}: expected one of {sorted(OPTIONS)}.")
        options[name] = value
    return Block(language or "", options, code)


def blocks_of(markdown: str) -> Iterator[Block]:
    """All fenced blocks of a page that begin in the first column."""
    return map(block_of, FENCE.finditer(markdown))


def run(name: str, markdown: str, *, cache: Path | None = CACHE) -> Outputs:
    """Run a page, or find what it showed when the same page was run with the same code."""
    blocks = [block._asdict() for block in blocks_of(markdown) if block.is_run]
    request = json.dumps(blocks)
    kept = cache / f"{_fingerprint(request)}.json" if cache else None
    if kept is not None and kept.is_file():
        return _read(kept.read_text())
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    with tempfile.TemporaryDirectory(prefix="dpvim-page-") as folder:
        done = subprocess.run(
            [sys.executable, str(RUNNER)],
            input=request,
            capture_output=True,
            text=True,
            cwd=folder,
            env=os.environ | {"PATH": path, "DPVIM_ROOT": str(ROOT)},
        )
    if done.returncode != 0:
        raise PageError(f"{name}: a block failed.\n{done.stderr}")
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(done.stdout)
    return _read(done.stdout)


def render(markdown: str, outputs: Outputs | None) -> str:
    """The page with what its blocks have shown, or None for one that was not run."""
    nothing: list[dict[str, str]] = []
    left = itertools.repeat(nothing) if outputs is None else iter(outputs.blocks)

    def replace(match: re.Match[str]) -> str:
        block = block_of(match)
        shown = next(left) if block.is_run else []
        if "hide" in block.options:
            return ""
        title = f' title="{block.options["file"]}"' if "file" in block.options else ""
        source = f"```{block.language}{title}\n{block.code}```"
        if "quiet" in block.options:
            return source
        return "\n\n".join([source, *map(_as_html, shown)])

    page = FENCE.sub(replace, markdown)
    if outputs is None:
        return f"{page}\n\n<p class='executed'>The code of this page was not run.</p>\n"
    seconds = max(1, round(outputs.cpu_seconds))
    return (
        f"{page}\n\n<p class='executed'>All code of this page was run when the site was built, in "
        f"{seconds} s of processor time; what it shows is what it printed.</p>\n"
    )


def _as_html(output: dict[str, str]) -> str:
    kind, content = output["kind"], output["content"]
    if kind == "text":
        lines = html.escape(content, quote=False)
        return f'<div class="output"><pre><code>{lines}</code></pre></div>'
    if kind == "html":
        return f'<div class="output md-typeset__scrollwrap">{content}</div>'
    picture = f'<img alt="what the code drew" src="data:image/png;base64,{content}">'
    return f'<div class="output">{picture}</div>'


def _read(text: str) -> Outputs:
    found: dict[str, Any] = json.loads(text)
    return Outputs(found["outputs"], found["cpu_seconds"])


def _fingerprint(request: str) -> str:
    """Of the blocks, and of all that their outputs depend on."""
    digest = hashlib.sha256(request.encode())
    for path in [*sorted((ROOT / "src").rglob("*.py")), RUNNER]:
        digest.update(path.read_bytes())
    for package in PACKAGES:
        digest.update(importlib.metadata.version(package).encode())
    return digest.hexdigest()[:32]


def main() -> None:
    """Run pages and print what they show."""
    for name in sys.argv[1:]:
        markdown = Path(name).read_text()
        try:
            found = run(name, markdown)
        except PageError as error:
            sys.exit(str(error))
        run_blocks = (block for block in blocks_of(markdown) if block.is_run)
        for block, outputs in zip(run_blocks, found.blocks, strict=True):
            print(block.code)
            for output in outputs:
                print(output["content"][:4000] if output["kind"] == "text" else output["kind"])
                print()
        print(f"{name}: {found.cpu_seconds:.0f} s of processor time")


if __name__ == "__main__":
    main()
