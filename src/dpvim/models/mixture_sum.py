r"""The clipped gradient sum of a mixture, by table look-ups.

With responsibilities r_k of the components for a record, the gradient of its log-probability by
the raw parameters u of column j in component k is :math:`r_k\, d \log p_{jk}(x_j) / du`. For a
column with levels the second factor is a row of a table that all records share. With z the
fractions that stick-breaking takes off (`biject_to(simplex)`: z = sigmoid(u - log(levels left))),

.. math:: \log p[c] = \log z_c + \sum_{i<c} \log(1 - z_i), \qquad
          \frac{d \log p[c]}{du_i} = [i = c] (1 - z_i) - [i < c] z_i.

So the square of a record's norm is :math:`\sum_k r_k^2 \sum_j n_{jk}[x_j]` with a table n of
weighted squared norms, the sum of the clipped records is a table of :math:`\sum_x f_x r_{xk}` for
each level, and the Jacobian is applied once to that table. Missing values are levels of a column
of their own (missing or present), and bins of a histogram are levels. What depends on numbers
rather than levels (counts, normals, weights of the components) is formed for each record, K numbers
for each parameter. The response's gradient is a number for each record, the score, times features,
most of which a level determines.

Why no record exceeds the bound. Let a record's row be what is in fact added up for it, divided by
its factor f. Its coordinates are (a) numbers held in single precision, (b) products of one
r_k and one table entry (1 - z_i or z_i), (c) products of the score and one feature, with a
coordinate for each feature (two features in one would add up to more than is measured). All these
operands are rounded before either the norm or the sum is formed, and both use the same rounded
operands: errors in them (of a responsibility, say) change the row, not the relation of its norm
to it. The squared norm is a sum of d terms, one for each coordinate and none negative: nothing
cancels. A sum of d terms takes at most d - 1 roundings on the way of any term, in any order, as
adding a zero is exact; squares, products, weights and the root are fewer than 16 more. So the norm
is off by at most (d + 16) 2^-24 of itself, half of which stems from the sum, and factor and
products ``f r_k`` by two more: within the (2 d + 32) 2^-24 that `lattice.Lattice` allows for.
Squares of r_k that would underflow are taken as larger ones. The sums are in double precision: a
record's share passes at most B - 1 additions (again, adding zeros is exact) and one product, as
`Lattice` has it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn import log_sigmoid, sigmoid
from jax.scipy.special import betaln, digamma
from jaxtyping import Array, Float, Int

from dpvim.bridge.latent_space import LatentSpace
from dpvim.bridge.structured import matmul
from dpvim.models.columns import (
    CategoricalColumn,
    CountColumn,
    FeaturePlaces,
    NormalColumn,
    Rows,
    feature_places,
    level_features,
    num_levels,
)
from dpvim.models.columns import codes as codes_of
from dpvim.privacy.clipping import clamp, clip_factors, finite_or_nan, materialize, scales_of
from dpvim.types import Latent, Mask, Weights

if TYPE_CHECKING:
    from dpvim.models.mixture import Mixture

WEIGHTS = "mixture.weights"
# Squares of smaller responsibilities could underflow while what they are multiplied with is large.
_SMALLEST = 2.0**-60
# Up to so many levels a product with indicators is faster than reading rows of a table.
_MOST_INDICATORS = 512


class MixtureSum:
    """The clipped sum of a mixture, for batches as `Mixture.batch_of` returns them.

    Arrays have the records, or the components, along their last axis.
    """

    def __init__(self, model: Mixture, space: LatentSpace) -> None:
        self._model = model
        self._space = space
        self._columns = {column.name: column for column in model.predictors}
        self._blocks = _blocks(model)
        self._levels = _Sticks([block.num_levels for block in self._blocks])
        self._weights = _Sticks([model.num_components])
        self._response = None if model.response is None else _ResponsePart(model, self._blocks)

    def __call__(
        self,
        latent: Latent,
        weights: Weights,
        batch: Rows,
        is_padding: Mask,
        bound: float,
    ) -> Float[Array, " d"]:
        scales = scales_of(weights)
        if scales is None:
            scales = jnp.ones_like(latent)
        raw, scale = self._space.unpack(latent), self._space.unpack(scales)
        count = self._model.num_components

        # Tables of all levels, and what they hold for each record.
        codes = self._codes(batch)
        fractions = self._levels.fractions(self._to_sticks(raw))
        tables = [
            self._levels.log_probs(fractions),
            self._levels.squared_norms(fractions, self._to_sticks(scale)),
        ]
        if self._response is not None:
            tables.append(self._response.tables(raw, scale))
        found = self._look_up(jnp.concatenate(tables, axis=1), codes, is_padding.size)

        # What is formed for each record: its norm and the sum must see the same numbers.
        def per_record() -> tuple[Array, dict[str, Array], _Score | None]:
            return self._per_record(found, raw, batch)

        resp, rows, score = materialize(per_record, is_padding)

        # Norms.
        floored = jnp.where(resp < _SMALLEST, _SMALLEST, resp)  # a maximum might pass over a NaN
        squares = jnp.sum(floored**2 * found[count : 2 * count], axis=0)
        if self._response is not None and score is not None:
            squares = squares + self._response.norms(found[-1], score, scale) ** 2
        for name, row in rows.items():
            squares = squares + jnp.sum((row * scale[name].reshape(-1, 1)) ** 2, axis=0)
        factors = clip_factors(jnp.sqrt(squares), is_padding, bound)

        # Sums, in double precision.
        numbers = resp if score is None else jnp.append(resp, score.numbers[None], axis=0)
        numbers = jnp.where(factors > 0, factors * numbers, 0.0)
        sums = {name: _sum(factors, row) for name, row in rows.items()}
        by_level = self._by_level(numbers, codes)
        with jax.enable_x64(True):
            sums |= self._from_sticks(self._levels.pulled_back(fractions, by_level[:, :count]))
            if self._response is not None and score is not None:
                sums |= self._response.sums(by_level[:, count], numbers[count], score.features)
            total = self._space.pack(
                {site.name: sums[site.name].reshape(site.raw_shape) for site in self._space.sites}
            )
            return jnp.where(scales > 0, total, 0.0)

    def _per_record(
        self, found: Float[Array, "t batch"], raw: dict[str, Array], batch: Rows
    ) -> tuple[Float[Array, "k batch"], dict[str, Float[Array, "m batch"]], _Score | None]:
        """Responsibilities, rows of coordinates by site, and the response's score."""
        count = self._model.num_components
        logits, rows = found[:count], dict[str, Array]()
        for column in self._model.predictors:
            if isinstance(column, CategoricalColumn) or num_levels(column):
                continue
            part = _number_part(column, raw, batch)
            logits = logits + part.log_prob
            rows |= part.derivatives
        weights = raw[WEIGHTS][:, None] if count > 1 else jnp.zeros((0, 1))
        shares = self._weights.fractions(weights)
        resp = jax.nn.softmax(logits + self._weights.log_probs(shares), axis=0)
        rows = {name: resp * derivative for name, derivative in rows.items()}
        if count > 1:
            rows[WEIGHTS] = matmul(self._weights.jacobian(shares), resp)
        if self._response is None:
            return resp, rows, None
        score, more_rows = self._response.score(found[2 * count], raw, batch)
        return resp, rows | more_rows, score

    # -- levels -------------------------------------------------------------------------------

    def _codes(self, batch: Rows) -> list[Int[Array, " batch"]]:
        """For each block the index of a record's level among all levels; the last is for none."""
        codes = []
        for block, first in zip(self._blocks, self._levels.first, strict=True):
            absent = batch.missing.get(block.column, False)
            if block.is_coin:
                codes.append(jnp.where(absent, first, first + 1))
            else:
                code = codes_of(self._columns[block.column], batch.values[block.column])
                known = (code >= 0) & (code < block.num_levels) & ~jnp.asarray(absent)
                codes.append(jnp.where(known, first + code, self._levels.num_levels))
        return codes

    def _look_up(
        self, table: Float[Array, "levels t"], codes: list[Int[Array, " batch"]], batch_size: int
    ) -> Float[Array, "t batch"]:
        """Sums of the table's rows over the levels that a record has."""
        if self._levels.num_levels > _MOST_INDICATORS:
            padded = jnp.append(table, jnp.zeros((1, table.shape[1])), axis=0)
            return sum((padded[code] for code in codes[1:]), start=padded[codes[0]]).T
        indicators = [
            code == np.arange(first, first + block.num_levels)[:, None]
            for code, block, first in zip(codes, self._blocks, self._levels.first, strict=True)
        ]
        one_hot = jnp.concatenate([jnp.zeros((0, batch_size)), *indicators])
        return matmul(table.T, one_hot)

    def _by_level(
        self, numbers: Float[Array, "t batch"], codes: list[Int[Array, " batch"]]
    ) -> Float[Array, "levels t"]:
        """Sums of the numbers over the records that have a level."""
        with jax.enable_x64(True):
            rows = numbers.T.astype(jnp.float64)
            sums = jnp.zeros((self._levels.num_levels + 1, rows.shape[1]), jnp.float64)
            for code in codes:
                sums = sums.at[code].add(rows)
            return sums[:-1]

    def _to_sticks(self, raw: dict[str, Array]) -> Float[Array, "sticks k"]:
        count = self._model.num_components
        sticks = [raw[block.site].reshape(count, -1).T for block in self._blocks]
        return jnp.concatenate([jnp.zeros((0, count)), *sticks])

    def _from_sticks(self, sticks: Float[Array, "sticks k"]) -> dict[str, Array]:
        ends = np.cumsum([block.num_levels - 1 for block in self._blocks])
        parts = jnp.split(sticks, ends)[:-1]  # nothing is left behind the last end
        return {block.site: part.T for block, part in zip(self._blocks, parts, strict=True)}


