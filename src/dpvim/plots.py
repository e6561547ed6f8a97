"""Plots of fits and plans. Readable with five parameters and with 700.

A few parameters are drawn one by one with their names; many are drawn as quantile bands or sorted
by their means, with only the extreme ones named.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpvim import _validate
from dpvim.inference.clip_relief import count_error
from dpvim.inference.families import Family, standard_deviations
from dpvim.inference.steering import SteeredReleases
from dpvim.inference.trace import Trace
from dpvim.inference.windows import windows_of
from dpvim.posterior.convergence import MIN_TIMES, autocorrelation_time
from dpvim.posterior.posterior import Posterior
from dpvim.privacy.norm_counts import NORM_BIN_ENDS
from dpvim.privacy.plan import PrivacyPlan

_MAX_NAMED_LINES = 12
_MAX_LINES = 60
LARGEST_FOREST = 40
# Of Okabe and Ito: told apart by everybody, and by their lightness in print.
_DP, _TOTAL, _OTHER, _BAD = "#E69F00", "#0072B2", "#7F7F7F", "#D55E00"
_LINES = (_TOTAL, _DP, "#009E73", "#CC79A7", "#56B4E9", _BAD, "#F0E442", "#000000")
_LEVELS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
# Budgets that a plan is compared with, as multiples of its own.
_BUDGETS = (0.25, 0.5, 1.0, 2.0, 4.0)


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


def plot_norms(releases: SteeredReleases, plan: PrivacyPlan) -> Figure:
    """Plot how many records have gradients of which length, and where they were clipped.

    These are the released counts of the last part of the run, so they have noise, which the
    whiskers show (two standard deviations); a count may be below zero. What is right of the line
    was shortened to it.
    """
    narrow = [i for i, window in enumerate(windows_of(plan.num_steps)) if not window.is_wide]
    done = [i for i in narrow if releases.steps[i] > 0]
    if not done:
        raise ValueError("plot_norms: expected a complete run, got one without its last part.")
    steps = releases.steps[done]
    counts = np.average(releases.counts[done], axis=0, weights=steps)
    error = 2 * count_error(plan, float(steps.sum()))
    figure, ax = plt.subplots(figsize=(8, 4), layout="constrained")
    places, ends = np.arange(len(counts)), np.array(NORM_BIN_ENDS)
    clipped = ends >= 1
    for chosen, colour, name in ((~clipped, _TOTAL, "as they are"), (clipped, _BAD, "clipped")):
        ax.bar(
            places[chosen],
            counts[chosen],
            width=0.9,
            color=colour,
            hatch="//" if name == "clipped" else None,
            label=name,
        )
    ax.errorbar(places, counts, yerr=error, fmt="none", ecolor="black", capsize=3, linewidth=1)
    ax.axvline(int(np.argmax(clipped)) - 0.5, color="black", linestyle="--", linewidth=1.5)
    ax.axhline(0, color="black", linewidth=0.5)
    above = [f"{end:g}" for end in ends[1:]]
    names = [f"< {above[0]}", *(f"{a} - {b}" for a, b in itertools.pairwise(above))]
    ax.set_xticks(places, [*names, f"> {above[-1]}"], fontsize=8)
    ax.set_xlabel("norm of a gradient, in clip norms")
    ax.set_ylabel(f"{plan.unit.value}s, with noise")
    share = counts[clipped].sum() / plan.num_examples
    ax.set_title(f"{share:.1%} of {plan.num_examples:,} {plan.unit.value}s clipped")
    ax.legend(frameon=False)
    return figure


def plot_plan(plan: Any) -> Figure:
    """Plot what a fit will do with its steps, and what other budgets would give. Spends nothing.

    Args:
        plan: A `dpvim.FitPlan`.
    """
    figure, axes = plt.subplots(
        2, 1, figsize=(8, 4.5), layout="constrained", gridspec_kw={"height_ratios": [1, 3]}
    )
    _draw_steps(axes[0], plan)
    budgets = [factor * plan.epsilon for factor in _BUDGETS]
    others = [
        dataclasses.replace(plan, plan=plan.plan.calibrate(epsilon=each, delta=plan.delta))
        for each in budgets
    ]
    ax = axes[1]
    if plan.expected_width is None:
        values, ylabel = [each.plan.noise_multiplier for each in others], "noise multiplier"
    else:
        values, ylabel = [each.expected_width for each in others], "width of intervals"
        ax.axhline(1, color=_OTHER, linestyle=":", label="without privacy")
    ax.plot(budgets, values, color=_TOTAL, marker="o", label="by budget")
    here = _BUDGETS.index(1.0)
    ax.plot(budgets[here], values[here], "D", color=_BAD, markersize=9, label="this plan")
    ax.annotate(
        f"{values[here]:.3g}",
        (budgets[here], values[here]),
        xytext=(8, 8),
        textcoords="offset points",
    )
    ax.set_xscale("log", base=2)
    ax.set_xticks(budgets, [f"{each:.3g}" for each in budgets])
    ax.set_xlabel(f"epsilon, at delta = {plan.delta:g}")
    ax.set_ylabel(ylabel)
    ax.legend(frameon=False)
    return figure


def _draw_steps(ax: Axes, plan: Any) -> None:
    """The parts of a run as pieces of one bar."""
    total = plan.plan.num_steps
    parts = [("optimise", total)]
    if plan.why_not_steered is None:
        windows = windows_of(total)
        search = sum(w.length for w in windows if w.searches)
        wide = sum(w.length for w in windows if w.is_wide) - search
        parts = [("place", search), ("curvature", wide), ("answer", total - search - wide)]
    start = 0
    for (name, length), colour in zip(parts, ("#56B4E9", _DP, "#009E73"), strict=False):
        ax.barh(0, length, left=start, color=colour, edgecolor="black")
        ax.text(start + length / 2, 0, f"{name}\n{length:,}", ha="center", va="center", fontsize=8)
        start += length
    ax.set_yticks([])
    ax.set_xlim(0, total)
    ax.set_title(
        f"{total:,} steps on {plan.plan.expected_batch_size:,.0f} of {plan.plan.num_examples:,} "
        f"{plan.plan.unit.value}s, epsilon = {plan.epsilon:.3g}"
    )


def plot_coverage(
    posteriors: Sequence[Posterior],
    truths: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    *,
    levels: Sequence[float] = _LEVELS,
) -> Figure:
    """Plot how often intervals hold the truth, by their level: on the diagonal they keep it.

    For simulated data, whose truth is known: fits of many simulated data sets. The band is where
    nineteen of twenty honest methods would be, were all entries independent.

    Args:
        posteriors: One for each data set.
        truths: True values by site, the same for all data sets or one mapping for each.
        levels: Probabilities of the intervals.
    """
    if not posteriors:
        raise ValueError("posteriors: expected at least one, got none.")
    each = [truths] * len(posteriors) if isinstance(truths, Mapping) else list(truths)
    if len(each) != len(posteriors):
        raise ValueError(f"truths: expected {len(posteriors)}, one each, got {len(each)}.")
    levels = [_validate.open_unit("levels", level) for level in levels]
    held = np.array([_held(p, t, levels) for p, t in zip(posteriors, each, strict=True)])
    shares, number = held.mean(axis=(0, 2)), held.shape[0] * held.shape[2]
    figure, ax = plt.subplots(figsize=(5, 5), layout="constrained")
    nominal = np.array(levels)
    half = 1.96 * np.sqrt(nominal * (1 - nominal) / number)
    ax.fill_between(nominal, nominal - half, nominal + half, color=_OTHER, alpha=0.3, linewidth=0)
    ax.plot([0, 1], [0, 1], color=_OTHER, linestyle=":", label="as promised")
    ax.plot(nominal, shares, color=_TOTAL, marker="o", label="measured")
    lowest = math.floor(10 * min(nominal.min(), shares.min()) - 0.5) / 10
    ax.set(xlim=(max(0, lowest), 1.02), ylim=(max(0, lowest), 1.02))
    ax.set_xlabel("level of the intervals")
    ax.set_ylabel("share that holds the truth")
    ax.set_title(f"{held.shape[0]} fits, {held.shape[2]} values each")
    ax.legend(frameon=False, loc="upper left")
    return figure


def _held(posterior: Posterior, truth: Mapping[str, Any], levels: Sequence[float]) -> np.ndarray:
    """For each level and each value, whether its interval holds the truth."""
    names = [site.name for site in posterior.space.sites]
    if absent := [name for name in truth if name not in names]:
        raise ValueError(f"truths: expected sites of the model ({', '.join(names)}), got {absent}.")
    found = []
    for level in levels:
        ends = posterior.interval(level)
        inside = [
            ((ends[name][..., 0] <= truth[name]) & (np.asarray(truth[name]) <= ends[name][..., 1]))
            for name in names
            if name in truth
        ]
        found.append(np.concatenate([np.ravel(each) for each in inside]))
    return np.array(found)


def _escape_labels(names: Iterable[str]) -> list[str]:
    """Escape dollar signs, between which matplotlib would read a formula."""
    return [name.replace("$", r"\$") for name in names]


def _draw_lines(ax: Axes, steps: np.ndarray, values: np.ndarray, labels: list[str]) -> None:
    if len(labels) <= _MAX_NAMED_LINES:
        styles = ("-", "--")  # there are more lines than colours
        for i, (column, label) in enumerate(zip(values.T, labels, strict=True)):
            colour, style = _LINES[i % len(_LINES)], styles[i // len(_LINES)]
            ax.plot(steps, column, linewidth=0.9, label=label, color=colour, linestyle=style)
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
