"""Figures of the experiments with the generative model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dpvim.experiments import pictures
from dpvim.experiments.experiment import AS_PUBLISHED, RECOMMENDED, mean_and_error

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MEANS, _STDS = "error of means", "error of stds"
_PARTS = {"means_pooled": _MEANS, "stds_pooled": _STDS}
_PUBLISHED_CLIP_NORM = 2.0
_SHADE = 0.15


def _first_epsilon(frame: pd.DataFrame) -> pd.DataFrame:
    return frame[frame["epsilon"] == frame["epsilon"].min()]


def _last(frame: pd.DataFrame) -> pd.DataFrame:
    return frame[(frame["way"] == AS_PUBLISHED) & (frame["estimate"] == "last")]


def _defaults_line(ax: Axes, frame: pd.DataFrame, column: str) -> None:
    """A level line for dpvim's defaults, if they were run."""
    ours = frame[(frame["way"] == RECOMMENDED) & (frame["estimate"] == "average")]
    if len(ours):
        label = f"{pictures.name_of('default')} ({int(ours['num_steps'].iloc[0]):,} steps)"
        ax.axhline(ours[column].mean(), color="black", linestyle=":", linewidth=1.2, label=label)


def _curves(ax: Axes, runs: pd.DataFrame, column: str, variant: str, **style: Any) -> None:
    """Mean over repeats as the runs went on, with its standard error as a band."""
    if runs.empty:
        return
    steps = runs["curve_steps"].iloc[0]
    curves = np.stack(runs[f"curve_{column}"].to_list())
    mean = curves.mean(axis=0)
    look = {"color": pictures.colour_of(variant), "label": pictures.name_of(variant)}
    ax.plot(steps, mean, linewidth=1.5, **{**look, **style})
    if len(curves) > 1:
        error = curves.std(axis=0, ddof=1) / np.sqrt(len(curves))
        colour = style.get("color", look["color"])
        ax.fill_between(steps, mean - error, mean + error, color=colour, alpha=_SHADE, linewidth=0)


def _all_labels(figure: Figure, axes: Sequence[Axes], *, columns: int = 4) -> None:
    """One legend below, with each label of any panel once."""
    found: dict[str, Any] = {}
    for ax in axes:
        handles, labels = ax.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    figure.legend(
        list(found.values()),
        list(found),
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=9,
    )


def draw_init(frame: pd.DataFrame) -> Figure:
    """Trade-off and errors by the start, above traces from three starts."""
    frame = _first_epsilon(frame)
    figure, axes = pictures.panels(3, 3)
    last = _last(frame)
    columns = list(_PARTS)
    variants = list(last["variant"].unique())
    if len(last):
        table = mean_and_error(last, ["variant", "init_scale"], columns)
        for variant in variants:
            own = table[table["variant"] == variant]
            axes[0, 0].errorbar(
                own[columns[0]],
                own[columns[1]],
                xerr=own[f"{columns[0]}_se"].fillna(0),
                yerr=own[f"{columns[1]}_se"].fillna(0),
                fmt=pictures.marker_of(variant),
                color=pictures.colour_of(variant),
                label=pictures.name_of(variant),
            )
            for x, y, start in zip(
                own[columns[0]], own[columns[1]], own["init_scale"], strict=True
            ):
                axes[0, 0].annotate(f" {start:g}", (x, y), fontsize=7)
            for ax, column in zip(axes[0, 1:], columns, strict=True):
                pictures.line(ax, own, "init_scale", column, variant)
    ours = frame[(frame["way"] == RECOMMENDED) & (frame["estimate"] == "average")]
    if len(ours):
        at = [ours[column].mean() for column in columns]
        axes[0, 0].plot(*at, "k*", markersize=11, linestyle="", label=pictures.name_of("default"))
    pictures.finish(axes[0, 0], "trade-off, one point a start", _MEANS, _STDS)
    for ax, (column, label) in zip(axes[0, 1:], _PARTS.items(), strict=True):
        _defaults_line(ax, frame, column)
        pictures.finish(ax, f"{label} at the end", "initial standard deviation", label, log="x")
    starts = sorted(last["init_scale"].unique()) if len(last) else []
    for ax in axes[0, 1:]:
        pictures.ticks(ax, starts)
    shown = [s for s in (0.01, 0.1, 1.0) if s in starts] if len(starts) > 2 else starts
    for place, start in enumerate(shown):
        runs = last[last["init_scale"] == start]
        for row, (column, label) in enumerate(_PARTS.items(), start=1):
            for variant in variants:
                _curves(axes[row, place], runs[runs["variant"] == variant], column, variant)
            pictures.finish(axes[row, place], f"{label}, start {start:g}", "step", label)
    for ax in axes[1:, len(shown) :].flat:
        ax.set_visible(False)
    _all_labels(figure, list(axes.flat), columns=5)
    return figure


