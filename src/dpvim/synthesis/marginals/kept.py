"""Rounds of counts with a checkpoint: a round that was released before is not made again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dpvim.archives import FileError
from dpvim.checkpoints import Checkpoint
from dpvim.privacy.counts import Cells, CountMechanism, Marginal, NoisyMarginal
from dpvim.privacy.plan import PrivacyPlan

_POSITION = "position"


class KeptRounds:
    """A `CountMechanism` whose rounds are kept when they are released.

    A round that was cut short is made again with the same noise, and releases the same counts.
    """

    def __init__(self, mechanism: CountMechanism, checkpoint: Checkpoint) -> None:
        self._mechanism, self._checkpoint = mechanism, checkpoint
        self._kept = checkpoint.load() or {}
        self._position = self._kept.pop(_POSITION, None)  # after all rounds that were kept
        self._round = 0

    @property
    def plan(self) -> PrivacyPlan:
        """Of the mechanism."""
        return self._mechanism.plan

    def release(
        self, cells: Cells, marginals: Sequence[Marginal], *, share: float
    ) -> list[NoisyMarginal]:
        """A round that was kept, or the next one; arguments as of a `CountMechanism`."""
        prefix, self._round = f"{self._round}.", self._round + 1
        if f"{prefix}variances" in self._kept:
            self._mechanism.skip(share, self._position)
            return self._round_of(prefix, cells, marginals)
        found = self._mechanism.release(cells, marginals, share=share)
        self._kept[f"{prefix}variances"] = np.array([each.variance for each in found])
        self._kept |= {f"{prefix}{i}": each.counts for i, each in enumerate(found)}
        self._checkpoint.save({**self._kept, _POSITION: self._mechanism.position()})
        return found

    def finish(self) -> None:
        """All rounds were released: what is kept is public, and the secret goes."""
        self._checkpoint.finish(self._kept)

    def _round_of(
        self, prefix: str, cells: Cells, marginals: Sequence[Marginal]
    ) -> list[NoisyMarginal]:
        try:
            variances = self._kept[f"{prefix}variances"].tolist()
            counts = [self._kept[f"{prefix}{i}"] for i in range(len(marginals))]
            pairs = zip(marginals, counts, variances, strict=True)
            found = [NoisyMarginal(each.columns, *kept) for each, *kept in pairs]
        except (KeyError, ValueError) as error:
            raise FileError(f"{self._checkpoint.folder}: damaged ({error}).") from error
        for each in found:
            if each.counts.shape != tuple(cells.sizes[column] for column in each.columns):
                raise FileError(f"{self._checkpoint.folder}: damaged (counts of other cells).")
        return found
