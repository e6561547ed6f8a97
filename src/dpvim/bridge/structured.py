"""Structured clipped sums: models that bring their own, and the arithmetic that they share.

A model may know a faster way to its clipped gradient sum than a gradient for each record. It says
so by being a `StructuredModel`, whose methods `bridge` then uses.

Privacy rests on such a sum as it does on the general one. What counts is the row that is in fact
added up, not how close it is to a gradient: its weighted norm, times its factor, must stay below
the bound. So a structured sum is written in two parts. Some coordinates of a row are numbers that
are formed in single precision, measured and added up as they are. The others are products
``number x table entry`` with one product for each coordinate, so that their squares are products
of squares, and the norm is a sum of terms that are never negative. Neither has anything that could
cancel, and `lattice.Lattice` allows for what is left. It takes that norm and sum see the very
same numbers: `clipping.materialize` sees to it.
"""

from __future__ import annotations

from typing import Any

import jax
from jaxtyping import Array

from dpvim.bridge.latent_space import LatentSpace
from dpvim.privacy.clipping import ClippedSum
from dpvim.types import LogPrior, Record

# Accelerators would otherwise round the operands of a norm to ten bits.
PRECISION = jax.lax.Precision.HIGHEST


class StructuredModel:
    """A NumPyro model with a clipped sum of its own, on which privacy then rests."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def batch_of(self, *args: Any, **kwargs: Any) -> Record:
        """The model's arguments in the form that the clipped sum takes, each row by itself.

        Done once for all data: what does not change from step to step belongs here.
        """
        raise NotImplementedError

    def clipped_sum_for(self, space: LatentSpace) -> ClippedSum | None:
        """The clipped sum for these sites; None if the general one is to be used."""
        raise NotImplementedError

    def log_prior_for(self, space: LatentSpace) -> LogPrior | None:
        """The log prior of the latent; None if the general one is to be used."""
        raise NotImplementedError


def matmul(a: Any, b: Array) -> Array:
    """The product a b in full precision, single or double as the operands are.

    `jax.numpy.matmul` would ask for the type of its result once more when it is vectorised, and
    outside of `enable_x64` would be given a single one.
    """
    return jax.lax.dot_general(a, b, (((1,), (0,)), ((), ())), precision=PRECISION)
