"""The paper's logistic regression on Adult: errors by variant, and the noise seen in traces."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from scipy import special

from dpvim.experiments import adult, pictures
from dpvim.experiments.experiment import (
    AS_PUBLISHED,
    DEFAULTS_REVISION,
    RECOMMENDED,
    Cell,
    CellResult,
    Experiment,
    Scope,
    Verdict,
    mean_and_error,
)
from dpvim.experiments.optimum import MeanField
from dpvim.experiments.running import fits
from dpvim.experiments.verdicts import Comparison, Number, judged
from dpvim.posterior.from_trace import posterior_from_trace
from dpvim.posterior.metrics import l2_error
from dpvim.result import Fit
from dpvim.types import Relation

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

EPSILONS = (1.0, 2.0, 4.0, 10.0)
NUM_STEPS, QUICK_STEPS = 400_000, 20_000
SAMPLING_PROB = 0.01
REPEATS, NOISE_REPEATS = 20, 50
_PREDICTIVE_DRAWS = 200
_ERRORS = ("means", "stds", "means_posterior", "stds_posterior", "accuracy", "log_likelihood")


def _published(scope: Scope, variants: Sequence[str], seeds: range) -> list[Cell]:
    epsilons = scope.epsilons or ((1.0, 10.0) if scope.quick else EPSILONS)
    steps = QUICK_STEPS if scope.quick else NUM_STEPS
    # Seeds in the outer loop: what is interrupted has some repeats of everything.
    return [
        {
            "way": AS_PUBLISHED,
            "variant": variant,
            "epsilon": epsilon,
            "relation": Relation.REPLACE_ONE.value,
            "clip_norm": adult.CLIP_NORMS[variant],
            "num_steps": steps,
            "seed": seed,
        }
        for first in range(0, len(seeds), _MOST_TOGETHER)
        for variant in variants
        for epsilon in epsilons
        for seed in seeds[first : first + _MOST_TOGETHER]
    ]


_MOST_TOGETHER = 4


def _recommended(scope: Scope, seeds: range) -> list[Cell]:
    epsilons = scope.epsilons or ((1.0, 10.0) if scope.quick else EPSILONS)
    return [
        {
            "way": RECOMMENDED,
            "variant": "default",
            "defaults": DEFAULTS_REVISION,
            "epsilon": epsilon,
            "relation": relation.value,
            "seed": seed,
        }
        for relation in (Relation.REPLACE_ONE, Relation.ZERO_OUT)
        for epsilon in epsilons
        for seed in seeds
    ]


def _cells(scope: Scope) -> list[Cell]:
    found: list[Cell] = []
    seeds = scope.seeds(quick=2, full=REPEATS)
    if AS_PUBLISHED in scope.ways:
        found += _published(scope, list(adult.CLIP_NORMS), seeds)
    if RECOMMENDED in scope.ways:
        found += _recommended(scope, scope.seeds(quick=1, full=REPEATS))
    return found


def _noise_cells(scope: Scope) -> list[Cell]:
    return _published(scope, ["aligned"], scope.seeds(quick=8, full=NOISE_REPEATS))


@cache
def _references() -> tuple[MeanField, MeanField]:
    """Without privacy: the best mean-field Gaussian, and the posterior (by Laplace)."""
    data = adult.loaded()
    mode = adult.laplace(data)
    stds = np.sqrt(np.diag(np.linalg.inv(mode.precision)))
    return adult.optimum(), MeanField(mode.mean, stds)


def _run(cells: Sequence[Cell]) -> list[CellResult]:
    first, data = cells[0], adult.loaded()
    options: dict[str, Any] = {"relation": first["relation"], "delta": 1 / len(data.X)}
    if first["way"] == AS_PUBLISHED:
        options |= {
            "variant": first["variant"],
            "clip_norm": first["clip_norm"],
            "num_steps": first["num_steps"],
            "sampling_prob": SAMPLING_PROB,
            "init_scale": 1.0,
            "probe_width": 1.0,
        }
    each = [{"epsilon": cell["epsilon"], "seed": cell["seed"]} for cell in cells]
    found = fits(adult.model, data.X, data.y, each=each, **options)
    return [_measure(cell, fit) for cell, fit in zip(cells, found, strict=True)]


def _measure(cell: Cell, fit: Fit) -> CellResult:
    if cell["way"] == RECOMMENDED:
        posterior = fit.posterior
        steps = {"taken": fit.plan.num_steps, "doubts": len(posterior.doubts)}
        draws = posterior.latent_dist.draw(jax.random.key(0), _PREDICTIVE_DRAWS)
        return CellResult([_errors("posterior", posterior.loc, posterior.scale, draws) | steps])
    rows = []
    for method in ("last", "trace"):
        found = fit.posterior_from(method, noise_aware=None, window="slope")
        draws = _independent_draws(found.loc, found.scale)
        errors = _errors(method, found.loc, found.scale, draws)
        rows.append(errors | {"taken": cell["num_steps"]})
    if cell["variant"] != "aligned":
        return CellResult(rows)
    return CellResult(rows, _seen_in_trace(fit))


def _independent_draws(loc: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return loc + scale * np.random.default_rng(0).normal(size=(_PREDICTIVE_DRAWS, len(loc)))


def _errors(estimate: str, loc: np.ndarray, scale: np.ndarray, draws: np.ndarray) -> dict[str, Any]:
    """Distances from both references, and predictions of the test part."""
    mean_field, posterior = _references()
    data = adult.loaded()
    fitted = special.expit(data.X_test @ draws.T).mean(axis=1)
    likely = np.where(data.y_test == 1, fitted, 1 - fitted)
    return {
        "estimate": estimate,
        "means": l2_error(loc, mean_field.loc),
        "stds": l2_error(scale, mean_field.scale),
        "means_posterior": l2_error(loc, posterior.loc),
        "stds_posterior": l2_error(scale, posterior.scale),
        "accuracy": adult.accuracy(data, loc),
        "log_likelihood": float(np.log(np.clip(likely, 1e-12, 1)).mean()),
    }


def _seen_in_trace(fit: Fit) -> dict[str, Any]:
    """Standard deviations of the converged part of the trace, and the last iterate."""
    found = posterior_from_trace(
        fit.trace, fit.family, estimate="average", noise_aware="iterate", window="slope"
    )
    return {
        "last": fit.trace.loc[-1],
        "trace_std": found.dp_scale,
        "converged": found.windows.converged.astype(int),
    }


# -- Fig. 4a --------------------------------------------------------------------------------------

_BY = ["way", "variant", "relation", "estimate", "epsilon"]


def _summarise(frame: pd.DataFrame) -> pd.DataFrame:
    return mean_and_error(frame, [*_BY, "taken"], [*_ERRORS, "seconds"])


def _draw(frame: pd.DataFrame) -> Figure:
    table = _summarise(frame)
    figure, axes = pictures.panels(1, 4, width=3.6)
    shown = {
        "means": "error of means (l2)",
        "stds": "error of stds (l2)",
        "log_likelihood": "test log-likelihood",
        "accuracy": "test accuracy",
    }
    best = _references()[0]
    without = _errors("", best.loc, best.scale, _independent_draws(best.loc, best.scale))
    for ax, (column, title) in zip(axes[0], shown.items(), strict=True):
        for variant in adult.CLIP_NORMS:
            part = table[(table.variant == variant) & (table.estimate == "last")]
            pictures.line(ax, part, "epsilon", column, variant)
        for relation, dashes in ((Relation.REPLACE_ONE, "-"), (Relation.ZERO_OUT, ":")):
            part = table[(table.way == RECOMMENDED) & (table.relation == relation.value)]
            # Each is compared with what its own family would be without privacy.
            own = f"{column}_posterior" if column in ("means", "stds") else column
            label = f"dpvim's defaults, {relation.value.replace('_', ' ')}"
            pictures.line(ax, part, "epsilon", own, "default", label=label, linestyle=dashes)
        if column in ("accuracy", "log_likelihood"):
            ax.axhline(without[column], color=pictures.GREY, linestyle="--", linewidth=1)
        pictures.finish(ax, title, "epsilon", "", log="x")
        pictures.ticks(ax, sorted(table.epsilon.unique()))
    pictures.legend(figure, axes[0, 0])
    return figure


def _judge(frame: pd.DataFrame) -> list[Verdict]:
    last = frame[frame.estimate == "last"]
    verdicts = []
    if len(last):
        verdicts = [
            _best_variant(last),
            _worse_than(last, "vanilla", "aligned", "stds"),
            _worse_than(last, "natural", "aligned", "means"),
        ]
    if set(frame.way) == {AS_PUBLISHED, RECOMMENDED}:
        verdicts += [_defaults_win(frame, column) for column in ("means", "stds")]
    return verdicts


def _best_variant(last: pd.DataFrame) -> Verdict:
    """Judge if aligned natural is closest to the fit without privacy, means and stds together."""
    last = last.assign(both=np.hypot(last.means, last.stds))
    passed, told = [], []
    for epsilon, group in last.groupby("epsilon"):
        of = dict(list(group.groupby("variant")))
        best = of.pop("aligned_natural")
        passed.append(all(Comparison.of(best, other, "both").is_clear for other in of.values()))
        errors = [("aligned natural", best), *((pictures.name_of(v), of[v]) for v in of)]
        each = ", ".join(
            f"{name} {Number.of(runs.means)} / {Number.of(runs.stds)}" for name, runs in errors
        )
        told.append(f"epsilon {epsilon:g}: {each}")
    return Verdict(
        "The aligned natural variant is closest to the non-private parameters.",
        f"Means / stds, {'; '.join(told)} {_repeats(last)}",
        judged(passed),
    )


def _worse_than(last: pd.DataFrame, worse: str, better: str, column: str) -> Verdict:
    passed, told = [], []
    for epsilon, group in last.groupby("epsilon"):
        low, high = (group[group.variant == variant] for variant in (better, worse))
        found = Comparison.of(low, high, column)
        passed.append(found.is_clear)
        told.append(f"epsilon {epsilon:g}: {found.larger} against {found.smaller}")
    return Verdict(
        f"The {pictures.name_of(worse)} variant learns {column} worse than the "
        f"{pictures.name_of(better)} one.",
        f"{'; '.join(told)} {_repeats(last)}",
        judged(passed),
    )


def _defaults_win(frame: pd.DataFrame, column: str) -> Verdict:
    """Judge if the defaults beat the best published variant, each against its own family."""
    ours = frame[(frame.way == RECOMMENDED) & (frame.relation == Relation.REPLACE_ONE.value)]
    ours = ours.assign(**{column: ours[f"{column}_posterior"]})
    published = frame[frame.way == AS_PUBLISHED]
    passed, told = [], []
    for epsilon, mine in ours.groupby("epsilon"):
        others = published[published.epsilon == epsilon].groupby(["variant", "estimate"])
        name = others[column].mean().idxmin()
        best = others.get_group(name)
        found = Comparison.of(mine, best, column)
        is_short = 10 * mine.taken.max() <= best.taken.max()
        passed.append(found.is_clear and is_short)
        told.append(
            f"epsilon {epsilon:g}: {found.smaller} in {mine.taken.max():,.0f} steps against "
            f"{found.larger} ({pictures.name_of(name[0])}, {name[1]}) in {best.taken.max():,.0f}"
        )
    doubted = f"{(ours.doubts > 0).sum()} of {len(ours)} fits with defaults are doubted"
    return Verdict(
        f"(Ours) dpvim's defaults have a smaller error of {column} than any published variant, at "
        "the same epsilon and relation and a tenth of the steps.",
        f"{'; '.join(told)}; {doubted} {_repeats(ours)}",
        judged(passed),
    )


def _repeats(frame: pd.DataFrame) -> str:
    return f"({frame.seed.nunique()} repeats)."


ADULT = Experiment(
    name="adult",
    title="Logistic regression on Adult, all variants",
    paper="Fig. 4a, appendix on hyper-parameters",
    repeats=REPEATS,
    cells=_cells,
    run=_run,
    summarise=_summarise,
    draw=_draw,
    judge=_judge,
    together=lambda cell: (cell["way"], cell["variant"], cell["relation"]),
    most_together=_MOST_TOGETHER,
    takes=frozenset({"ways", "epsilons"}),
)


# -- Fig. 4b --------------------------------------------------------------------------------------


def _noise_summary(frame: pd.DataFrame) -> pd.DataFrame:
    """Squared errors of stds seen in traces against those of last iterates over repeats."""
    import pandas as pd

    rows = []
    for epsilon, group in frame[frame.estimate == "last"].groupby("epsilon"):
        last = np.stack(list(group["last"]))
        seen = np.stack(list(group["trace_std"]))
        converged = np.stack(list(group["converged"])).astype(bool)
        among_repeats = last.std(axis=0, ddof=1)
        errors = np.square(seen - among_repeats)
        by_repeat = np.nanmean(np.where(converged, errors, np.nan), axis=1)
        nothing = np.array([np.square(among_repeats[c]).mean() for c in converged if c.any()])
        rows.append(
            {
                "epsilon": epsilon,
                "mse": np.nanmean(by_repeat),
                "mse_sd": np.nanstd(by_repeat, ddof=1),
                "baseline": nothing.mean(),
                "ratio_of_stds": np.median((seen / among_repeats)[converged]),
                "converged": converged.mean(),
                # The mean squared std of last iterates, estimated from so many repeats, is itself
                # uncertain: a squared error that no estimate could be below.
                "floor": nothing.mean() / (2 * (len(last) - 1)),
                "repeats": len(last),
            }
        )
    return pd.DataFrame(rows)


def _draw_noise(frame: pd.DataFrame) -> Figure:
    table = _noise_summary(frame)
    figure, axes = pictures.panels(1, 2)
    ax = axes[0, 0]
    errors = table.rename(columns={"mse_sd": "mse_se"})
    pictures.line(ax, errors, "epsilon", "mse", "aligned", label="from the trace")
    look: dict[str, Any] = {"color": pictures.GREY}
    ax.plot(table.epsilon, table.baseline, "--", label="not estimating it", **look)
    ax.plot(table.epsilon, table.floor, ":", label="error of the repeats' own std", **look)
    pictures.finish(
        ax, "std of the DP noise in the means", "epsilon", "mean squared error", log="xy"
    )
    pictures.ticks(ax, table.epsilon)
    ax.legend(frameon=False, fontsize=8)
    ax = axes[0, 1]
    pictures.line(ax, table, "epsilon", "ratio_of_stds", "aligned")
    ax.axhline(1.0, color=pictures.GREY, linestyle="--", linewidth=1)
    pictures.finish(ax, "std in the trace over std among repeats", "epsilon", "median", log="x")
    pictures.ticks(ax, table.epsilon)
    return figure


def _judge_noise(frame: pd.DataFrame) -> list[Verdict]:
    table = _noise_summary(frame)
    told = "; ".join(
        f"epsilon {row.epsilon:g}: mean squared error {row.mse:.2g}, baseline {row.baseline:.2g}, "
        f"std {row.ratio_of_stds:.2f} times that of the repeats, {row.converged:.0%} converged"
        for row in table.itertuples()
    )
    repeats = f" ({int(table.repeats.min())} repeats)"
    return [
        Verdict(
            "The noise seen in converged traces is closer to that of last iterates over repeats "
            "than not estimating it.",
            told + repeats,
            judged((table.mse < table.baseline).tolist()),
        ),
        # Close: standard deviations within a quarter of each other.
        Verdict(
            "The std inferred from the traces is close to that over repeats.",
            told + repeats,
            judged(table.ratio_of_stds.between(0.75, 1.25).tolist()),
        ),
    ]


ADULT_NOISE = Experiment(
    name="adult-noise",
    title="DP noise inferred from converged traces",
    paper="Fig. 4b",
    repeats=NOISE_REPEATS,
    cells=_noise_cells,
    run=_run,
    summarise=_noise_summary,
    draw=_draw_noise,
    judge=_judge_noise,
    together=lambda cell: (cell["way"], cell["variant"], cell["relation"]),
    most_together=_MOST_TOGETHER,
    store="adult",
    takes=frozenset({"epsilons"}),
)
