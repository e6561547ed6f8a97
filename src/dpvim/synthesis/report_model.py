"""What a report shows of the model: posterior, trace and convergence."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from dpvim.models.mixture import Mixture
from dpvim.synthesis import pictures, words
from dpvim.synthesis.model import coefficient_names
from dpvim.synthesis.pictures import Picture
from dpvim.synthesis.twin import Twin

_MOST_COEFFICIENTS = 40


def model_content(twin: Twin) -> dict[str, Any]:
    """Posterior, trace and convergence."""
    fit, posterior = twin.fit, twin.fit.posterior
    settled, told = words.convergence(posterior)
    total = posterior.loc.size
    coefficients = None
    table = _coefficients(twin)
    if table is not None:
        alt = "Posterior of the regression's coefficients: " + "; ".join(
            f"{name} {row.estimate:.2f} ({row.lower:.2f} to {row.upper:.2f})"
            for name, row in table.head(12).iterrows()
        )
        coefficients = Picture(pictures.as_data_uri(pictures.intervals(table)), alt + ".")
    num_values = sum(math.prod(site.shape) for site in posterior.space.sites)
    return {
        "settled": settled,
        "told": told,
        "total": total,
        "coefficients": coefficients,
        "num_coefficients": 0 if table is None else len(table),
        "posterior": Picture(
            _uri(fit.plot_posterior(), height=1 + 0.2 * num_values if num_values <= 40 else 3.6),
            f"Posterior intervals of all {total} parameters, with the part that is noise.",
        ),
        "trace": Picture(
            _uri(fit.plot_trace(), height=4.6),
            f"Means and standard deviations of {total} parameters against the steps of the run.",
        ),
        "convergence": Picture(
            _uri(fit.plot_convergence(), height=3.4),
            f"Length of each parameter's window in autocorrelation times. {told}",
        ),
    }


def _uri(figure: Any, *, height: float) -> str:
    return pictures.as_data_uri(pictures.for_page(figure, height=height))


def _coefficients(twin: Twin) -> pd.DataFrame | None:
    """Posterior of the target's coefficients, those farthest from zero if there are many."""
    model = twin.model
    if not isinstance(model, Mixture) or model.response is None:
        return None
    site = f"{model.response.name}.coefficients"
    ends = twin.fit.posterior.interval(0.9)[site]
    table = pd.DataFrame(
        {
            "estimate": twin.fit.posterior.mean[site],
            "lower": ends[:, 0],
            "upper": ends[:, 1],
        },
        index=coefficient_names(model, twin.schema),
    )
    distance = (table["estimate"] / (table["upper"] - table["lower"])).abs().to_numpy()
    chosen = np.sort(np.argsort(-distance, kind="stable")[:_MOST_COEFFICIENTS])
    return table.iloc[chosen]
