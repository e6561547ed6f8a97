"""Moments of the noise: cheap, and the sharpest test of scale and of reused or broadcast noise.

Steps on empty batches release noise alone. Scale, correlation across coordinates, steps and fits,
distinct values in the tail, and the lattice are looked at.
"""

from __future__ import annotations

import itertools

import numpy as np
from scipy import stats

from dpvim.audit.findings import Finding, chi_square, two_sided_normal
from dpvim.audit.target import Target, VectorizedRuns
from dpvim.privacy.noise import RoundedGaussianNoise
from dpvim.privacy.randomness import SecretStreams

CHECK = "noise"
_LAGS = (1, 2, 3)
_TAIL = 4.0


def noise_checks(target: Target, streams: list[SecretStreams], *, runs: int) -> list[Finding]:
    """Checks of the noise of two fits."""
    plan, program = target.plan, VectorizedRuns(target)
    # Rows that add nothing; where rows are counted a zero adds its count.
    nobody = "nan" if target.engine.variant.whitens else "zero"
    rows = np.full(2, target.path.row_number(nobody))
    nothing = program.prepare_steps(target.path.rows, [rows] * plan.num_steps)
    first, second = (
        program.run_sampled(
            nothing, 2, runs=runs, streams=each, summarize=lambda view: view.release
        )
        for each in streams[:2]
    )
    z, other = (release.astype(float) / plan.noise_stddev for release in (first, second))
    return [
        _scale(z),
        _mean(z),
        _across_coordinates(z),
        _across_steps(z),
        _across_fits(z, other),
        _separate_streams(streams[3]),
        _tail(target, streams[2], draws=max(4_000_000, 100 * runs)),
        _lattice(first, plan.noise_grid),
    ]


def _scale(z: np.ndarray) -> Finding:
    ratio = float(np.sqrt(np.mean(z**2)))
    observed = f"{ratio:.4f} of the declared standard deviation"
    return Finding(CHECK, "scale", observed, chi_square(float(np.sum(z**2)), z.size))


def _mean(z: np.ndarray) -> Finding:
    statistic = float(z.mean() * np.sqrt(z.size))
    return Finding(CHECK, "mean", f"{z.mean():+.4f} sd", float(two_sided_normal(statistic)))


def _across_coordinates(z: np.ndarray) -> Finding:
    flat = z.reshape(-1, z.shape[-1])
    pairs = itertools.combinations(range(flat.shape[1]), 2)
    candidates = [correlation(flat[:, i], flat[:, j], f"coordinates {i}, {j}") for i, j in pairs]
    return Finding.strongest(CHECK, "correlation across coordinates", candidates)


def _across_steps(z: np.ndarray) -> Finding:
    """Within runs, and on from one run to the next: the source knows steps only."""
    flat = z.reshape(-1, z.shape[-1])
    candidates = [
        correlation(flat[:-lag, i], flat[lag:, j], f"lag {lag}, coordinates {i}, {j}")
        for lag in _LAGS
        for i, j in itertools.product(range(flat.shape[1]), repeat=2)
    ]
    return Finding.strongest(CHECK, "correlation across steps", candidates)


def _across_fits(z: np.ndarray, other: np.ndarray) -> Finding:
    flat, again = (a.reshape(-1, a.shape[-1]) for a in (z, other))
    candidates = [
        correlation(flat[:, i], again[:, i], f"coordinate {i}") for i in range(flat.shape[1])
    ]
    return Finding.strongest(CHECK, "correlation across fits", candidates)


def _separate_streams(streams: SecretStreams) -> Finding:
    """Batches and noise come from streams of their own."""
    names = ("membership", "truncation", "places", "noise")
    starts = [streams.generator(name).bytes(32) for name in names]
    different = len(set(starts))
    observed = f"{different} different streams for {len(names)} purposes"
    return Finding.rule(CHECK, "a stream for each purpose", observed, holds=different == len(names))


def _tail(target: Target, streams: SecretStreams, *, draws: int) -> Finding:
    """Values beyond four standard deviations: as many as there should be, and all different.

    A single-precision normal by inversion has some five hundred values there and ends at 5.42.
    """
    plan = target.plan
    source = RoundedGaussianNoise(
        streams, stddev=plan.noise_stddev, grid=plan.noise_grid, size=1000
    )
    noise = source.draw(draws // 1000).ravel()
    in_units = plan.noise_stddev / plan.noise_grid
    far = noise[np.abs(noise) > _TAIL * in_units]
    share = 2 * stats.norm.sf(_TAIL)
    number = stats.binomtest(len(far), noise.size, share).pvalue
    # A grid of 2^24 points a standard deviation, and a tail of about 1/4 of one: pairs that meet
    # by chance are Poisson with this mean.
    repeated = len(far) - len(np.unique(far))
    expected = len(far) ** 2 / 2 / (2 * in_units / _TAIL * 2)
    twice = stats.poisson.sf(repeated - 1, expected) if repeated else 1.0
    candidates = [
        (float(number), f"{len(far)} of {noise.size} beyond {_TAIL:g} sd"),
        (float(twice), f"{repeated} of {len(far)} tail values seen before"),
    ]
    return Finding.strongest(CHECK, "tails", candidates)


def _lattice(release: np.ndarray, grid: float) -> Finding:
    below = int(np.sum(release.astype(float) % grid != 0))
    observed = f"{below} of {release.size} releases have bits below the grid"
    return Finding.rule(CHECK, "noise lies on the lattice", observed, holds=below == 0)


def correlation(a: np.ndarray, b: np.ndarray, where: str) -> tuple[float, str]:
    """p-value and text of the correlation of numbers whose mean is zero."""
    value = float(np.mean(a * b) / np.sqrt(np.mean(a**2) * np.mean(b**2) + 1e-300))
    return float(two_sided_normal(value * np.sqrt(len(a)))), f"{value:+.4f} ({where})"
