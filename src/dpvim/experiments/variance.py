r"""Variances of the scales' gradient, vanilla and aligned: Theorem 1 and its proof (appendix D).

A fixed batch of a linear regression with known noise, and draws of eta and of the DP noise. With
:math:`S = \sum_x \alpha_x g_x` the clipped sum of the latent's gradients, for each coordinate:

.. math:: Var[vanilla] = T'^2 Var[\eta S] + \sigma^2 C^2, \qquad
          Var[aligned] = T'^2 Var[\eta S] + T'^2 \sigma^2 C^2.

The clip's factors alpha depend on eta, and those of vanilla on T' too: with the same C the first
terms are not the same. They are with the same clip bias, which takes
:math:`C \sqrt{1 + T'^2 \eta^2}` for vanilla: exactly for one coordinate, and with the mean of
eta^2 about so for more. What is measured is made by the library's own gradients; the formulas are
worked out here, in double precision, from the same draws of eta.

The entropy's gradient is outside of the clip here and inside in the paper: a constant, divided by
the number of records. The prior is flat.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dpvim._compile import single_precision
from dpvim.experiments import pictures
from dpvim.experiments.experiment import (
    Cell,
    CellResult,
    Experiment,
    Scope,
    Verdict,
    mean_and_error,
)
from dpvim.experiments.verdicts import Number, judged
from dpvim.inference.families import Family, mean_field
from dpvim.inference.families.mean_field import MeanFieldParams
from dpvim.inference.gradient import Problem, make_private_gradient
from dpvim.inference.variants import Variant, make_variant
from dpvim.privacy.clipping import Likelihood
from dpvim.privacy.plan import PrivacyPlan
from dpvim.privacy.randomness import SecretStreams
from dpvim.privacy.source import BatchNoiseSource

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# T' of softplus, between 0 and 1.
SLOPES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 0.6, 0.9, 0.99, 0.999)
DIMS = (1, 10)
NOISES = (1.0, 20.0)
BATCH_SIZE = 50
REPEATS = 20
SAME_C, SAME_BIAS = "same C", "same clip bias"
_DRAWS = 4000
_ESTIMATORS = (("vanilla", SAME_C), ("aligned", SAME_C), ("vanilla", SAME_BIAS))


class Batch(NamedTuple):
    """Records, the means at which gradients are taken, and the aligned variant's clip norm."""

    x: Float[np.ndarray, "batch d"]
    y: Float[np.ndarray, " batch"]
    loc: Float[np.ndarray, " d"]
    clip_norm: float


@cache
def make_batch(dim: int) -> Batch:
    """A batch, always the same. The clip norm is the median of its gradients' norms."""
    rng = np.random.default_rng(dim)
    x = rng.normal(size=(BATCH_SIZE, dim))
    coefficients = rng.normal(size=dim)
    y = x @ coefficients + rng.normal(size=BATCH_SIZE)
    loc = coefficients + 0.5 * rng.normal(size=dim)
    norms = np.abs(y - x @ loc) * np.linalg.norm(x, axis=1)
    return Batch(x, y, loc, float(np.median(norms)))


def _log_likelihood(latent: Array, record: Any) -> Array:
    return -0.5 * (record["y"] - record["x"] @ latent) ** 2


def _with_clip_bias_of_aligned(vanilla: Variant) -> Variant:
    """Vanilla with the clip norm C |g| / |g_m|, for a scale that is the same in all coordinates.

    A clip norm that depends on the draw is a public factor on what is clipped, taken off again.
    """

    def factor(params: MeanFieldParams, eta: Array) -> Array:
        slope = jax.nn.sigmoid(params.raw_scale[0])
        return 1 / jnp.sqrt(1 + slope**2 * jnp.mean(eta**2))

    def weights(params: MeanFieldParams, eta: Array) -> Array:
        of_vanilla = vanilla.weights(params, eta)
        assert isinstance(of_vanilla, Array)
        return factor(params, eta) ** 2 * of_vanilla

    return vanilla._replace(
        weights=weights,
        encode=lambda params, eta, g: factor(params, eta) * vanilla.encode(params, eta, g),
        decode=lambda params, eta, r, free: vanilla.decode(
            params, eta, r / factor(params, eta), free
        ),
    )


