r"""A run steered by what it released: no learning rate, no clip norm.

Probes of a window are :math:`\theta = m + L u`, u around zero, and its releases are noisy whitened
gradients :math:`L' \nabla \log p(D \mid \theta)`, with noise of a known size. A linear regression
of releases on u gives the gradient at the centre and the curvature :math:`A = L' H L`, each with a
known error. Then, in units that the approximation itself defines,

* the belief about A is updated, entry by entry, as a Kalman filter does;
* the centre moves by a Newton step, shortened where the noise is larger than the step;
* L becomes the Cholesky factor of the inverse of curvature and prior together, or smaller where
  counts of norms say that the clip does more harm than noise (`dpvim.inference.clip_relief`).

The first window probes with the prior's median and scales. There all gradients are clipped, and
point at the data: scales shrink by an order of magnitude a window until few are. All of it is a
function of releases, the prior and the plan: post-processing. It is done in NumPy between windows,
in double precision.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from dpvim.inference.belief import Belief, advance, measure
from dpvim.inference.clip_relief import relief
from dpvim.inference.directions import Directions, Informed
from dpvim.inference.windows import NUM_NARROW, NUM_WINDOWS, Window, windows_of
from dpvim.privacy.norm_counts import COUNT_SHARE, NORM_BIN_ENDS, NUM_NORM_BINS
from dpvim.privacy.plan import Plan


class SteeredReleases(NamedTuple):
    """Releases of a steered run, by window, and the belief that came out of them.

    Of the directions that the likelihood depends on, and in units of the factor that the window
    had; the narrow windows share the last one. Windows that were not finished have no steps.

    Attributes:
        steps: Numbers of steps.
        centre: Centres, as z of `Directions`.
        point, gradient: Means of the points about the centre and of the whitened gradients.
        noise, residual: Variances of one whitened gradient about the line, by coordinate: at least
            the known one, and as measured.
        counts: Noisy numbers of records by the norm of their gradient (`NORM_BIN_ENDS`).
        factor, curvature, variance: Of the last `Belief`.
        width: Width of wide probes.
        origin, basis: Those of the `Directions`.
        at_a_place: Number of directions that the likelihood depends on at any one place.
    """

    steps: Float[np.ndarray, " windows"]
    centre: Float[np.ndarray, "windows r"]
    point: Float[np.ndarray, "windows r"]
    gradient: Float[np.ndarray, "windows r"]
    noise: Float[np.ndarray, "windows r"]
    residual: Float[np.ndarray, "windows r"]
    counts: Float[np.ndarray, "windows bins"]
    factor: Float[np.ndarray, "r r"]
    curvature: Float[np.ndarray, "r r"]
    variance: Float[np.ndarray, "r r"]
    width: Float[np.ndarray, ""]
    origin: Float[np.ndarray, " d"]
    basis: Float[np.ndarray, "d r"]
    at_a_place: Float[np.ndarray, ""]

    @classmethod
    def zeros(cls, dim: int, num_informed: int) -> SteeredReleases:
        """Arrays of the right shapes."""
        vector, square = (NUM_WINDOWS, num_informed), (num_informed, num_informed)
        shapes = (vector[:1], *(vector,) * 5, (NUM_WINDOWS, NUM_NORM_BINS), *(square,) * 3)
        return cls(*(np.zeros(each) for each in (*shapes, (), (dim,), (dim, num_informed), ())))

    @property
    def directions(self) -> Directions:
        """Those that the likelihood depends on."""
        return Directions(self.origin, self.basis)

    @property
    def is_complete(self) -> bool:
        """True if all windows were finished."""
        return bool((self.steps > 0).all())

    def gradients_at_last(
        self, curvature: Float[np.ndarray, "d d"]
    ) -> Float[np.ndarray, "narrow d"]:
        """Mean gradients of the narrow windows, carried to the last centre by the curvature."""
        recent = slice(-NUM_NARROW, None)
        away = self.centre[recent] - self.centre[-1]
        points = self.point[recent] + np.linalg.solve(self.factor, away.T).T
        return self.gradient[recent] + points @ curvature


class Steering:
    """Takes the releases of a run as they come, and says where the next steps probe.

    Guarantees:
        A function of what was released and of public numbers. Rows wait until their window is
        complete, so the result does not depend on how a run is cut into chunks.
    """

    def __init__(
        self,
        plan: Plan,
        prior_loc: Float[np.ndarray, " d"],
        prior_scale: Float[np.ndarray, " d"],
        informed: Informed,
        width: float,
    ) -> None:
        """A run from its beginning.

        Args:
            plan: The plan of the run.
            prior_loc, prior_scale: The prior, or where the run begins and how far it looks.
            informed: What the likelihood depends on.
            width: Width of wide probes.
        """
        self._plan, self._width = plan, width
        loc, self._scale = np.asarray(prior_loc, float), np.asarray(prior_scale, float)
        self._directions = Directions.of(informed.span, loc, self._scale)
        self._rest = self._directions.rest(loc, self._scale)
        loc, scale = self._directions.prior(loc, self._scale)
        self._prior = {"prior_loc": loc, "prior_scale": scale}
        self._belief = Belief.from_prior(loc, scale, width)
        self._windows = windows_of(plan.num_steps)
        self._informed = informed
        self._sums = SteeredReleases.zeros(*informed.span.shape)
        self._done = 0
        self._rows: list[tuple[np.ndarray, np.ndarray]] = []

    def steps_left(self, step: int) -> int:
        """Steps from `step` to the end of its window."""
        return next(window.end - step for window in self._windows if step < window.end)

    def add(self, first: int, length: int, points: Any, releases: Any) -> bool:
        """Take steps of the window that `first` is in; True if it is complete."""
        window = self._windows[self._done]
        self._rows.append((np.asarray(points)[:length], np.asarray(releases)[:length]))
        if first + length < window.end:
            return False
        parts = zip(*self._rows, strict=True)
        points, releases = (np.concatenate(each).astype(float) for each in parts)
        self._rows = []
        self._finish(window, points, releases)
        return True

    def place(self) -> tuple[Float[np.ndarray, " d"], Float[np.ndarray, "d d"]]:
        """Centre and factor of the next probes; the prior's where the likelihood is constant."""
        factor, _ = self._directions.whole(self._belief.factor, self._scale)
        return self._rest + self._directions.basis @ self._belief.centre, factor

    def releases(self) -> SteeredReleases:
        """The finished windows."""
        belief, sums = self._belief, self._sums
        return sums._replace(
            factor=belief.factor,
            curvature=belief.curvature,
            variance=belief.variance,
            width=np.array(self._width),
            origin=self._directions.origin,
            basis=self._directions.basis,
            at_a_place=np.array(float(self._informed.at_a_place)),
        )

    def progress(self) -> dict[str, np.ndarray]:
        """Everything that changes as a run goes on; `go_on` takes it."""
        parts = [np.concatenate(each) for each in zip(*self._rows, strict=True)]
        rows = dict(zip(("points", "releases"), parts, strict=False))
        sums = {f"sums.{name}": array for name, array in self._sums._asdict().items()}
        belief = {f"belief.{name}": array for name, array in self._belief._asdict().items()}
        return {"done": np.array(self._done), **sums, **belief, **rows}

    def go_on(self, progress: Mapping[str, np.ndarray]) -> None:
        """Go on from the `progress` of a steering that was made alike."""
        self._done = int(progress["done"])
        kept = {name: progress.get(f"sums.{name}") for name in self._sums._fields}
        self._sums = self._sums._replace(**{k: v for k, v in kept.items() if v is not None})
        self._belief = Belief(*(progress[f"belief.{name}"] for name in self._belief._fields))
        has_rows = "points" in progress
        self._rows = [(progress["points"], progress["releases"])] if has_rows else []

    def _finish(self, window: Window, points: np.ndarray, releases: np.ndarray) -> None:
        plan, dim, known_dim = self._plan, *self._directions.basis.shape
        _, rotation = self._directions.whole(self._belief.factor, self._scale)
        turn = rotation[:known_dim].T
        share = plan.sampling_prob * math.sqrt(1 - COUNT_SHARE)
        noise = (plan.noise_stddev / share) ** 2
        # Columns are one after the other in the memory, since all sums are over steps.
        turned = [np.asfortranarray(rows @ turn) for rows in (points, releases[:, :dim])]
        found = measure(turned[0], turned[1] / share, noise)
        unit = plan.sampling_prob * math.sqrt(COUNT_SHARE) * plan.clip_norm
        row = {
            "steps": found.steps,
            "centre": self._belief.centre,
            "point": found.point,
            "gradient": found.gradient,
            "noise": found.noise,
            "residual": found.residual,
            "counts": releases[:, dim:].mean(axis=0) / unit,
        }
        for name, value in row.items():
            getattr(self._sums, name)[self._done] = value
        self._belief = advance(
            self._belief,
            found,
            window,
            width=self._width,
            clipped=self._clipped(self._done),
            relief=relief(self._sums.counts, self._sums.steps, plan, len(found.point)),
            **self._prior,
        )
        self._done += 1

    def _clipped(self, window: int) -> float:
        """Share of records that were clipped in a window; noisy."""
        clipped = np.array(NORM_BIN_ENDS) >= 1
        return float(self._sums.counts[window, clipped].sum() / self._plan.num_examples)
