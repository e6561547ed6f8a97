"""Verdicts on the paper's claims about its generative model, each by a rule.

A difference counts where it is more than two standard errors of the differences between runs of
the same seed (any difference, if there is one repeat). A claim about several settings holds if it
does in all of them, and in part if in some. Errors are pooled proportions (sums over parameters of
distances from the optimum, over those at the start) unless MPAE is named.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpvim.experiments.experiment import AS_PUBLISHED, RECOMMENDED, Judgement, Verdict

if TYPE_CHECKING:
    import pandas as pd

_STANDARD_ERRORS = 2.0


class Number(NamedTuple):
    """A mean over repeats, its standard error, and the spread of the repeats."""

    mean: float
    error: float
    spread: float
    repeats: int

    @classmethod
    def of(cls, values: Sequence[float] | np.ndarray) -> Number:
        known = np.asarray(values, float)
        spread = float(known.std(ddof=1)) if len(known) > 1 else np.nan
        return cls(float(known.mean()), spread / np.sqrt(len(known)), spread, len(known))

    def __str__(self) -> str:
        error = f" ± {self.error:.2g}" if np.isfinite(self.error) else ""
        return f"{self.mean:.3g}{error}"

    @property
    def is_positive(self) -> bool:
        """True if it is, by more than chance."""
        return self.mean > (_STANDARD_ERRORS * self.error if np.isfinite(self.error) else 0.0)


class Comparison(NamedTuple):
    """An error of two kinds of runs, and by how much the second one is larger, seed by seed."""

    smaller: Number
    larger: Number
    difference: Number

    @classmethod
    def of(cls, smaller: pd.DataFrame, larger: pd.DataFrame, column: str) -> Comparison:
        a, b = (frame.set_index("seed")[column] for frame in (smaller, larger))
        return cls(Number.of(a), Number.of(b), Number.of((b - a).dropna()))

    def __str__(self) -> str:
        return f"{self.smaller} against {self.larger}"

    @property
    def is_clear(self) -> bool:
        return self.difference.is_positive


def share_judged(passed: Sequence[bool]) -> Judgement:
    """Holds if all do, in part if some do."""
    if passed and all(passed):
        return "holds"
    return "holds in part" if any(passed) else "does not hold"


def _repeats(frame: pd.DataFrame) -> str:
    return f"({frame['seed'].nunique()} repeats)"


def _published(frame: pd.DataFrame, **settings: object) -> pd.DataFrame:
    """Published runs with these settings; last iterates unless told."""
    found = frame[frame["way"] == AS_PUBLISHED]
    if found.empty:  # the defaults do not have all of the settings
        return found
    for name, value in {"estimate": "last", **settings}.items():
        found = found[found[name] == value]
    return found


def _first_epsilon(frame: pd.DataFrame) -> pd.DataFrame:
    return frame[frame["epsilon"] == frame["epsilon"].min()]


def _with_sums(frame: pd.DataFrame) -> pd.DataFrame:
    """With both errors in one number, by each measure."""
    return frame.assign(
        both=frame["means"] + frame["stds"],
        both_pooled=frame["means_pooled"] + frame["stds_pooled"],
        both_plain=frame["means_rmse"] + frame["stds_log"],
    )


def _defaults(frame: pd.DataFrame, rival: pd.DataFrame, what: str) -> list[Verdict]:
    """Judge if the defaults of today beat a published setting."""
    ours = frame[(frame["way"] == RECOMMENDED) & (frame["estimate"] == "average")]
    if ours.empty or rival.empty:
        return []
    errors = {"means": "means (rmse)", "stds": "stds (|log|)"}
    found = {n: Comparison.of(ours, rival, c) for n, c in _PLAIN.items()}
    steps = [int(each["num_steps"].iloc[0]) for each in (ours, rival)]
    measured = "; ".join(f"{errors[name]} {each}" for name, each in found.items())
    return [
        Verdict(
            f"(Ours) dpvim's defaults are closer to the optimum than {what}, at the same epsilon.",
            f"{measured}, with {steps[0]:,} steps against {steps[1]:,} {_repeats(ours)}.",
            share_judged([each.is_clear for each in found.values()]),
        )
    ]


_PLAIN = {"means": "means_rmse", "stds": "stds_log"}
_RIVALS = ("vanilla", "preconditioned")


# -- initial standard deviations ----------------------------------------------------------------


def judge_init(frame: pd.DataFrame) -> list[Verdict]:
    """Verdicts of ukb-init."""
    frame = _with_sums(_first_epsilon(frame))
    found = []
    if not _published(frame).empty:
        found = [
            _judge_trade_off(frame, "both", "MPAE"),
            _judge_trade_off(frame, "both_pooled", "pooled proportions"),
            *_judge_speed(frame),
            _judge_smaller_starts(frame),
            _judge_preconditioned(frame),
        ]
    aligned = _published(frame, variant="aligned", init_scale=1.0)
    return found + _defaults(frame, aligned, "aligned from standard deviations of 1")


def _judge_trade_off(frame: pd.DataFrame, column: str, measure: str) -> Verdict:
    passed, told = [], []
    for scale in sorted(_published(frame)["init_scale"].unique()):
        aligned = _published(frame, variant="aligned", init_scale=scale)
        for rival in _RIVALS:
            other = _published(frame, variant=rival, init_scale=scale)
            found = Comparison.of(aligned, other, column)
            passed.append(found.is_clear)
            told.append(f"from {scale:g}, {rival}: {found}")
    return Verdict(
        f"Aligned has the smallest error of means and stds together, from all starts ({measure}).",
        f"{'; '.join(told)} {_repeats(frame)}.",
        share_judged(passed),
    )


def _judge_speed(frame: pd.DataFrame) -> list[Verdict]:
    """By the mean of the error over the run, which is smaller where it falls sooner."""
    runs = _published(frame, init_scale=1.0)
    runs = runs.assign(
        area=[
            a.mean() + b.mean()
            for a, b in zip(runs.curve_means_pooled, runs.curve_stds_pooled, strict=True)
        ]
    )
    if runs.empty:
        return []
    aligned = runs[runs["variant"] == "aligned"]
    found = {
        rival: Comparison.of(aligned, runs[runs["variant"] == rival], "area") for rival in _RIVALS
    }
    told = [f"{rival}: {each}" for rival, each in found.items()]
    spreads = {
        variant: Number.of(runs.loc[runs["variant"] == variant, "both_pooled"]).spread
        for variant in ("aligned", *_RIVALS)
    }
    spread = ", ".join(f"{name} {value:.2g}" for name, value in spreads.items())
    less = [not spreads["aligned"] > spreads[rival] for rival in _RIVALS]
    return [
        Verdict(
            "From standard deviations of 1 aligned converges fastest, and deviates least.",
            f"Mean over the run of the errors of means + stds: {'; '.join(told)}; spread of the "
            f"final error over repeats: {spread} {_repeats(runs)}.",
            share_judged([*(each.is_clear for each in found.values()), *less]),
        )
    ]


def _judge_smaller_starts(frame: pd.DataFrame) -> Verdict:
    scales = sorted(_published(frame)["init_scale"].unique())
    low, high = (
        _published(frame, variant="vanilla", init_scale=s) for s in (scales[0], scales[-1])
    )
    stds, means = Comparison.of(high, low, "stds_pooled"), Comparison.of(low, high, "means_pooled")
    return Verdict(
        "From smaller starts it is harder for vanilla to learn stds; means get a little better.",
        f"From {scales[-1]:g} against {scales[0]:g}, error of stds {stds}; of means, from "
        f"{scales[0]:g} against {scales[-1]:g}, {means} {_repeats(frame)}.",
        share_judged([stds.is_clear, means.is_clear]),
    )


def _judge_preconditioned(frame: pd.DataFrame) -> Verdict:
    stds, means = [], []
    for scale in sorted(_published(frame)["init_scale"].unique()):
        vanilla, other = (_published(frame, variant=v, init_scale=scale) for v in _RIVALS)
        stds.append(Comparison.of(other, vanilla, "stds_pooled"))
        means.append(Comparison.of(vanilla, other, "means_pooled"))
    told = [
        f"{label} {', '.join(map(str, each))}"
        for label, each in {
            "stds (preconditioned first)": stds,
            "means (vanilla first)": means,
        }.items()
    ]
    return Verdict(
        "Preconditioned learns stds better than vanilla, and means worse.",
        f"Errors by rising start: {'; '.join(told)} {_repeats(frame)}.",
        share_judged([each.is_clear for each in (*stds, *means)]),
    )


# -- longer runs --------------------------------------------------------------------------------


def judge_epochs(frame: pd.DataFrame) -> list[Verdict]:
    """Verdicts of ukb-epochs."""
    frame = _first_epsilon(frame)
    aligned = _published(frame, variant="aligned")
    found = []
    if not aligned.empty:
        found = [*_judge_lengths(frame), _judge_clip_norm(frame)]
        errors = aligned.groupby("num_steps")[list(_PLAIN.values())].mean().sum(axis=1)
        aligned = aligned[aligned["num_steps"] == errors.idxmin()]
    return found + _defaults(frame, aligned, "aligned with its best number of steps")


def _judge_lengths(frame: pd.DataFrame) -> list[Verdict]:
    vanilla = _published(frame, variant="vanilla", clip_norm=2.0)
    aligned = _published(frame, variant="aligned")
    stds, means = {}, {}
    for steps in sorted(aligned["num_steps"].unique()):
        ours, other = (each[each["num_steps"] == steps] for each in (aligned, vanilla))
        stds[steps] = Comparison.of(ours, other, "stds_pooled")
        means[steps] = Comparison.of(ours, other, "means_pooled")
    first, last = (means[steps].difference for steps in (min(means), max(means)))
    clear = [each.is_clear for each in stds.values()]
    return [
        Verdict(
            "However long the run, vanilla learns stds worse than aligned.",
            "Errors of stds: "
            + "; ".join(f"{steps:,} steps {each}" for steps, each in stds.items())
            + f" {_repeats(frame)}.",
            share_judged(clear),
        ),
        Verdict(
            "The difference in means between vanilla and aligned vanishes in longer runs.",
            f"Error of vanilla's means less that of aligned: {first} at {min(means):,} steps, "
            f"{last} at {max(means):,} {_repeats(frame)}.",
            share_judged([first.is_positive, first.is_positive and last.mean < first.mean / 2]),
        ),
    ]


def _judge_clip_norm(frame: pd.DataFrame) -> Verdict:
    """Vanilla with the clip norm that is best for it, chosen with the optimum in hand."""
    frame = _with_sums(frame)
    vanilla = _published(frame, variant="vanilla")
    steps = vanilla.loc[vanilla["clip_norm"] != 2.0, "num_steps"].iloc[0]
    vanilla = vanilla[vanilla["num_steps"] == steps]
    aligned = _published(frame, variant="aligned", num_steps=steps)
    passed, told = [], []
    for name, column in {"stds": "stds_pooled", "means + stds": "both_pooled"}.items():
        best = vanilla.groupby("clip_norm")[column].mean().idxmin()
        found = Comparison.of(aligned, vanilla[vanilla["clip_norm"] == best], column)
        passed.append(found.is_clear)
        told.append(f"{name}: C = {best:g} is best for vanilla; aligned with C = 2 has {found}")
    return Verdict(
        "(Asked here) The disadvantage of vanilla is not one of its clip norm.",
        f"{'; '.join(told)}, after {steps:,} steps {_repeats(vanilla)}.",
        share_judged(passed),
    )


# -- averages -----------------------------------------------------------------------------------


def judge_average(frame: pd.DataFrame) -> list[Verdict]:
    """Verdicts of ukb-average."""
    frame = _first_epsilon(frame)
    found = []
    if not _published(frame).empty:
        found = [*_judge_slope(frame), _judge_rhat(frame), _judge_mechanism(frame)]
    return found + _judge_default_tables(frame)


def _estimates(frame: pd.DataFrame, scale: float, *names: str) -> list[pd.DataFrame]:
    return [_published(frame, init_scale=scale, estimate=name) for name in names]


def _judge_slope(frame: pd.DataFrame) -> list[Verdict]:
    verdicts = []
    told = {}
    for scale in (1.0, 0.1):
        slope, last = _estimates(frame, scale, "slope", "last")
        found = Comparison.of(slope, last, "rmse")
        spreads = found.smaller.spread, found.larger.spread
        told[scale] = found, spreads
    found, spreads = told[1.0]
    verdicts.append(
        Verdict(
            "Averages over windows of the slope test have a smaller, and less variable, error "
            "than the last iterate (start 1).",
            f"RMSE of the pooled coefficients {found}; standard deviation over repeats "
            f"{spreads[0]:.2g} against {spreads[1]:.2g} {_repeats(frame)}.",
            share_judged([found.is_clear, spreads[0] < spreads[1]]),
        )
    )
    found, spreads = told[0.1]
    verdicts.append(
        Verdict(
            "From standard deviations of 0.1 averaging makes the error more variable.",
            f"Standard deviation over repeats of the RMSE {spreads[0]:.2g} with the slope test, "
            f"{spreads[1]:.2g} for the last iterate; the RMSE itself {found} {_repeats(frame)}.",
            share_judged([bool(spreads[0] > spreads[1])]),
        )
    )
    return verdicts


def _judge_rhat(frame: pd.DataFrame) -> Verdict:
    passed, told = [], []
    for scale in (1.0, 0.1):
        rhat, slope = _estimates(frame, scale, "rhat", "slope")
        found = Comparison.of(rhat, slope, "rmse")
        fixed = frame[(frame["init_scale"] == scale) & frame["estimate"].str.endswith("%")]
        best = fixed.groupby("estimate")["rmse"].mean()
        told.append(
            f"start {scale:g}: {found} (best fixed window, {best.idxmin()}: {best.min():.3g})"
        )
        passed.append(found.is_clear)
    return Verdict(
        "(Asked here) Split R-hat chooses better windows than the slope.",
        f"RMSE of the pooled coefficients, {'; '.join(told)} {_repeats(frame)}.",
        share_judged(passed),
    )


def _judge_mechanism(frame: pd.DataFrame) -> Verdict:
    """The slope's bound has the parameter's units: small drifts pass, however slow the walk."""
    narrow, wide = (_estimates(frame, scale, "slope")[0] for scale in (0.1, 1.0))
    drifting = Comparison.of(wide, narrow, "passed_drifting")
    by_rhat = _estimates(frame, 0.1, "rhat")[0]
    rhat = Comparison.of(by_rhat, narrow, "passed_drifting")
    told = [
        f"from {scale:g} {parts[0]:.2g} bias and {parts[1]:.2g} spread with the slope test, "
        f"{last[0]:.2g} and {last[1]:.2g} for the last iterate"
        for scale in (1.0, 0.1)
        for parts, last in [(bias_and_spread(frame, scale, n) for n in ("slope", "last"))]
    ]
    return Verdict(
        "(Asked here) The slope test is unstable since it passes parameters that still drift, "
        "more of them from standard deviations of 0.1.",
        f"Share of coefficients that pass although the start of their window differs from its end "
        f"by two standard errors: {drifting} (start 1 against 0.1); with R-hat against the slope, "
        f"start 0.1: {rhat}. Means of coefficients, over repeats: {'; '.join(told)} "
        f"{_repeats(frame)}.",
        share_judged([drifting.is_clear, rhat.is_clear]),
    )


def bias_and_spread(frame: pd.DataFrame, scale: float, estimate: str) -> tuple[float, float]:
    """Root mean squares over coefficients of the mean error over repeats, and of its spread.

    The part of the squared mean that the spread explains is taken off.
    """
    runs = _estimates(frame, scale, estimate)[0]
    errors = np.stack(runs[f"error {estimate}"].to_list())
    spread = errors.var(axis=0, ddof=1) if len(errors) > 1 else np.zeros(errors.shape[1])
    bias = errors.mean(axis=0) ** 2 - spread / len(errors)
    return float(np.sqrt(max(0.0, bias.mean()))), float(np.sqrt(spread.mean()))


def _judge_default_tables(frame: pd.DataFrame) -> list[Verdict]:
    ours = frame[(frame["way"] == RECOMMENDED) & (frame["estimate"] == "noise-aware")]
    rival = _published(frame, init_scale=1.0, estimate="slope")
    if ours.empty or rival.empty:
        return []
    found = Comparison.of(ours, rival, "rmse")
    return [
        Verdict(
            "(Ours) Tables from dpvim's defaults give better coefficients than the paper's "
            "averages, at the same epsilon.",
            f"RMSE {found}; 95 % intervals hold {Number.of(ours['coverage'])} of the original's "
            f"coefficients against {Number.of(rival['coverage'])} {_repeats(ours)}.",
            share_judged([found.is_clear]),
        )
    ]


# -- natural gradients --------------------------------------------------------------------------


def judge_natural(frame: pd.DataFrame) -> list[Verdict]:
    """Verdicts of ukb-natural."""
    frame = _with_sums(_first_epsilon(frame))
    found = []
    if not _published(frame).empty:
        found = [_judge_slower(frame), _judge_smaller_clip(frame), _judge_trials(frame)]
    return found + _defaults(frame, _natural(frame, "aligned", 2.0), "aligned from 1")


def _natural(frame: pd.DataFrame, variant: str, clip_norm: float) -> pd.DataFrame:
    """Runs of a variant with the paper's start and learning rate, which vanilla always has."""
    rates = _published(frame, variant="vanilla")["learning_rate"]
    if rates.empty:
        return rates.to_frame()
    return _published(
        frame, variant=variant, clip_norm=clip_norm, init_scale=1.0, learning_rate=rates.iloc[0]
    )


