r"""Mixtures of product distributions over tables with columns of several kinds.

Each of K components has a distribution of its own for every column, and columns are independent
given the component. Which component a record comes from is summed out:

.. math:: p(x) = \sum_k \pi_k \prod_j p_j(x_j \mid \theta_{jk}) \cdot
          p(y \mid \text{features of } x),

the last factor for a response, if there is one (section 4.2 of the paper). Weights and category
probabilities have Dirichlet(1) priors. Whether a value is missing is part of the model: a coin for
each component, with a Beta(1, 1) prior; a missing value contributes nothing else.

>>> import jax, jax.numpy as jnp
>>> model = Mixture([CategoricalColumn("sex", 2), CountColumn("visits", upper=40)], 3)
>>> [str(name) for name in model.site_shapes]
['mixture.weights', 'sex.probs', 'visits.standard_log_rate']
>>> draw = {name: jnp.full(shape, 0.5) for name, shape in model.site_shapes.items()}
>>> rows = model.sample_rows(jax.random.key(0), draw, num_rows=5)
>>> sorted(rows.values), rows.values["visits"].shape
(['sex', 'visits'], (5,))
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jaxtyping import Array, Float
from numpyro.distributions import biject_to

from dpvim import _validate
from dpvim.bridge.latent_space import LatentSpace
from dpvim.bridge.structured import StructuredModel
from dpvim.models.columns import (
    CategoricalColumn,
    Column,
    CountColumn,
    NormalColumn,
    Response,
    Rows,
    check_column,
    check_regression,
    feature_names,
    features,
    level_codes,
    num_levels,
    upper_count,
)
from dpvim.models.factorized_prior import factorized_log_prior
from dpvim.models.mixture_sum import WEIGHTS, MixtureSum
from dpvim.models.regression import GLM_FAMILIES, GlmFamily
from dpvim.models.sample_rows import draw_rows
from dpvim.privacy.clipping import ClippedSum
from dpvim.types import LogPrior, ModelError

_COMPONENT = "mixture.component"
_RECORDS = "mixture.records"
_ROWS = "mixture.rows"
# Scales of normal columns, in units of a value that is spread evenly: 95 % of the prior lies
# between 0.07 and 3.5. Narrower components would be single values.
_LOG_SCALE_PRIOR = (math.log(0.5), 1.0)
# Concentrations of negative binomials: 95 % of the prior lies between 0.4 and 19; at 19 the
# variance of a mean of 19 is twice that of a Poisson.
_LOG_CONCENTRATION_PRIOR = (1.0, 1.0)

Sites: TypeAlias = Mapping[str, Array]


@dataclasses.dataclass(frozen=True)
class Mixture(StructuredModel):
    """A NumPyro model ``(values, missing)`` of a table.

    Args:
        columns: What is publicly known about each column.
        num_components: K.
        response: A column to be regressed on the others, with an intercept and indicators of all
            levels but the first; a value that may be missing has an indicator of its own.
        prior_scale: Standard deviation of the normal prior of the response's coefficients.
        intercept_scale: The same for its intercept: rates of rare outcomes are e^-5 and less.

    The model takes the values of all columns by name, and for nullable columns where they are
    missing. Given ``num_rows`` instead it draws that many rows and returns them.
    """

    columns: Sequence[Column]
    num_components: int
    response: Response | None = None
    prior_scale: float = 1.0
    intercept_scale: float = 5.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", tuple(self.columns))
        _validate.positive_int("num_components", self.num_components)
        _validate.positive("prior_scale", self.prior_scale)
        _validate.positive("intercept_scale", self.intercept_scale)
        for column in self.columns:
            check_column(column)
        names = [column.name for column in self.columns]
        masks = [_missing_site(column.name) for column in self.nullable]
        drawn = [_draw_site(name) for name in [*names, *masks]]
        own = [_COMPONENT, _RECORDS, _ROWS, *drawn, *map(_place_site, names)]
        taken = [*names, *masks, *own, *self.site_shapes]
        if repeated := sorted({name for name in taken if taken.count(name) > 1}):
            raise ValueError(
                f"columns: expected every name once, got {', '.join(map(repr, repeated))} more "
                "often (names of sites, such as 'sex.probs', count too). Rename a column."
            )
        if self.response is not None:
            _validate.one_of("response.name", self.response.name, names)
            check_regression(self.response_column, self.response.kind)
        if not self.predictors:
            raise ValueError("columns: expected at least one besides the response, got none.")

    # -- structure ----------------------------------------------------------------------------

    @property
    def several_modes(self) -> tuple[str, ...]:
        """Sites whose posterior has several modes: components can change their places."""
        if self.num_components == 1:
            return ()
        return tuple(name for name in self.site_shapes if not self._is_of_response(name))

    def _is_of_response(self, site: str) -> bool:
        name = None if self.response is None else self.response.name
        return site in (f"{name}.coefficients", f"{name}.noise_scale")

    @property
    def predictors(self) -> list[Column]:
        """The columns that are not the response."""
        name = None if self.response is None else self.response.name
        return [column for column in self.columns if column.name != name]

    @property
    def nullable(self) -> list[Column]:
        """The columns with missing values, the response among them."""
        return [column for column in self.columns if column.nullable]

    @property
    def response_column(self) -> Column:
        """The column that is regressed on the others."""
        return next(c for c in self.columns if self.response and c.name == self.response.name)

    @property
    def response_family(self) -> GlmFamily:
        """The distribution of the response given its predictor."""
        assert self.response is not None
        return GLM_FAMILIES[self.response.kind]

    @property
    def log_mean_offset(self) -> float:
        """The offset of a Poisson response's predictor."""
        if self.response is None or self.response.kind != "poisson":
            return 0.0
        return math.log(upper_count(self.response_column)) / 2

    @property
    def feature_names(self) -> list[str]:
        """Names of the coefficients of the response."""
        return ["intercept", *feature_names(self.predictors)]

    @property
    def dim(self) -> int:
        """Number of unconstrained parameters."""
        return sum(
            math.prod(biject_to(prior.support).inverse_shape(prior.shape()))
            for prior in self._priors().values()
        )

    @property
    def site_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the latent sites, in the model's order."""
        return {name: prior.shape() for name, prior in self._priors().items()}

    def _priors(self) -> dict[str, dist.Distribution]:
        count = self.num_components

        def each(prior: dist.Distribution) -> dist.Distribution:
            return prior.expand([count]).to_event(1)

        def flat(size: int) -> dist.Distribution:
            return dist.Dirichlet(np.ones(size, np.float32))  # JAX would compile one for each size

        priors = {WEIGHTS: flat(count)} if count > 1 else {}
        for column in self.predictors:
            name = column.name
            if levels := num_levels(column):
                priors[f"{name}.probs"] = each(flat(levels))
            elif isinstance(column, CountColumn):
                priors[f"{name}.standard_log_rate"] = each(dist.Normal(0, 1))
                if column.overdispersed:
                    prior = dist.LogNormal(*_LOG_CONCENTRATION_PRIOR)
                    priors[f"{name}.concentration"] = each(prior)
            else:
                priors[f"{name}.mean"] = each(dist.Normal(0, 1))
                priors[f"{name}.scale"] = each(dist.LogNormal(*_LOG_SCALE_PRIOR))
        for column in self.nullable:
            priors[f"{column.name}.missing_prob"] = each(dist.Beta(1, 1))
        if self.response is not None:
            scales = np.full(len(self.feature_names), self.prior_scale, np.float32)
            scales[0] = self.intercept_scale
            priors[f"{self.response.name}.coefficients"] = dist.Normal(0, scales).to_event(1)
            if self.response_family.has_noise:
                priors[f"{self.response.name}.noise_scale"] = dist.LogNormal(*_LOG_SCALE_PRIOR)
        return priors

    # -- the model ----------------------------------------------------------------------------

    def __call__(
        self, values: Any = None, missing: Any = None, *, num_rows: int | None = None
    ) -> Rows | None:
        sites = {name: numpyro.sample(name, prior) for name, prior in self._priors().items()}
        if values is None:
            if num_rows is None:
                raise ModelError(
                    "expected the columns' values, or num_rows to draw rows; got none."
                )
            return self._draw_rows(sites, num_rows)
        rows = self.batch_of(values, missing)
        log_probs = self.log_prob(sites, rows)
        with numpyro.plate(_RECORDS, log_probs.shape[0]):
            numpyro.factor(_ROWS, log_probs)
        return None

    def batch_of(self, values: Any, missing: Any = None) -> Rows:
        """The arguments of the model, checked by name."""
        rows = Rows(dict(values), dict(missing or {}))
        _check_names("values", rows.values, self.columns)
        _check_names("missing", rows.missing, self.nullable)
        return rows

    @functools.partial(jax.jit, static_argnums=0)  # one program, however it is called
    def log_prob(self, sites: Sites, rows: Rows) -> Float[Array, " rows"]:
        """Log-probability of each row, with the component summed out."""
        log_weights = jnp.log(sites[WEIGHTS]) if self.num_components > 1 else jnp.zeros(1)
        joint = log_weights + sum(
            self._zero_if_missing(column, rows, self._column_log_prob(column, sites, rows))
            for column in self.predictors
        )
        for column in self.nullable:
            coin = dist.Bernoulli(probs=sites[f"{column.name}.missing_prob"])
            joint = joint + coin.log_prob(rows.missing[column.name][:, None].astype(jnp.int32))
        total = jax.nn.logsumexp(joint, axis=1)
        if self.response is None:
            return total
        y = self.response_values(rows)
        log_prob = self._response_distribution(sites, rows).log_prob(y)
        return total + self._zero_if_missing(self.response_column, rows, log_prob)

    def _column_log_prob(self, column: Column, sites: Sites, rows: Rows) -> Array:
        """Log-probabilities [rows, K] of a column, as if no value were missing."""
        values = rows.values[column.name]
        if num_levels(column):
            return jnp.log(sites[f"{column.name}.probs"]).T[level_codes(column, values)]
        if isinstance(column, NormalColumn):
            values = column.standardised(values)
        return _component_distribution(column, sites).log_prob(values[:, None])

    def _zero_if_missing(self, column: Column, rows: Rows, log_prob: Array) -> Array:
        if not column.nullable:
            return log_prob
        absent = rows.missing[column.name]
        return jnp.where(absent.reshape(-1, *(1,) * (log_prob.ndim - 1)), 0.0, log_prob)

    # -- the response -------------------------------------------------------------------------

    def response_values(self, rows: Rows) -> Array:
        """The response on the scale of its regression."""
        values = rows.values[self.response_column.name]
        if isinstance(self.response_column, NormalColumn):
            return self.response_column.standardised(values)
        return values

    def features(self, rows: Rows) -> Float[Array, "rows features"]:
        """The response's design matrix; see `feature_names`."""
        block = features(self.predictors, rows)
        return jnp.append(jnp.ones((len(block), 1)), block, axis=1)

    def _response_distribution(self, sites: Sites, rows: Rows) -> dist.Distribution:
        name = self.response_column.name
        predictor = self.log_mean_offset + self.features(rows) @ sites[f"{name}.coefficients"]
        return self.response_family.distribution(predictor, sites.get(f"{name}.noise_scale"))

    # -- drawing rows -------------------------------------------------------------------------

    def sample_rows(self, key: Array, params: Sites, num_rows: int) -> Rows:
        """Rows from the model with the sites' values fixed at one draw of the posterior.

        Args:
            key: For all that is drawn.
            params: A value for every site, for instance an entry of ``posterior.sample()``.
            num_rows: How many rows.

        Guarantees:
            All values lie in their columns' domains: what falls outside is put on the bound.
        """
        sites = {name: jnp.asarray(params[name], jnp.float32) for name in self.site_shapes}
        values, missing = draw_rows(self, key, sites, num_rows)
        # Compiled functions sort the names.
        return Rows(
            {column.name: values[column.name] for column in self.columns},
            {column.name: missing[column.name] for column in self.nullable},
        )

    def _draw_rows(self, sites: Sites, num_rows: int) -> Rows:
        rows = Rows({}, {})
        with numpyro.plate(_RECORDS, num_rows):
            component = jnp.zeros(num_rows, jnp.int32)
            if self.num_components > 1:
                component = numpyro.sample(_COMPONENT, dist.Categorical(probs=sites[WEIGHTS]))
            for column in self.nullable:
                coin = dist.Bernoulli(probs=sites[f"{column.name}.missing_prob"][component])
                mask = _missing_site(column.name)
                drawn = numpyro.sample(_draw_site(mask), coin).astype(bool)
                rows.missing[column.name] = numpyro.deterministic(mask, drawn)
            for column in self.predictors:
                source = _component_distribution(column, sites, lambda leaf: leaf[component])
                drawn = numpyro.sample(_draw_site(column.name), source)
                if isinstance(column, NormalColumn) and column.num_bins:
                    place = numpyro.sample(_place_site(column.name), dist.Uniform())
                    drawn = column.within_bin(drawn, place)
                rows.values[column.name] = self._into_domain(column, drawn, rows)
            if self.response is not None:
                column = self.response_column
                source = self._response_distribution(sites, rows)
                drawn = numpyro.sample(_draw_site(column.name), source)
                rows.values[column.name] = self._into_domain(column, drawn, rows)
        order = [column.name for column in self.columns]
        values = {name: numpyro.deterministic(name, rows.values[name]) for name in order}
        return Rows(values, rows.missing)

    def _into_domain(self, column: Column, drawn: Array, rows: Rows) -> Array:
        """Put drawn values into the domain, and the smallest value where they are missing."""
        if isinstance(column, NormalColumn):
            values = column.unstandardised(drawn)
        else:
            values = jnp.clip(drawn, 0, upper_count(column)).astype(jnp.int32)
        if not column.nullable:
            return values
        absent = rows.missing[column.name]
        return jnp.where(absent, jnp.asarray(column.smallest, values.dtype), values)

    # -- the clipped sum ----------------------------------------------------------------------

    def clipped_sum_for(self, space: LatentSpace) -> ClippedSum:
        """Gathers from tables instead of a gradient for each record; see `mixture_sum`."""
        return MixtureSum(self, space)

    def log_prior_for(self, space: LatentSpace) -> LogPrior:
        """All priors at once, as a sum over coordinates."""
        return factorized_log_prior([(site, self._priors()[site.name]) for site in space.sites])


