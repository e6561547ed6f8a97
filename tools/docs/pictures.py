"""The pictures of the concepts, as SVG: drawn from formulas and from the committed measurements.

    python tools/docs/pictures.py            # writes docs/pictures/*.svg
    python tools/docs/pictures.py --check    # ends with 1 if they are not what would be written

They have no font and no script of their own, follow the page's colours where they stand in one, and
the reader's scheme where they stand alone (README).
"""

from __future__ import annotations

import csv
import math
import statistics
import sys
from collections.abc import Callable
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"
RESULTS = ROOT / "benchmarks" / "results"

# Colours by role: light, dark. A page that defines the variables decides (docs/assets/site.css).
COLOURS = {
    "ink": ("#263238", "#eceff1"),
    "soft": ("#607d8b", "#90a4ae"),
    "line": ("#b0bec5", "#546e7a"),
    "private": ("#d84315", "#ff8a65"),
    "public": ("#00796b", "#4db6ac"),
    "private-fill": ("#fbe9e7", "#3e2723"),
    "public-fill": ("#e0f2f1", "#00332e"),
}
FONTS = "system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif"


def colour(name: str) -> str:
    """A colour as it is written in a picture."""
    return f"var(--dpvim-{name}, var(--own-{name}))"


def svg(name: str, width: int, height: int, title: str, parts: list[str]) -> str:
    """A whole picture. It has no empty line, so that it can stand within Markdown."""
    light = "".join(f"--own-{role}:{pair[0]};" for role, pair in COLOURS.items())
    dark = "".join(f"--own-{role}:{pair[1]};" for role, pair in COLOURS.items())
    style = (
        f".{name}{{{light}font-family:{FONTS}}}"
        f"@media(prefers-color-scheme:dark){{.{name}{{{dark}}}}}"
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'class="dpvim-picture {name}" aria-label="{escape(title)}">'
    )
    return "\n".join([head, f"<style>{style}</style>", *parts, "</svg>"]) + "\n"


def text(
    x: float,
    y: float,
    words: str,
    *,
    size: float = 13,
    fill: str = "ink",
    anchor: str = "middle",
    bold: bool = False,
) -> str:
    """A line of text; y is its base line."""
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{colour(fill)}" '
        f'text-anchor="{anchor}"{weight}>{escape(words)}</text>'
    )


def box(x: float, y: float, w: float, h: float, kind: str, lines: list[str]) -> list[str]:
    """A box with a title and smaller lines under it."""
    parts = [
        f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="8" '
        f'fill="{colour(kind + "-fill")}" stroke="{colour(kind)}" stroke-width="1.5"/>'
    ]
    top = y + h / 2 - 8.5 * (len(lines) - 1) + 5
    for i, line in enumerate(lines):
        parts.append(
            text(
                x + w / 2,
                top + 17 * i,
                line,
                size=14 if i == 0 else 11.5,
                fill="ink" if i == 0 else "soft",
                bold=i == 0,
            )
        )
    return parts


def line(
    points: list[tuple[float, float]], stroke: str, *, width: float = 1.5, dash: str = ""
) -> str:
    """A path through points."""
    path = "M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<path d="{path}" fill="none" stroke="{colour(stroke)}" stroke-width="{width:g}"{dashes}/>'
    )


def arrow(x1: float, y1: float, x2: float, y2: float, stroke: str = "soft") -> list[str]:
    """A straight arrow."""
    angle = math.atan2(y2 - y1, x2 - x1)
    tip = [
        (x2 - 8 * math.cos(angle + turn), y2 - 8 * math.sin(angle + turn)) for turn in (0.45, -0.45)
    ]
    return [line([(x1, y1), (x2, y2)], stroke), line([tip[0], (x2, y2), tip[1]], stroke)]


