"""Put what was measured into docs/reproduction.md: figures, verdicts and repeats.

    python benchmarks/reproduction_page.py [--check]

The page is written by hand, but for what is between `<!-- measured: NAME -->` and
`<!-- end -->`, which comes from docs/reproduction/NAME/{summary,manifest}.json. With --check
nothing is written, and a page that does not say what was measured is an error.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
PAGE, RESULTS = DOCS / "reproduction.md", DOCS / "reproduction"
_MEASURED = re.compile(r"(<!-- measured: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> None:
    page = PAGE.read_text()
    filled = fill(page)
    if "--check" in sys.argv[1:]:
        sys.exit(filled != page and f"{PAGE}: run python benchmarks/reproduction_page.py")
    PAGE.write_text(filled)


def fill(page: str) -> str:
    """The page with what was measured in its places."""
    return _MEASURED.sub(lambda found: found[1] + measured(found[2]) + found[3], page)


def measured(name: str) -> str:
    """Figure, verdicts and repeats of an experiment."""
    folder = RESULTS / name
    if not folder.exists():
        return f"Not run in full yet: `dpvim reproduce {name} --full`.\n"
    lines = [f"![{name}](reproduction/{name}/figure.png)", ""]
    if not (folder / "summary.json").exists():  # runtimes are a table, with no claims
        with (folder / "summary.csv").open() as file:
            header, *rows = csv.reader(file)
        return "\n".join([*lines, *table([" ".join(h.split("_")) for h in header], rows), ""])
    verdicts = json.loads((folder / "summary.json").read_text())["verdicts"]
    rows = [[v["claim"], v["measured"], f"**{v['judgement']}**"] for v in verdicts]
    return "\n".join([*lines, *table(["claim", "measured", "verdict"], rows), "", runs(name), ""])


def runs(name: str) -> str:
    manifest = json.loads((RESULTS / name / "manifest.json").read_text())
    scope, repeats = manifest["scope"], manifest["repeats"]
    least, most, paper = (repeats[key] for key in ("least", "most", "paper"))
    ways = f" --{scope['ways'][0]}" if len(scope["ways"]) == 1 else ""
    seeds = f" --seeds {scope['repeats']}" if scope["repeats"] else ""
    count = f"{most}" if least == most else f"{least} to {most}"
    of_paper = f" (the paper has {paper})" if paper and most < paper else ""
    return (
        f"`dpvim reproduce {name} --full{ways}{seeds}`: {count} repeats of each setting{of_paper}, "
        f"{manifest['cells']['done']} cells, {manifest['seconds'] / 60:,.0f} minutes."
    )


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in [header, *rows]]
    lines = [f"| {' | '.join(row)} |" for row in escaped]
    return [lines[0], "|" + "---|" * len(header), *lines[1:]]


if __name__ == "__main__":
    main()
