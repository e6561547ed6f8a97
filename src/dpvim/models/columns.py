"""The columns of a table: public knowledge of them, from which a model is made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dpvim import _validate

# A value that is spread evenly between its bounds has variance 1/12 of the range's square.
_UNIFORM_SPREAD = math.sqrt(12)
# The largest number below 2^31 in single precision.
_LARGEST_INTEGER = 2.0**31 - 128


class CategoricalColumn(NamedTuple):
    """Codes 0, ..., num_levels - 1. Two levels make it a Bernoulli."""

    name: str
    num_levels: int
    nullable: bool = False

    @property
    def smallest(self) -> int:
        return 0


class CountColumn(NamedTuple):
    r"""Counts from 0 to a public bound: Poisson, or negative binomial if overdispersed.

    The logarithm of a component's mean is m + s u with u standard normal a priori. It has m =
    log(upper) / 2 and s = max(1, log(upper) / 4): the middle of the range on the logarithmic
    scale, with its ends two standard deviations away or closer. The site holds u, so that it
    starts in the middle and is of order one whatever the bound.
    """

    name: str
    upper: int
    nullable: bool = False
    overdispersed: bool = False

    @property
    def smallest(self) -> int:
        return 0

    @property
    def log_rate_prior(self) -> tuple[float, float]:
        """Location m and scale s of the prior of the log-rate."""
        return math.log(self.upper) / 2, max(1.0, math.log(self.upper) / 4)

    def rate(self, standard_log_rate: Array) -> Array:
        loc, scale = self.log_rate_prior
        return jnp.exp(loc + scale * standard_log_rate)

    def standardised(self, values: Array) -> Array:
        """Values on the logarithmic scale, as a feature of a response."""
        return (jnp.log1p(values) / math.log1p(self.upper) - 0.5) * _UNIFORM_SPREAD


class NormalColumn(NamedTuple):
    """Numbers between public bounds; normal once standardised by the bounds, or a histogram.

    Standardised means that a value spread evenly between the bounds has mean 0 and variance 1. A
    component's mean has a standard normal prior, its scale a log-normal one. With `integral`
    sampled values are rounded. With `num_bins` a component is a histogram of so many equal bins
    instead, within which values are spread evenly.
    """

    name: str
    nullable: bool = False
    lower: float = 0.0
    upper: float = 1.0
    integral: bool = False
    num_bins: int = 0

    @property
    def smallest(self) -> float:
        return self.lower

    @property
    def _range(self) -> float:
        return float(self.upper - self.lower)

    @property
    def _exact(self) -> bool:
        """True if differences from the lower bound are taken as integers of 32 bits.

        In single precision large integers that lie close together are the same. Differences of
        bounds that are very far apart do not fit.
        """
        return self.integral and self._range < 2**31

    def standardised(self, values: Array | np.ndarray) -> Array:
        values = jnp.asarray(values)
        if self._exact and jnp.issubdtype(values.dtype, jnp.integer):
            above = (values.astype(jnp.int32) - int(self.lower)).astype(jnp.float32)
        else:
            above = values.astype(jnp.float32) - self.lower
        return (above / self._range - 0.5) * _UNIFORM_SPREAD

    def bin_of(self, values: Array) -> Array:
        unit = self.standardised(values) / _UNIFORM_SPREAD + 0.5
        return jnp.clip(jnp.floor(unit * self.num_bins), 0, self.num_bins - 1).astype(jnp.int32)

    def within_bin(self, code: Array, place: Array) -> Array:
        """Standardised values at places from 0 to 1 in bins."""
        return ((code + place) / self.num_bins - 0.5) * _UNIFORM_SPREAD

    def unstandardised(self, standardised: Array) -> Array:
        """The inverse of `standardised`, within the bounds."""
        unit = standardised / _UNIFORM_SPREAD + 0.5
        if self._exact:
            above = jnp.rint(self._range * jnp.clip(unit, 0.0, 1.0))
            whole = jnp.minimum(above, _LARGEST_INTEGER).astype(jnp.int32)
            return jnp.minimum(whole, int(self._range)) + int(self.lower)
        values = jnp.clip(self.lower + self._range * unit, self.lower, self.upper)
        if not self.integral:
            return values
        # Integers beyond 2^24 are rounded in single precision, perhaps past the bounds.
        whole = jnp.rint(jnp.clip(values, -_LARGEST_INTEGER, _LARGEST_INTEGER)).astype(jnp.int32)
        return jnp.clip(whole, int(self.lower), int(self.upper))


Column: TypeAlias = CategoricalColumn | CountColumn | NormalColumn


class Response(NamedTuple):
    """The column that is regressed on all others: its name and the kind of regression.

    * ``logistic``: a column of two levels.
    * ``poisson``: counts, or two levels as in the paper; drawn values are cut at the bound. The
      mean is sqrt(upper) at a predictor of zero, so 1 for two levels.
    * ``linear``: a normal column, on its standardised scale.
    """

    name: str
    kind: str


class Rows(NamedTuple):
    """Columns by name, as the model takes them; a missing value is the column's smallest one."""

    values: dict[str, Array]
    missing: dict[str, Array]


