"""Composition of many steps: Fourier transforms of exponentially tilted masses.

Delta is a tail of the composed loss, and a plain transform would drown it in rounding errors. The
tilt moves the losses around epsilon to the middle of the distribution; masses are tilted back
after the transform. All that is left out or rounded is counted on the safe side.
"""

from __future__ import annotations

import math

import numpy as np
import scipy

from dpvim.privacy.accounting.pld import (
    GridComposition,
    epsilon_from_log_mgf,
    exponential_tilt,
    increasing_root,
)

# Mass that counts as infinite loss, and mass that wraps around, as parts of what makes up delta.
TAIL_MASS = 1e-7
_WRAPPED_MASS = 1e-5
# A bound on the relative rounding error of one step's masses, losses and Fourier coefficients:
# three times the most that is seen against extended precision. T steps have T times that.
_ROUNDING = 5e-15
# Where records are rarely in a batch (q < 1e-4, T > 1e5), the tilt may bring up single losses that
# are far above epsilon and far too rare to matter, and the window widens. A window of so many
# points is tried with less of a tilt, where rounding errors allow it.
MANY_POINTS = 2**20
# exp(700) is about the largest number there is.
_MAX_EXPONENT = 700


def chernoff_window(grids: GridComposition, delta: float, epsilon: float) -> tuple[float, float]:
    """Bounds on the composed loss, outside of which there is next to nothing.

    Above there is little against delta. What else is outside comes in again at the other side, and
    is little against what makes up delta at `epsilon` under the tilt.
    """
    log_share = math.log(delta) + grids.tilt * epsilon - grids.log_mgf(grids.tilt)
    log_outside = math.log(_WRAPPED_MASS) + min(0.0, log_share)
    low = _chernoff_bound(grids, grids.tilt, log_outside, side=-1)
    high = _chernoff_bound(grids, grids.tilt, log_outside, side=1)
    log_tail = math.log(TAIL_MASS * delta)
    return low, max(high, _chernoff_bound(grids, 0.0, log_tail, side=1))


def _chernoff_bound(grids: GridComposition, tilt: float, log_outside: float, side: int) -> float:
    """A loss beyond which the composed loss has at most that mass under `tilt` (Chernoff)."""
    log_mgf = grids.log_mgf(tilt)

    def log_mass_ratio(further: float) -> float:
        other, mean = grids.tilted(tilt + side * further)
        return side * further * mean - (other - log_mgf) + log_outside

    further = increasing_root(log_mass_ratio)
    return side * (grids.log_mgf(tilt + side * further) - log_mgf - log_outside) / further


def composed_epsilon(
    grids: GridComposition, delta: float, window: tuple[float, float], *, floor: float
) -> float | None:
    """The least epsilon, from `floor` on, at which the composed loss has at most `delta`.

    None if it lies below all that can be seen: below the window, or where tilted masses mean
    nothing because their exponents are too large.
    """
    low, high = window
    tilt, width = grids.tilt, grids.width
    rounding = grids.num_steps * _ROUNDING
    budget = delta * (1 - rounding - TAIL_MASS) - grids.infinity_mass
    log_mgf = grids.log_mgf(tilt)
    if epsilon_from_log_mgf(log_mgf, tilt, budget) + rounding <= floor:
        return floor

    low = max(low, (log_mgf - _MAX_EXPONENT) / tilt)
    start = grids.origin
    first = math.floor((max(low, floor) - start) / width)
    last = math.ceil((high - start) / width)
    size = scipy.fft.next_fast_len(last - math.floor((low - start) / width) + 1, real=True)

    index = np.arange(first, last + 1)
    loss = start + width * index
    mass, error = compose(grids, size)
    untilt = np.exp(np.minimum(log_mgf - tilt * loss, _MAX_EXPONENT))
    mass = mass[index % size] * untilt
    error *= _hockey_stick_norm(tilt, width)
    # delta(loss) = E max(0, 1 - exp(loss - L)) = P(L > loss) - E [exp(loss - L), L > loss]
    decay = math.exp(-width)
    at_or_above = np.cumsum(mass[::-1])[::-1]
    discounted = scipy.signal.lfilter([1.0], [1.0, -decay], mass[::-1])[::-1]
    budgets = budget - error * untilt
    too_low = np.flatnonzero(at_or_above[1:] - decay * discounted[1:] > budgets[:-1])
    if too_low.size == 0:
        return floor if low <= floor else None
    below, above = too_low[-1], too_low[-1] + 1
    # Between points of the grid delta is linear in exp(epsilon). Where the rounding errors alone
    # exceed the budget there may be no mass, and no way back.
    excess, most = at_or_above[above] - budgets[below], discounted[above]
    step_back = math.log(excess / most) if excess < most else 0.0
    return max(floor, float(loss[above]) + step_back + rounding)


