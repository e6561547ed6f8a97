"""Section of a report on the model: how it was fitted, and how well."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from dpvim import plots
from dpvim.models.mixture import Mixture
from dpvim.plots import LARGEST_FOREST
from dpvim.privacy.counts import NoisyMarginal
from dpvim.synthesis.marginals.fit import MarginalFit
from dpvim.synthesis.model import coefficient_names
from dpvim.synthesis.report import charts, text
from dpvim.synthesis.report.charts import Picture
from dpvim.synthesis.twin import DPVI, MARGINALS, Twin

_MAX_COEFFICIENTS = 40
_MAX_UNEXPLAINED = 10


def model_content(twin: Twin) -> dict[str, Any]:
    """The section by the twin's ``engine``; ``caveat`` is what a reader must know of the fit."""
    if isinstance(twin.fit, MarginalFit):
        return _counts_content(twin.fit)
    return _dpvi_content(twin)


def _counts_content(fit: MarginalFit) -> dict[str, Any]:
    """The releases, and what the fit to them cannot explain."""
    unexplained = fit.unexplained
    fits, message = text.describe_unexplained(fit, unexplained)
    return {
        "engine": MARGINALS,
        "caveat": "" if fits else "The model does not explain all of the released counts",
        "traits": fit.num_traits,
        "released": _released(fit),
        "noise_message": text.describe_noise(fit),
        "fits": fits,
        "unexplained_message": message,
        "unexplained": [
            (*names, float(share))
            for names, share in unexplained.head(_MAX_UNEXPLAINED).items()
            if isinstance(names, tuple)
        ],
        "num_pairs": len(unexplained),
    }


def _released(fit: MarginalFit) -> list[dict[str, Any]]:
    """By kind of count: how many there are, and their noise."""
    names = fit.schema.names
    kinds: dict[str, list[NoisyMarginal]] = {}
    for each in fit.releases.noisy:
        if len(each.columns) == 1:
            kind = "Columns by themselves"
        elif fit.target is None:
            kind = "Pairs of columns"
        else:
            has_target = fit.target in [names[column] for column in each.columns]
            kind = f"Pairs with {fit.target}" if has_target else "Other pairs"
        kinds.setdefault(kind, []).append(each)
    rows = fit.releases.num_rows
    return [
        {
            "kind": kind,
            "number": len(each),
            "cells": sum(noisy.counts.size for noisy in each),
            "stddev": (stddev := math.sqrt(max(noisy.variance for noisy in each))),
            "share": text.percent(stddev / rows),
        }
        for kind, each in kinds.items()
    ]


def _dpvi_content(twin: Twin) -> dict[str, Any]:
    """Posterior, trace and convergence."""
    fit = twin.by_dpvi
    posterior = twin.posterior
    converged, message = text.describe_convergence(posterior)
    total = posterior.loc.size
    num_values = sum(math.prod(site.shape) for site in posterior.space.sites)
    each_has_a_row = num_values <= LARGEST_FOREST
    height = 1 + 0.2 * num_values if each_has_a_row else 3.6
    return {
        "engine": DPVI,
        "caveat": "" if converged else "Not all of the model has settled",
        "converged": converged,
        "convergence_message": message,
        "total": total,
        "coefficients": _coefficients_content(twin),
        "starred": each_has_a_row and not converged,
        "posterior": Picture(
            _uri(plots.plot_posterior(posterior), height=height),
            f"Posterior intervals of {num_values} values, with the part that is noise.",
        ),
        "trace": Picture(
            _uri(fit.plot_trace(), height=4.6),
            f"Means and standard deviations of {total} parameters against the steps of the run.",
        ),
        "convergence": Picture(
            _uri(fit.plot_convergence(), height=3.4),
            f"Length of each parameter's window in autocorrelation times. {message}",
        ),
    }


def _coefficients_content(twin: Twin) -> dict[str, Any] | None:
    table = _coefficients(twin)
    if table is None:
        return None
    # Those farthest from zero if there are many.
    distance = (table["estimate"] / (table["upper"] - table["lower"])).abs().to_numpy()
    shown = table.iloc[np.sort(np.argsort(-distance, kind="stable")[:_MAX_COEFFICIENTS])]
    described = "; ".join(
        f"{name} {row.estimate:.2f} ({row.lower:.2f} to {row.upper:.2f})"
        for name, row in shown.head(12).iterrows()
    )
    picture = Picture(
        charts.as_data_uri(charts.intervals(shown)),
        f"Posterior of the regression's coefficients: {described}.",
    )
    return {"picture": picture, "shown": len(shown), "total": len(table)}


def _uri(figure: Any, *, height: float) -> str:
    return charts.as_data_uri(charts.fit_to_page(figure, height=height))


def _coefficients(twin: Twin) -> pd.DataFrame | None:
    """Posterior of the target's coefficients: means and 90 % intervals."""
    model = twin.model
    if not isinstance(model, Mixture) or model.response is None:
        return None
    site = f"{model.response.name}.coefficients"
    posterior = twin.posterior
    ends = posterior.interval(0.9)[site]
    return pd.DataFrame(
        {
            "estimate": posterior.mean[site],
            "lower": ends[:, 0],
            "upper": ends[:, 1],
        },
        index=coefficient_names(model, twin.schema),
    )