@cache
def _estimator(dim: int, noise: float, name: str, rule: str) -> tuple[Any, PrivacyPlan, Variant]:
    """``(params, etas, noises) ->`` gradients of the scales for each draw, compiled."""
    batch, family = make_batch(dim), mean_field(dim)
    variant = make_variant(name, family)
    if (name, rule) == ("vanilla", SAME_BIAS):
        variant = _with_clip_bias_of_aligned(variant)
    plan = PrivacyPlan(
        num_examples=BATCH_SIZE,
        sampling_prob=1.0,
        num_steps=1,
        clip_norm=batch.clip_norm,
        noise_multiplier=noise,
    )
    likelihood = Likelihood.from_log_prob(_log_likelihood)
    problem = Problem(dim, likelihood, lambda latent: jnp.zeros(()))
    gradient = make_private_gradient(problem, family, variant, plan)
    records = {name: jnp.asarray(getattr(batch, name), jnp.float32) for name in ("x", "y")}
    everyone = jnp.zeros(0, jnp.int32)

    def one(params: MeanFieldParams, eta: Array, noise: Array) -> Array:
        release = gradient.release(params, eta, records, everyone, noise)
        found: Array = gradient.direction(params, eta, release).raw_scale
        return found

    return jax.jit(jax.vmap(one, (None, 0, 0))), plan, variant


@single_precision
def measured_variance(
    family: Family, noise: float, estimator: tuple[str, str], slope: float, seed: int
) -> tuple[float, Float[np.ndarray, "draws d"]]:
    """Mean over coordinates of the variance of the sum's scale gradient, and the draws of eta."""
    gradients, plan, variant = _estimator(family.dim, noise, *estimator)
    params = MeanFieldParams(
        jnp.asarray(make_batch(family.dim).loc, jnp.float32),
        jnp.full(family.dim, np.log(slope / (1 - slope)), jnp.float32),
    )
    source = BatchNoiseSource(
        plan, SecretStreams(seed), num_rows=BATCH_SIZE, num_released=variant.num_released
    )
    etas = jax.random.normal(jax.random.key(seed), (_DRAWS, family.dim))
    found = np.asarray(gradients(params, etas, source.draw(_DRAWS, _DRAWS)[1]), float)
    # The library's gradients are of ELBO / N, the paper's of the ELBO.
    return float(found.var(axis=0, ddof=1).mean() * BATCH_SIZE**2), np.asarray(etas, float)


def terms_of_formula(
    dim: int, estimator: tuple[str, str], slope: float, noise: float, etas: np.ndarray
) -> tuple[float, float]:
    """T'^2 Var[eta S], with the mean over coordinates, and the term of the DP noise."""
    batch = make_batch(dim)
    latents = batch.loc - np.log1p(-slope) * etas  # softplus is -log(1 - T')
    scores = batch.y - latents @ batch.x.T
    weights = np.ones_like(etas)
    clip_norms = np.full(len(etas), batch.clip_norm)
    if estimator[0] == "vanilla":
        weights = 1 + slope**2 * etas**2
    if estimator == ("vanilla", SAME_BIAS):
        clip_norms = clip_norms * np.sqrt(1 + slope**2 * np.mean(etas**2, axis=1))
    norms = np.abs(scores) * np.sqrt(weights @ (batch.x**2).T)
    sums = (np.minimum(1, clip_norms[:, None] / norms) * scores) @ batch.x
    signal = slope**2 * np.var(etas * sums, axis=0, ddof=1).mean()
    square = (noise * batch.clip_norm) ** 2
    scaling = {
        ("vanilla", SAME_C): 1.0,
        ("aligned", SAME_C): slope**2,
        ("vanilla", SAME_BIAS): 1 + slope**2,
    }
    return float(signal), float(square * scaling[estimator])


