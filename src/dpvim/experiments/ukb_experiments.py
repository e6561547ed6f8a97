"""The paper's four experiments with its generative model; see `dpvim.experiments.ukb`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dpvim.experiments import ukb, ukb_pictures, ukb_verdicts
from dpvim.experiments.experiment import (
    AS_PUBLISHED,
    DEFAULTS_REVISION,
    RECOMMENDED,
    Cell,
    Experiment,
    Scope,
    mean_and_error,
)
from dpvim.synthesis.fitting import DEFAULT_CLIP_NORM, DEFAULT_LEARNING_RATE, DEFAULT_STEPS

if TYPE_CHECKING:
    import pandas as pd

STORE = "ukb"
REPEATS = 10
SAMPLING_PROB = 0.01
LEARNING_RATE = 1e-3
EPOCHS, AVERAGED_EPOCHS = 1000, 4000
# Steps of an epoch; `quick` takes fewer and larger ones.
_STEPS, _QUICK_STEPS, _QUICK_RATE = 100, 8, 2e-3
# Appendix on hyper-parameters.
CLIP_NORMS = {
    "vanilla": 2.0,
    "aligned": 2.0,
    "preconditioned": 4.0,
    "natural": 0.1,
    "aligned_natural": 0.1,
}
_PAPERS_THREE = ("vanilla", "aligned", "preconditioned")
INIT_SCALES, QUICK_INIT_SCALES = (0.01, 0.03, 0.1, 0.3, 1.0), (0.03, 1.0)
EPOCHS_GRID = (200, 400, 600, 800, 1000, 2000, 4000, 8000)
QUICK_EPOCHS_GRID = (400, 1000)
AVERAGED_SCALES = (1.0, 0.1)
DATASETS, QUICK_DATASETS = 100, 5
VANILLA_CLIP_NORMS, QUICK_CLIP_NORMS = (0.5, 1.0, 2.0, 4.0, 8.0), (1.0, 4.0)
NATURAL_CLIP_NORMS, QUICK_NATURAL_CLIP_NORMS = (0.1, 0.02, 0.01), (0.1, 0.02)
# Larger steps; and a start about as wide as the optimum, where one clip norm suits the whole run:
# natural gradients are proportional to the variances.
NATURAL_TRIALS: tuple[dict[str, Any], ...] = (
    {"clip_norm": 0.1, "learning_rate": 1e-2},
    {"clip_norm": 0.02, "learning_rate": 1e-2},
    {"clip_norm": 0.02, "init_scale": 0.1},
    {"clip_norm": 0.01, "init_scale": 0.1},
    {"clip_norm": 0.005, "init_scale": 0.1},
    {"clip_norm": 0.01, "init_scale": 0.1, "learning_rate": 3e-3},
)
_MOST_TOGETHER = 2
_ERRORS = ("means", "stds", "means_pooled", "stds_pooled", "means_rmse", "stds_log")


# -- cells --------------------------------------------------------------------------------------


def _settings_of(scope: Scope) -> Iterator[dict[str, Any]]:
    """Settings that all cells share: the table and the budget."""
    table = ukb.table_settings(scope.table, scope.schema)
    for epsilon in scope.epsilons or (1.0,):
        yield {**table, "epsilon": epsilon}


def _published(
    scope: Scope, variant: str, *, epochs: int = EPOCHS, **more: Any
) -> list[dict[str, Any]]:
    """The paper's settings, but for what is given."""
    own = {
        "way": AS_PUBLISHED,
        "variant": variant,
        "init_scale": 1.0,
        "clip_norm": CLIP_NORMS[variant],
        "learning_rate": _QUICK_RATE if scope.quick else LEARNING_RATE,
        "sampling_prob": SAMPLING_PROB,
        "num_steps": epochs * (_QUICK_STEPS if scope.quick else _STEPS),
    }
    return [{**shared, **own, **more} for shared in _settings_of(scope)]


def _recommended(scope: Scope, **more: Any) -> list[dict[str, Any]]:
    """The settings of `dpvim.synthesis.fitting.fit_twin`."""
    own = {
        "way": RECOMMENDED,
        "variant": "default",
        "clip_norm": DEFAULT_CLIP_NORM,
        "learning_rate": DEFAULT_LEARNING_RATE,
        "num_steps": DEFAULT_STEPS,
        "defaults": DEFAULTS_REVISION,
    }
    return [{**shared, **own, **more} for shared in _settings_of(scope)]


def _repeated(scope: Scope, settings: Sequence[Mapping[str, Any]], *, quick: int = 2) -> list[Cell]:
    """Seeds in the outer loop, some at a time: what is interrupted has repeats of everything."""
    seeds = scope.seeds(quick=quick, full=REPEATS)
    wanted = [setting for setting in settings if setting["way"] in scope.ways]
    return [
        {**setting, "seed": seed}
        for first in range(0, len(seeds), _MOST_TOGETHER)
        for setting in wanted
        for seed in seeds[first : first + _MOST_TOGETHER]
    ]


