"""Distance of parameters from their optimum: the paper's two measures.

>>> import numpy as np
>>> trace = np.array([[0.0, 0.0], [1.0, 1.0], [2.0, 4.0]])
>>> mpae(trace, initial=trace[0], optimum=np.array([2.0, 4.0]))
array([1.   , 0.625, 0.   ])
>>> l2_error(trace, np.array([2.0, 4.0]))
array([4.47213595, 3.16227766, 0.        ])
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float


def mpae(
    params: Float[np.ndarray, "*snapshots d"],
    initial: Float[np.ndarray, " d"],
    optimum: Float[np.ndarray, " d"],
) -> Float[np.ndarray, "*snapshots"]:
    r"""Mean proportional absolute error, equation (eq:MPAE) of the paper.

    .. math:: \frac 1 D \sum_d \frac{|\xi_d - \xi^*_d|}{|\xi^{(0)}_d - \xi^*_d|}

    It is 0 at the optimum, and 1 on average as far from it as at the start.

    Args:
        params: Parameters :math:`\xi`, or a trace of them.
        initial: Their initial values, :math:`\xi^{(0)}`.
        optimum: Their optimum, :math:`\xi^*`; usually from a fit without privacy.

    Returns:
        One number for each snapshot. A parameter that started exactly at its optimum has no
        proportion to be measured by and is left out of the mean. If all of them did, the result is
        0 for parameters that are still there and infinity for others.
    """
    params, initial, optimum = np.asarray(params), np.asarray(initial), np.asarray(optimum)
    _check_shapes(params, initial=initial, optimum=optimum)
    start = np.abs(initial - optimum)
    error = np.abs(params - optimum)
    counted = start > 0
    if not counted.any():
        return np.where(error.any(axis=-1), np.inf, 0.0)[()]
    return (error[..., counted] / start[counted]).mean(axis=-1)


def l2_error(
    params: Float[np.ndarray, "*snapshots d"], optimum: Float[np.ndarray, " d"]
) -> Float[np.ndarray, "*snapshots"]:
    r"""Euclidean distance :math:`|\xi - \xi^*|_2`, one number for each snapshot."""
    params, optimum = np.asarray(params), np.asarray(optimum)
    _check_shapes(params, optimum=optimum)
    return np.linalg.norm(params - optimum, axis=-1)


def _check_shapes(params: np.ndarray, **others: np.ndarray) -> None:
    # Broadcasting would turn a forgotten axis into a plausible number.
    for name, value in others.items():
        if value.ndim != 1 or params.shape[-1:] != value.shape:
            raise ValueError(
                f"{name}: expected one number for each of the parameters {params.shape[-1:]}, got "
                f"shape {value.shape}. Flatten both to one axis of parameters."
            )
