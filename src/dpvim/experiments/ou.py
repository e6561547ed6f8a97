r"""Stationary covariance of noisy iterates, against the Lyapunov equation (appendix on OU).

Where the ELBO is quadratic with curvature A and a gradient has noise of covariance Z, iterates of
SGD with the rate alpha have a stationary covariance with

.. math:: A \Sigma + \Sigma A = \alpha Z, \qquad
          Z = Z_{batch} + Z_\eta + (\sigma C / q N)^2 I.

The paper has :math:`\alpha (B + \sigma^2 I)` on the right, B a factor of the covariance of the
batches' noise, and :math:`(B + \sigma I) dW` in its process: it is covariances that add up, so B
must be B B'. For Adam it has the same with another rate. The rate is
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
    Judgement,
    Scope,
    Verdict,
    mean_and_error,
)
from dpvim.experiments.running import fits

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


def as_printed(noise_multiplier: float) -> Float[np.ndarray, "d d"]:
    """The paper's equation for SGD to the letter: a root B of the other noise's covariance."""
    dp = noise_of_gradient(noise_multiplier) - problem().gradient_noise
    root = np.real(linalg.sqrtm(problem().gradient_noise))
    return lyapunov(rates_of("sgd", noise_multiplier), root + dp)


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


# A prediction may be off by so much: discrete time, draws at other scales, moments that move.
_TOLERANCE = 0.1


def _judge(frame: pd.DataFrame) -> list[Verdict]:
    table = _summarise(frame)
    return [
        _judge_equation(
            table[table["optimizer"] == "sgd"],
            "The stationary covariance of SGD's iterates solves the Lyapunov equation (with the "
            "covariances of all noises on its right).",
        ),
        _judge_printed(table[table["optimizer"] == "sgd"]),
        _judge_power(
            frame[frame["optimizer"] == "sgd"],
            "The covariance of the iterates grows linearly with sigma^2 (SGD).",
        ),
        _judge_equation(
            table[table["optimizer"] == "adam"],
            "Adam's rates become static, and the same analysis holds (with these rates: "
            "PA Sigma + Sigma AP = PZP).",
        ),
        _judge_power(
            frame[frame["optimizer"] == "adam"],
            "So with Adam, too, the covariance grows linearly with sigma^2.",
        ),
    ]


def _judge_equation(table: pd.DataFrame, claim: str) -> Verdict:
    worst = table.loc[(table["of_lyapunov"] - 1).abs().idxmax()]
    off = (table["of_lyapunov"] - 1).abs() > _TOLERANCE + 2 * table["of_lyapunov_se"].fillna(0)
    error = np.sqrt((table["of_lyapunov_se"].fillna(0) ** 2).sum()) / len(table)
    measured = (
        f"trace of the measured covariance over that of the equation: "
        f"{table['of_lyapunov'].mean():.3f} ± {error:.3f} on average over {len(table)} noise "
        f"multipliers, at worst {worst['of_lyapunov']:.3f} ± {worst['of_lyapunov_se']:.3f}; over "
        f"that of discrete time {table['of_discrete'].mean():.3f} on average "
        f"({int(table['repeats'].min())} repeats)."
    )
    judgement: Judgement = "holds in part" if not off.all() else "does not hold"
    return Verdict(claim, measured, judgement if off.any() else "holds")


def _judge_printed(table: pd.DataFrame) -> Verdict:
    ratios = [
        variance * DIM / float(np.trace(as_printed(noise)))
        for noise, variance in zip(table["noise_multiplier"], table["variance"], strict=True)
    ]
    close = [abs(ratio - 1) < _TOLERANCE for ratio in ratios]
    noises = list(table["noise_multiplier"])
    measured = (
        f"trace of the measured covariance over that of the equation: {ratios[0]:.3f} at noise "
        f"multiplier {noises[0]:g}, {ratios[-1]:.3f} at {noises[-1]:g}, where the DP noise is all "
        f"({int(table['repeats'].min())} repeats)."
    )
    claim = "The equation as printed, with alpha (B + sigma^2 I) and B not squared (SGD)."
    judgement: Judgement = "holds in part" if any(close) else "does not hold"
    return Verdict(claim, measured, "holds" if all(close) else judgement)


def _judge_power(frame: pd.DataFrame, claim: str) -> Verdict:
    """The power of sigma, where the DP noise is the largest: 2 if the claim is true."""
    large = frame[frame["dp_over_rest"] > _DOMINATES]
    powers = np.array([_power(group) for _, group in large.groupby("seed")])
    mean, error = powers.mean(), powers.std(ddof=1) / np.sqrt(len(powers)) if len(powers) > 1 else 0
    low, high = large["noise_multiplier"].min(), large["noise_multiplier"].max()
    measured = (
        f"the variance grows with sigma to the power {mean:.3f} ± {error:.3f} between noise "
        f"multipliers {low:g} and {high:g}, where the DP noise is the largest ({len(powers)} "
        "repeats)."
    )
    good = abs(mean - 2) < _TOLERANCE + 2 * error
    return Verdict(claim, measured, "holds" if good else "does not hold")


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
