r"""Directions of the latent that a likelihood depends on.

Some likelihoods know less than their model has parameters: of an intercept and an effect for each
level only the sums, of the scores of all classes only the differences. With a basis B of what they
know, and F of what they do not, orthogonal to each other in units of the prior,

.. math:: \theta = o + B z + F w, \qquad B' S^{-2} F = 0, \quad F' S^{-2} F = I,

S the scales of the prior. A steered run looks for z alone; w has its prior whatever the data.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

# Of products of unit vectors.
_ROUNDING = 1e-6


class Informed(NamedTuple):
    """Directions that gradients of a likelihood span.

    Attributes:
        span: An orthogonal basis of the directions of gradients anywhere, in columns.
        at_a_place: Number of directions at any one place. If these are fewer, parameters act only
            together (factors of a product), and the likelihood is constant along curves.
    """

    span: Float[np.ndarray, "d r"]
    at_a_place: int


class Directions(NamedTuple):
    """Directions that are looked for, and where from.

    Attributes:
        origin: o, the latent at z = w = 0.
        basis: B, one direction a column.
    """

    origin: Float[np.ndarray, " d"]
    basis: Float[np.ndarray, "d r"]

    @classmethod
    def of(
        cls,
        span: Float[np.ndarray, "d r"],
        loc: Float[np.ndarray, " d"],
        scale: Float[np.ndarray, " d"],
    ) -> Directions:
        """The directions of `span`, in units of the prior; or coordinates, if it is made of them.

        Args:
            span: Directions of gradients, in columns.
            loc, scale: The middle and the scales of the prior.
        """
        if np.count_nonzero(span) == span.shape[1]:
            return cls(np.zeros(len(loc)), np.where(span == 0, 0.0, 1.0))
        return cls(np.array(loc, float), scale[:, None] * np.linalg.qr(scale[:, None] * span)[0])

    def are_orthogonal(self, scale: Float[np.ndarray, " d"]) -> bool:
        """True if the directions are orthogonal in units of these scales."""
        if not (scale > 0).all():
            return False
        in_units = self.basis / scale[:, None]
        lengths = np.linalg.norm(in_units, axis=0)
        if not (lengths > 0).all():
            return False
        products = (in_units / lengths).T @ (in_units / lengths)
        return bool(np.abs(products - np.eye(len(lengths))).max(initial=0) < _ROUNDING)

    def prior(
        self, loc: Float[np.ndarray, " d"], scale: Float[np.ndarray, " d"]
    ) -> tuple[Float[np.ndarray, " r"], Float[np.ndarray, " r"]]:
        """Middle and scales of z a priori."""
        if np.count_nonzero(self.basis) == self.basis.shape[1]:  # the same to the last bit
            return self.basis.T @ (loc - self.origin), self.basis.T @ scale
        in_units = self.basis / scale[:, None]
        precision = np.square(in_units).sum(axis=0)
        return in_units.T @ ((loc - self.origin) / scale) / precision, 1 / np.sqrt(precision)

    def unknown(self, scale: Float[np.ndarray, " d"]) -> Float[np.ndarray, "d others"]:
        """F."""
        known = self.basis.shape[1]
        complete = np.linalg.qr(self.basis / scale[:, None], mode="complete")[0]
        return scale[:, None] * complete[:, known:]

    def rest(
        self, loc: Float[np.ndarray, " d"], scale: Float[np.ndarray, " d"]
    ) -> Float[np.ndarray, " d"]:
        """o + F w, with w in the middle of the prior."""
        unknown = self.unknown(scale)
        return self.origin + unknown @ (unknown.T @ ((loc - self.origin) / np.square(scale)))

    def whole(
        self, factor: Float[np.ndarray, "r r"], scale: Float[np.ndarray, " d"]
    ) -> tuple[Float[np.ndarray, "d d"], Float[np.ndarray, "d d"]]:
        r"""A Cholesky factor L of the latent from one of z, and how to turn what is whitened by it.

        With :math:`K = [B f, F]` and the rotation Q, :math:`L = K Q`. So the first r entries of
        :math:`Q L' g` are the whitened gradient of z, and those of :math:`Q \eta` its point.

        Returns:
            L and Q.
        """
        root = np.hstack([self.basis @ factor, self.unknown(scale)])
        rotation, upper = np.linalg.qr(root.T)
        signs = np.where(np.diagonal(upper) < 0, -1.0, 1.0)
        return upper.T * signs, rotation * signs