def _init_cells(scope: Scope) -> list[Cell]:
    scales = QUICK_INIT_SCALES if scope.quick else INIT_SCALES
    settings = [
        setting
        for variant in _PAPERS_THREE
        for scale in scales
        for setting in _published(scope, variant, init_scale=scale)
    ]
    return _repeated(scope, [*settings, *_recommended(scope)])


def _epochs_cells(scope: Scope) -> list[Cell]:
    grid = QUICK_EPOCHS_GRID if scope.quick else EPOCHS_GRID
    norms = QUICK_CLIP_NORMS if scope.quick else VANILLA_CLIP_NORMS
    settings = [
        setting
        for epochs in grid
        for variant in (_PAPERS_THREE[:2] if scope.quick else _PAPERS_THREE)
        for setting in _published(scope, variant, epochs=epochs)
    ]
    settings += [
        setting
        for norm in norms
        if norm != CLIP_NORMS["vanilla"]
        for setting in _published(scope, "vanilla", clip_norm=norm)
    ]
    return _repeated(scope, [*settings, *_recommended(scope)])


def _average_cells(scope: Scope) -> list[Cell]:
    datasets = QUICK_DATASETS if scope.quick else DATASETS
    settings = [
        setting
        for scale in AVERAGED_SCALES
        for setting in _published(
            scope, "aligned", epochs=AVERAGED_EPOCHS, init_scale=scale, datasets=datasets
        )
    ]
    return _repeated(scope, [*settings, *_recommended(scope, datasets=datasets)])


def _natural_cells(scope: Scope) -> list[Cell]:
    norms = QUICK_NATURAL_CLIP_NORMS if scope.quick else NATURAL_CLIP_NORMS
    trials = NATURAL_TRIALS[2:3] if scope.quick else NATURAL_TRIALS
    settings = [
        setting for variant in ("vanilla", "aligned") for setting in _published(scope, variant)
    ]
    settings += [
        setting
        for norm in norms
        for variant in ("natural", "aligned_natural")
        for setting in _published(scope, variant, clip_norm=norm)
    ]
    for trial in trials:
        settings += _published(scope, "aligned_natural", **trial)
        # Beside aligned with the same start and rate, which make most of the difference.
        shared = {name: value for name, value in trial.items() if name != "clip_norm"}
        rivals = _published(scope, "aligned", **shared)
        settings += [rival for rival in rivals if rival not in settings]
    return _repeated(scope, [*settings, *_recommended(scope)])


# -- tables -------------------------------------------------------------------------------------

_SETTING = ("way", "variant", "epsilon", "init_scale", "clip_norm", "learning_rate", "num_steps")


def _summarise(frame: pd.DataFrame) -> pd.DataFrame:
    own = ("norm_start", "norm_end", "doubts", "not_converged")
    columns = [*_ERRORS, *(c for c in own if c in frame)]
    return _by_setting(frame, columns)


def _summarise_average(frame: pd.DataFrame) -> pd.DataFrame:
    """Also the spread of errors over repeats, which is what the paper's figure shows."""
    own = ("rmse", "coverage", "failed", "window", "passed", "passed_drifting", "worse_than_last")
    columns = [*(c for c in own if c in frame), *_ERRORS]
    found = _by_setting(frame, columns)
    by = [*(c for c in _SETTING if c in frame), "estimate"]
    spread = frame.groupby(by, sort=False, dropna=False)["rmse"].std().to_numpy()
    return found.assign(rmse_spread=spread)


def _by_setting(frame: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    by = [*(c for c in _SETTING if c in frame), "estimate"]
    return mean_and_error(frame, by, columns)


# -- experiments --------------------------------------------------------------------------------


def _experiment(**parts: Any) -> Experiment:
    return Experiment(
        repeats=REPEATS,
        run=ukb.run,
        together=ukb.together,
        most_together=_MOST_TOGETHER,
        store=STORE,
        takes=frozenset({"ways", "epsilons", "table"}),
        **{"summarise": _summarise, **parts},
    )


UKB_INIT = _experiment(
    name="ukb-init",
    title="Robustness to the initial standard deviations",
    paper="Fig. 1, section 4.2; appendix on robustness",
    cells=_init_cells,
    draw=ukb_pictures.draw_init,
    judge=ukb_verdicts.judge_init,
)
UKB_EPOCHS = _experiment(
    name="ukb-epochs",
    title="Longer runs at the same epsilon",
    paper="Fig. 2, section 4.2",
    cells=_epochs_cells,
    draw=ukb_pictures.draw_epochs,
    judge=ukb_verdicts.judge_epochs,
)
UKB_AVERAGE = _experiment(
    name="ukb-average",
    title="Averages of iterates, seen in analyses of synthetic tables",
    paper="Fig. 3, section 4.2; appendix on downstream analysis",
    cells=_average_cells,
    summarise=_summarise_average,
    draw=ukb_pictures.draw_average,
    judge=ukb_verdicts.judge_average,
)
UKB_NATURAL = _experiment(
    name="ukb-natural",
    title="Natural gradients",
    paper="appendix on natural gradients, three figures",
    cells=_natural_cells,
    draw=ukb_pictures.draw_natural,
    judge=ukb_verdicts.judge_natural,
)