def relative_rounding_error(grids: GridComposition, delta: float, epsilon: float) -> float:
    """The size of the rounding errors at `epsilon`, roughly, as a part of delta.

    A smaller transform, in which masses lie on top of each other, has about the same errors.
    """
    _, error = compose(grids, MANY_POINTS // 4)
    exponent = grids.log_mgf(grids.tilt) - grids.tilt * epsilon - math.log(delta)
    untilt = math.exp(min(exponent, _MAX_EXPONENT))
    return error * _hockey_stick_norm(grids.tilt, grids.width) * untilt


def _hockey_stick_norm(tilt: float, width: float) -> float:
    """Euclidean norm of (1 - exp(-l)) exp(-tilt * l) on the grid's points l > 0, or more."""
    ratio = math.exp(-2 * tilt * width)
    rest = -math.expm1(-2 * tilt * width)
    return math.sqrt(min(1 / rest, width**2 * ratio * (1 + ratio) / rest**3))


def compose(grids: GridComposition, size: int) -> tuple[np.ndarray, float]:
    """Tilted masses of the sum of all steps' indices modulo `size`; a bound on the error's norm.

    Kinds of steps are composed each with itself, then with each other. A convolution
    carries the error of each factor, times what the masses of the other sum to: one, but for its
    own error. Each of the three transforms is off by a small part of the norm of what it is given.
    """
    mass, error = np.empty(0), 0.0
    for number, (step, count) in enumerate(grids.parts):
        _, weights = exponential_tilt(step, grids.tilt)
        own_mass, own_error = self_compose(step.index, weights, count, size)
        if number == 0:
            mass, error = own_mass, own_error
            continue
        total = max(1.0, float(mass.sum()), float(own_mass.sum()))
        norms = _norm(mass) + _norm(own_mass)
        product = scipy.fft.rfft(mass) * scipy.fft.rfft(own_mass)
        mass = np.maximum(scipy.fft.irfft(product, size), 0)
        error = total * (error + own_error + _ROUNDING * norms) + _ROUNDING * _norm(mass)
    return mass, error


def self_compose(
    index: np.ndarray, weights: np.ndarray, num_steps: int, size: int
) -> tuple[np.ndarray, float]:
    """Masses of the sum of `num_steps` indices modulo `size`; a bound on the norm of their error.

    Every coefficient F of a transform is off by a small part of the norm of what is transformed,
    and F^T by T |F|^(T - 1) times that. Where most of the mass is at one point, the point is kept
    out of the transforms: (atom + rest)^T - atom^T is small, and so is its error.
    """
    middle = int(index[np.argmax(weights)])
    rest = np.bincount((index - middle) % size, weights=weights, minlength=size)
    atom, rest[0] = rest[0], 0.0
    spectrum = scipy.fft.rfft(rest)
    norm = _norm(rest)
    log_all_atom = num_steps * math.log(atom)
    if atom > 0.6 and log_all_atom > -30:
        part = spectrum / atom
        log_size = 0.5 * np.log1p(2 * part.real + part.real**2 + part.imag**2)
        log_one = log_size + 1j * np.arctan2(part.imag, 1 + part.real)
        mass = scipy.fft.irfft(np.expm1(num_steps * log_one), size) * math.exp(log_all_atom)
        mass[0] += math.exp(log_all_atom) * (1 + num_steps * _ROUNDING)
    else:
        spectrum += atom
        norm = math.hypot(norm, atom)
        # Most of it vanishes in the power, and is not worth the time.
        loud = np.abs(spectrum) > math.exp(-60 / num_steps)
        power = np.zeros_like(spectrum)
        power[loud] = spectrum[loud] ** num_steps
        mass = scipy.fft.irfft(power, size)
        norm *= math.sqrt(np.sum(np.abs(spectrum[loud]) ** (2 * num_steps - 2)) / len(spectrum))
    mass = np.roll(np.maximum(mass, 0), num_steps * middle % size)
    return mass, num_steps * _ROUNDING * norm


def _norm(values: np.ndarray) -> float:
    return math.sqrt(np.sum(values**2))
