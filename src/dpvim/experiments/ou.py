r"""Stationary covariance of noisy iterates, against the Lyapunov equation (appendix on OU).

Where the ELBO is quadratic with curvature A and a gradient has noise of covariance Z, iterates of
SGD with the rate alpha have a stationary covariance with

.. math:: A \Sigma + \Sigma A = \alpha Z, \qquad
          Z = Z_{batch} + Z_\eta + (\sigma C / q N)^2 I.

Section 3.2 of the paper adds covariances, too. Its appendix has
:math:`\alpha (B + \sigma_{DP}^2 I)` on the right, where B is the Cholesky factor of
:math:`Z_{batch}`, and :math:`(B + \sigma_{DP} I) dW` in the process: it is covariances that add up,
so B must be B B'. And :math:`\sigma_{DP}` is the noise multiplier in the rest of the paper, with
the noise :math:`\sigma_{DP} C` on a sum; here it must be :math:`\sigma C / q N`, the noise's
standard deviation in the gradient. `as_printed` has the equation with either.

For Adam the paper has the same with another rate. The rate is
:math:`P = \alpha\, diag(1 / \sqrt{E g^2})`, and it depends on the noise:

.. math:: P A \Sigma + \Sigma A P = P Z P.

Once the DP noise is the largest, the rates fall with 1/sigma, and the covariance grows with sigma
instead of sigma^2. The exact covariance in discrete time, with Adam's first moment, is that of a
linear recursion (`stationary_covariance`).

The model is a linear regression with known noise, where all of this can be worked out for the
means: their gradient is linear. Runs begin at the optimum, and nothing is clipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jaxtyping import Float
from scipy import linalg

from dpvim.experiments import pictures
from dpvim.experiments.experiment import (
    Cell,
    CellResult,
    Experiment,
    Scope,
    Verdict,
    mean_and_error,
)
from dpvim.experiments.running import fits
from dpvim.experiments.verdicts import Number, judged

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NUM_EXAMPLES, DIM = 2000, 4
SAMPLING_PROB, CLIP_NORM = 0.05, 20.0
NOISES = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
QUICK_NOISES = (0.25, 2.0, 8.0)
RATES = {"sgd": 0.02, "adam": 4e-3}
REPEATS = 10
_STEPS, _QUICK_STEPS = 100_000, 20_000
_EVERY = 10
_MOST_TOGETHER = 2
_FIRST_MOMENT = 0.9  # Adam's default
# Where the DP noise is this many times that of batches and draws, it is the one that counts.
_DOMINATES = 4.0


class Quadratic(NamedTuple):
    """A linear regression with noise one and standard normal coefficients.

    Attributes:
        X, y: Records.
        loc, scale: Optimum of the mean-field approximation.
        curvature: A, of the negative ELBO / N, by the means.
        gradient_noise: Covariance of its gradient over batches and draws of eta.
    """

    X: Float[np.ndarray, "n d"]
    y: Float[np.ndarray, " n"]
    loc: Float[np.ndarray, " d"]
    scale: Float[np.ndarray, " d"]
    curvature: Float[np.ndarray, "d d"]
    gradient_noise: Float[np.ndarray, "d d"]


@cache
def problem() -> Quadratic:
    """The regression, always the same: columns of different size, two of them correlated."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(NUM_EXAMPLES, DIM)) * [0.5, 1.0, 1.0, 1.5]
    X[:, 2] += 0.7 * X[:, 1]
    y = X @ rng.normal(size=DIM) + rng.normal(size=NUM_EXAMPLES)
    curvature = (X.T @ X + np.eye(DIM)) / NUM_EXAMPLES
    loc = np.linalg.solve(NUM_EXAMPLES * curvature, X.T @ y)
    scale = 1 / np.sqrt(NUM_EXAMPLES * np.diag(curvature))
    gradients = X * (y - X @ loc)[:, None]
    # A sum over records that are in a batch with probability q, divided by q N.
    of_batches = (1 / SAMPLING_PROB - 1) * gradients.T @ gradients / NUM_EXAMPLES**2
    of_draws = curvature @ np.diag(scale**2) @ curvature
    return Quadratic(X, y, loc, scale, curvature, of_batches + of_draws)


