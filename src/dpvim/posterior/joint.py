"""Posterior of a latent that falls into blocks: one for each, independent of each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from dpvim.inference.blocks import Blocks
from dpvim.inference.release_sums import ReleaseSums
from dpvim.posterior.convergence import Windows
from dpvim.posterior.from_releases import GaussianMixture, mixture_from_releases
from dpvim.posterior.from_releases.regression import GaussianPrior
from dpvim.posterior.from_trace import GaussianPosterior
from dpvim.privacy.plan import Plan

Part = GaussianMixture | GaussianPosterior


class JointPosterior(NamedTuple):
    """Independent posteriors of blocks of coordinates, used like one of them.

    Attributes:
        parts: The posteriors.
        members: Coordinates of each; all coordinates once.
    """

    parts: tuple[Part, ...]
    members: tuple[Int[np.ndarray, " k"], ...]

    @property
    def loc(self) -> Float[np.ndarray, " d"]:
        """Mean."""
        return self._joined(lambda part: part.loc)

    @property
    def scale(self) -> Float[np.ndarray, " d"]:
        """Standard deviations."""
        return self._joined(lambda part: part.scale)

    @property
    def dp_scale(self) -> Float[np.ndarray, " d"]:
        """Standard deviation that the noise of the run adds to each coordinate."""
        return self._joined(lambda part: part.dp_scale)

    @property
    def windows(self) -> Windows:
        """Snapshots behind each coordinate, and if they pass the test of their method."""
        lengths = self._joined(lambda part: part.windows.lengths)
        return Windows(lengths, self._joined(lambda part: part.windows.converged))

    @property
    def covariance(self) -> Float[np.ndarray, "d d"]:
        """Covariance."""
        dim = sum(map(len, self.members))
        covariance = np.zeros((dim, dim))
        for part, members in zip(self.parts, self.members, strict=True):
            covariance[np.ix_(members, members)] = part.covariance
        return covariance

    def draw(self, key: Array, n: int) -> Float[np.ndarray, "n d"]:
        """`n` independent draws."""
        keys = iter(jax.random.split(key, len(self.parts)))
        return self._joined(lambda part: part.draw(next(keys), n).T).T

    def log_density(self, latents: Float[np.ndarray, "*n d"]) -> np.ndarray:
        """Log-density at one latent or at several."""
        logs = [
            # SciPy takes a vector of a single coordinate for several latents.
            np.reshape(part.log_density(latents[..., members]), latents.shape[:-1])
            for part, members in zip(self.parts, self.members, strict=True)
        ]
        return np.sum(logs, axis=0)

    def quantiles(self, tails: Float[np.ndarray, " q"]) -> Float[np.ndarray, "d q"]:
        """Quantiles of each coordinate."""
        return self._joined(lambda part: part.quantiles(tails))

    def _joined(self, of: Callable[[Part], np.ndarray]) -> np.ndarray:
        """An array with a row for each coordinate, from those of the parts."""
        rows = np.concatenate([of(part) for part in self.parts])
        return rows[np.argsort(np.concatenate(self.members))]


def posterior_by_block(
    sums: ReleaseSums,
    plan: Plan,
    prior: GaussianPrior,
    blocks: Blocks,
    *,
    others: Mapping[int, Part] | None = None,
    snapshot_steps: int = 1,
) -> Part | JointPosterior:
    """Infer the posterior of each block by itself, from its own releases.

    Their likelihoods share no parameter, the noise of their releases is independent, and so are the
    Gaussians that stand for the prior: so are their posteriors. Coordinates of no block have their
    prior.

    Args:
        sums: Sums of points and released gradients.
        plan: The plan of the run.
        prior: Gaussians that stand for the model's prior.
        blocks: The likelihood's.
        others: Posteriors of blocks that are not to be inferred, by the blocks' numbers.
        snapshot_steps: Steps between snapshots of the trace, the unit of windows.
    """
    parts = dict(others or {})
    for number, block in enumerate(blocks.members):
        if number not in parts:
            parts[number] = mixture_from_releases(
                sums.of_block(number, blocks),
                plan,
                GaussianPrior(prior.loc[block], prior.scale[block]),
                snapshot_steps=snapshot_steps,
                num_parameters=sums.dim,
                num_blocks=len(blocks.members),
            )
    found, members = [parts[number] for number in range(len(blocks.members))], [*blocks.members]
    if len(outside := blocks.outside):
        length = int(sums.steps.sum()) // snapshot_steps + 1
        windows = Windows(np.full(len(outside), length), np.ones(len(outside), bool))
        unmoved = np.zeros(len(outside))
        found.append(GaussianPosterior(prior.loc[outside], prior.scale[outside], unmoved, windows))
        members.append(outside)
    return found[0] if len(found) == 1 else JointPosterior(tuple(found), tuple(members))