def _judge_slower(frame: pd.DataFrame) -> Verdict:
    aligned = _natural(frame, "aligned", 2.0)
    natural, both = (_natural(frame, v, 0.1) for v in ("natural", "aligned_natural"))
    found = {
        "aligned against natural, means": Comparison.of(aligned, natural, "means_pooled"),
        "aligned against aligned natural, means": Comparison.of(aligned, both, "means_pooled"),
        "aligned against aligned natural, stds": Comparison.of(aligned, both, "stds_pooled"),
        "natural against aligned natural, stds": Comparison.of(natural, both, "stds_pooled"),
    }
    return Verdict(
        "With C = 0.1 both natural variants converge more slowly than aligned, natural in its "
        "means; aligned natural is worse than natural.",
        "Errors, "
        + "; ".join(f"{name}: {each}" for name, each in found.items())
        + f" {_repeats(aligned)}.",
        share_judged([each.is_clear for each in found.values()]),
    )


def _judge_smaller_clip(frame: pd.DataFrame) -> Verdict:
    at = {norm: _natural(frame, "aligned_natural", norm) for norm in (0.1, 0.02, 0.01)}
    helps = Comparison.of(at[0.02], at[0.1], "stds_pooled")
    told, passed = [f"C = 0.02 against 0.1: stds {helps}"], [helps.is_clear]
    if not at[0.01].empty:
        hurts = Comparison.of(at[0.02], at[0.01], "stds_pooled")
        told.append(f"C = 0.02 against 0.01: stds {hurts}")
        passed.append(hurts.is_clear)
    return Verdict(
        "C = 0.02 lets aligned natural learn the stds; C = 0.01 is too small for it.",
        f"Errors, {'; '.join(told)} {_repeats(frame)}.",
        share_judged(passed),
    )