class _Block(NamedTuple):
    """A column with levels, or the coin that says whether a value of a column is missing.

    The levels of a coin are missing and present, in this order.
    """

    column: str
    site: str
    num_levels: int
    is_coin: bool


def _blocks(model: Mixture) -> list[_Block]:
    levelled = [column for column in model.predictors if num_levels(column)]
    return [
        *(_Block(c.name, f"{c.name}.probs", num_levels(c), is_coin=False) for c in levelled),
        *(_Block(c.name, f"{c.name}.missing_prob", 2, is_coin=True) for c in model.nullable),
    ]


class _Fractions(NamedTuple):
    """Stick-breaking in the form that everything follows from."""

    sticks: Float[Array, "sticks k"]
    taken: Float[Array, "sticks k"]
    left: Float[Array, "sticks k"]


class _Sticks:
    """Stick-breaking for groups of levels, side by side.

    Level c takes a part of what the levels before it have left, and the last one takes the rest.
    """

    def __init__(self, sizes: list[int]) -> None:
        self.num_levels = sum(sizes)
        self.first = np.cumsum([0, *sizes])[:-1]
        self._takes = np.zeros((self.num_levels - len(sizes), self.num_levels), np.float32)
        self._leaves = np.zeros_like(self._takes)
        row = 0
        for first, size in zip(self.first, sizes, strict=True):
            for level in range(first, first + size - 1):
                self._takes[row, level] = 1
                self._leaves[row, level + 1 : first + size] = 1
                row += 1
        remaining = [np.arange(size - 1, 0, -1) for size in sizes]
        self._log_remaining = np.log(np.concatenate([np.zeros(0), *remaining])).astype(np.float32)

    def fractions(self, raw: Float[Array, "sticks k"]) -> _Fractions:
        sticks = raw - self._log_remaining[:, None]
        return _Fractions(sticks, _no_nan(sigmoid(sticks)), _no_nan(sigmoid(-sticks)))

    def log_probs(self, fractions: _Fractions) -> Float[Array, "levels k"]:
        return self._accumulate(log_sigmoid(fractions.sticks), log_sigmoid(-fractions.sticks))

    def squared_norms(
        self, fractions: _Fractions, scale: Float[Array, "sticks k"]
    ) -> Float[Array, "levels k"]:
        """Squared norms of the derivatives of the levels' log-probabilities, times scale."""
        return self._accumulate((scale * fractions.left) ** 2, (scale * fractions.taken) ** 2)

    def jacobian(self, fractions: _Fractions) -> Float[Array, "sticks levels"]:
        """Derivatives of the levels' log-probabilities, for fractions with k = 1."""
        return fractions.left * self._takes - fractions.taken * self._leaves

    def pulled_back(
        self, fractions: _Fractions, gradient: Float[Array, "levels n"]
    ) -> Float[Array, "sticks n"]:
        """A gradient by the levels' log-probabilities, carried to the raw values."""
        own = matmul(self._takes.astype(gradient.dtype), gradient)
        later = matmul(self._leaves.astype(gradient.dtype), gradient)
        return own * fractions.left - later * fractions.taken

    def _accumulate(self, taking: Array, leaving: Array) -> Float[Array, "levels k"]:
        matrix = np.concatenate([self._takes, self._leaves]).T
        return matmul(matrix, jnp.concatenate([taking, leaving]))