# -- the experiment -------------------------------------------------------------------------------


def _cells(scope: Scope) -> list[Cell]:
    slopes = SLOPES[::3] if scope.quick else SLOPES
    return [
        {"dim": dim, "noise_multiplier": noise, "slope": slope, "seed": seed}
        for seed in scope.seeds(quick=3, full=REPEATS)
        for dim in DIMS
        for noise in NOISES
        for slope in slopes
    ]


def _run(cells: Sequence[Cell]) -> list[CellResult]:
    return [_measure(cell) for cell in cells]


def _measure(cell: Cell) -> CellResult:
    dim, noise, slope = cell["dim"], cell["noise_multiplier"], cell["slope"]
    rows = []
    for estimator in _ESTIMATORS:
        variance, etas = measured_variance(mean_field(dim), noise, estimator, slope, cell["seed"])
        signal, perturbation = terms_of_formula(dim, estimator, slope, noise, etas)
        rows.append(
            {
                "variant": estimator[0],
                "rule": estimator[1],
                "variance": variance,
                "formula": signal + perturbation,
                "signal": signal,
                "perturbation": perturbation,
                "ratio": variance / (signal + perturbation),
                "signal_over_bound": signal / (slope * make_batch(dim).clip_norm) ** 2,
            }
        )
    return CellResult(rows)


_SETTING = ["dim", "noise_multiplier", "rule", "slope", "variant"]
_MEASURED = ["variance", "formula", "signal", "perturbation", "ratio", "signal_over_bound"]


def _summarise(frame: pd.DataFrame) -> pd.DataFrame:
    return mean_and_error(frame, _SETTING, _MEASURED).sort_values(_SETTING, ignore_index=True)


def _of_rule(table: pd.DataFrame, rule: str) -> pd.DataFrame:
    """The rows of a rule; the aligned variant is the same in both."""
    return table[(table["rule"] == rule) | (table["variant"] == "aligned")]


def _draw(frame: pd.DataFrame) -> Figure:
    table = _summarise(frame)
    columns = [(dim, rule) for dim in DIMS for rule in (SAME_C, SAME_BIAS)]
    figure, axes = pictures.panels(len(NOISES), len(columns), width=3.4, height=3.0)
    for row, noise in zip(axes, NOISES, strict=True):
        for ax, (dim, rule) in zip(row, columns, strict=True):
            here = table[(table["dim"] == dim) & (table["noise_multiplier"] == noise)]
            _draw_variances(ax, _of_rule(here, rule))
            title = f"d {dim}, noise {noise:g} C, {rule}"
            pictures.finish(ax, title, "T'", "variance of scale gradient", log="xy")
    pictures.legend(figure, axes[0, 0])
    return figure


def _draw_variances(ax: Axes, here: pd.DataFrame) -> None:
    for variant in ("vanilla", "aligned"):
        own = here[here["variant"] == variant].sort_values("slope")
        colour = pictures.colour_of(variant)
        ax.plot(own["slope"], own["formula"], color=colour, label=f"{variant}, formula")
        pictures.line(
            ax, own, "slope", "variance", variant, label=f"{variant}, measured", linestyle="none"
        )


# A formula may be off by so much, and a variance that is at most another one above it, chance
# included.
_TOLERANCE, _MARGIN = 0.05, 0.02


def _judge(frame: pd.DataFrame) -> list[Verdict]:
    return [
        _judge_formulas(frame),
        _judge_order(
            frame[frame["dim"] == 1],
            SAME_BIAS,
            "Theorem 1: with the same clip bias the variance of the aligned scale gradient is at "
            "most that of vanilla's (one coordinate, where one C for all records can do that).",
        ),
        _judge_order(
            frame[frame["dim"] > 1],
            SAME_BIAS,
            "The same for ten coordinates, where |g| / |g_m| differs from record to record, and "
            "the clip bias is the same only about.",
        ),
        _judge_order(
            frame,
            SAME_C,
            "Appendix D: with the same C the variances differ in the DP term alone, so that "
            "aligned is below vanilla iff T' is at most 1.",
        ),
        _judge_bound(frame),
    ]


