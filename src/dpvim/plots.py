"""Plots of a fit: trace, posterior, convergence. Readable with five parameters and with 700.

A few parameters are drawn one by one with their names; many are drawn as quantile bands or sorted
by their means, with only the extreme ones named.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpvim.inference.families import Family, standard_deviations
from dpvim.inference.trace import Trace
from dpvim.posterior.convergence import MIN_TIMES, autocorrelation_time
from dpvim.posterior.posterior import Posterior

_MAX_NAMED_LINES = 12
_MAX_LINES = 60
LARGEST_FOREST = 40
_DP, _TOTAL, _OTHER, _BAD = "tab:orange", "tab:blue", "tab:gray", "tab:red"


def plot_trace(trace: Trace, posterior: Posterior, family: Family) -> Figure:
    """Plot means and standard deviations of the latent against steps.

    A dotted line marks the start of the median window; everything left of it is burn-in.
    """
    figure, axes = plt.subplots(2, 1, figsize=(9, 6), sharex=True, layout="constrained")
    labels = _escape_labels(posterior.space.raw_labels())
    snapshots = jax.tree.map(jnp.asarray, trace.params)
    scales = np.asarray(jax.vmap(lambda p: standard_deviations(family, p))(snapshots))
    _draw_lines(axes[0], trace.steps, trace.loc, labels)
    _draw_lines(axes[1], trace.steps, scales, labels)
    axes[0].set_ylabel("mean")
    axes[1].set_ylabel("standard deviation")
    axes[1].set_yscale("log")
    axes[1].set_xlabel("step")
    window = np.median(posterior.latent_dist.windows.lengths)
    for ax in axes:
        start = trace.steps[-int(window)] if window < len(trace) else trace.steps[0]
        ax.axvline(start, color="black", linestyle=":", linewidth=1)
    if len(labels) <= _MAX_NAMED_LINES:
        axes[0].legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)
    axes[0].set_title(f"Trace of {len(labels)} parameters; dotted: start of the median window")
    return figure


def plot_posterior(
    posterior: Posterior,
    *,
    probability: float = 0.9,
    nonprivate: Mapping[str, Any] | None = None,
) -> Figure:
    """Plot central intervals of every entry of every site, and the part of them that is DP noise.

    Args:
        posterior: The posterior to draw.
        probability: Probability of the intervals.
        nonprivate: Another `Posterior` to draw beside it. It carries no guarantee: a picture with
            it is not for release.
    """
    table = posterior.summary(probability)
    other = None if nonprivate is None else nonprivate.summary(probability)  # type: ignore[attr-defined]
    if len(table) <= LARGEST_FOREST:
        return _forest(table, other, probability)
    return _caterpillar(table, other, probability)


def plot_convergence(trace: Trace, posterior: Posterior) -> Figure:
    """Plot each parameter's window in autocorrelation times; fifty are needed to converge."""
    windows, labels = posterior.latent_dist.windows, _escape_labels(posterior.space.raw_labels())
    times = np.array(
        [
            length / autocorrelation_time(trace.loc[-length:, [i]].astype(float))[0]
            for i, length in enumerate(windows.lengths)
        ]
    )
    figure, ax = plt.subplots(figsize=(9, 4), layout="constrained")
    places = np.arange(len(labels))
    for passed, colour, name in ((True, _TOTAL, "converged"), (False, _BAD, "not converged")):
        chosen = windows.converged == passed
        ax.scatter(
            places[chosen],
            times[chosen],
            color=colour,
            s=18 if len(labels) <= 100 else 6,
            label=f"{name} ({chosen.sum()})",
        )
    ax.axhline(MIN_TIMES, color="black", linestyle=":", linewidth=1)
    ax.set_yscale("log")
    ax.set_ylabel("window / autocorrelation time")
    if len(labels) <= LARGEST_FOREST:
        ax.set_xticks(places, labels, rotation=60 if len(labels) > 6 else 0, ha="right", fontsize=8)
    else:
        ax.set_xlabel("parameter")
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    ax.set_title("How much of the noise each window has seen")
    return figure