def _judge_trials(frame: pd.DataFrame) -> Verdict:
    """The setting of aligned natural that is best beside aligned with the same start and rate."""
    runs = _published(frame, variant="aligned_natural")
    trials = []
    for setting, chosen in runs.groupby(["clip_norm", "init_scale", "learning_rate"]):
        shared = {"init_scale": setting[1], "learning_rate": setting[2]}
        rival = _published(frame, variant="aligned", **shared)
        lead = Comparison.of(chosen, rival, "both_plain").difference.mean
        trials.append((lead, setting, chosen, rival))
    _, best, chosen, aligned = max(trials, key=lambda trial: trial[0])
    found = {name: Comparison.of(chosen, aligned, column) for name, column in _PLAIN.items()}
    paper = _natural(frame, "aligned_natural", 0.1)
    told = "; ".join(f"{name} {each}" for name, each in found.items())
    norms = [
        f"{label}: {Number.of(each['norm_start'])} at the start, {Number.of(each['norm_end'])} at "
        "the end"
        for label, each in {"the paper's setting": paper, "this one": chosen}.items()
    ]
    return Verdict(
        "(Asked here) There are settings with which aligned natural converges as well as aligned.",
        f"Best are C = {best[0]:g}, start {best[1]:g}, learning rate {best[2]:g}: {told} for "
        f"aligned with this start and rate. Median norm of a record's gradient over C, "
        f"{'; '.join(norms)}: where it is far below one, noise drowns it; far above, the clip has "
        f"the say {_repeats(chosen)}.",
        share_judged([not _is_worse(each) for each in found.values()]),
    )


def _is_worse(found: Comparison) -> bool:
    difference = found.difference
    return difference._replace(mean=-difference.mean).is_positive