class _Part(NamedTuple):
    """Log-probability [K, batch] of a column and its derivatives by the raw values of sites."""

    log_prob: Float[Array, "k batch"]
    derivatives: dict[str, Float[Array, "k batch"]]


def _number_part(column: CountColumn | NormalColumn, raw: dict[str, Array], batch: Rows) -> _Part:
    """A column of numbers; constants that all components share are left out."""
    values = batch.values[column.name]
    if isinstance(column, NormalColumn):
        part = _normal_part(column, raw, column.standardised(values))
    elif column.overdispersed:
        part = _negative_binomial_part(column, raw, values.astype(jnp.float32))
    else:
        part = _poisson_part(column, raw, values.astype(jnp.float32))
    part = part._replace(derivatives=jax.tree.map(clamp, part.derivatives))
    if not column.nullable:
        return part
    absent = batch.missing[column.name]
    return jax.tree.map(lambda leaf: jnp.where(absent, 0.0, leaf), part)


def _normal_part(column: NormalColumn, raw: dict[str, Array], values: Array) -> _Part:
    log_scale = raw[f"{column.name}.scale"][:, None]
    precision = jnp.exp(-log_scale)
    residual = (values - raw[f"{column.name}.mean"][:, None]) * precision
    return _Part(
        -0.5 * residual**2 - log_scale,
        {f"{column.name}.mean": residual * precision, f"{column.name}.scale": residual**2 - 1},
    )