def _escape_labels(names: Iterable[str]) -> list[str]:
    """Escape dollar signs, between which matplotlib would read a formula."""
    return [name.replace("$", r"\$") for name in names]


def _draw_lines(ax: Axes, steps: np.ndarray, values: np.ndarray, labels: list[str]) -> None:
    if len(labels) <= _MAX_NAMED_LINES:
        for column, label in zip(values.T, labels, strict=True):
            ax.plot(steps, column, linewidth=0.9, label=label)
        return
    bands = np.quantile(values, [0.05, 0.25, 0.5, 0.75, 0.95], axis=1)
    ax.fill_between(steps, bands[0], bands[4], color=_TOTAL, alpha=0.15, linewidth=0)
    ax.fill_between(steps, bands[1], bands[3], color=_TOTAL, alpha=0.25, linewidth=0)
    chosen = np.linspace(0, len(labels) - 1, min(_MAX_LINES, len(labels))).astype(int)
    ax.plot(steps, values[:, chosen], color="black", linewidth=0.3, alpha=0.4)
    ax.plot(steps, bands[2], color=_TOTAL, linewidth=1.5)


def _forest(table: Any, other: Any, probability: float) -> Figure:
    figure, ax = plt.subplots(figsize=(8, 1.2 + 0.32 * len(table)), layout="constrained")
    rows = np.arange(len(table))
    low, high = table.columns[2:4]
    ax.hlines(rows, table[low], table[high], color=_TOTAL, linewidth=2, label="posterior")
    half = (table[high] - table[low]) / 2 * np.sqrt(table["dp_share"])
    ax.hlines(
        rows,
        table["mean"] - half,
        table["mean"] + half,
        color=_DP,
        linewidth=5,
        alpha=0.6,
        label="of it DP noise",
    )
    ax.plot(table["mean"], rows, "o", color=_TOTAL, markersize=4)
    if other is not None:
        ax.hlines(
            rows + 0.25, other[low], other[high], color=_OTHER, linewidth=1.5, label="non-private"
        )
        ax.plot(other["mean"], rows + 0.25, "o", color=_OTHER, markersize=3)
    names = [
        name if good else f"{name} (not converged)"
        for name, good in zip(_escape_labels(table.index), table["converged"], strict=True)
    ]
    ax.set_yticks(rows, names)
    ax.invert_yaxis()
    ax.axvline(0, color="black", linewidth=0.5)
    ax.set_xlabel(f"value, {probability:.0%} interval")
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    return figure


def _caterpillar(table: Any, other: Any, probability: float) -> Figure:
    """Intervals of all entries, sorted by their means; only the first and the last are named."""
    figure, ax = plt.subplots(figsize=(10, 4.5), layout="constrained")
    order = np.argsort(table["mean"].to_numpy())
    low, high = table.columns[2:4]
    sorted_table, places = table.iloc[order], np.arange(len(table))
    ax.vlines(
        places, sorted_table[low], sorted_table[high], color=_TOTAL, alpha=0.35, linewidth=0.8
    )
    half = (sorted_table[high] - sorted_table[low]) / 2 * np.sqrt(sorted_table["dp_share"])
    mean = sorted_table["mean"]
    ax.vlines(places, mean - half, mean + half, color=_DP, alpha=0.6, linewidth=0.8)
    ax.plot(places, mean, ".", color=_TOTAL, markersize=2, label="posterior")
    if other is not None:
        ax.plot(
            places, other["mean"].to_numpy()[order], ".", color="black", ms=2, label="non-private"
        )
    for place in (0, len(table) - 1):
        ax.annotate(
            _escape_labels([sorted_table.index[place]])[0],
            (place, mean.iloc[place]),
            xytext=(6 if place == 0 else -6, 0),
            textcoords="offset points",
            ha="left" if place == 0 else "right",
            va="center",
            fontsize=8,
        )
    bad = int((~table["converged"]).sum())
    ax.set_title(
        f"{len(table)} values by their means, {probability:.0%} intervals (orange: DP noise); "
        f"{bad} not converged"
    )
    ax.set_xlabel("rank")
    ax.legend(loc="upper left", frameon=False)
    return figure
