r"""Norms of the parts of a record's gradient, by variant (last figure of the appendix).

Adult's logistic regression, at the means of the best mean-field approximation without privacy, and
at the scale 0.1. A part is what the variant clips for the means, for the scales, or in all. At the
scales of that approximation the 0.975 quantile of all is how the paper chose its clip norms.

What the library clips is the likelihood's gradient; the paper's has 1/N of prior and entropy too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from dpvim._compile import single_precision
from dpvim.experiments import adult, pictures
from dpvim.experiments.experiment import (
    Cell,
    CellResult,
    Experiment,
    Scope,
    Verdict,
    mean_and_error,
)
from dpvim.experiments.verdicts import Number, judged
from dpvim.inference.families import SCALE_TRANSFORMS, Family, mean_field
from dpvim.inference.families.mean_field import MeanFieldParams
from dpvim.inference.variants import make_variant
from dpvim.privacy.norm_counts import COUNT_SHARE

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

TWO_PARTS = ("vanilla", "natural", "preconditioned")
ONE_PART = ("aligned", "aligned_natural", "whitened")
SCALE = 0.1
AT_SCALE, AT_OPTIMUM = "scale 0.1", "optimum"
REPEATS = 10
_MEANS, _SCALES, _ALL = "means", "scales", "all"
_QUANTILES = np.linspace(0.0025, 0.9975, 200)


@single_precision
def norms_of_parts(
    name: str,
    family: Family,
    params: Any,
    eta: jax.Array,
    X: np.ndarray,
    y: np.ndarray,
) -> dict[str, np.ndarray]:
    """Norms of the parts of every record's gradient, as the variant clips it.

    Args:
        name: The variant.
        family, params, eta: A mean-field approximation, and the draw.
        X, y: Records of a logistic regression.
    """
    variant = make_variant(name, family)
    latent = family.reparametrise(params, eta)
    records = jnp.asarray(X, jnp.float32)
    gradients = (jnp.asarray(y) - jax.nn.sigmoid(records @ latent))[:, None] * records
    encoded = jax.vmap(partial(variant.encode, params, eta))(gradients)
    if variant.whitens:  # without the share of the clip norm that its counts take
        encoded = encoded / math.sqrt(1 - COUNT_SHARE)
    found = {_ALL: encoded}
    if variant.num_released == family.num_params:
        found |= {_MEANS: encoded[:, : family.dim], _SCALES: encoded[:, family.dim :]}
    return {part: np.asarray(jnp.linalg.norm(rows, axis=1)) for part, rows in found.items()}


# -- the experiment ---------------------------------------------------------------------------


def _cells(scope: Scope) -> list[Cell]:
    return [
        {"place": place, "variant": variant, "seed": seed}
        for seed in scope.seeds(quick=2, full=REPEATS)
        for place in (AT_SCALE, AT_OPTIMUM)
        for variant in (*TWO_PARTS, *ONE_PART)
    ]


def _run(cells: Sequence[Cell]) -> list[CellResult]:
    return [_measure(cell) for cell in cells]


def _measure(cell: Cell) -> CellResult:
    data, optimum = adult.loaded(), adult.optimum()
    family = mean_field(data.X.shape[1])
    at_scale = np.full(family.dim, SCALE)
    scale = jnp.asarray(at_scale if cell["place"] == AT_SCALE else optimum.scale, jnp.float32)
    raw_scale = SCALE_TRANSFORMS[family.scale_transform].inverse(scale)
    params = MeanFieldParams(jnp.asarray(optimum.loc, jnp.float32), raw_scale)
    eta = jax.random.normal(jax.random.key(cell["seed"]), (family.dim,))
    norms = norms_of_parts(cell["variant"], family, params, eta, data.X, data.y)
    rows = [
        {
            "part": part,
            "median": np.median(values),
            "quantile_975": np.quantile(values, 0.975),
        }
        for part, values in norms.items()
    ]
    arrays = {f"norms_{part}": np.quantile(values, _QUANTILES) for part, values in norms.items()}
    return CellResult(rows, arrays)


_SETTING = ["place", "variant", "part"]


def _summarise(frame: pd.DataFrame) -> pd.DataFrame:
    return mean_and_error(frame, _SETTING, ["median", "quantile_975"])


_COLOURS = {_MEANS: "aligned", _SCALES: "vanilla", _ALL: "default"}


def _draw(frame: pd.DataFrame) -> Figure:
    frame = frame[frame["place"] == AT_SCALE]
    figure, axes = pictures.panels(2, 3, height=2.6)
    panels = zip(axes.flat, (*TWO_PARTS, *ONE_PART), strict=True)
    for ax, variant in panels:
        own = frame[frame["variant"] == variant]
        parts = [part for part in _COLOURS if part in set(own["part"])]
        for part in parts:
            values = np.concatenate(list(own[own["part"] == part][f"norms_{part}"]))
            values = np.log10(np.maximum(values, 1e-9))
            is_all = part == _ALL and len(parts) > 1
            ax.hist(
                values,
                bins=np.linspace(-5, 1.5, 66),
                density=True,
                color=pictures.colour_of(_COLOURS[part]),
                alpha=1.0 if is_all else 0.6,
                histtype="step" if is_all else "stepfilled",
                label={_MEANS: "$g_m$", _SCALES: "$g_s$", _ALL: "all that is clipped"}[part],
            )
        title = pictures.name_of(variant)
        pictures.finish(ax, title, "log10 of a record's norm", "density")
        ax.legend(fontsize=8, loc="upper left")
    return figure


def _ratio(frame: pd.DataFrame, variant: str, part: str, of: tuple[str, str]) -> Number:
    """The ratio of two medians, over draws."""
    here = (
        frame[frame["place"] == AT_SCALE]
        .set_index(["variant", "part", "seed"])["median"]
        .sort_index()
    )
    return Number.of(here[variant, part] / here[of])


def _is_between(found: Number, low: float, high: float) -> bool:
    return low < found.mean - found.limit and found.mean + found.limit < high


# "Much smaller" and "matching" are words of the paper; the numbers are ours.
_MUCH = 2.0


def _judge(frame: pd.DataFrame) -> list[Verdict]:
    draws = f"({frame['seed'].nunique()} draws of eta)"
    between = {v: _ratio(frame, v, _SCALES, (v, _MEANS)) for v in TWO_PARTS}
    total = _ratio(frame, "preconditioned", _ALL, ("vanilla", _ALL))
    matches = _is_between(between["preconditioned"], 1 / _MUCH, _MUCH)
    found = [
        Verdict(
            "Vanilla: gradients of the scales are much smaller than those of the means.",
            f"median norm of g_s over that of g_m: {between['vanilla']} {draws}.",
            judged([_is_between(between["vanilla"], -math.inf, 1 / _MUCH)]),
        ),
        Verdict(
            "Natural gradients reverse the problem.",
            f"median norm of g_s over that of g_m: {between['natural']} {draws}.",
            judged([_is_between(between["natural"], _MUCH, math.inf)]),
        ),
        Verdict(
            "Preconditioned gradients have parts of matching size, at the cost of a larger norm.",
            f"median norm of g_s over that of g_m: {between['preconditioned']}; of all over that "
            f"of vanilla's: {total} {draws}.",
            judged([matches, _is_between(total, 1, math.inf)]),
        ),
    ]
    return [*found, _judge_clip_norms(frame)]


def _judge_clip_norms(frame: pd.DataFrame) -> Verdict:
    own = frame[(frame["place"] == AT_OPTIMUM) & (frame["part"] == _ALL)]
    found = {v: Number.of(own.loc[own["variant"] == v, "quantile_975"]) for v in adult.CLIP_NORMS}
    several = [
        f"{pictures.name_of(v)} {number} (paper {adult.CLIP_NORMS[v]:g})"
        for v, number in found.items()
    ]
    # As the paper rounds them.
    close = [
        _is_between(found[v], 0.75 * norm, 1.25 * norm) for v, norm in adult.CLIP_NORMS.items()
    ]
    return Verdict(
        "The clip norms of the Adult experiment are 97.5 % quantiles of norms at the non-private "
        "optimum.",
        f"quantiles: {'; '.join(several)}.",
        judged(close),
    )


GRADIENTS = Experiment(
    name="gradients",
    title="Norms of the parts of a record's gradient",
    paper="Last figure of the appendix; clip norms of the appendix on hyper-parameters",
    repeats=0,  # the paper does not say
    cells=_cells,
    run=_run,
    summarise=_summarise,
    draw=_draw,
    judge=_judge,
)