def _poisson_part(column: CountColumn, raw: dict[str, Array], values: Array) -> _Part:
    site = f"{column.name}.standard_log_rate"
    loc, scale = column.log_rate_prior
    log_rate = loc + scale * raw[site][:, None]
    rate = jnp.exp(log_rate)
    return _Part(values * log_rate - rate, {site: scale * (values - rate)})


def _negative_binomial_part(column: CountColumn, raw: dict[str, Array], values: Array) -> _Part:
    site, concentration = f"{column.name}.standard_log_rate", f"{column.name}.concentration"
    loc, scale = column.log_rate_prior
    log_mean, log_size = loc + scale * raw[site][:, None], raw[concentration][:, None]
    mean, size = jnp.exp(log_mean), jnp.exp(log_size)
    # size / (size + mean) and mean / (size + mean), by their logarithms
    log_stop, log_go = log_sigmoid(log_size - log_mean), log_sigmoid(log_mean - log_size)
    excess = (values - mean) * jnp.exp(log_stop)
    slope = digamma(values + size) - digamma(size) + log_stop
    # By the beta function: logarithms of gamma functions are larger than their difference.
    log_choices = -betaln(size, values + 1) - jnp.log(values + size)
    return _Part(
        log_choices + size * log_stop + values * log_go,
        {site: scale * excess, concentration: size * slope - excess},
    )


class _Score(NamedTuple):
    """The response's part of a record's gradient: a number times the features.

    Only features that are no indicators of levels are here, the intercept's first.
    """

    numbers: Float[Array, " batch"]
    features: Float[Array, "m batch"]