def _component_distribution(
    column: Column, sites: Sites, pick: Callable[[Array], Array] = lambda leaf: leaf
) -> dist.Distribution:
    """A column's distribution in each component, or in the picked ones."""
    name = column.name
    if isinstance(column, CategoricalColumn) or num_levels(column):
        return dist.Categorical(probs=pick(sites[f"{name}.probs"]))
    if isinstance(column, NormalColumn):
        return dist.Normal(pick(sites[f"{name}.mean"]), pick(sites[f"{name}.scale"]))
    rate = column.rate(pick(sites[f"{name}.standard_log_rate"]))
    if column.overdispersed:
        return dist.NegativeBinomial2(rate, pick(sites[f"{name}.concentration"]))
    return dist.Poisson(rate)


def _draw_site(name: str) -> str:
    """The site of a value as drawn, before it is put into its domain."""
    return f"{name}.draw"


def _place_site(name: str) -> str:
    """The site of a value's place in its bin."""
    return f"{name}.place"


def _missing_site(name: str) -> str:
    """The site of a column's mask of missing values."""
    return f"{name}.missing"


def _check_names(what: str, given: Mapping[str, Any], columns: Sequence[Column]) -> None:
    expected = {column.name for column in columns}
    if set(given) != expected:
        wrong = sorted(expected ^ set(given))
        raise ModelError(
            f"{what}: expected arrays for the columns {sorted(expected)}, got {sorted(given)}; "
            f"{', '.join(map(repr, wrong))}: not in both. Name each column once."
        )
