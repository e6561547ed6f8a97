"""Reference values for the accountant, from two computations that share no code with it.

    python benchmarks/accounting_reference.py > tests/privacy/accounting/accounting_reference.csv

`tight` is epsilon from the integral that inverts the Laplace transform of the privacy loss,

    delta(epsilon) = 1/(2 pi i) int M(z)^T exp(-z epsilon) / (z (z + 1)) dz,   M(z) = E exp(z L),

on a line through the saddle point, with M by the trapezoidal rule. It agrees to 1e-5 with the
closed forms for one step and for full batches. `prv_low` and `prv_high` are the bounds of
prv-accountant (Gopi, Lee and Wutschitz 2021). They are left out where its transform, which is not
tilted, has rounding errors of the size of delta, and where it refuses for lack of points. The
settings fill the box of the tests evenly on logarithmic scales. Takes about ten minutes.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import itertools
import math
import sys
import warnings
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from prv_accountant import PRVAccountant
from prv_accountant.privacy_random_variables import PrivacyRandomVariable
from scipy import fft, optimize, special
from scipy.stats import qmc

from dpvim.privacy import accounting
from dpvim.types import Relation

Array = NDArray[np.float64]
ComplexArray = NDArray[np.complex128]

NUM_SETTINGS = 100
LOG10_RANGES = {"epsilon": (-2, 2), "delta": (-12, -2), "sampling_prob": (-5, 0), "steps": (0, 7)}
FACTS = ["relation", "sampling_prob", "num_steps", "noise", "delta"]
RESULTS = ["tight", "prv_low", "prv_high"]
MOST_POINTS = 3_000_000


@dataclasses.dataclass(frozen=True)
class Step:
    """P = (1 - p) N(0, 1) + p N(s, 1) against Q = (1 - r) N(0, 1) + r N(-s, 1)."""

    p: float
    r: float
    s: float

    def log_density(self, x: Array) -> Array:
        with np.errstate(divide="ignore"):
            still = np.log1p(-self.p) - x**2 / 2
            moved = np.log(self.p) - (x - self.s) ** 2 / 2
        return np.logaddexp(still, moved) - math.log(2 * math.pi) / 2

    def cdf(self, x: Array) -> Array:
        return (1 - self.p) * special.ndtr(x) + self.p * special.ndtr(x - self.s)

    def loss(self, x: Array) -> Array:
        return self._log_ratio(self.p, x) - self._log_ratio(self.r, -x)

    def _log_ratio(self, prob: float, x: Array) -> Array:
        exponent = self.s * x - self.s**2 / 2
        with np.errstate(divide="ignore"):
            far = np.logaddexp(np.log1p(-prob), np.log(prob) + exponent)
        near = np.log1p(prob * np.expm1(np.minimum(exponent, 1.0)))
        return np.where(exponent < 1, near, far) if prob < 1 else exponent

    def inverse_loss(self, loss: Array) -> Array:
        """x at which the loss is `loss`; infinite outside of the losses that occur."""
        s, q = self.s, max(self.p, self.r)
        with np.errstate(divide="ignore", invalid="ignore"):
            if self.p and self.r:
                odds = (1 - q) / q * np.exp(s**2 / 2)
                return (loss / 2 + np.arcsinh(odds * np.sinh(loss / 2))) / s
            sign = 1 if self.p else -1
            inner = np.log1p(np.maximum(np.expm1(sign * loss) / q, -1.0))
            return sign * (inner / s + s / 2)

    def on_even_points(self, tilt: float, dx: float) -> tuple[Array, Array]:
        """Losses and logarithms of masses, up to where exp(tilt * L) has its mass."""
        x = np.arange(-14, 14 + self.s * (1 + min(tilt, 1e3)), dx)
        return self.loss(x), self.log_density(x) + math.log(dx)


def steps_of(sampling_prob: float, noise: float, relation: Relation) -> list[Step]:
    sides = [(1, 1)] if relation is Relation.REPLACE_ONE else [(1, 0), (0, 1)]
    return [Step(sampling_prob * p, sampling_prob * r, 1 / noise) for p, r in sides]


def saddle_point(step: Step, num_steps: int, epsilon: float) -> tuple[float, float]:
    """The tilt at which E exp(tilt * L) bounds delta(epsilon) best, and the log of that bound."""

    def log_bound(log_tilt: float) -> float:
        tilt = math.exp(log_tilt)
        loss, log_mass = step.on_even_points(tilt, min(0.01, 0.2 / step.s))
        log_mgf = float(special.logsumexp(log_mass + tilt * loss))
        largest = tilt * log_tilt - (1 + tilt) * math.log1p(tilt)
        return num_steps * log_mgf - tilt * epsilon + largest

    best = optimize.minimize_scalar(log_bound, bounds=(-9, 15), method="bounded")
    return math.exp(best.x), float(best.fun)


class Inversion:
    """delta(epsilon) for epsilon near a guess, by integration on a line through the saddle."""

    def __init__(self, step: Step, num_steps: int, epsilon: float) -> None:
        tilt, _ = saddle_point(step, num_steps, epsilon)
        loss, log_mass = step.on_even_points(tilt, min(0.001, 0.1 / step.s))
        weights = special.softmax(log_mass + tilt * loss)
        mean = np.sum(weights * loss)
        spread = math.sqrt(num_steps * np.sum(weights * (loss - mean) ** 2))
        width = 24 * spread + 3 * np.ptp(loss[weights > 1e-12 / num_steps])
        # A taper smooths the loss, by little against all lengths on which delta changes.
        taper = 100 * (1 + tilt + 1 / spread + 5 / epsilon)
        count = math.ceil(6 * taper * width / (2 * math.pi))
        frequency = np.arange(count) * 2 * math.pi / width
        for last in (64 * 2**k for k in range(40)):
            u = frequency[:last]
            log_mgf = log_transform(step, tilt, u)
            size = num_steps * (log_mgf.real - log_mgf[0].real)
            if last >= count or size[-last // 4 :].max() < -25:
                break
        self.z = tilt + 1j * u
        self.log_terms = num_steps * log_mgf - np.log(self.z) - np.log(self.z + 1)
        self.log_terms += math.log(frequency[1] / math.pi) - (u / taper) ** 2 / 2
        self.log_terms[0] -= math.log(2)

    def log_delta(self, epsilon: float) -> float:
        exponent = self.log_terms - self.z * epsilon
        largest = float(exponent.real.max())
        return largest + math.log(max(np.sum(np.exp(exponent - largest)).real, 1e-300))


def log_transform(step: Step, tilt: float, u: Array) -> ComplexArray:
    """log E exp((tilt + i u) L) at evenly spaced u."""
    dx = min(0.03, 0.3 / step.s, 2 / (step.s * (tilt + u[-1])))
    loss, log_mass = step.on_even_points(tilt, dx)
    exponent = log_mass + tilt * loss
    largest = exponent.max()
    weights = np.exp(exponent - largest)
    loss, weights = loss[weights > 1e-25], weights[weights > 1e-25]
    if len(u) * len(loss) < 5e7:
        parts = np.array_split(u, 1 + len(u) * len(loss) // 10**6)
        total = np.concatenate([np.exp(1j * np.outer(part, loss)) @ weights for part in parts])
    else:
        total = nonuniform_transform(weights, loss * (u[1] - u[0]), len(u))
    return largest + np.log(total)


def nonuniform_transform(weights: Array, angle: Array, count: int) -> ComplexArray:
    """sum_j w_j exp(i k angle_j) for k < count: spread by a Gaussian, transform, divide by it."""
    reach, size = 14, fft.next_fast_len(4 * count)
    variance = math.pi * reach / (4 * count**2 * 3)
    centre = np.round(angle * size / (2 * math.pi)).astype(np.int64)
    spread = np.zeros(size)
    for offset in range(-reach, reach + 1):
        distance = angle - 2 * math.pi * (centre + offset) / size
        kernel = weights * np.exp(-(distance**2) / (4 * variance))
        spread += np.bincount((centre + offset) % size, weights=kernel, minlength=size)
    k = np.arange(count)
    factor = math.sqrt(math.pi / variance) * np.exp(k**2 * variance) / size
    return np.conj(fft.rfft(spread)[:count]) * factor


def tight_epsilon(step: Step, num_steps: int, delta: float, guess: float) -> float:
    """Epsilon if it is at least 0.9 times the guess; else 0."""
    if saddle_point(step, num_steps, 0.9 * guess)[1] < math.log(delta):
        return 0.0
    inversion = Inversion(step, num_steps, guess)

    def excess(epsilon: float) -> float:
        return inversion.log_delta(epsilon) - math.log(delta)

    if excess(0.9 * guess) < 0:
        return 0.0
    return float(optimize.brentq(excess, 0.9 * guess, 1.1 * guess, xtol=1e-9 * guess))


class Loss(PrivacyRandomVariable):
    """The privacy loss of a step, for prv-accountant."""

    def __init__(self, step: Step) -> None:
        self.step = step

    def cdf(self, t: Array) -> Array:
        return self.step.cdf(self.step.inverse_loss(np.asarray(t, dtype=np.float64)))


def prv_bounds(step: Step, num_steps: int, delta: float, guess: float) -> tuple[float, float]:
    delta_error = 1e-3 * delta
    # All losses up to where T steps together have a quarter of delta_error.
    largest = 2 * guess
    while saddle_point(step, num_steps, largest)[1] > math.log(delta_error / 4):
        largest *= 1.1
    per_point = math.sqrt(num_steps / 2 * math.log(12 / delta_error))
    eps_error = max(1e-3 * guess, 2 * largest * per_point / MOST_POINTS)
    accountant = PRVAccountant(
        [Loss(step)], eps_error, delta_error, max_self_compositions=[num_steps], eps_max=largest
    )
    low, _, high = accountant.compute_epsilon(delta, [num_steps])
    return float(low), float(high)


def settings() -> Iterator[tuple[float, float, float, int, Relation]]:
    points = qmc.Halton(len(LOG10_RANGES), scramble=False).random(4 * NUM_SETTINGS)[1:]
    for number, point in enumerate(points):
        ends = np.array(list(LOG10_RANGES.values()))
        epsilon, delta, prob, num_steps = 10 ** (ends[:, 0] + np.diff(ends)[:, 0] * point)
        # A delta above the probability of being in a batch needs no noise.
        if delta < -math.expm1(round(num_steps) * math.log1p(-prob)):
            relation = list(Relation)[number % len(Relation)]
            yield epsilon, shorter(delta), shorter(prob), round(num_steps), relation


def shorter(value: float) -> float:
    return float(f"{value:.4g}")


def main() -> None:
    warnings.simplefilter("ignore")  # prv-accountant is told the largest loss, and says so
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(FACTS + RESULTS)
    for epsilon, delta, prob, num_steps, relation in itertools.islice(settings(), NUM_SETTINGS):
        calibrated = accounting.calibrate_noise(
            epsilon=epsilon,
            delta=delta,
            relation=relation,
            sampling_prob=prob,
            num_steps=num_steps,
            num_examples=1,
            max_batch_size=1,  # all records there are: no batch is cut to size
        )
        noise = shorter(calibrated)
        steps = steps_of(prob, noise, relation)
        found = [tight_epsilon(step, num_steps, delta, epsilon) for step in steps]
        worst = int(np.argmax(found))
        bounds = (math.nan, math.nan)
        with contextlib.suppress(RuntimeError):  # it says by itself that its grid is too coarse
            if delta > 1e-13 * num_steps:
                bounds = prv_bounds(steps[worst], num_steps, delta, epsilon)
        values = [f"{value:.9g}" for value in (found[worst], *bounds)]
        table.writerow([relation.value, prob, num_steps, noise, delta, *values])
        sys.stdout.flush()


if __name__ == "__main__":
    main()
