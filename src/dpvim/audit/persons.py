"""Checks of how rows become persons: whose rows stand where, which are kept, and in what order.

What a person adds to a step is attacked on the path `persons`; here the arrangement itself is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd

from dpvim.audit.counts.sensitivity import weighted_release
from dpvim.audit.counts.target import COLUMNS, SLACK, TABLE
from dpvim.audit.findings import Finding, chi_square
from dpvim.bridge.persons import person_numbers
from dpvim.privacy import persons
from dpvim.privacy.randomness import SecretStreams
from dpvim.synthesis import persons as twins

CHECK = "persons"
_PURPOSE = "rows of persons"
# One person with many rows among some with a few.
_MANY, _KEPT = 12, 3
_IDS = np.repeat(np.arange(9), [_MANY, 1, 2, 1, 3, 1, 1, 5, 2])
_ROWS_OF_CANARY = (1, 2, 7, 50)


def person_checks(streams: Callable[[], SecretStreams], *, trials: int) -> Iterator[Finding]:
    """Rules that hold for every table, and how coins decide the rest."""
    yield _places_hold_one_person(streams())
    drawn = _draws(streams(), trials)
    yield _kept_evenly(drawn)
    yield _places_evenly(drawn)
    yield _apart(streams(), trials)
    yield _share_of_one_person_in_a_twin(streams)


def _places_hold_one_person(streams: SecretStreams) -> Finding:
    """A place has room for the public number of rows, and holds those of one person, each once."""
    rng, generator = np.random.default_rng(3), streams.generator(_PURPOSE)
    tables: list[Any] = [
        _IDS,
        rng.permutation(_IDS),
        rng.integers(0, 30, 200),
        np.full(50, 7),
        np.arange(40),
        np.array([f"person {i}" for i in rng.integers(0, 5, 60)], object),
        rng.integers(0, 3, 20) * 1e300,
    ]
    broken = sum(
        not _holds_one_person(
            ids, most, persons.arrange_by_person(person_numbers(ids), most, generator)
        )
        for ids in tables
        for most in (1, _KEPT, 60)
    )
    observed = f"{broken} of {3 * len(tables)} tables break it"
    return Finding.rule(CHECK, "a place is one person's", observed, holds=broken == 0)


def _holds_one_person(ids: Any, most: int, found: persons.RowsByPerson) -> bool:
    _, sizes = np.unique(ids, return_counts=True)
    if found.rows.shape != (len(sizes), most) or found.is_used.shape != found.rows.shape:
        return False
    owners = np.asarray(ids)[found.rows]
    used = found.rows[found.is_used]
    first, counts = owners[:, 0], found.is_used.sum(axis=1)
    return bool(
        (owners == owners[:, :1]).all()
        and len(np.unique(first)) == len(sizes)
        and len(np.unique(used)) == len(used)
        and (counts[np.argsort(first)] == np.minimum(sizes, most)).all()
    )


def _draws(streams: SecretStreams, trials: int) -> list[persons.RowsByPerson]:
    generator = streams.generator(_PURPOSE)
    return [persons.arrange_by_person(_IDS, _KEPT, generator) for _ in range(trials)]


def _kept_evenly(drawn: list[persons.RowsByPerson]) -> Finding:
    """Of a person with too many rows each is kept as often as any other."""
    kept = np.zeros(len(_IDS))
    for each in drawn:
        kept[each.rows[each.is_used]] += 1
    counts, share = kept[:_MANY], _KEPT / _MANY
    # Rows compete for places, which makes their counts negatively correlated.
    variance = len(drawn) * share * (1 - share) * _MANY / (_MANY - 1)
    statistic = float(np.sum((counts - len(drawn) * share) ** 2) / variance)
    observed = f"{counts.min():.0f} to {counts.max():.0f} times, expected {len(drawn) * share:.0f}"
    p_value = chi_square(statistic, _MANY - 1)
    return Finding(CHECK, "rows are kept evenly", observed, p_value)


def _places_evenly(drawn: list[persons.RowsByPerson]) -> Finding:
    """Everybody stands everywhere: an order by ids, or by the table, would tell of others."""
    num_persons = int(_IDS.max()) + 1
    stands = np.zeros((num_persons, num_persons))
    for each in drawn:
        stands[_IDS[each.rows[:, 0]], np.arange(num_persons)] += 1
    expected = len(drawn) / num_persons
    # A permutation has one person in every place, and one place for every person.
    statistic = float(np.sum((stands - expected) ** 2) / expected)
    statistic *= (num_persons - 1) / num_persons
    observed = f"{stands.min():.0f} to {stands.max():.0f} times, expected {expected:.0f}"
    p_value = chi_square(statistic, (num_persons - 1) ** 2)
    return Finding(CHECK, "everybody stands everywhere", observed, p_value)


def _apart(streams: SecretStreams, trials: int) -> Finding:
    """The row that is kept of one person says nothing about another's."""
    ids, generator = np.array([0, 1, 0, 1]), streams.generator(_PURPOSE)
    counts = np.zeros((2, 2))
    for _ in range(trials):
        rows = persons.arrange_by_person(ids, 1, generator).rows[:, 0]
        kept = {int(row) % 2: int(row) // 2 for row in rows}
        counts[kept[0], kept[1]] += 1
    statistic = float(np.sum((counts - trials / 4) ** 2) / (trials / 4))
    observed = f"{counts.min():.0f} to {counts.max():.0f} times, expected {trials / 4:.0f}"
    return Finding(CHECK, "persons are independent", observed, chi_square(statistic, 3))


def _share_of_one_person_in_a_twin(streams: Callable[[], SecretStreams]) -> Finding:
    """A person with many rows moves all counts of a twin by no more than one with a single row."""
    names = [f"column {i}" for i in range(COLUMNS)]
    others = pd.DataFrame(TABLE, columns=names).assign(person=np.arange(len(TABLE)))
    worst = 0.0
    for rows in _ROWS_OF_CANARY:
        canary = pd.DataFrame(np.full((rows, COLUMNS), 3), columns=names).assign(person=-1)
        released = [
            weighted_release(_counted(pieces, names, streams()))
            for pieces in ([others, canary], [canary, others], [others])
        ]
        shifts = [np.linalg.norm(each - released[-1]) for each in released[:-1]]
        worst = max(worst, *map(float, shifts))
    observed = f"at most {worst:.6f} C"
    return Finding.rule(CHECK, "share of one person in a twin", observed, holds=worst <= 1 + SLACK)


def _counted(pieces: list[pd.DataFrame], names: list[str], streams: SecretStreams) -> np.ndarray:
    kept = twins.one_row_a_person(lambda: pieces, "person", streams.generator(_PURPOSE))
    return pd.concat(list(kept()), ignore_index=True)[names].to_numpy()
