r"""The clipped gradient sum of a mixture, by gathers from tables.

With responsibilities r_k of the components for a record, the gradient of its log-probability by
the raw parameters u of column j in component k is :math:`r_k\, d \log p_{jk}(x_j) / du`. For a
column with levels the second factor is a row of a table that all records share, made of the
fractions z and 1 - z of `stick_breaking`. So the square of a record's norm is
:math:`\sum_k r_k^2 \sum_j n_{jk}[x_j]` with a table n of weighted squared norms, the sum of the
clipped records is a table of :math:`\sum_x f_x r_{xk}` for each level, and the Jacobian is applied
once to that table. Missing values are levels of a column of their own (missing or present), and
bins of a histogram are levels (`level_tables`). What depends on numbers rather than levels (counts,
normals, weights of the components) is formed for each record, K numbers for each parameter
(`numeric_columns`). The response's gradient is a number for each record, the score, times features,
most of which a level determines (`mixture_response`).

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

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dpvim.bridge.latent_space import LatentSpace
from dpvim.bridge.structured import matmul
from dpvim.models.columns import CategoricalColumn, Rows, num_levels
from dpvim.models.level_tables import LevelTables
from dpvim.models.mixture_response import ResponseGradient, ResponseTerm
from dpvim.models.numeric_columns import numeric_log_density
from dpvim.models.stick_breaking import StickBreaking
from dpvim.privacy.clipping import clip_factors, materialize, scales_of
from dpvim.types import Latent, Mask, Weights

if TYPE_CHECKING:
    from dpvim.models.mixture import Mixture

WEIGHTS = "mixture.weights"
# Squares of smaller responsibilities could underflow while what they are multiplied with is large.
_SMALLEST = 2.0**-60


class MixtureSum:
    """The clipped sum of a mixture, for batches as `Mixture.batch_of` returns them.

    Arrays have the records, or the components, along their last axis.
    """

    def __init__(self, model: Mixture, space: LatentSpace) -> None:
        self._model = model
        self._space = space
        self._levels = LevelTables(model)
        self._weights = StickBreaking([model.num_components])
        blocks = self._levels.blocks
        self._response = None if model.response is None else ResponseTerm(model, blocks)

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
        codes = self._levels.codes(batch)
        sticks = self._levels.sticks
        fractions = sticks.fractions(self._levels.to_sticks(raw))
        tables = [
            sticks.log_probs(fractions),
            sticks.squared_norms(fractions, self._levels.to_sticks(scale)),
        ]
        if self._response is not None:
            tables.append(self._response.tables(raw, scale))
        found = self._levels.gather_sums(jnp.concatenate(tables, axis=1), codes, is_padding.size)

        # What is formed for each record: its norm and the sum must see the same numbers.
        def per_record() -> tuple[Array, dict[str, Array], ResponseGradient | None]:
            return self._per_record(found, raw, batch)

        resp, rows, response = materialize(per_record, is_padding)

        # Norms.
        floored = jnp.where(resp < _SMALLEST, _SMALLEST, resp)  # a maximum might pass over a NaN
        squares = jnp.sum(floored**2 * found[count : 2 * count], axis=0)
        if self._response is not None and response is not None:
            squares = squares + self._response.norms(found[-1], response, scale) ** 2
        for name, row in rows.items():
            squares = squares + jnp.sum((row * scale[name].reshape(-1, 1)) ** 2, axis=0)
        factors = clip_factors(jnp.sqrt(squares), is_padding, bound)

        # Sums, in double precision.
        numbers = resp if response is None else jnp.append(resp, response.score[None], axis=0)
        numbers = jnp.where(factors > 0, factors * numbers, 0.0)
        sums = {name: _sum(factors, row) for name, row in rows.items()}
        by_level = self._levels.scatter_sums(numbers, codes)
        with jax.enable_x64(True):
            pulled_back = sticks.pull_back(fractions, by_level[:, :count])
            sums |= self._levels.from_sticks(pulled_back)
            if self._response is not None and response is not None:
                by_number = _sum(numbers[count], response.features)
                sums |= self._response.sums(by_level[:, count], by_number)
            total = self._space.pack(
                {site.name: sums[site.name].reshape(site.raw_shape) for site in self._space.sites}
            )
            return jnp.where(scales > 0, total, 0.0)

    def _per_record(
        self, found: Float[Array, "t batch"], raw: dict[str, Array], batch: Rows
    ) -> tuple[
        Float[Array, "k batch"], dict[str, Float[Array, "m batch"]], ResponseGradient | None
    ]:
        """Responsibilities, rows of coordinates by site, and the response's gradient."""
        count = self._model.num_components
        logits, rows = found[:count], dict[str, Array]()
        for column in self._model.predictors:
            if isinstance(column, CategoricalColumn) or num_levels(column):
                continue
            density = numeric_log_density(column, raw, batch)
            logits = logits + density.log_prob
            rows |= density.derivatives
        weights = raw[WEIGHTS][:, None] if count > 1 else jnp.zeros((0, 1))
        shares = self._weights.fractions(weights)
        resp = jax.nn.softmax(logits + self._weights.log_probs(shares), axis=0)
        rows = {name: resp * derivative for name, derivative in rows.items()}
        if count > 1:
            rows[WEIGHTS] = matmul(self._weights.jacobian(shares), resp)
        if self._response is None:
            return resp, rows, None
        response, more_rows = self._response.gradient(found[2 * count], raw, batch)
        return resp, rows | more_rows, response


def _sum(factors: Float[Array, " batch"], rows: Float[Array, "m batch"]) -> Float[Array, " m"]:
    """Rows times factors, summed in double precision; what has factor zero may be anything."""
    with jax.enable_x64(True):
        safe = jnp.where(factors != 0, rows, 0.0)
        return matmul(safe.astype(jnp.float64), factors.astype(jnp.float64))
