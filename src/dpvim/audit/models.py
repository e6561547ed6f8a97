"""The models that are attacked, one for each way to a clipped sum, and ordinary rows for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from dpvim.models.columns import CategoricalColumn, CountColumn, NormalColumn, Response
from dpvim.models.mixture import Mixture
from dpvim.models.regression import Regression

_ROWS = 24
_LEVELS = 4


class Case(NamedTuple):
    """A model and rows for it, as its arguments.

    Attributes:
        model: A NumPyro model.
        ordinary: Rows with gradients above and below the clip norm.
        canary, opposite: Rows whose gradients are long and point away from each other.
        extra: Extreme rows that are special to this model, by name; those with an infinite value
            are called so.
        start: Values of the sites to start from.
        clip_norm: What rows are clipped to.
        max_rows_per_person: If records are persons, room for so many rows: arrays then have an axis
            of rows behind that of persons. A last one says which of them are used.
    """

    model: Callable[..., Any]
    ordinary: tuple[Any, ...]
    canary: tuple[Any, ...]
    opposite: tuple[Any, ...]
    extra: dict[str, tuple[Any, ...]]
    start: dict[str, Any]
    clip_norm: float = 0.37  # not one: a forgotten clip norm must show
    max_rows_per_person: int | None = None


def _normals(x: Any) -> None:
    mean = numpyro.sample("mean", dist.Normal(0, 1).expand([2]).to_event(1))
    scale = numpyro.sample("scale", dist.LogNormal(0, 1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("x", dist.Normal(mean, scale).to_event(1), obs=x)


def plain() -> Case:
    """Normals with a scale that is not one: gradients by autodiff, carried through a transform."""
    x = np.random.default_rng(0).normal(size=(_ROWS, 2)) * np.geomspace(0.3, 30, _ROWS)[:, None]
    return Case(
        _normals,
        (_single(x),),
        # The scale's gradients, by which the transform multiplies, have opposite signs.
        (_single([[16.0, -16.0]]),),
        (_single([[0.3, -0.2]]),),
        {"huge residual": (_single([[1e4, 1e4]]),)},
        {"mean": np.array([0.3, -0.2], np.float32), "scale": np.float32(4.0)},
    )


def persons() -> Case:
    """The same normals, with up to three rows a person; what is not used holds anything."""
    rng, most = np.random.default_rng(0), 3
    x = rng.normal(size=(_ROWS, most, 2)) * np.geomspace(0.3, 30, _ROWS)[:, None, None]
    is_used = np.arange(most) < rng.integers(1, most + 1, _ROWS)[:, None]
    long, short = [16.0, -16.0], [0.3, -0.2]

    def person(*rows: Any, used: int = most) -> tuple[Any, ...]:
        return _single([rows]), np.arange(most)[None] < used

    return Case(
        _normals,
        (_single(x), is_used),
        person(long, long, long),
        person(short, short, short),
        {
            "three rows below the clip": person(*[[0.3, 5.0]] * 3),
            "one huge row of three": person(short, [1e4, 1e4], short),
            "rows that cancel": person([40.0, 0.0], [-40.0, 0.0], short),
            "one infinite row of three": person(short, [np.inf, 0.0], short),
            "one row, the others huge": person(short, [1e4, 1e4], [-1e30, 1e30], used=1),
            "one row, the others NaN": person(short, [np.nan, 0.0], [np.inf, np.nan], used=1),
        },
        {"mean": np.array([0.3, -0.2], np.float32), "scale": np.float32(4.0)},
        max_rows_per_person=most,
    )


def table() -> Case:
    """Levels that are looked up in a table made of a simplex; levels outside say nothing."""

    def model(level: Any, x: Any) -> None:
        flat = dist.Dirichlet(np.ones(_LEVELS, np.float32))
        probs = numpyro.sample("probs", flat.expand([2]).to_event(1))
        mean = numpyro.sample("mean", dist.Normal(0, 1).expand([2]).to_event(1))
        looked_up = jnp.log(probs).T.at[level].get(mode="fill", fill_value=0.0)
        by_component = looked_up + dist.Normal(mean, 1).log_prob(x[:, None])
        with numpyro.plate("records", x.shape[0]):
            numpyro.factor("rows", jax.nn.logsumexp(by_component, axis=1))

    rng = np.random.default_rng(0)
    levels = rng.integers(-1, _LEVELS + 1, _ROWS).astype(np.int32)
    x = rng.normal(size=_ROWS) * np.geomspace(0.1, 3, _ROWS)
    return Case(
        model,
        (levels, _single(x)),
        (np.array([0], np.int32), _single([9.0])),
        (np.array([3], np.int32), _single([-9.0])),
        {
            f"level {level}": (np.array([level], np.int32), _single([0.5]))
            for level in (-(2**31), -1, 3, _LEVELS, 2**31 - 1)
        },
        {
            "probs": np.array([[0.1, 0.2, 0.3, 0.4], [0.4, 0.1, 0.3, 0.2]], np.float32),
            "mean": np.array([0.2, -0.3], np.float32),
        },
    )


def logistic() -> Case:
    """A logistic regression with an intercept."""
    X = _covariates()
    y = np.random.default_rng(1).random(_ROWS) < 0.5
    return Case(
        Regression("logistic"),
        (X, _single(y)),
        (_single([[3, -3, 1]]), _single([1])),
        (_single([[3, -3, 1]]), _single([0])),
        _tiny_or_huge() | {"only the intercept": (_single([[0, 0, 0]]), _single([1e12]))},
        _coefficients() | {"intercept": np.float32(0.2)},
    )


def poisson() -> Case:
    """A Poisson regression without an intercept, at the smallest clip norm there is.

    There products of huge outcomes and covariates whose squares underflow are above it.
    """
    X, y = _covariates() * 1e-3, np.random.default_rng(1).poisson(1.0, _ROWS)
    return Case(
        # A flat prior: what it adds to a step is noise next to such clip norms.
        Regression("poisson", intercept=False, prior_scale=100.0),
        (_single(X), _single(y)),
        (_single([[1, -1, 1]]), _single([40])),
        (_single([[1, -1, 1]]), _single([0])),
        _tiny_or_huge(),
        _coefficients(),
        clip_norm=1e-4,
    )


def linear() -> Case:
    """A linear regression, with a noise scale."""
    X = _covariates()
    y = np.random.default_rng(1).normal(size=_ROWS)
    return Case(
        Regression("linear"),
        (X, _single(y)),
        (_single([[3, -3, 1]]), _single([1.5])),
        (_single([[3, -3, 1]]), _single([-1.5])),
        _tiny_or_huge() | {"large residual": (_single([[0, 0, 0]]), _single([1e4]))},
        _coefficients() | {"intercept": np.float32(0.2), "noise_scale": np.float32(1.2)},
    )


def _covariates() -> np.ndarray:
    return _single(
        np.random.default_rng(0).normal(size=(_ROWS, 3)) * np.geomspace(0.1, 9, _ROWS)[:, None]
    )


def _coefficients() -> dict[str, Any]:
    return {"coefficients": np.array([0.1, 0.1, -0.1], np.float32)}


def _tiny_or_huge() -> dict[str, tuple[Any, ...]]:
    """Covariates and outcomes of very different sizes."""
    return {
        f"covariates {x:g}, outcome {y:g}": (_single([[x, -x, x]]), _single([y]))
        for x, y in ((1e-19, 1e30), (1e-30, 1e30), (1e25, 1.0), (3.0, 1e30))
    } | {"infinite outcome": (_single([[1, -1, 1]]), _single([np.inf]))}


def mixture() -> Case:
    """A mixture with a column of every kind, missing values and a response."""
    rng = np.random.default_rng(0)
    columns = (
        CategoricalColumn("kind", 3, nullable=True),
        CountColumn("visits", 20),
        CountColumn("claims", 50, overdispersed=True),
        NormalColumn("size", nullable=True, lower=0, upper=2),
        NormalColumn("age", num_bins=3, lower=0, upper=90),
        NormalColumn("income", lower=-1, upper=1),
    )
    model = Mixture(columns, 2, Response("income", "linear"))
    ordinary = _table_rows(
        kind=rng.integers(0, 3, _ROWS),
        visits=rng.poisson(4, _ROWS),
        claims=rng.poisson(7, _ROWS),
        size=rng.uniform(0.5, 1.5, _ROWS),
        age=rng.uniform(0, 90, _ROWS),
        income=rng.normal(scale=0.3, size=_ROWS),
        no_kind=rng.random(_ROWS) < 0.3,
        no_size=rng.random(_ROWS) < 0.3,
    )
    return Case(
        model,
        ordinary,
        _table_rows(visits=20, claims=50),
        _table_rows(visits=0, claims=0),
        {
            "nothing but levels": _table_rows(visits=4, claims=7, income=0.1),
            "all missing": _table_rows(kind=0, size=np.nan, no_kind=True, no_size=True),
            "huge counts": _table_rows(visits=2**31 - 1, claims=2**31 - 1),
            "huge number": _table_rows(size=1e6),
            "huge response": _table_rows(income=1e6),
            "infinite response": _table_rows(income=np.inf),
            "levels outside": _table_rows(kind=7, age=1e30),
        },
        _mixture_start(model),
    )


def _table_rows(**given: Any) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Arguments of the mixture; what is not given is in the middle."""
    middle = {"kind": 1, "visits": 4, "claims": 7, "size": 1.0, "age": 45.0, "income": 0.1}
    values = middle | {"no_kind": False, "no_size": False} | given
    types: dict[str, Any] = {"kind": np.int32, "visits": np.int32, "claims": np.int32}
    types |= {"no_kind": bool, "no_size": bool}
    rows = {k: np.atleast_1d(v).astype(types.get(k, np.float32)) for k, v in values.items()}
    missing = {"kind": rows.pop("no_kind"), "size": rows.pop("no_size")}
    return rows, missing


def _mixture_start(model: Mixture) -> dict[str, Any]:
    """Components that differ, so that responsibilities are not all alike."""
    rng = np.random.default_rng(2)
    start: dict[str, Any] = {}
    for name, shape in model.site_shapes.items():
        if name.endswith((".probs", ".weights")):
            start[name] = rng.dirichlet(np.full(shape[-1], 4.0), shape[:-1])
        elif name.endswith(".missing_prob"):
            start[name] = rng.uniform(0.2, 0.6, shape)
        elif name.endswith(("scale", ".concentration")):
            start[name] = rng.uniform(0.8, 1.5, shape)
        else:
            start[name] = rng.normal(scale=0.2, size=shape)
    return {name: np.asarray(value, np.float32) for name, value in start.items()}


def _single(values: Any) -> np.ndarray:
    return np.asarray(values, np.float32)