class _ResponsePart:
    """A regression on indicators of levels and on a few numbers."""

    def __init__(self, model: Mixture, blocks: list[_Block]) -> None:
        self._model = model
        self._site = f"{model.response_column.name}.coefficients"
        self._noise_site = f"{model.response_column.name}.noise_scale"
        self._numeric = [c for c in model.predictors if not isinstance(c, CategoricalColumn)]
        # By place: names of features are labels, of which two may be the same. Two features in one
        # place would have a larger norm than is measured.
        places = feature_places(model.predictors)
        # Levels of categories say what the features are; bins of numbers do not.
        numbers = {column.name for column in self._numeric}
        self._of_levels = _features_of_levels(blocks, places, numbers, len(model.feature_names))
        self._of_numbers = np.array([0, *(1 + places[c.name].first for c in self._numeric)], int)

    def tables(self, raw: dict[str, Array], scale: dict[str, Array]) -> Float[Array, "levels 2"]:
        """For each level its share of the predictor, and its features' squared weighted norm."""
        shares = matmul(self._of_levels, raw[self._site][:, None])
        norms = matmul(self._of_levels**2, scale[self._site][:, None] ** 2)
        return jnp.append(shares, norms, axis=1)

    def score(
        self, by_levels: Float[Array, " batch"], raw: dict[str, Array], batch: Rows
    ) -> tuple[_Score, dict[str, Float[Array, "1 batch"]]]:
        """The score, and the derivative by the noise's scale if there is one."""
        model = self._model
        features = self._features(batch)
        coefficients = raw[self._site][self._of_numbers]
        predictor = by_levels + coefficients @ features + model.log_mean_offset
        noise_scale = jnp.exp(raw[self._noise_site]) if model.outcome.has_noise else None
        y = model.response_values(batch).astype(jnp.float32)
        score = model.outcome.score(predictor, noise_scale, y)
        score = jax.tree.map(finite_or_nan, score)
        if model.response_column.nullable:
            absent = batch.missing[model.response_column.name]
            score = jax.tree.map(lambda a: jnp.where(absent, 0.0, a), score)
        rows = {} if score.noise is None else {self._noise_site: score.noise[None]}
        return _Score(score.predictor, features), rows

    def norms(
        self, by_levels: Float[Array, " batch"], score: _Score, scale: dict[str, Array]
    ) -> Float[Array, " batch"]:
        scaled = score.features * scale[self._site][self._of_numbers][:, None]
        return score.numbers * jnp.sqrt(by_levels + jnp.sum(scaled**2, axis=0))

    def sums(
        self,
        by_level: Float[Array, " levels"],
        numbers: Float[Array, " batch"],
        features: Float[Array, "m batch"],
    ) -> dict[str, Array]:
        from_levels = matmul(self._of_levels.T.astype(float), by_level[:, None])
        places = np.eye(len(self._of_levels.T))[:, self._of_numbers]
        from_numbers = matmul(places, _sum(numbers, features)[:, None])
        return {self._site: (from_levels + from_numbers)[:, 0]}

    def _features(self, batch: Rows) -> Float[Array, "m batch"]:
        y = batch.values[self._model.response_column.name]
        features = [jnp.ones(y.shape[0])]
        for column in self._numeric:
            values = column.standardised(batch.values[column.name])
            features.append(jnp.where(batch.missing.get(column.name, False), 0.0, values))
        return jnp.stack(features)


def _features_of_levels(
    blocks: list[_Block],
    places: dict[str, FeaturePlaces],
    numbers: set[str],
    num_features: int,
) -> Float[np.ndarray, "levels features"]:
    """For each level of all blocks the features that a record gets from it; intercept first."""
    rows = []
    for block in blocks:
        row = np.zeros((block.num_levels, num_features), np.float32)
        place = places.get(block.column)  # the response's own missing values are no feature
        if place is not None and block.is_coin:
            assert place.missing is not None
            row[0, 1 + place.missing] = 1
        elif place is not None and block.column not in numbers:
            first = 1 + place.first
            row[:, first : first + block.num_levels - 1] = level_features(block.num_levels)
        rows.append(row)
    return np.concatenate([np.zeros((0, num_features), np.float32), *rows])


def _sum(factors: Float[Array, " batch"], rows: Float[Array, "m batch"]) -> Float[Array, " m"]:
    """Rows times factors, summed in double precision; what has factor zero may be anything."""
    with jax.enable_x64(True):
        safe = jnp.where(factors != 0, rows, 0.0)
        return matmul(safe.astype(jnp.float64), factors.astype(jnp.float64))


def _no_nan(numbers: Array) -> Array:
    """With a latent that is not a number no record counts; the sum is still to be zero."""
    return jnp.where(jnp.isnan(numbers), 0.0, numbers)
