"""The response of a mixture: its share of a record's norm and of the clipped sum.

The gradient of a record is a number, the score, times its features, most of which a level
determines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dpvim.bridge.structured import matmul
from dpvim.models.columns import (
    CategoricalColumn,
    FeaturePositions,
    Rows,
    feature_positions,
    level_features,
)
from dpvim.models.level_tables import LevelBlock
from dpvim.privacy.clipping import finite_or_nan

if TYPE_CHECKING:
    from dpvim.models.mixture import Mixture


class ResponseGradient(NamedTuple):
    """The response's part of a record's gradient: the score times the features.

    Only features that are no indicators of levels are here, the intercept's first.
    """

    score: Float[Array, " batch"]
    features: Float[Array, "m batch"]


class ResponseTerm:
    """A regression on indicators of levels and on a few numbers."""

    def __init__(self, model: Mixture, blocks: list[LevelBlock]) -> None:
        self._model = model
        self._site = f"{model.response_column.name}.coefficients"
        self._noise_site = f"{model.response_column.name}.noise_scale"
        self._numeric = [c for c in model.predictors if not isinstance(c, CategoricalColumn)]
        # By position: names of features are labels, of which two may be the same. Two features in
        # one position would have a larger norm than is measured.
        positions = feature_positions(model.predictors)
        # Levels of categories say what the features are; bins of numbers do not.
        numbers = {column.name for column in self._numeric}
        self._of_levels = _features_of_levels(blocks, positions, numbers, len(model.feature_names))
        self._of_numbers = np.array([0, *(1 + positions[c.name].first for c in self._numeric)], int)

    def tables(self, raw: dict[str, Array], scale: dict[str, Array]) -> Float[Array, "levels 2"]:
        """For each level its share of the predictor, and its features' squared weighted norm."""
        shares = matmul(self._of_levels, raw[self._site][:, None])
        norms = matmul(self._of_levels**2, scale[self._site][:, None] ** 2)
        return jnp.append(shares, norms, axis=1)

    def gradient(
        self, by_levels: Float[Array, " batch"], raw: dict[str, Array], batch: Rows
    ) -> tuple[ResponseGradient, dict[str, Float[Array, "1 batch"]]]:
        """Score and features, and the derivative by the noise's scale if there is one.

        Args:
            by_levels: The predictor's share that comes from levels.
            raw: Raw values of the sites.
            batch: Records.
        """
        model = self._model
        features = self._features(batch)
        coefficients = raw[self._site][self._of_numbers]
        predictor = by_levels + coefficients @ features + model.log_mean_offset
        noise_scale = jnp.exp(raw[self._noise_site]) if model.response_family.has_noise else None
        y = model.response_values(batch).astype(jnp.float32)
        score = model.response_family.score(predictor, noise_scale, y)
        score = jax.tree.map(finite_or_nan, score)
        if model.response_column.nullable:
            absent = batch.missing[model.response_column.name]
            score = jax.tree.map(lambda a: jnp.where(absent, 0.0, a), score)
        rows = {} if score.noise is None else {self._noise_site: score.noise[None]}
        return ResponseGradient(score.predictor, features), rows

    def norms(
        self, by_levels: Float[Array, " batch"], gradient: ResponseGradient, scale: dict[str, Array]
    ) -> Float[Array, " batch"]:
        """Weighted norms, with the score's sign, from the squared norms of features of levels."""
        scaled = gradient.features * scale[self._site][self._of_numbers][:, None]
        return gradient.score * jnp.sqrt(by_levels + jnp.sum(scaled**2, axis=0))

    def sums(
        self, by_level: Float[Array, " levels"], by_number: Float[Array, " m"]
    ) -> dict[str, Float[Array, " features"]]:
        """The clipped sum of the coefficients' gradients.

        Args:
            by_level: Sums of clipped scores over the records that have a level.
            by_number: Sums of clipped scores times numeric features.
        """
        from_levels = matmul(self._of_levels.T.astype(float), by_level[:, None])
        positions = np.eye(len(self._of_levels.T))[:, self._of_numbers]
        from_numbers = matmul(positions, by_number[:, None])
        return {self._site: (from_levels + from_numbers)[:, 0]}

    def _features(self, batch: Rows) -> Float[Array, "m batch"]:
        y = batch.values[self._model.response_column.name]
        features = [jnp.ones(y.shape[0])]
        for column in self._numeric:
            values = column.standardised(batch.values[column.name])
            features.append(jnp.where(batch.missing.get(column.name, False), 0.0, values))
        return jnp.stack(features)


def _features_of_levels(
    blocks: list[LevelBlock],
    positions: dict[str, FeaturePositions],
    numbers: set[str],
    num_features: int,
) -> Float[np.ndarray, "levels features"]:
    """For each level of all blocks the features that a record gets from it; intercept first."""
    rows = []
    for block in blocks:
        row = np.zeros((block.num_levels, num_features), np.float32)
        position = positions.get(block.column)  # the response's own missing values are no feature
        if position is not None and block.is_coin:
            assert position.missing is not None
            row[0, 1 + position.missing] = 1
        elif position is not None and block.column not in numbers:
            first = 1 + position.first
            row[:, first : first + block.num_levels - 1] = level_features(block.num_levels)
        rows.append(row)
    return np.concatenate([np.zeros((0, num_features), np.float32), *rows])