def num_levels(column: Column) -> int:
    """Number of levels or bins that a component has probabilities of; 0 if it has none."""
    if isinstance(column, CategoricalColumn):
        return column.num_levels
    return column.num_bins if isinstance(column, NormalColumn) else 0


def level_codes(column: Column, values: Array) -> Array:
    """The level or bin of each value."""
    return column.bin_of(values) if isinstance(column, NormalColumn) else values


def feature_names(
    columns: Sequence[Column], levels: Mapping[str, Sequence[object]] | None = None
) -> list[str]:
    """Names of the columns of `features`. They are labels: two of them may be the same.

    Args:
        columns: The columns.
        levels: Names of levels by column; codes if not given.

    >>> feature_names([CategoricalColumn("sex", 2), NormalColumn("age", nullable=True)])
    ['sex=1', 'age', 'age missing']
    """
    names = []
    for column in columns:
        if isinstance(column, CategoricalColumn):
            known = (levels or {}).get(column.name, range(column.num_levels))
            names += [f"{column.name}={level}" for level in known[1:]]
        else:
            names.append(column.name)
        if column.nullable:
            names.append(f"{column.name} missing")
    return names


class FeaturePositions(NamedTuple):
    """Positions of a column's features among those of all columns.

    Attributes:
        first: The first of those that its value determines.
        missing: The indicator of missing values; None if the column is not nullable.
    """

    first: int
    missing: int | None


def feature_positions(columns: Sequence[Column]) -> dict[str, FeaturePositions]:
    """Positions of the columns' features, in the order of `feature_names`.

    >>> feature_positions([CategoricalColumn("sex", 3), NormalColumn("age", nullable=True)])["age"]
    FeaturePositions(first=2, missing=3)
    """
    positions, end = {}, 0
    for column in columns:
        first = end
        end += column.num_levels - 1 if isinstance(column, CategoricalColumn) else 1
        positions[column.name] = FeaturePositions(first, end if column.nullable else None)
        end += column.nullable
    return positions


def level_features(num_levels: int) -> Float[np.ndarray, "levels features"]:
    """Features of each level of a column; see `features`."""
    return np.eye(num_levels, dtype=np.float32)[:, 1:] - np.float32(1 / num_levels)


def features(columns: Sequence[Column], rows: Rows) -> Float[Array, "rows features"]:
    """The design matrix that a response is regressed on.

    Indicators of all levels but the first, less their mean if levels were equally frequent; numbers
    on their standardised scale; and for columns with missing values an indicator of those, whose
    other features are zero. Coefficients of levels are differences from the first one, as usual.
    Centred features only change what the intercept stands for, and keep it apart from the others:
    optimisers are slow where many parameters must move together.
    """
    blocks = []
    for column in columns:
        values = rows.values[column.name]
        absent = rows.missing[column.name] if column.nullable else jnp.zeros(len(values), bool)
        if isinstance(column, CategoricalColumn):
            table = level_features(column.num_levels)
            block = jnp.take(table, values, axis=0, mode="fill", fill_value=0.0)
        else:
            block = column.standardised(values)[:, None]
        blocks.append(jnp.where(absent[:, None], 0.0, block))
        if column.nullable:
            blocks.append(absent[:, None].astype(jnp.float32))
    return jnp.concatenate(blocks, axis=1)


