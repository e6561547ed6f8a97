"""Arguments of a model, with all rows of a person as one record; see `dpvim.privacy.persons`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from dpvim import _validate
from dpvim._compile import single_precision
from dpvim.bridge.data import ModelInput, prepare
from dpvim.privacy.persons import RowsByPerson, arrange_by_person
from dpvim.privacy.randomness import SecretStreams
from dpvim.types import Record, Scalar

GROUP_BY = "group_by"
"""The argument with the ids of persons, one for each row."""


@single_precision
def read_inputs(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    max_rows_per_person: int | None,
    streams: SecretStreams,
) -> ModelInput:
    """Arguments of a model, checked; records are persons if ``group_by`` is among them.

    Args:
        args, kwargs: As the model takes them, and ``group_by``: for each row the id of a person.
        max_rows_per_person: Public.
        streams: Coins that decide which rows of a person are kept.
    """
    ids = kwargs.get(GROUP_BY)
    inputs = rows_of(args, kwargs)
    if ids is None and max_rows_per_person is None:
        return inputs
    if max_rows_per_person is None:
        raise ValueError(
            "max_rows_per_person: expected with group_by: the most rows of one person that are to "
            "be used, got none. It is public: choose it, do not read it off the data."
        )
    if ids is None:
        raise ValueError(
            "group_by: expected with max_rows_per_person: for each row the id of a person, got "
            "none."
        )
    most = _validate.positive_int("max_rows_per_person", max_rows_per_person)
    if inputs.on_disk:
        raise ValueError(
            "group_by: expected arrays in memory, got some on the disk, in which the rows of a "
            "person need not lie together. Load them, or give a row for each person."
        )
    if np.ndim(ids) == 1 and len(ids) != inputs.num_rows:
        raise ValueError(
            f"group_by: expected the id of a person for each of {inputs.num_rows} rows, got "
            f"{len(ids)}."
        )
    coins = streams.generator("rows of persons")
    return as_persons(inputs, arrange_by_person(person_numbers(ids), most, coins))


def rows_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModelInput:
    """Arguments of a model, checked, with a record for each row, whoever's it is."""
    return prepare(args, {name: value for name, value in kwargs.items() if name != GROUP_BY})


def given_rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """All that records are made from but the coins: rows, and whose they are."""
    return rows_of(args, kwargs).records, person_numbers(kwargs[GROUP_BY])


def person_numbers(ids: Any, name: str = GROUP_BY) -> Int[np.ndarray, " rows"]:
    """Persons as numbers from 0 on; rows with equal ids are one person's.

    Args:
        ids: One for each row: numbers or texts.
        name: Of the ids, in errors, which name no row and no id.
    """
    if isinstance(ids, str) or np.ndim(ids) != 1 or not len(ids):
        given = "a text" if isinstance(ids, str) else f"shape {np.shape(ids)}"
        raise ValueError(
            f"{name}: expected the id of a person for each row, in one column, got {given}. Pass "
            "the column itself, as frame['person']."
        )
    import pandas as pd  # takes long, and most fits do not need it

    column = pd.Series(ids)
    numbers = pd.factorize(column)[0]
    has_texts = not pd.api.types.is_numeric_dtype(column)
    blank = has_texts and (column.astype(str).str.strip() == "").any()
    if blank or (numbers < 0).any():
        raise ValueError(
            f"{name}: expected the id of a person in every row, got rows without one. Say whose "
            "they are, give each of them an id of its own, or leave them out."
        )
    return numbers


def as_persons(inputs: ModelInput, arranged: RowsByPerson) -> ModelInput:
    """Arguments with a record for each person, from those with a record for each row."""
    num_persons, most = arranged.rows.shape
    if most == 1:  # a person is a row, which models may have faster ways for
        records = [jnp.asarray(np.asarray(leaf)[arranged.rows[:, 0]]) for leaf in inputs.records]
    else:
        records = [jnp.asarray(np.asarray(leaf)[arranged.rows]) for leaf in inputs.records]
        records.append(jnp.asarray(arranged.is_used))
    structure, constants, _ = inputs.signature
    signature = (structure, constants, [(leaf.shape, leaf.dtype) for leaf in records])
    return ModelInput(records, num_persons, signature, inputs.call, most)


def log_prob_of_person(
    log_prob: Callable[[Any, Record], Scalar],
) -> Callable[[Any, Record], Scalar]:
    """The log-likelihood of all rows of a person, from that of one row."""

    def total(latent: Any, person: Record) -> Scalar:
        *arrays, is_used = person

        # Zero times the slope of a row that is not used must be zero: it is the first one again.
        def used(leaf: jax.Array) -> jax.Array:
            mask = is_used.reshape(-1, *(1,) * (leaf.ndim - 1))
            return jnp.where(mask, leaf, leaf[:1])

        terms = jax.vmap(log_prob, (None, 0))(latent, [used(leaf) for leaf in arrays])
        return jnp.sum(jnp.where(is_used, terms, 0.0))

    return total
