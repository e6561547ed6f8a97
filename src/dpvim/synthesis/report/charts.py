"""Pictures of synthetic tables, on their own or beside the original, made to stand in a page.

They are narrow and have large letters, so that they can be read on a telephone. What shows original
data says so in the picture itself, which may be copied out of its page.
"""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter
from PIL import Image

from dpvim.synthesis.analysis.contingency import Bins, format_short
from dpvim.synthesis.report.names import NOT_FOR_RELEASE

_SYNTHETIC, _ORIGINAL, _ALARM, _EMPTY = "tab:blue", "black", "#b00020", "#dddddd"
_DPI, _COLOURS = 130, 128
_SMALL, _WIDE = (4.0, 2.7), 4.5
MAX_BARS = 20
# A group with fewer records has no distribution worth a look.
_SMALLEST_SHARE, _FEWEST = 0.002, 10
Shares = Float[np.ndarray, "tables groups"]


@dataclass(frozen=True, eq=False)
class Picture:
    """A picture with a text for those who do not see it."""

    uri: str
    alt: str


def as_data_uri(figure: Figure) -> str:
    """A figure as a PNG file within an address, for pages without other files."""
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        # Names may be in scripts that the font lacks, or too long for the picture. It is still a
        # picture, and the page has the names as text.
        warnings.simplefilter("ignore", UserWarning)
        figure.savefig(buffer, format="png", dpi=_DPI)
    plt.close(figure)
    return "data:image/png;base64," + base64.b64encode(_with_palette(buffer)).decode("ascii")