def record_to_posterior() -> str:
    """What happens to a record, and where data end."""
    parts: list[str] = []
    parts.append(text(20, 28, "data: private", size=12, fill="private", anchor="start", bold=True))
    stages = [
        (20, ["records", "or rows of a table"]),
        (212, ["each by itself", "a gradient,", "or its cells"]),
        (404, ["clip", "at most C,", "whatever it holds"]),
        (596, ["sum", "exact, on a lattice"]),
    ]
    for x, lines in stages:
        parts += box(x, 42, 150, 76, "private", lines)
    for x in (170, 362, 554):
        parts += arrow(x + 4, 80, x + 38, 80)
    parts += box(788, 42, 152, 76, "public", ["noise", "Gaussian integers,", "AES from the OS"])
    parts.append(line([(10, 152), (950, 152)], "private", width=2, dash="7 5"))
    parts.append(text(20, 170, "data end here", size=11.5, fill="private", anchor="start"))
    parts += arrow(671, 118, 671, 194) + arrow(864, 118, 741, 196)
    parts += box(
        566,
        198,
        210,
        76,
        "public",
        ["release", "noisy sums at known points,", "noise of known size"],
    )
    parts += box(
        314, 198, 190, 76, "public", ["inference", "where, how curved,", "what the clip took"]
    )
    parts += box(
        20,
        198,
        232,
        76,
        "public",
        ["posterior or twin", "intervals that know of the noise,", "doubts, tables, statement"],
    )
    parts += arrow(562, 236, 508, 236) + arrow(310, 236, 256, 236)
    parts.append(line([(409, 198), (409, 178), (604, 178), (604, 194)], "soft", dash="3 3"))
    parts.append(text(506, 172, "where to look next", size=11, fill="soft"))
    parts.append(
        text(940, 240, "public: all of this", size=12, fill="public", anchor="end", bold=True)
    )
    parts.append(text(940, 257, "is post-processing", size=12, fill="public", anchor="end"))
    title = "Records are clipped and summed, noise is added, and all else is made of the release."
    return svg("record-to-posterior", 960, 290, title, parts)


class Axes:
    """A small pair of axes."""

    def __init__(
        self,
        left: float,
        top: float,
        width: float,
        height: float,
        *,
        x: Callable[[float], float],
        y: Callable[[float], float],
    ) -> None:
        self.left, self.top, self.width, self.height = left, top, width, height
        self._x, self._y = x, y

    def at(self, x: float, y: float) -> tuple[float, float]:
        """A place in the picture."""
        return self.left + self._x(x) * self.width, self.top + (1 - self._y(y)) * self.height

    def frame(
        self, x_ticks: list[tuple[float, str]], y_ticks: list[tuple[float, str]], x_name: str
    ) -> list[str]:
        """Ticks, grid lines and the name of the lower axis."""
        parts = []
        bottom = self.top + self.height
        for value, label in y_ticks:
            (_, y) = self.at(0.0 if self.left == 0 else 1.0, value)
            parts.append(line([(self.left, y), (self.left + self.width, y)], "line", width=0.6))
            parts.append(text(self.left - 8, y + 4, label, size=11, fill="soft", anchor="end"))
        for value, label in x_ticks:
            x = self.left + self._x(value) * self.width
            parts.append(line([(x, bottom), (x, bottom + 5)], "line"))
            parts.append(text(x, bottom + 19, label, size=11, fill="soft"))
        middle = self.left + self.width / 2
        parts.append(text(middle, bottom + 38, x_name, size=12, fill="ink"))
        return parts


def guess() -> str:
    """The most that somebody who guesses can be right, by epsilon."""
    low, high, delta = math.log(0.01), math.log(16), 1e-5
    axes = Axes(
        70,
        30,
        840,
        190,
        x=lambda e: (math.log(e) - low) / (high - low),
        y=lambda p: (p - 0.5) / 0.5,
    )
    ticks = [(e, f"{e:g}") for e in (0.01, 0.03, 0.1, 0.3, 1, 3, 10)]
    parts = axes.frame(
        ticks,
        [(p, f"{100 * p:.0f} %") for p in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)],
        "epsilon",
    )
    epsilons = [math.exp(low + (high - low) * i / 120) for i in range(121)]
    bound = [(e, min(1.0, (math.exp(e) + delta) / (math.exp(e) + 1))) for e in epsilons]
    parts.append(line([axes.at(e, p) for e, p in bound], "public", width=3))
    for e, words, dx, dy, anchor in (
        (0.1, "0.1: next to a coin", -10, -9, "end"),
        (1.0, "1: right 73 %", -10, -9, "end"),
        (4.0, "4: right 98 %", 12, 20, "start"),
    ):
        x, y = axes.at(e, math.exp(e) / (math.exp(e) + 1))
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour("private")}"/>')
        parts.append(text(x + dx, y + dy, words, size=12, anchor=anchor))
    name = "right at most, from even odds, knowing all other records"
    parts.append(text(70, 18, name, size=12, fill="soft", anchor="start"))
    return svg("guess", 960, 270, "The best guess about one record, by epsilon.", parts)


def rows_of(name: str) -> list[dict[str, str]]:
    """A table of committed measurements."""
    with (RESULTS / name).open() as file:
        return list(csv.DictReader(file))


CASES = {
    "linear-10": "linear, d 10",
    "linear-10-correlated": "correlated",
    "logistic-6": "logistic, d 6",
    "logistic-20": "logistic, d 20",
    "poisson-6": "Poisson, d 6",
}


