"""Hooks of MkDocs: run pages, bring in files from outside of docs/, describe the command line."""

from __future__ import annotations

import os
import posixpath
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import command_line
import executed_pages
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = executed_pages.ROOT
DOCS = ROOT / "docs"
# Pages that stand outside of docs/.
ROOT_PAGES = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
LINK = re.compile(r"(\]\()([^)#\s:]+)([^)]*\))")
COMMANDS = "<!-- commands -->"
# Pictures that follow the colours of the page stand in it, and are not linked.
PICTURE = re.compile(r'<img [^>]*src="[^"]*pictures/([\w-]+)\.svg"[^>]*>')
_EXECUTE = re.compile(r"\A---\n(?:[^\n]+\n)*execute: true\n")
_outputs: dict[str, executed_pages.Outputs | None] = {}


def on_files(files: Files, config: Any) -> Files:
    """Run the pages that are to be run; add what pages link to outside of docs/."""
    for name in ROOT_PAGES:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    outside = set()
    executed = []
    for file in files.documentation_pages():
        source = Path(str(file.abs_src_path))
        text = source.read_text()
        outside |= {path for path in links_of(text, source) if not path.is_relative_to(DOCS)}
        if _EXECUTE.match(text):
            executed.append((file.src_uri, text))
    for path in sorted(outside - {ROOT / name for name in ROOT_PAGES}):
        if path.is_file():
            uri = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, uri, abs_src_path=str(path)))
    run_all(executed)
    return files


def run_all(pages: list[tuple[str, str]]) -> None:
    """Run pages side by side: DPVIM_DOCS_JOBS at a time, or one a core; for a look at the layout
    none (0)."""
    jobs = int(os.environ.get("DPVIM_DOCS_JOBS", os.cpu_count() or 1))
    if jobs == 0:
        _outputs.update(dict.fromkeys(name for name, _ in pages))
        return
    with ThreadPoolExecutor(jobs) as pool:
        runs = {name: pool.submit(executed_pages.run, name, text) for name, text in pages}
        for name, future in runs.items():
            try:
                _outputs[name] = future.result()
            except executed_pages.PageError as error:
                pool.shutdown(cancel_futures=True)
                raise PluginError(str(error)) from error


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Put outputs, commands and links in place."""
    source = Path(str(page.file.abs_src_path))
    if page.file.src_uri in _outputs:
        markdown = executed_pages.render(markdown, _outputs[page.file.src_uri])
    if COMMANDS in markdown:
        markdown = markdown.replace(COMMANDS, command_line.describe())

    def replace(match: re.Match[str]) -> str:
        before, link, after = match.groups()
        target = Path(os.path.normpath(source.parent / link))
        if not target.is_relative_to(ROOT) or not target.exists():
            return match[0]  # MkDocs has a warning for it
        here = posixpath.dirname(page.file.src_uri) or "."
        return f"{before}{posixpath.relpath(site_uri(target), here)}{after}"

    return LINK.sub(replace, markdown)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Put pictures into the page."""
    return PICTURE.sub(lambda found: (DOCS / "pictures" / f"{found[1]}.svg").read_text(), html)


def links_of(text: str, source: Path) -> set[Path]:
    """Files that a page links to."""
    return {Path(os.path.normpath(source.parent / link)) for _, link, _ in LINK.findall(text)}


def site_uri(path: Path) -> str:
    """The place of a file of the repository among the sources of the site."""
    return path.relative_to(DOCS if path.is_relative_to(DOCS) else ROOT).as_posix()
