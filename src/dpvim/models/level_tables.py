"""Tables with a row for each level of a mixture's columns, and records that gather from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dpvim.bridge.structured import matmul
from dpvim.models.columns import Rows, level_codes, num_levels
from dpvim.models.stick_breaking import StickBreaking

if TYPE_CHECKING:
    from dpvim.models.mixture import Mixture

# Up to so many levels a product with indicators is faster than reading rows of a table.
_MOST_INDICATORS = 512


class LevelBlock(NamedTuple):
    """The levels of a column, or the coin that says whether a value of a column is missing.

    The levels of a coin are missing and present, in this order.
    """

    column: str
    site: str
    num_levels: int
    is_coin: bool


def level_blocks(model: Mixture) -> list[LevelBlock]:
    """The blocks of a model: its columns with levels, then its coins."""
    with_levels = [column for column in model.predictors if num_levels(column)]
    return [
        *(LevelBlock(c.name, f"{c.name}.probs", num_levels(c), is_coin=False) for c in with_levels),
        *(LevelBlock(c.name, f"{c.name}.missing_prob", 2, is_coin=True) for c in model.nullable),
    ]


class LevelTables:
    """The levels of all blocks, one after the other: rows of tables that all records share."""

    def __init__(self, model: Mixture) -> None:
        self._columns = {column.name: column for column in model.predictors}
        self._num_components = model.num_components
        self.blocks = level_blocks(model)
        self.sticks = StickBreaking([block.num_levels for block in self.blocks])

    def codes(self, batch: Rows) -> list[Int[Array, " batch"]]:
        """For each block the index of a record's level among all levels; the last is for none."""
        codes = []
        for block, first in zip(self.blocks, self.sticks.first, strict=True):
            absent = batch.missing.get(block.column, False)
            if block.is_coin:
                codes.append(jnp.where(absent, first, first + 1))
            else:
                code = level_codes(self._columns[block.column], batch.values[block.column])
                known = (code >= 0) & (code < block.num_levels) & ~jnp.asarray(absent)
                codes.append(jnp.where(known, first + code, self.sticks.num_levels))
        return codes

    def gather_sums(
        self, table: Float[Array, "levels t"], codes: list[Int[Array, " batch"]], batch_size: int
    ) -> Float[Array, "t batch"]:
        """For each record the sum of the table's rows over the levels that it has."""
        if self.sticks.num_levels > _MOST_INDICATORS:
            padded = jnp.append(table, jnp.zeros((1, table.shape[1])), axis=0)
            return sum((padded[code] for code in codes[1:]), start=padded[codes[0]]).T
        indicators = [
            code == np.arange(first, first + block.num_levels)[:, None]
            for code, block, first in zip(codes, self.blocks, self.sticks.first, strict=True)
        ]
        one_hot = jnp.concatenate([jnp.zeros((0, batch_size)), *indicators])
        return matmul(table.T, one_hot)

    def scatter_sums(
        self, numbers: Float[Array, "t batch"], codes: list[Int[Array, " batch"]]
    ) -> Float[Array, "levels t"]:
        """For each level the sum of the numbers over the records that have it, in double."""
        with jax.enable_x64(True):
            rows = numbers.T.astype(jnp.float64)
            sums = jnp.zeros((self.sticks.num_levels + 1, rows.shape[1]), jnp.float64)
            for code in codes:
                sums = sums.at[code].add(rows)
            return sums[:-1]

    def to_sticks(self, raw: dict[str, Array]) -> Float[Array, "sticks k"]:
        """Raw values of the blocks' sites, side by side."""
        count = self._num_components
        sticks = [raw[block.site].reshape(count, -1).T for block in self.blocks]
        return jnp.concatenate([jnp.zeros((0, count)), *sticks])

    def from_sticks(self, sticks: Float[Array, "sticks k"]) -> dict[str, Array]:
        """The inverse of `to_sticks`."""
        ends = np.cumsum([block.num_levels - 1 for block in self.blocks])
        parts = jnp.split(sticks, ends)[:-1]  # nothing is left behind the last end
        return {block.site: part.T for block, part in zip(self.blocks, parts, strict=True)}
