"""A picture of a ledger: what was spent on what, and how much of the budget that is together."""

from __future__ import annotations

import math

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from dpvim.ledger.book import Ledger
from dpvim.ledger.cost import Budget
from dpvim.ledger.state import Release

# Of Okabe and Ito: told apart by everybody, and by their lightness in print.
_OWN, _TOTAL, _BUDGET, _OPEN = "#56B4E9", "#0072B2", "#D55E00", "#E69F00"
_MOST_NAMES = 40
_LONGEST_NAME = 36


def draw(ledger: Ledger) -> Figure:
    """A row for each release: its own epsilon as a bar, the total after it as a point.

    Releases that were booked and not made have no bar. The total is computed anew; each one's own
    epsilon is at its own delta.
    """
    releases = ledger.releases
    height = 1.8 + 0.32 * max(1, min(len(releases), _MOST_NAMES))
    figure, ax = plt.subplots(figsize=(9, height), layout="constrained")
    _draw_rows(ax, releases)
    totals = running_totals(ledger.budget, releases)
    rows = list(range(len(releases)))
    if releases:
        ax.plot(totals, rows, color=_TOTAL, marker="o", markersize=4)
    ax.axvline(ledger.epsilon, color=_BUDGET, linestyle="--", linewidth=2)
    spent = totals[-1] if totals else 0.0
    ax.set_title(
        f"{ledger.name}: epsilon = {spent:.3g} of {ledger.epsilon:g} spent, at delta = "
        f"{ledger.delta:g}"
    )
    ax.set_xlabel("epsilon")
    ax.set_xlim(0, 1.05 * max([ledger.epsilon, spent, *(each.epsilon for each in releases)]))
    ax.set_ylim(len(releases) - 0.5 if releases else 0.5, -0.5)
    figure.legend(
        handles=[
            Patch(color=_OWN, label="a release by itself"),
            Patch(facecolor=_OPEN, hatch="//", label="open: under way, or killed"),
            Line2D([], [], color=_TOTAL, marker="o", label="all until then, composed"),
            Line2D([], [], color=_BUDGET, linestyle="--", label="budget"),
        ],
        loc="outside lower center",
        ncols=4,
        frameon=False,
        fontsize=8,
    )
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    return figure


def running_totals(budget: Budget, releases: tuple[Release, ...]) -> list[float]:
    """The composed epsilon after each release, at what each costs now."""
    prices, totals = [], []
    for release in releases:
        if release.price is not None:
            prices.append(release.price)
        totals.append(budget.total(prices))
    return totals


def _draw_rows(ax: Axes, releases: tuple[Release, ...]) -> None:
    for row, release in enumerate(releases):
        is_open = release.settled is None
        ax.barh(
            row,
            release.epsilon,
            color=_OPEN if is_open else _OWN,
            hatch="//" if is_open else None,
            height=0.6,
        )
    # All names where there is room, else some of them.
    every = math.ceil(len(releases) / _MOST_NAMES) or 1
    rows = range(0, len(releases), every)
    ax.set_yticks(list(rows), [_label(releases[row]) for row in rows], fontsize=8)


def _label(release: Release) -> str:
    booked = release.booked
    purpose = booked.purpose
    if len(purpose) > _LONGEST_NAME:
        purpose = purpose[: _LONGEST_NAME - 1] + "…"
    mark = " (seeded)" if booked.seeded else ""
    # Purposes are words, not formulas.
    return f"{booked.time[:10]}  {purpose}{mark}".replace("$", r"\$")