def fit_to_page(figure: Figure, *, height: float) -> Figure:
    """Make a figure of a fit narrower and drop its titles: the page has captions."""
    figure.set_size_inches(_WIDE, height)
    for axes in figure.axes:
        axes.set_title("")
        for axis in (axes.xaxis, axes.yaxis):
            if isinstance(axis.get_major_formatter(), FuncFormatter):  # names, not numbers
                names = [label.get_text().replace(r"\$", "$") for label in axis.get_ticklabels()]
                axis.set_ticks(axis.get_majorticklocs(), [_parameter(name) for name in names])
        if (legend := axes.get_legend()) is not None:
            # Beside the axes it would take half of the width.
            handles, labels = axes.get_legend_handles_labels()
            legend.remove()
            rows = -(-len(labels) // 3)
            axes.legend(
                handles,
                labels,
                loc="lower center",
                bbox_to_anchor=(0.5, 1.0),
                ncols=min(3, -(-len(labels) // rows)),
                frameon=False,
                fontsize=8,
            )
    for text in figure.findobj(Text):
        text.set_fontsize(min(text.get_fontsize(), 9))
    return figure


def marginal(bins: Bins, shares: Shares, original: np.ndarray | None = None) -> Figure:
    """Shares of a column's groups: the mean over tables, and where 90 % of the tables lie.

    Args:
        bins: The groups.
        shares: Of each group in each synthetic table.
        original: The original's shares. The picture is then not for release.
    """
    figure = Figure(figsize=_SMALL, layout="constrained")
    axes = figure.add_subplot()
    mean, low, high = mean_and_quantiles(shares)
    draw = _steps if _has_even_bins(bins) and bins.num_present > MAX_BARS // 2 else _bars
    draw(axes, bins, np.stack([mean, low, high]), original)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("share of rows")
    axes.spines[["top", "right"]].set_visible(False)
    if original is not None:
        _stamp(figure)
        axes.set_ylim(top=1.2 * axes.get_ylim()[1])  # room for the legend
        axes.legend(frameon=False, fontsize=8, loc="upper right", ncols=2)
    return figure


def mean_and_quantiles(shares: Shares) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean over tables, and the 5 % and 95 % quantiles."""
    low, high = np.quantile(shares, [0.05, 0.95], axis=0)
    return shares.mean(axis=0), low, high


def heat_map(names: Sequence[str], values: Float[np.ndarray, "k k"]) -> Figure:
    """Matrix of the dependence between columns, from 0 to 1; the diagonal is left empty."""
    side = _WIDE if len(names) <= 15 else _WIDE * 1.35
    figure = Figure(figsize=(side, side * 0.86), layout="constrained")
    axes = figure.add_subplot()
    shown = np.where(np.eye(len(names), dtype=bool), np.nan, values)
    axes.set_facecolor(_EMPTY)
    image = axes.imshow(shown, cmap="Blues", vmin=0, vmax=max(0.1, float(np.nanmax(shown))))
    labels = [shorten_label(name, 16) for name in names]
    size = 8 if len(names) <= 15 else 7
    axes.set_xticks(range(len(names)), labels, rotation=60, ha="right", fontsize=size)
    axes.set_yticks(range(len(names)), labels, fontsize=size)
    colours = figure.colorbar(image, ax=axes, shrink=0.7)
    colours.ax.tick_params(labelsize=8)
    colours.set_label("Cramer's V", fontsize=8)
    return figure


def pair(
    names: tuple[str, str],
    bins: tuple[Bins, Bins],
    synthetic: np.ndarray,
    original: np.ndarray | None = None,
) -> Figure:
    """The second column's distribution for each group of the first one, as shades.

    Args:
        names: Of the two columns.
        bins: Their groups.
        synthetic: Joint counts, the first column's groups by the second one's.
        original: The same of the original. The picture is then not for release.
    """
    panels = [("synthetic", synthetic)] + ([] if original is None else [("original", original)])
    size = _SMALL if original is None else (_WIDE, 2.6)
    figure = Figure(figsize=size, layout="constrained")
    grid = np.atleast_1d(figure.subplots(1, len(panels), sharey=True))
    shades = [_conditional(counts) for _, counts in panels]
    top = max(0.05, *(np.nanmax(shade, initial=0) for shade in shades))
    for axes, (title, _), shade in zip(grid, panels, shades, strict=True):
        axes.set_facecolor(_EMPTY)
        image = axes.imshow(shade.T, cmap="Blues", vmin=0, vmax=top, origin="lower", aspect="auto")
        _label_groups(axes, bins[0], vertical=False)
        if original is not None:
            axes.set_title(title, fontsize=9)
    _label_groups(grid[0], bins[1], vertical=True)
    figure.supylabel(shorten_label(names[1], 26), fontsize=9)
    figure.supxlabel(shorten_label(names[0], 40), fontsize=9)
    colours = figure.colorbar(image, ax=list(grid))
    colours.ax.tick_params(labelsize=8)
    colours.set_label("share within", fontsize=8)
    if original is not None:
        _stamp(figure)
    return figure


def intervals(table: pd.DataFrame, *, other: pd.DataFrame | None = None) -> Figure:
    """Estimates with intervals, a row each; `other` is of the original and not for release.

    Args:
        table: ``estimate``, ``lower`` and ``upper``, by name.
        other: The same, for the same names.
    """
    figure = Figure(figsize=(_WIDE, 1.1 + 0.3 * len(table)), layout="constrained")
    axes = figure.add_subplot()
    places = np.arange(len(table))
    sides = [(table, _SYNTHETIC, "synthetic, pooled" if other is not None else "posterior", 0.0)]
    if other is not None:
        sides = [(*sides[0][:3], 0.16), (other, _ORIGINAL, "original", -0.16)]
    for rows, colour, label, shift in sides:
        axes.hlines(places + shift, rows["lower"], rows["upper"], color=colour, linewidth=2)
        axes.plot(rows["estimate"], places + shift, "o", color=colour, markersize=4, label=label)
    axes.set_yticks(places, [shorten_label(name, 30) for name in table.index], fontsize=8)
    axes.invert_yaxis()
    axes.axvline(0, color="grey", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if other is not None:
        # An interval of a pool that knows nothing would leave no room for the others.
        ends = pd.concat([other["lower"], other["upper"], table["estimate"]])
        margin = max(float(ends.max() - ends.min()), 1e-9)
        axes.set_xlim(float(ends.min()) - margin, float(ends.max()) + margin)
        axes.legend(frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)
        _stamp(figure)
    return figure


def shorten_label(text: object, most: int) -> str:
    """A label of a certain length that is not taken for a formula.

    What is too long loses its middle: names often differ at the end.

    >>> shorten_label("the age of my cat", 10), shorten_label("in $", 10)
    ('the age…cat', 'in \\\\$')
    """
    label = " ".join(str(text).split())
    if len(label) > most:
        label = f"{label[: most - most // 3]}…{label[-(most // 3) :]}"
    return label.replace("$", r"\$")


def _with_palette(png: io.BytesIO) -> bytes:
    """The picture with a palette instead of full colours: a third of the size."""
    smaller = io.BytesIO()
    with Image.open(png) as image:
        image.convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE).save(smaller, "png")
    return smaller.getvalue()


def _parameter(name: str) -> str:
    site, star, _ = name.partition(" (not converged)")
    return shorten_label(site, 22) + "*" * bool(star)


def _stamp(figure: Figure) -> None:
    figure.suptitle(
        f"{NOT_FOR_RELEASE}: shows original data", color=_ALARM, fontsize=9, weight="bold"
    )


def _bars(axes: Axes, bins: Bins, shares: np.ndarray, original: np.ndarray | None) -> None:
    chosen = np.arange(bins.size)
    if bins.size > MAX_BARS:
        # The most frequent ones, in their declared order, and missing values.
        order = np.argsort(-shares[0], kind="stable")[:MAX_BARS]
        chosen = np.unique([*order, bins.size - 1] if bins.nullable else order)
    places = np.arange(len(chosen))
    mean, low, high = shares[:, chosen]
    axes.bar(places, mean, color=_SYNTHETIC, alpha=0.55, label="synthetic")
    axes.vlines(places, low, high, color=_SYNTHETIC, linewidth=2)
    if original is not None:
        axes.plot(places, original[chosen], "_", color=_ORIGINAL, ms=9, mew=2, label="original")
    few = max(map(len, bins.labels)) * len(chosen) <= 36
    labels = [shorten_label(bins.labels[i], 14) for i in chosen]
    if few:
        axes.set_xticks(places, labels, fontsize=8)
    else:
        axes.set_xticks(places, labels, rotation=60, ha="right", fontsize=7, rotation_mode="anchor")


def _steps(axes: Axes, bins: Bins, shares: np.ndarray, original: np.ndarray | None) -> None:
    assert bins.edges is not None
    present = slice(bins.num_present)
    mean, low, high = shares[:, present]
    axes.stairs(high, bins.edges, baseline=low, fill=True, color=_SYNTHETIC, alpha=0.35)
    axes.stairs(mean, bins.edges, baseline=None, color=_SYNTHETIC, linewidth=1.5, label="synthetic")
    if original is not None:
        shown = original[present]
        axes.stairs(shown, bins.edges, baseline=None, color=_ORIGINAL, label="original")
    if bins.log_scale:
        axes.set_xscale("log")
    if bins.starts is not None:
        chosen = range(0, bins.num_present, -(-bins.num_present // 5))
        axes.set_xticks(bins.edges[chosen], [shorten_label(bins.starts[i], 16) for i in chosen])
        axes.tick_params(axis="x", labelsize=7, labelrotation=20)
    if bins.nullable:
        absent = "missing {:.1%} ({:.1%} to {:.1%})".format(*shares[:, -1])
        if original is not None:
            absent += f", original {original[-1]:.1%}"
        axes.set_xlabel(absent, fontsize=8)


def _has_even_bins(bins: Bins) -> bool:
    """True if shares of groups can stand over an axis of numbers, as a histogram."""
    if bins.edges is None:
        return False
    widths = np.diff(np.log(bins.edges) if bins.log_scale else bins.edges)
    return np.allclose(widths[:-1], widths[0])  # the last one may be cut at the bound


def _conditional(counts: np.ndarray) -> np.ndarray:
    """Each row divided by its sum; rows with next to no records are NaN."""
    totals = counts.sum(axis=1, keepdims=True)
    enough = totals >= max(_FEWEST, _SMALLEST_SHARE * counts.sum())
    return np.where(enough, counts / np.maximum(totals, 1), np.nan)


def _label_groups(axes: Axes, bins: Bins, *, vertical: bool) -> None:
    """Names of the groups, or of a few that are evenly spaced among many."""
    every = -(-bins.size // (8 if vertical else 7))
    chosen = list(range(0, bins.num_present, every)) if every > 1 else list(range(bins.size))
    if every > 1 and bins.nullable:
        chosen = [*(i for i in chosen if i < bins.size - 1 - every // 2), bins.size - 1]
    if bins.edges is not None and every > 1:
        # Where a group starts is shorter than its name.
        starts = bins.starts or [format_short(edge) for edge in bins.edges]
        texts = [starts[i] if i < bins.num_present else bins.labels[i] for i in chosen]
    else:
        texts = [bins.labels[i] for i in chosen]
    labels = [shorten_label(text, 12) for text in texts]
    if vertical:
        axes.set_yticks(chosen, labels, fontsize=8)
    elif max(map(len, labels)) * len(labels) <= 24:
        axes.set_xticks(chosen, labels, fontsize=8)
    else:
        axes.set_xticks(chosen, labels, rotation=60, ha="right", fontsize=7, rotation_mode="anchor")
