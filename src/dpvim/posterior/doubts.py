"""Doubtful posteriors in words: what is said when one is asked for."""

from __future__ import annotations

import warnings

from dpvim.posterior.posterior import Posterior
from dpvim.types import ConvergenceWarning


def warn_of_doubts(posterior: Posterior, *, stacklevel: int) -> None:
    """Announce with a `ConvergenceWarning` that a posterior has parameters that are doubtful."""
    if posterior.not_converged:
        warnings.warn(_doubts_message(posterior), ConvergenceWarning, stacklevel=stacklevel)


def _doubts_message(posterior: Posterior) -> str:
    if posterior.doubts:
        return "the posterior is doubtful: " + " Also: ".join(posterior.doubts)
    methods = posterior.methods or (posterior.method,) * posterior.loc.size
    told = dict(zip(posterior.space.raw_labels(), methods, strict=True))
    names = posterior.not_converged
    messages = []
    if by_releases := [name for name in names if told[name] == "releases"]:
        messages.append(_lack_of_fit_message(posterior, by_releases))
    if by_trace := [name for name in names if told[name] != "releases"]:
        messages.append(_drift_message(posterior, by_trace))
    return " Also: ".join(messages)


def _lack_of_fit_message(posterior: Posterior, names: list[str]) -> str:
    return (
        f"the released gradients do not tell {len(names)} of {posterior.loc.size} parameters: "
        f"{_named(names)}. They do not lie on one line within their noise, or the line leads "
        "further away than the run has been: it has not arrived, or the log-likelihood is not "
        "close to a quadratic there. The intervals of these parameters may be far off. "
        "Take more steps or a larger learning rate if the trace is still on its way, start closer "
        "to the answer (init_params, from public knowledge), or probe less wide (probe_width=1)."
    )


def _drift_message(posterior: Posterior, names: list[str]) -> str:
    return (
        f"{len(names)} of {posterior.loc.size} parameters have not converged: "
        f"{_named(names)}. The trace is too short, or still on its way, to tell how far noise has "
        "moved them, and their intervals may be too narrow. Take more steps or a larger learning "
        "rate, or a larger epsilon."
    )


def _named(names: list[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")
