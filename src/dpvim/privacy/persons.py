"""People instead of rows: all rows of a person are one record.

What is sampled, clipped and protected is then a person. Rows are arranged before anything else
sees them: `RowsByPerson` has a place for each person, with room for a public number of rows. Of a
person with more rows a uniformly random part is kept. What a person's place holds is a function of
that person's rows and of secret coins; so are the places, which are drawn, too: where a person
stands says nothing about the rows of others, nor about their order in the table.

A person's gradient is the sum of those of the rows kept (`sum_within_persons`). From there on a
person is a record like any other: there is one clip, one sampler and one source of noise.

>>> import numpy as np
>>> arranged = arrange_by_person(np.array([0, 0, 0, 1]), 2, np.random.default_rng(0))
>>> sorted(arranged.is_used.sum(axis=1).tolist())
[1, 2]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int


class RowsByPerson(NamedTuple):
    """Numbers of the rows of each person, and which of them are rows; private.

    Attributes:
        rows: Where a person has fewer rows than there is room for, its first one stands again.
        is_used: False for those.
    """

    rows: Int[np.ndarray, "persons most"]
    is_used: Bool[np.ndarray, "persons most"]


def arrange_by_person(
    persons: Int[np.ndarray, " rows"], max_rows: int, generator: np.random.Generator
) -> RowsByPerson:
    """Give every person a place of `max_rows` rows, and draw who stands where.

    Args:
        persons: For each row the number of its person, from 0 on, each at least once.
        max_rows: Public. Of a person with more rows so many are kept, all choices alike.
        generator: Secret coins.

    Guarantees:
        A place holds rows of one person, each once, and all of them if there is room. The shape
        tells the number of persons and nothing else.
    """
    num_persons = int(persons.max()) + 1
    places = generator.permutation(num_persons)[persons]
    # Rows in random order, then by place: the first ones of a person are a random choice.
    order = generator.permutation(len(persons))
    order = order[np.argsort(places[order], kind="stable")]
    places = places[order]
    firsts = np.searchsorted(places, np.arange(num_persons))
    within = np.arange(len(order)) - firsts[places]
    kept = within < max_rows
    rows = np.repeat(order[firsts][:, None], max_rows, axis=1)
    is_used = np.zeros((num_persons, max_rows), bool)
    rows[places[kept], within[kept]] = order[kept]
    is_used[places[kept], within[kept]] = True
    return RowsByPerson(rows, is_used)


def sum_within_persons(
    gradients: Callable[[list[Array]], Float[Array, "rows d"]], persons: list[Array]
) -> Float[Array, "persons d"]:
    """Gradients of persons: the sums of those of their rows.

    Args:
        gradients: Of rows, each by itself.
        persons: Arrays of rows [persons, most, ...], and last which of them are used.

    Guarantees:
        A person's gradient is a function of that person's rows. Rows that are not used add
        exactly nothing, whatever they hold. One row that is not finite makes the sum so, and the
        person counts for nothing.
    """
    *arrays, is_used = persons
    rows = [leaf.reshape(-1, *leaf.shape[2:]) for leaf in arrays]
    by_row = gradients(rows).reshape(*is_used.shape, -1)
    return jnp.sum(jnp.where(is_used[:, :, None], by_row, 0.0), axis=1)
