"""Faults in how rows become persons: clip and sampling by rows, rows of others, a forgotten cap."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from planting import Fault, patch

from dpvim.bridge import model as bridge
from dpvim.inference.engine import Engine
from dpvim.privacy import clipping, persons
from dpvim.privacy.persons import RowsByPerson
from dpvim.privacy.sampling import EMPTY
from dpvim.synthesis import persons as twins

# -- gradients ------------------------------------------------------------------------------------


@contextmanager
def _clip_by_row() -> Iterator[None]:
    """Every row of a person is clipped, and their sum is not."""

    def make_rows(old: Any) -> Any:
        def faulty(gradients: Any, people: Any) -> Any:
            *arrays, is_used = people
            rows = gradients([leaf.reshape(-1, *leaf.shape[2:]) for leaf in arrays])
            return jnp.where(is_used.reshape(-1, 1), rows, 0.0)

        return faulty

    def make_sum(old: Any) -> Any:
        def faulty(gradients: Any, weights: Any, is_padding: Any, bound: float) -> Any:
            rows = jax.eval_shape(gradients).shape[0] // len(is_padding)
            return old(gradients, weights, jnp.repeat(is_padding, rows), bound)

        return faulty

    with (
        patch(bridge, "sum_within_persons", make_rows),
        patch(clipping, "clipped_sum", make_sum),
    ):
        yield


def _of_persons(change: Callable[[Any], Any]) -> Any:
    """Sums within persons with other rows than are used."""

    def make(old: Any) -> Any:
        def faulty(gradients: Any, people: Any) -> Any:
            *arrays, is_used = people
            return old(gradients, [*arrays, change(is_used)])

        return faulty

    return patch(bridge, "sum_within_persons", make)


def _mean_of_the_batch_taken_off() -> Any:
    """Persons are compared with those who happen to be in the batch."""

    def make(old: Any) -> Any:
        def faulty(gradients: Any, people: Any) -> Any:
            found = old(gradients, people)
            finite = jnp.nan_to_num(found, posinf=0.0, neginf=0.0)
            return found - jnp.clip(finite, -1, 1).mean(axis=0)

        return faulty

    return patch(bridge, "sum_within_persons", make)


def _rows_are_sampled() -> Any:
    """Every row is drawn by itself, and brings all of its person along."""

    class Source:
        def __init__(self, source: Any, most: int) -> None:
            self._source, self._most = source, most
            self.batch_size = source.batch_size

        def draw(self, *sizes: int) -> Any:
            rows, noise = self._source.draw(*sizes)
            return np.where(rows == EMPTY, EMPTY, rows // self._most).astype(np.int32), noise

    def make(old: Any) -> Any:
        def faulty(self: Engine, num_rows: int, streams: Any) -> Any:
            most = self.plan.max_rows_per_person or 1
            if most == 1:
                return old(self, num_rows, streams)
            plan = dataclasses.replace(self.plan, num_examples=most * self.plan.num_examples)
            return Source(old(self._replace(plan=plan), most * num_rows, streams), most)

        return faulty

    return patch(Engine, "source", make)


# -- the arrangement ------------------------------------------------------------------------------


def _arranged(change: Callable[[np.ndarray, RowsByPerson], RowsByPerson]) -> Any:
    """Another arrangement of the rows of a table."""

    def make(old: Any) -> Any:
        def faulty(numbers: np.ndarray, *settings: Any) -> RowsByPerson:
            return change(numbers, old(numbers, *settings))

        return faulty

    return patch(persons, "arrange_by_person", make)


def _rows_of_the_next_person(numbers: np.ndarray, found: RowsByPerson) -> RowsByPerson:
    """Places that a person leaves free are filled with whoever stands next."""
    following = np.roll(found.rows, -1, axis=0)
    return RowsByPerson(np.where(found.is_used, found.rows, following), np.ones_like(found.is_used))


def _no_cap(numbers: np.ndarray, found: RowsByPerson) -> RowsByPerson:
    """There is room for all rows of whoever has the most."""
    order = np.argsort(numbers, kind="stable")
    sizes = np.bincount(numbers)
    firsts = np.cumsum(sizes) - sizes
    within = np.arange(sizes.max())
    is_used = within < sizes[:, None]
    rows = order[np.where(is_used, firsts[:, None] + within, firsts[:, None])]
    return RowsByPerson(rows, is_used)


def _in_order_of_the_table(numbers: np.ndarray, found: RowsByPerson) -> RowsByPerson:
    order = np.argsort(numbers[found.rows[:, 0]])
    return RowsByPerson(found.rows[order], found.is_used[order])


def _first_rows_kept(numbers: np.ndarray, found: RowsByPerson) -> RowsByPerson:
    """Not at random: whoever orders the table decides which rows of a person are used."""
    full, cap = _no_cap(numbers, found), found.rows.shape[1]
    place = numbers[found.rows[:, 0]]
    wide = np.pad(full.rows, [(0, 0), (0, cap)], mode="edge")[place, :cap]
    return RowsByPerson(np.where(found.is_used, wide, wide[:, :1]), found.is_used)


def _all_rows_in_a_twin() -> Any:
    def make(old: Any) -> Any:
        def faulty(frames: Any, person: str, generator: Any) -> Any:
            return lambda: (piece.drop(columns=person) for piece in frames())

        return faulty

    return patch(twins, "one_row_a_person", make)


PERSON_FAULTS = [
    Fault("clip by row", _clip_by_row, "clip", "persons"),
    Fault(
        "rows that fill up a person counted",
        lambda: _of_persons(jnp.ones_like),
        "clip",
        "persons",
    ),
    Fault(
        "rows used as by the next person",
        lambda: _of_persons(lambda is_used: jnp.roll(is_used, 1, axis=0)),
        "clip",
        "persons",
    ),
    Fault("persons centred by their batch", _mean_of_the_batch_taken_off, "clip", "persons"),
    Fault("rows are sampled, not persons", _rows_are_sampled, "game", "persons"),
    Fault("rows of the next person", lambda: _arranged(_rows_of_the_next_person), "persons"),
    Fault("no cap on the rows of a person", lambda: _arranged(_no_cap), "persons"),
    Fault(
        "persons in the order of the table", lambda: _arranged(_in_order_of_the_table), "persons"
    ),
    Fault("first rows of a person kept", lambda: _arranged(_first_rows_kept), "persons"),
    Fault("all rows of a person in a twin", _all_rows_in_a_twin, "persons"),
]