def coverage_of_defaults(case: str) -> float:
    """The share of 90 % intervals of fits with defaults that hold the truth, at epsilon 1."""
    found = [
        r for r in rows_of("default_coverage.csv") if r["case"] == case and float(r["epsilon"]) == 1
    ]
    return sum(int(r["held"]) for r in found) / sum(int(r["parameters"]) for r in found)


def coverage_of_last_iterate(case: str) -> float:
    """The same for the last iterate of runs with an optimiser."""
    found = [
        r
        for r in rows_of("honest_posterior.csv")
        if (r["case"], r["method"], r["parameters"]) == (case, "last iterate", "all")
        and float(r["epsilon"]) == 1
        and r["question"] == "whole"
    ]
    (row,) = found
    return float(row["90%"])


def widths(epsilon: float) -> list[float]:
    """Median widths of the models whose fits are not doubted at that epsilon, one a model."""
    by_model: dict[str, list[float]] = {}
    for row in rows_of("defaults.csv"):
        if float(row["epsilon"]) == epsilon and row["flagged"] == "False":
            by_model.setdefault(row["model"], []).append(float(row["width"]))
    return sorted(statistics.median(values) for values in by_model.values())


def intervals() -> str:
    """Coverage at epsilon 1, and what it costs in width."""
    parts = []
    left = Axes(70, 50, 470, 190, x=lambda i: (i + 0.5) / len(CASES), y=lambda share: share)
    parts += left.frame(
        [(i, name) for i, name in enumerate(CASES.values())],
        [(p, f"{100 * p:.0f} %") for p in (0.0, 0.25, 0.5, 0.75, 1.0)],
        "90 % intervals that hold the true parameter, epsilon 1",
    )
    y = left.at(0, 0.9)[1]
    parts.append(line([(70, y), (540, y)], "ink", dash="5 4"))
    parts.append(text(546, y + 4, "90 %", size=11, anchor="start"))
    for i, case in enumerate(CASES):
        for shift, share, kind in (
            (-16, coverage_of_last_iterate(case), "private"),
            (16, coverage_of_defaults(case), "public"),
        ):
            x, top = left.at(i, share)
            bottom = left.at(i, 0)[1]
            parts.append(
                f'<rect x="{x + shift - 13:.1f}" y="{top:.1f}" width="26" '
                f'height="{bottom - top:.1f}" rx="2" fill="{colour(kind)}"/>'
            )
            parts.append(text(x + shift, top - 5, f"{100 * share:.0f}", size=11))
    for x, kind, words in (
        (70, "private", "last iterate of a private run"),
        (290, "public", "dpvim's defaults"),
    ):
        parts.append(f'<rect x="{x}" y="14" width="14" height="14" rx="2" fill="{colour(kind)}"/>')
        parts.append(text(x + 20, 26, words, size=12, anchor="start"))
    epsilons = (0.5, 1.0, 8.0)
    right = Axes(
        670,
        50,
        260,
        190,
        x=lambda i: (i + 0.5) / len(epsilons),
        y=lambda w: math.log(w) / math.log(8),
    )
    parts += right.frame(
        [(i, f"epsilon {e:g}") for i, e in enumerate(epsilons)],
        [(w, f"{w:g} x") for w in (1, 2, 4, 8)],
        "width, in units of that without privacy",
    )
    for i, epsilon in enumerate(epsilons):
        found = widths(epsilon)
        for value in found:
            x, y = right.at(i, max(value, 1.0))
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour("public")}" '
                'fill-opacity="0.5"/>'
            )
        x, y = right.at(i, statistics.median(found))
        parts.append(line([(x - 22, y), (x + 22, y)], "ink", width=2))
        parts.append(
            text(x + 28, y + 4, f"{statistics.median(found):.2f}", size=11, anchor="start")
        )
    parts.append(
        text(
            670,
            26,
            "a dot a model, fits that are not doubted",
            size=12,
            fill="soft",
            anchor="start",
        )
    )
    title = "Coverage of 90 % intervals at epsilon 1, and their width by epsilon."
    return svg("intervals", 960, 290, title, parts)


DRAWN = {
    "record-to-posterior": record_to_posterior,
    "guess": guess,
    "intervals": intervals,
}


def main() -> int:
    """Write all pictures, or look if they are as they would be written."""
    stale = []
    for name, draw in DRAWN.items():
        path, content = PICTURES / f"{name}.svg", draw()
        if "--check" in sys.argv:
            if not path.is_file() or path.read_text() != content:
                stale.append(name)
        else:
            path.write_text(content)
    if stale:
        print(f"stale: {', '.join(stale)}; run python tools/docs/pictures.py", file=sys.stderr)
    return bool(stale)


if __name__ == "__main__":
    sys.exit(main())
