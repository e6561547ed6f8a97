"""Rows become persons: whose rows stand where, what is kept, and what a person adds to a sum."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from dpvim.privacy.clipping import clipped_sum
from dpvim.privacy.persons import arrange_by_person, sum_within_persons

RNG = np.random.default_rng(0)
IDS = np.append(RNG.integers(0, 12, 48), np.arange(12))


def rows_of_each(ids, arranged) -> dict[object, set[int]]:
    """The rows that are used, by person."""
    ids = np.asarray(ids)
    return {
        ids[rows[0]]: set(rows[used].tolist())
        for rows, used in zip(arranged.rows, arranged.is_used, strict=True)
    }


@pytest.mark.parametrize("max_rows", [1, 3, 60])
def test_a_place_holds_rows_of_one_person_up_to_the_cap(max_rows) -> None:
    arranged = arrange_by_person(IDS, max_rows, np.random.default_rng(1))
    own = {person: set(np.flatnonzero(person == IDS)) for person in set(IDS)}
    assert arranged.rows.shape == arranged.is_used.shape == (len(own), max_rows)
    found = rows_of_each(IDS, arranged)
    assert set(found) == set(own)
    for person, rows in found.items():
        assert rows <= own[person]
        assert len(rows) == min(max_rows, len(own[person]))
    # What fills up a place is the person's own, too.
    owners = IDS[arranged.rows]
    assert (owners == owners[:, :1]).all()


def test_the_order_of_the_table_changes_nothing_but_coins() -> None:
    order = np.random.default_rng(2).permutation(len(IDS))
    before = arrange_by_person(IDS, 60, np.random.default_rng(3))
    after = arrange_by_person(IDS[order], 60, np.random.default_rng(3))
    by_order = rows_of_each(IDS[order], after)
    moved = {person: {int(order[row]) for row in rows} for person, rows in by_order.items()}
    assert moved == rows_of_each(IDS, before)


def own_values(rows):
    """Rows that are their own gradients."""
    return rows[0]


@pytest.mark.parametrize("filler", [0.0, 1e30, np.inf, np.nan])
def test_rows_that_are_not_used_add_exactly_nothing(filler) -> None:
    rows = np.full((2, 3, 2), filler, np.float32)
    rows[:, 0], rows[1, 1] = [1.0, 2.0], [0.5, 0.25]
    is_used = jnp.array([[True, False, False], [True, True, False]])
    found = sum_within_persons(own_values, [jnp.asarray(rows), is_used])
    np.testing.assert_array_equal(found, [[1.0, 2.0], [1.5, 2.25]])


@pytest.mark.parametrize("value", [1.0, 100.0, 1e19, 1e38, 3e38, np.inf, np.nan])
def test_a_person_moves_the_sum_by_at_most_the_bound(value) -> None:
    """However many rows of whatever size; rows that are each within the bound, too."""
    rows = np.full((5, 4, 2), 0.3, np.float32)
    rows[0] = value
    used = jnp.ones((5, 4), bool)

    def total(is_padding):
        people = [jnp.asarray(rows), used]
        found = clipped_sum(
            lambda: sum_within_persons(own_values, people), None, jnp.asarray(is_padding), 1.0
        )
        return np.asarray(found)

    shift = np.linalg.norm(total(np.zeros(5, bool)) - total(np.arange(5) == 0))
    assert shift <= 1 + 1e-6
    if np.isfinite(value) and value < 1e38:
        assert shift > 0.999
