"""Section of a report on the model: posterior, trace and convergence."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from dpvim import plots
from dpvim.models.mixture import Mixture
from dpvim.plots import LARGEST_FOREST
from dpvim.synthesis.model import coefficient_names
from dpvim.synthesis.report import charts, text
from dpvim.synthesis.report.charts import Picture
from dpvim.synthesis.twin import Twin

_MAX_COEFFICIENTS = 40


def model_content(twin: Twin) -> dict[str, Any]:
    """Posterior, trace and convergence."""
    fit, posterior = twin.fit, twin.fit.averaged
    converged, message = text.describe_convergence(posterior)
    total = posterior.loc.size
    num_values = sum(math.prod(site.shape) for site in posterior.space.sites)
    each_has_a_row = num_values <= LARGEST_FOREST
    height = 1 + 0.2 * num_values if each_has_a_row else 3.6
    return {
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
    ends = twin.fit.averaged.interval(0.9)[site]
    return pd.DataFrame(
        {
            "estimate": twin.fit.averaged.mean[site],
            "lower": ends[:, 0],
            "upper": ends[:, 1],
        },
        index=coefficient_names(model, twin.schema),
    )