def model(X: Any, y: Any = None) -> None:
    """Linear regression with known noise."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, 1), obs=y)


# -- theory -----------------------------------------------------------------------------------


def noise_of_gradient(noise_multiplier: float) -> Float[np.ndarray, "d d"]:
    """Z: batches, draws of eta and DP noise."""
    dp = (noise_multiplier * CLIP_NORM / (SAMPLING_PROB * NUM_EXAMPLES)) ** 2
    return problem().gradient_noise + dp * np.eye(DIM)


def rates_of(optimizer: str, noise_multiplier: float) -> Float[np.ndarray, " d"]:
    """Rates by coordinate: of Adam divided by the root mean square of the gradient."""
    rate = RATES[optimizer]
    if optimizer == "sgd":
        return np.full(DIM, rate)
    curvature, noise = problem().curvature, noise_of_gradient(noise_multiplier)
    squares = np.diag(noise)
    for _ in range(20):  # iterates away from the optimum have gradients, too
        covariance = stationary_covariance(rate / np.sqrt(squares), noise, _FIRST_MOMENT)
        squares = np.diag(noise + curvature @ covariance @ curvature)
    return rate / np.sqrt(squares)


def lyapunov(
    rates: Float[np.ndarray, " d"], noise: Float[np.ndarray, "d d"]
) -> Float[np.ndarray, "d d"]:
    """Sigma with P A Sigma + Sigma A P = P Z P, in continuous time."""
    drift = rates[:, None] * problem().curvature
    found: np.ndarray = linalg.solve_continuous_lyapunov(drift, np.outer(rates, rates) * noise)
    return found


def stationary_covariance(
    rates: Float[np.ndarray, " d"], noise: Float[np.ndarray, "d d"], first_moment: float
) -> Float[np.ndarray, "d d"]:
    """That of x' = x - P m' with m' = b m + (1 - b)(A x + z), in discrete time."""
    keep, curvature = first_moment, problem().curvature
    identity, P = np.eye(DIM), np.diag(rates)
    step = np.block(
        [
            [identity - (1 - keep) * P @ curvature, -keep * P],
            [(1 - keep) * curvature, keep * identity],
        ]
    )
    enters = np.vstack([-(1 - keep) * P, (1 - keep) * identity])
    found: np.ndarray = linalg.solve_discrete_lyapunov(step, enters @ noise @ enters.T)
    return found[:DIM, :DIM]


def as_printed(noise_multiplier: float, *, of_gradient: bool = True) -> Float[np.ndarray, "d d"]:
    """The appendix's equation for SGD, its right side alpha (B + sigma_DP^2 I).

    B is the symmetric root of the other noise's covariance: with a triangular one the right side
    is not symmetric, and Sigma no covariance.

    Args:
        noise_multiplier: Of the run.
        of_gradient: Read sigma_DP as the standard deviation of the DP noise in the gradient; else
            as the noise multiplier, without C / (q N).
    """
    square = noise_multiplier**2 * np.eye(DIM)
    if of_gradient:
        square = noise_of_gradient(noise_multiplier) - problem().gradient_noise
    root = np.real(linalg.sqrtm(problem().gradient_noise))
    return lyapunov(rates_of("sgd", noise_multiplier), root + square)


def predictions(optimizer: str, noise_multiplier: float) -> dict[str, Float[np.ndarray, "d d"]]:
    """The covariance in continuous and in discrete time."""
    rates, noise = rates_of(optimizer, noise_multiplier), noise_of_gradient(noise_multiplier)
    first_moment = _FIRST_MOMENT if optimizer == "adam" else 0.0
    return {
        "lyapunov": lyapunov(rates, noise),
        "discrete": stationary_covariance(rates, noise, first_moment),
    }


# -- the experiment ---------------------------------------------------------------------------


def _cells(scope: Scope) -> list[Cell]:
    seeds = scope.seeds(quick=2, full=REPEATS)
    noises = QUICK_NOISES if scope.quick else NOISES
    return [
        {
            "optimizer": optimizer,
            "noise_multiplier": noise,
            "num_steps": _QUICK_STEPS if scope.quick else _STEPS,
            "seed": seed,
        }
        for first in range(0, len(seeds), _MOST_TOGETHER)
        for optimizer in RATES
        for noise in noises
        for seed in seeds[first : first + _MOST_TOGETHER]
    ]


def _together(cell: Cell) -> tuple[Any, ...]:
    return tuple(value for name, value in cell.items() if name != "seed")


_OPTIMIZERS = {"sgd": optax.sgd, "adam": optax.adam}