def table_features(
    columns: Sequence[Column],
    values: Mapping[str, np.ndarray],
    missing: Mapping[str, np.ndarray],
) -> Float[np.ndarray, "rows features"]:
    """`features` of a whole table, each row of which depends on that row alone, to the last bit.

    A program that XLA compiles for N rows may round some of them in another way than one for N + 1
    rows, and how many there are can be private. So this is done row by row: by indexing, and by
    NumPy's sums and products, which are correctly rounded wherever a row stands.
    """
    blocks = []
    for column in columns:
        value = values[column.name]
        if isinstance(column, CategoricalColumn):
            block = level_features(column.num_levels)[value]
        else:
            block = table_standardised(column, value)[:, None]
        if column.nullable:
            absent = missing[column.name][:, None]
            blocks += [np.where(absent, np.float32(0), block), absent.astype(np.float32)]
        else:
            blocks.append(block)
    return np.concatenate(blocks, axis=1)


def table_standardised(
    column: CountColumn | NormalColumn, values: np.ndarray
) -> Float[np.ndarray, " rows"]:
    """`standardised` values of a whole table, each of which depends on that value alone."""
    if isinstance(column, CountColumn):
        # One by one: how a vector of logarithms is rounded may depend on the place in it.
        logarithms = np.array([*map(math.log1p, values.tolist())])
        unit = logarithms / math.log1p(column.upper)
    else:
        unit = (values.astype(np.float64) - column.lower) / float(column.upper - column.lower)
    return ((unit - 0.5) * _UNIFORM_SPREAD).astype(np.float32)


def upper_count(column: Column) -> int:
    """The largest code or count of a column."""
    if isinstance(column, CategoricalColumn):
        return column.num_levels - 1
    return int(column.upper)


def check_column(column: Column) -> None:
    """Refuse a column that says nothing a model could be made from."""
    if isinstance(column, CategoricalColumn):
        ok, expected = column.num_levels >= 2, "at least 2 levels"
    elif isinstance(column, CountColumn):
        ok, expected = column.upper >= 1, "an upper bound of at least 1"
    elif isinstance(column, NormalColumn):
        ok, expected = column.lower < column.upper, "bounds with lower < upper"
        if ok and column.num_bins:
            ok, expected = column.num_bins >= 2, "at least 2 bins, or 0 for a normal"
    else:
        raise TypeError(
            "columns: expected a CategoricalColumn, CountColumn or NormalColumn each, got "
            f"{type(column).__name__}."
        )
    if not ok:
        raise ValueError(f"column {column.name!r}: expected {expected}, got {column!r}.")


def check_regression(column: Column, kind: str) -> None:
    """Refuse a column that cannot be the response of a kind of regression."""
    two_levels = isinstance(column, CategoricalColumn) and column.num_levels == 2
    suits = {
        "logistic": two_levels,
        "poisson": two_levels or isinstance(column, CountColumn),
        "linear": isinstance(column, NormalColumn),
    }
    _validate.one_of("response.kind", kind, suits)
    if not suits[kind]:
        able = [kind for kind, suited in suits.items() if suited] or ["no regression"]
        wanted = {
            "logistic": "two levels",
            "poisson": "a count, or two levels",
            "linear": "a real number",
        }
        raise ValueError(
            f"response: expected a column that suits a {kind} regression ({wanted[kind]}), got "
            f"{column!r}, which suits {' or '.join(able)}. Choose another kind or column."
        )