def draw_epochs(frame: pd.DataFrame) -> Figure:
    """Errors by the length of the run, and of vanilla by its clip norm."""
    frame = _first_epsilon(frame)
    figure, axes = pictures.panels(1, 3)
    last = _last(frame)
    variants = list(last["variant"].unique())
    usual = last[(last["variant"] != "vanilla") | (last["clip_norm"] == _PUBLISHED_CLIP_NORM)]
    for ax, (column, label) in zip(axes[0], _PARTS.items(), strict=False):
        for variant in variants:
            own = usual[usual["variant"] == variant]
            pictures.line(
                ax, mean_and_error(own, ["num_steps"], [column]), "num_steps", column, variant
            )
        _defaults_line(ax, frame, column)
        pictures.finish(ax, f"{label} at the end, same epsilon", "steps", label, log="x")
        pictures.ticks(ax, sorted(usual["num_steps"].unique()))
        ax.tick_params(axis="x", rotation=30)
    others = last[(last["variant"] == "vanilla") & (last["clip_norm"] != _PUBLISHED_CLIP_NORM)]
    if len(others):
        _draw_clip_norms(axes[0, 2], last[last["num_steps"] == others["num_steps"].iloc[0]])
    _all_labels(figure, list(axes.flat), columns=4)
    return figure


def _draw_clip_norms(ax: Axes, runs: pd.DataFrame) -> None:
    vanilla = runs[runs["variant"] == "vanilla"]
    aligned = runs[runs["variant"] == "aligned"]
    for column, style in {"means_pooled": "--", "stds_pooled": "-"}.items():
        table = mean_and_error(vanilla, ["clip_norm"], [column])
        label = f"vanilla, {_PARTS[column]}"
        pictures.line(ax, table, "clip_norm", column, "vanilla", label=label, linestyle=style)
        label = f"aligned with C = 2, {_PARTS[column]}"
        colour = pictures.colour_of("aligned")
        ax.axhline(aligned[column].mean(), color=colour, linestyle=style, label=label)
    pictures.finish(ax, "vanilla by its clip norm", "clip norm C of vanilla", "error", log="x")
    pictures.ticks(ax, sorted(vanilla["clip_norm"].unique()))


def draw_average(frame: pd.DataFrame) -> Figure:
    """Errors of downstream coefficients by estimate, and what became of the windows."""
    from dpvim.experiments.ukb_verdicts import bias_and_spread

    frame = _first_epsilon(frame)
    published = frame[frame["way"] == AS_PUBLISHED]
    if published.empty:
        return draw_epochs(frame)
    starts = sorted(published["init_scale"].unique(), reverse=True)
    figure, axes = pictures.panels(2, 2, width=6.0)
    ours = frame[(frame["way"] == RECOMMENDED) & (frame["estimate"] == "noise-aware")]
    for ax, start in zip(axes[0], starts, strict=False):
        runs = published[published["init_scale"] == start]
        names = list(runs["estimate"].unique())
        for place, name in enumerate(names):
            values = runs.loc[runs["estimate"] == name, "rmse"].to_numpy()
            ax.plot(np.full(len(values), place), values, ".", color=pictures.GREY, markersize=5)
            error = values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else 0.0
            ax.errorbar(place, values.mean(), error, fmt="o", color=pictures.colour_of("aligned"))
        if len(ours):
            ax.axhline(ours["rmse"].mean(), color="black", linestyle=":", linewidth=1.2)
            label = f" {pictures.name_of('default')}"
            ax.annotate(label, (0, ours["rmse"].mean()), fontsize=8, va="bottom")
        ax.set_xticks(range(len(names)), names, rotation=30, ha="right")
        pictures.finish(ax, f"downstream coefficients, start {start:g}", "", "RMSE")
    _draw_windows(axes[1, 0], published, starts)
    ax = axes[1, 1]
    for start, shade in zip(starts, ("#0072B2", "#D55E00"), strict=False):
        names = list(published["estimate"].unique())
        parts = np.array([bias_and_spread(published, start, name) for name in names])
        ax.plot(names, parts[:, 0], "o-", color=shade, label=f"bias, start {start:g}")
        ax.plot(names, parts[:, 1], "s--", color=shade, label=f"spread, start {start:g}")
    ax.tick_params(axis="x", rotation=30)
    pictures.finish(ax, "means of coefficients, over repeats", "", "root mean square")
    ax.legend(fontsize=8)
    return figure