def _run(cells: Sequence[Cell]) -> list[CellResult]:
    first, data = cells[0], problem()
    name = first["optimizer"]
    found = fits(
        model,
        data.X,
        data.y,
        each=[{"seed": cell["seed"]} for cell in cells],
        noise_multiplier=first["noise_multiplier"],
        delta=1 / NUM_EXAMPLES,
        num_steps=first["num_steps"],
        sampling_prob=SAMPLING_PROB,
        clip_norm=CLIP_NORM,
        variant="aligned",
        optimizer=_OPTIMIZERS[name](RATES[name]),
        init_params={"w": data.loc},
        init_scale=float(data.scale.mean()),
        probe_width=1.0,
        trace_every=_EVERY,
    )
    return [_measure(cell, fit.trace.loc) for cell, fit in zip(cells, found, strict=True)]


def _measure(cell: Cell, loc: Float[np.ndarray, "snapshots d"]) -> CellResult:
    # Runs begin at the optimum, and in a tenth of the steps they have forgotten that.
    away = np.asarray(loc[len(loc) // 10 :], float) - problem().loc
    covariance = away.T @ away / len(away)
    expected = predictions(cell["optimizer"], cell["noise_multiplier"])
    dp = (cell["noise_multiplier"] * CLIP_NORM / (SAMPLING_PROB * NUM_EXAMPLES)) ** 2
    row = {
        "variance": float(np.trace(covariance) / DIM),
        **{name: float(np.trace(matrix) / DIM) for name, matrix in expected.items()},
        **{
            f"of_{name}": float(np.trace(covariance) / np.trace(matrix))
            for name, matrix in expected.items()
        },
        "dp_over_rest": float(dp * DIM / np.trace(problem().gradient_noise)),
    }
    arrays = {"covariance": covariance, "expected": expected["discrete"]}
    return CellResult([row], arrays)


_MEASURED = ["variance", "lyapunov", "discrete", "of_lyapunov", "of_discrete", "misfit"]
_SETTING = ["optimizer", "noise_multiplier", "dp_over_rest"]


def _summarise(frame: pd.DataFrame) -> pd.DataFrame:
    misfits = [
        float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
        for found, expected in zip(frame["covariance"], frame["expected"], strict=True)
    ]
    table = mean_and_error(frame.assign(misfit=misfits), _SETTING, _MEASURED)
    return table.sort_values(_SETTING, ignore_index=True)


_COLOURS = {"sgd": "aligned", "adam": "vanilla"}
_NAMES = {"sgd": "SGD", "adam": "Adam"}


def _draw(frame: pd.DataFrame) -> Figure:
    table = _summarise(frame)
    figure, axes = pictures.panels(1, 3)
    x = "noise_multiplier"
    for optimizer, variant in _COLOURS.items():
        own, name = table[table["optimizer"] == optimizer], _NAMES[optimizer]
        colour, ratios = pictures.colour_of(variant), axes[0, 1]
        axes[0, 0].plot(own[x], own["lyapunov"], color=colour, label=f"{name}, equation")
        look = {"label": f"{name}, measured", "linestyle": "none"}
        pictures.line(axes[0, 0], own, x, "variance", variant, **look)
        look = {"label": f"{name}, over Lyapunov", "linestyle": ":"}
        pictures.line(ratios, own, x, "of_lyapunov", variant, **look)
        pictures.line(ratios, own, x, "of_discrete", variant, label=f"{name}, over discrete time")
    _draw_matrices(axes[0, 2], frame)
    x = "noise multiplier"
    pictures.finish(axes[0, 0], "Variance of iterates, mean of 4", x, "variance", log="xy")
    pictures.finish(axes[0, 1], "Measured over predicted", x, "ratio of traces", log="x")
    axes[0, 1].axhline(1, color=pictures.GREY, linewidth=1)
    for ax in axes[0, :2]:
        pictures.ticks(ax, sorted(table["noise_multiplier"].unique()))
        ax.legend(fontsize=7)
    return figure


def _draw_matrices(ax: Axes, frame: pd.DataFrame) -> None:
    """Every entry of every covariance, mean over repeats."""
    upper = np.triu_indices(DIM)
    for optimizer, variant in _COLOURS.items():
        own = frame[frame["optimizer"] == optimizer]
        for _, group in own.groupby("noise_multiplier"):
            found = np.mean(list(group["covariance"]), axis=0)
            expected = group["expected"].iloc[0]
            size = np.sqrt(np.outer(np.diag(expected), np.diag(expected)))
            colour = pictures.colour_of(variant)
            ax.plot((expected / size)[upper], (found / size)[upper], ".", color=colour, alpha=0.6)
    ax.axline((0, 0), slope=1, color=pictures.GREY, linewidth=1)
    pictures.finish(ax, "Entries of covariances, in units of the stds", "discrete time", "measured")


# A prediction may be off by so much, chance included: discrete time, draws at other scales, moments
# that move.
_TOLERANCE = 0.1


def _is_close(found: Number, expected: float) -> bool:
    return abs(found.mean - expected) + found.limit < _TOLERANCE


def _judge(frame: pd.DataFrame) -> list[Verdict]:
    sgd, adam = (frame[frame["optimizer"] == name] for name in ("sgd", "adam"))
    return [
        _judge_equation(
            sgd,
            "The stationary covariance of SGD's iterates solves the Lyapunov equation (with the "
            "covariances of all noises on its right).",
        ),
        _judge_printed(sgd),
        _judge_power(sgd, "The covariance of the iterates grows linearly with sigma^2 (SGD)."),
        _judge_equation(
            adam,
            "Adam's rates become static, and the same analysis holds (with these rates: "
            "PA Sigma + Sigma AP = PZP).",
        ),
        _judge_power(adam, "So with Adam, too, the covariance grows linearly with sigma^2."),
    ]


def _by_noise(frame: pd.DataFrame, column: str) -> dict[float, Number]:
    return {noise: Number.of(own[column]) for noise, own in frame.groupby("noise_multiplier")}


def _judge_equation(frame: pd.DataFrame, claim: str) -> Verdict:
    ratios = _by_noise(frame, "of_lyapunov")
    average = Number.of(frame.groupby("seed")["of_lyapunov"].mean())
    worst = max(ratios.values(), key=lambda ratio: abs(ratio.mean - 1))
    close = [_is_close(ratio, 1) for ratio in ratios.values()]
    measured = (
        f"trace of the measured covariance over that of the equation: {average} on average over "
        f"{len(ratios)} noise multipliers, at worst {worst}, within {_TOLERANCE:.0%} by more than "
        f"chance for {sum(close)} of them; over that of discrete time "
        f"{frame['of_discrete'].mean():.3f} on average ({average.repeats} repeats)."
    )
    return Verdict(claim, measured, judged(close))


def _judge_printed(frame: pd.DataFrame) -> Verdict:
    """With the reading of sigma_DP that is kinder; by the other one the DP noise is off as well."""
    ratios, without_factor = (
        _by_noise(frame.assign(ratio=_over_printed(frame, of_gradient=reading)), "ratio")
        for reading in (True, False)
    )
    low, high = min(ratios), max(ratios)
    measured = (
        f"trace of the measured covariance over that of the equation: {ratios[low]} at noise "
        f"multiplier {low:g}, {ratios[high]} at {high:g}, where the DP noise is all; "
        f"{without_factor[low]} and {without_factor[high]} if sigma_DP is the noise multiplier, as "
        f"it is in the paper's algorithms ({ratios[low].repeats} repeats)."
    )
    claim = (
        "The equation as the appendix prints it, with alpha (B + sigma_DP^2 I) and B not squared, "
        "sigma_DP read as the noise's standard deviation in the gradient (SGD)."
    )
    return Verdict(claim, measured, judged([_is_close(ratio, 1) for ratio in ratios.values()]))


def _over_printed(frame: pd.DataFrame, *, of_gradient: bool) -> pd.Series[float]:
    noises = frame["noise_multiplier"]
    traces = {n: np.trace(as_printed(n, of_gradient=of_gradient)) for n in noises.unique()}
    return frame["variance"] * DIM / noises.map(traces)


def _judge_power(frame: pd.DataFrame, claim: str) -> Verdict:
    """The power of sigma, where the DP noise is the largest: 2 if the claim is true."""
    large = frame[frame["dp_over_rest"] > _DOMINATES]
    power = Number.of([_power(group) for _, group in large.groupby("seed")])
    low, high = large["noise_multiplier"].min(), large["noise_multiplier"].max()
    measured = (
        f"the variance grows with sigma to the power {power} between noise multipliers {low:g} and "
        f"{high:g}, where the DP noise is the largest ({power.repeats} repeats)."
    )
    return Verdict(claim, measured, judged([_is_close(power, 2)]))


def _power(group: pd.DataFrame) -> float:
    return float(np.polyfit(np.log(group["noise_multiplier"]), np.log(group["variance"]), 1)[0])


OU = Experiment(
    name="ou",
    title="Stationary covariance of noisy iterates",
    paper="Section 3.2, appendix on the Ornstein-Uhlenbeck process",
    repeats=0,  # the paper has the theory alone
    cells=_cells,
    run=_run,
    summarise=_summarise,
    draw=_draw,
    judge=_judge,
    together=_together,
    most_together=_MOST_TOGETHER,
)
