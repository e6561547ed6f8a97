"""Names shared by all layers: the neighbouring relation, array shapes, errors and warnings."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from jaxtyping import Array, Bool, Float

Scalar: TypeAlias = Float[Array, ""]
Latent: TypeAlias = Float[Array, " d"]
"""The flat, unconstrained latent theta: what all of a model's parameters are packed into."""
Record: TypeAlias = Any
"""A pytree of arrays: one row of the data (or, with a leading axis, a batch of rows)."""
Mask: TypeAlias = Bool[Array, " batch"]


class Whitening(NamedTuple):
    """A public matrix L: rows g become L' g, are clipped, and counted by their norms.

    L is [d, d], or its diagonal [d].
    """

    factor: Float[Array, "d d"] | Float[Array, " d"]


Weights: TypeAlias = Float[Array, " d"] | Whitening | None
"""The metric of the clip, public. Weights w >= 0 with |E g|^2 = sum_i w_i g_i^2; a matrix; None
stands for ones."""

LogLikelihood: TypeAlias = Callable[[Latent, Record], Scalar]
LogPrior: TypeAlias = Callable[[Latent], Scalar]


class Relation(enum.StrEnum):
    """The neighbouring relation: what one record may change; records may be persons (`Unit`).

    * ``zero_out``: one record is replaced by nothing; the number of records is public.
    * ``add_or_remove``: one record is added or removed; the caller declares a public
      ``num_examples``, at least the number of records.
    * ``replace_one``: one record is replaced by any other one; the sensitivity doubles.

    >>> Relation("zero_out") is Relation.ZERO_OUT
    True
    """

    ZERO_OUT = "zero_out"
    ADD_OR_REMOVE = "add_or_remove"
    REPLACE_ONE = "replace_one"


class Unit(enum.StrEnum):
    """The unit of privacy: whom one guarantee is about.

    * ``record``: one row. A person with several rows is protected less.
    * ``person``: all rows of a person together.
    """

    RECORD = "record"
    PERSON = "person"


class Origin(enum.IntEnum):
    """The weakest protection among the steps that led to a state."""

    PRIVATE = 0
    SEEDED = 1
    NOT_PRIVATE = 2


class ModelError(ValueError):
    """The model is not one that can be fitted under differential privacy here."""


class BudgetExceededError(RuntimeError):
    """A step was asked for that the privacy plan does not pay for."""


class LostProcessError(RuntimeError):
    """Another process of a run over several ended, or cannot be reached."""


class NotPrivateError(RuntimeError):
    """Something without a privacy guarantee was about to be written as if it had one."""


class PrivacyWarning(UserWarning):
    """The result is private in name, but something about it deserves a second look."""


class NotForReleaseWarning(PrivacyWarning):
    """The random numbers came from a given seed: the result is for tests and experiments only."""


class ConvergenceWarning(UserWarning):
    """Parts of a posterior come from windows of the trace that have not converged."""
