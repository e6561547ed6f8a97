"""Fit a twin: choose the model of a table, its budget and its settings, and run the private fit.

`synthesize` does all of it. On the command line the model is built first, so that what is wrong
with it is said before the table is read; `fit_twin` then takes it as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import pandas as pd

from dpvim import _validate
from dpvim.fitting import fit as fit_model
from dpvim.options import Budget, FitOptions
from dpvim.synthesis.encoding import encode
from dpvim.synthesis.model import DEFAULT_NUMBERS, build_model
from dpvim.synthesis.schema import Schema
from dpvim.synthesis.twin import Twin

DEFAULT_COMPONENTS = 10
DEFAULT_CLIP_NORM = 2.0
DEFAULT_LEARNING_RATE = 2e-2
DEFAULT_STEPS = 4000


def synthesize(
    frame: pd.DataFrame,
    schema: Schema,
    *,
    epsilon: float,
    delta: float | None = None,
    target: str | None = None,
    target_model: str | None = None,
    components: int = DEFAULT_COMPONENTS,
    numbers: str = DEFAULT_NUMBERS,
    model: Callable[..., Any] | None = None,
    clip_norm: float = DEFAULT_CLIP_NORM,
    learning_rate: float = DEFAULT_LEARNING_RATE,
    num_examples: int | None = None,
    **fit_options: Any,
) -> Twin:
    """Learn a model of a sensitive table under (epsilon, delta)-differential privacy.

    Args:
        frame: The table; one row for each person.
        schema: What is publicly known about its columns; every entry must be reviewed.
        epsilon: The budget.
        delta: Default: a tenth of one over the number of rows.
        target: A column to be regressed on all others.
        target_model: ``logistic``, ``poisson`` or ``linear``; default by the target's kind.
        components: Number of mixture components.
        numbers: What integer and real columns are in a component: ``histogram`` or ``normal``.
        model: A NumPyro model of your own instead of the mixture: called with the columns' values
            and where they are missing (dicts of arrays, as `dpvim.synthesis.encoding.encode`
            returns them) it observes them; called with ``num_rows=`` it returns drawn columns.
        clip_norm, learning_rate, num_examples, fit_options: As in `dpvim.fit`; 4000 steps and
            a learning rate of 0.02 unless told. (Longer runs have more noise a step, which shows
            where data are scarce.)

    Returns:
        A `Twin`: ``twin.sample()``, ``twin.datasets(100)``, ``twin.save("twin")``.
    """
    chosen = build_model(
        schema,
        model,
        components=components,
        target=target,
        target_model=target_model,
        numbers=numbers,
    )
    return fit_twin(
        frame,
        schema,
        chosen,
        epsilon=epsilon,
        delta=delta,
        clip_norm=clip_norm,
        learning_rate=learning_rate,
        num_examples=num_examples,
        **fit_options,
    )


def fit_twin(
    frame: pd.DataFrame,
    schema: Schema,
    model: Callable[..., Any],
    *,
    epsilon: float,
    delta: float | None,
    clip_norm: float,
    learning_rate: float,
    num_examples: int | None,
    **fit_options: Any,
) -> Twin:
    """Fit a model that `build_model` chose to a table; arguments as in `synthesize`."""
    schema.check_reviewed()
    _check_fit_options(fit_options)
    if not {"num_steps", "num_epochs"} & set(fit_options):
        fit_options["num_steps"] = DEFAULT_STEPS
    # A mixture is no quadratic over wide probes (benchmarks/probe_width.py).
    fit_options.setdefault("probe_width", 1.0)
    public_rows = len(frame) if num_examples is None else num_examples
    table = encode(frame, schema)
    result = fit_model(
        model,
        table.values,
        table.missing,
        epsilon=epsilon,
        delta=resolve_delta(delta, public_rows),
        clip_norm=clip_norm,
        learning_rate=learning_rate,
        num_examples=num_examples,
        **fit_options,
    )
    return Twin(schema, result, model, public_rows)


def resolve_delta(delta: float | None, num_rows: int) -> float:
    """The given delta, else a tenth of 1/N: at 1/N a mechanism may publish a record outright.

    >>> resolve_delta(None, 1000), resolve_delta(1e-5, 1000)
    (0.0001, 1e-05)
    """
    if delta is not None:
        return delta
    return 0.1 / _validate.positive_int("num_examples", num_rows)


class TwinModel:
    """`synthesize` in the manner of scikit-learn.

    >>> model = TwinModel("schema", epsilon=1.0, target="infected")
    >>> model.get_params()["epsilon"]
    1.0

    Then ``model.fit(frame).sample(1000)``; the twin is ``model.twin_``.

    Args:
        schema, epsilon, options: As in `synthesize`.
    """

    def __init__(self, schema: Schema, *, epsilon: float, **options: Any) -> None:
        self.set_params(schema=schema, epsilon=epsilon, **options)

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The settings; `deep` is there for scikit-learn."""
        return dict(self._params)

    def set_params(self, **params: Any) -> Self:
        """Change settings; they hold from the next `fit` on."""
        for name in params:
            _validate.one_of("option", name, [*_OWN_OPTIONS, *_FIT_OPTIONS])
        self._params = {**getattr(self, "_params", {}), **params}
        return self

    def fit(self, frame: pd.DataFrame, y: None = None) -> Self:
        """Fit the model under differential privacy; `y` is there for scikit-learn."""
        self.twin_ = synthesize(frame, **self._params)
        return self

    def sample(self, num_rows: int | None = None, *, seed: int | None = None) -> pd.DataFrame:
        """One synthetic table, from one draw of the posterior."""
        if not hasattr(self, "twin_"):
            raise ValueError("expected a model that was fitted, got one that was not: call fit.")
        return self.twin_.sample(num_rows, seed=seed)


_OWN_OPTIONS = ["schema", "epsilon", *(synthesize.__kwdefaults__ or {})]
# Options of `dpvim.fit` that `synthesize` hands on.
_FIT_OPTIONS = [
    field.name
    for kind in (Budget, FitOptions)
    for field in dataclasses.fields(kind)
    if field.name not in {*_OWN_OPTIONS, "noise_multiplier"}
]


def _check_fit_options(options: dict[str, Any]) -> None:
    # Otherwise they would be taken for arguments of the model.
    for name in options:
        _validate.one_of("option", name, _FIT_OPTIONS)
