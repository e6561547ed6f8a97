"""Tables with several rows a person: one row of each, chosen by secret coins, is what twins see.

A row of a twin then stands for a person, and what a table says of one person has norm 1, as if it
had one row a person from the start. More rows of a person would tell more about rows, but a count
of m of them needs m times the noise (docs/synthesis.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

import numpy as np
import pandas as pd

from dpvim.bridge.persons import person_numbers
from dpvim.privacy.persons import arrange_by_person
from dpvim.synthesis.tables import check_names

Frames: TypeAlias = Callable[[], Iterable[pd.DataFrame]]
"""Gives a table piece by piece, from the start at every call."""


def one_row_a_person(frames: Frames, person: str, generator: np.random.Generator) -> Frames:
    """The table with one row of each person, the same at every call.

    Args:
        frames: The table.
        person: The column with the ids of persons; it is left out of what is returned.
        generator: Secret coins. All rows of a person are kept with the same probability.
    """
    ids = _ids(frames, person)
    arranged = arrange_by_person(person_numbers(ids, person), 1, generator)
    is_kept = np.zeros(len(ids), bool)
    is_kept[arranged.rows[:, 0]] = True

    def kept() -> Iterator[pd.DataFrame]:
        first = 0
        for piece in frames():
            yield piece[is_kept[first : first + len(piece)]].drop(columns=person)
            first += len(piece)

    return kept


def _ids(frames: Frames, person: str) -> pd.Series:
    pieces = []
    for piece in frames():
        check_names("table", list(piece.columns), [person])
        pieces.append(piece[person])
    return pd.concat(pieces, ignore_index=True)