def _numbers(frame: pd.DataFrame, by: Sequence[str], column: str) -> dict[Any, Number]:
    return {key: Number.of(own[column]) for key, own in frame.groupby(list(by))}


def _judge_formulas(frame: pd.DataFrame) -> Verdict:
    ratios = _numbers(frame, _SETTING, "ratio")
    close = [abs(each.mean - 1) + each.limit < _TOLERANCE for each in ratios.values()]
    (*_, slope, variant), worst = max(ratios.items(), key=lambda item: abs(item[1].mean - 1))
    measured = (
        f"measured over formula: {frame['ratio'].mean():.4f} on average over {len(ratios)} "
        f"settings; at worst {worst} ({variant}, T' = {slope:g}); within {_TOLERANCE:.0%}, by more "
        f"than chance, in {sum(close)} ({worst.repeats} repeats of {_DRAWS} draws)."
    )
    return Verdict("Appendix D: the formulas of both variances.", measured, judged(close))


def _judge_order(frame: pd.DataFrame, rule: str, claim: str) -> Verdict:
    """From the ratio of variances, aligned over vanilla, of the same seeds."""
    key = ["dim", "noise_multiplier", "slope"]
    variances = _of_rule(frame, rule).set_index([*key, "seed", "variant"])["variance"]
    of = variances.unstack("variant")
    ratios = _numbers((of["aligned"] / of["vanilla"]).rename("ratio").reset_index(), key, "ratio")
    passed = [each.mean + each.limit < 1 + _MARGIN for each in ratios.values()]
    above = [where for where, each in ratios.items() if each.mean - each.limit > 1]
    low, high = (find(ratios, key=lambda where: ratios[where].mean) for find in (min, max))
    measured = (
        f"variance of aligned over that of vanilla: {_ratio(low, ratios[low])} to "
        f"{_ratio(high, ratios[high])}; surely below {1 + _MARGIN:g} in {sum(passed)}, above 1 in "
        f"{len(above)} of {len(ratios)} settings ({ratios[low].repeats} repeats)."
    )
    if above:
        noises = sorted({noise for _, noise, _ in above})
        smallest = {noise: min(slope for _, n, slope in above if n == noise) for noise in noises}
        several = [f"T' = {slope:g} with noise {noise:g} C" for noise, slope in smallest.items()]
        measured += f" It is above 1 from {' and from '.join(several)} on."
    return Verdict(claim, measured, judged(passed))


def _ratio(where: tuple[float, float, float], found: Number) -> str:
    dim, noise, slope = where
    return f"{found} (T' = {slope:g}, d {dim:g}, noise {noise:g} C)"


def _judge_bound(frame: pd.DataFrame) -> Verdict:
    own = frame[frame["variant"] == "aligned"]
    found = _numbers(own, ["dim", "noise_multiplier", "slope"], "signal_over_bound")
    (dim, _, slope), worst = max(found.items(), key=lambda item: item[1].mean)
    claim = "Appendix D: by the clip Var[eta alpha g] is at most C^2, a share of the DP term."
    measured = (
        f"at most {worst} C^2 (d {dim:g}, T' = {slope:g}): what is clipped to C is a record, and "
        f"{BATCH_SIZE} of them are added up, for which the bound is {BATCH_SIZE**2} C^2."
    )
    return Verdict(claim, measured, judged([worst.mean + worst.limit <= 1]))


VARIANCE = Experiment(
    name="variance",
    title="Variances of scale gradients: Theorem 1",
    paper="Theorem 1, appendix D",
    repeats=0,  # the paper has the theory alone
    cells=_cells,
    run=_run,
    summarise=_summarise,
    draw=_draw,
    judge=_judge,
)
