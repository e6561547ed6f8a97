"""Looks that the figures of all experiments share: colours and markers, panels, error bars.

Colours are those of Okabe and Ito, which the colour-blind can tell apart; a variant has the same
one in every figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

_LOOKS = {
    "vanilla": ("#D55E00", "s"),
    "preconditioned": ("#E69F00", "v"),
    "aligned": ("#0072B2", "o"),
    "natural": ("#CC79A7", "^"),
    "aligned_natural": ("#009E73", "D"),
    "default": ("#000000", "*"),
}
_NAMES = {
    "aligned_natural": "aligned natural",
    "default": "dpvim's defaults",
}
GREY = "#777777"


def panels(rows: int, columns: int, *, width: float = 4.2, height: float = 3.2) -> Any:
    """A figure and its axes, in an array of that shape."""
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def name_of(variant: str) -> str:
    """As people write it."""
    return _NAMES.get(variant, variant)


def colour_of(variant: str) -> str:
    """The variant's colour in all figures."""
    return _LOOKS[variant][0] if variant in _LOOKS else GREY


def marker_of(variant: str) -> str:
    """The variant's marker in all figures."""
    return _LOOKS[variant][1] if variant in _LOOKS else "x"


def line(
    ax: Axes, table: pd.DataFrame, x: str, y: str, variant: str, *, label: str = "", **style: Any
) -> None:
    """Means against `x` with standard errors (column `y`_se), in the variant's colour."""
    colour, marker = _LOOKS.get(variant, (GREY, "x"))
    table = table.sort_values(x)
    error = table.get(f"{y}_se", pd.Series(np.nan, table.index)).fillna(0.0)
    look = {"color": colour, "marker": marker, "markersize": 5, "capsize": 2, "linewidth": 1.5}
    ax.errorbar(
        table[x], table[y], yerr=error, label=label or name_of(variant), **{**look, **style}
    )


def finish(ax: Axes, title: str, x: str, y: str, *, log: str = "") -> None:
    """Title and labels; `log` names the axes, ``"x"``, ``"y"`` or ``"xy"``, with that scale."""
    ax.set_title(title, fontsize=10)
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    if "x" in log:
        ax.set_xscale("log")
    if "y" in log:
        ax.set_yscale("log")
    ax.grid(alpha=0.3, linewidth=0.5)


def ticks(ax: Axes, values: Sequence[float]) -> None:
    """Mark these values of x, and no others."""
    ax.set_xticks(list(values), [f"{value:g}" for value in values])
    ax.minorticks_off()


def legend(figure: Figure, ax: Axes, *, columns: int = 4) -> None:
    """One legend for all panels, below them."""
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9
    )