def _draw_windows(ax: Axes, published: pd.DataFrame, starts: Sequence[float]) -> None:
    rules = ("slope", "rhat", "auto")
    measures = {"passed": "pass", "passed_drifting": "pass, but drift", "window": "window / run"}
    width = 0.8 / (len(rules) * len(starts))
    colours = ("#D55E00", "#CC79A7", "#0072B2")
    for i, start in enumerate(starts):
        for j, rule in enumerate(rules):
            runs = published[(published["init_scale"] == start) & (published["estimate"] == rule)]
            places = np.arange(len(measures)) + (i * len(rules) + j) * width
            heights = [runs[name].mean() for name in measures]
            shade, label = 1.0 if i == 0 else 0.5, f"{rule}, start {start:g}"
            ax.bar(places, heights, width, label=label, color=colours[j], alpha=shade)
    ax.set_xticks(np.arange(len(measures)) + 0.35, list(measures.values()))
    pictures.finish(ax, "windows of the coefficients", "", "share")
    ax.legend(fontsize=8, ncols=2)


def draw_natural(frame: pd.DataFrame) -> Figure:
    """Traces by the natural variants' clip norm, and of the trials."""
    frame = _first_epsilon(frame)
    last = _last(frame)
    if last.empty:
        return draw_epochs(frame)
    names = ("natural", "aligned_natural")
    rate = last.loc[last["variant"] == "vanilla", "learning_rate"].iloc[0]
    plain = (last["init_scale"] == 1.0) & (last["learning_rate"] == rate)
    natural = last[last["variant"].isin(names)]
    norms = sorted(natural.loc[plain, "clip_norm"].unique(), reverse=True)
    figure, axes = pictures.panels(2, len(norms) + 1)
    for row, (column, label) in enumerate(_PARTS.items()):
        for place, norm in enumerate(norms):
            ax = axes[row, place]
            for variant in ("vanilla", "aligned"):
                _curves(ax, last[plain & (last["variant"] == variant)], column, variant)
            for variant in names:
                chosen = plain & (last["variant"] == variant) & (last["clip_norm"] == norm)
                _curves(ax, last[chosen], column, variant)
            pictures.finish(ax, f"{label}, natural C = {norm:g}", "step", label)
        _draw_trials(axes[row, -1], last, natural[~plain[natural.index]], column)
        pictures.finish(axes[row, -1], f"{label}, aligned natural, trials", "step", label)
    _all_labels(figure, list(axes.flat), columns=3)
    return figure


def _draw_trials(ax: Axes, last: pd.DataFrame, trials: pd.DataFrame, column: str) -> None:
    rate = last.loc[last["variant"] == "vanilla", "learning_rate"].iloc[0]
    for start, style in {1.0: "-", 0.1: ":"}.items():
        usual = (last["variant"] == "aligned") & (last["learning_rate"] == rate)
        runs = last[usual & (last["init_scale"] == start)]
        label = "aligned" if start == 1 else f"aligned, start {start:g}"
        _curves(ax, runs, column, "aligned", linestyle=style, label=label)
    settings = trials.groupby(["clip_norm", "init_scale", "learning_rate"], sort=False)
    greens = ("#009E73", "#E69F00", "#56B4E9", "#CC79A7", "#777777", "#D55E00")
    for colour, ((norm, start, own_rate), runs) in zip(greens, settings, strict=False):
        label = f"trial: C = {norm:g}, start {start:g}, rate {own_rate:g}"
        _curves(ax, runs, column, "aligned_natural", color=colour, label=label, linestyle="--")
