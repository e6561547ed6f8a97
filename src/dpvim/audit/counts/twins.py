"""The release that a twin makes: its cells, its rounds, and what decides what is asked next."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from dpvim.audit.counts.target import CHECK, SLACK, FixedAnswers, make_plan
from dpvim.audit.findings import Finding
from dpvim.privacy.plan import PrivacyPlan
from dpvim.privacy.randomness import SecretStreams
from dpvim.synthesis.encoding import EncodedTable
from dpvim.synthesis.marginals import release as twin_release
from dpvim.synthesis.schema import Binary, Categorical, Count, Date, Integer, Real, Schema
from dpvim.types import Relation

_SCHEMA = Schema(
    (
        Integer(name="age", lower=0, upper=120),
        Categorical(name="region", levels=("north", "east", "south"), nullable=True),
        Count(name="visits", upper=5000),
        Real(name="weight", lower=0.0, upper=200.0, nullable=True),
        Real(name="grade", lower=0.0, upper=5.0, decimals=1),
        Binary(name="smokes", levels=("no", "yes")),
        Date(name="admitted", lower="2015-01-01", upper="2024-12-31", nullable=True),
        Categorical(name="code", levels=("A", "B", "other"), prefix=1, outside="other"),
    ),
    # Whatever is known of a table, its records are counted as they are.
    constraints=("age >= visits",),
)
_NUMBERS = (0.0, 1.0, 0.5, 1e-30, 1 - 1e-7, -1.0, 2.0, 1e38, -1e38, math.inf, -math.inf, math.nan)
_INTEGERS = (0, 1, 2, 57, 119, 120, 121, -1, 4999, 5000, 2**31 - 1, -(2**31))


def twin_checks() -> Iterator[Finding]:
    """Rules that hold for every table, whatever the noise."""
    yield _shares_of_a_twin()
    yield _questions_from_releases()
    yield _cells_of_a_record_alone()


def _extreme_table() -> EncodedTable:
    """Encoded values, also such as no encoding makes."""
    table = EncodedTable({}, {})
    for column in _SCHEMA.columns:
        is_real = isinstance(column, Real)
        values = np.array(_NUMBERS, np.float32) if is_real else np.array(_INTEGERS, np.int32)
        table.values[column.name] = values
        if column.nullable:
            table.missing[column.name] = np.arange(len(values)) % 5 == 0
    return table


def _some_of(table: EncodedTable, rows: slice) -> EncodedTable:
    return EncodedTable(
        {name: values[rows] for name, values in table.values.items()},
        {name: missing[rows] for name, missing in table.missing.items()},
    )


def _cells_of_a_record_alone() -> Finding:
    """Records in tables of all lengths are in the cells that they are in by themselves."""
    wanted = twin_release.design(_SCHEMA, make_plan(1000))
    codes = functools.partial(twin_release.codes_of, schema=_SCHEMA, grids=wanted.grids)
    table, sizes = _extreme_table(), [grid.num_cells for grid in wanted.grids]
    alone = np.concatenate([codes(_some_of(table, slice(i, i + 1))) for i in range(len(_NUMBERS))])
    moved = sum(
        int(np.any(codes(_some_of(table, slice(i, j))) != alone[i:j], axis=1).sum())
        for i, j in itertools.combinations(range(len(_NUMBERS) + 1), 2)
    )
    outside = int(np.any((alone < 0) | (alone >= sizes), axis=1).sum())
    observed = f"{moved} records moved by others, {outside} in no cell"
    return Finding.rule(
        CHECK, "a record's cells are its own", observed, holds=moved == outside == 0
    )


def _shares_of_a_twin() -> Finding:
    """All that a twin asks for, with a target and without, with pairs and without."""
    schemas = {"table": _SCHEMA, "one column": Schema(_SCHEMA.columns[:1])}
    found = {}
    for (name, schema), target in itertools.product(schemas.items(), (None, "age")):
        wanted = twin_release.design(schema, make_plan(1000), target=target)
        mechanism = FixedAnswers(make_plan(1000), SecretStreams(0), _codes(wanted, "spread"))
        twin_release.release(mechanism, wanted)
        found[name, target] = sum(asked.share for asked in mechanism.rounds)
    worst = max(found.values())
    observed = f"a record's squared norm is {worst:g} C^2"
    return Finding.rule(CHECK, "rounds of a twin", observed, holds=worst <= 1 + SLACK)


def _codes(wanted: twin_release.Design, kind: str) -> np.ndarray:
    """Tables that have little in common."""
    sizes = np.array([grid.num_cells for grid in wanted.grids])
    rng = np.random.default_rng(2)
    return {
        "spread": rng.integers(0, sizes, (1000, len(sizes))),
        "one cell": np.zeros((1000, len(sizes)), int),
        "last cells": np.tile(sizes - 1, (1000, 1)),
        "one record": sizes[None] // 2,
        "alternating": np.arange(1000)[:, None] % np.minimum(sizes, 2),
    }[kind]


def _questions_from_releases() -> Finding:
    """If answers are the same for all tables, so are questions, groups and numbers of records."""
    differ = []
    for relation in (Relation.ADD_OR_REMOVE, Relation.REPLACE_ONE):
        plan = make_plan(1000, relation=relation)
        wanted = twin_release.design(_SCHEMA, plan, target="smokes")
        first, *others = (
            _what_follows(plan, wanted, kind)
            for kind in ("spread", "one cell", "last cells", "alternating", "one record")
        )
        differ += [f"{relation}" for other in others if other != first]
    observed = f"{len(differ)} of 8 tables change them ({', '.join(sorted(set(differ))) or 'none'})"
    return Finding.rule(CHECK, "releases alone decide", observed, holds=not differ)


def _what_follows(plan: PrivacyPlan, wanted: twin_release.Design, kind: str) -> list[Any]:
    """All that follows from answers that are fixed."""
    mechanism = FixedAnswers(plan, SecretStreams(0), _codes(wanted, kind))
    found = twin_release.release(mechanism, wanted)
    asked = [
        (each.marginals, each.share, [cells.tolist() for cells in each.cells.of_code])
        for each in mechanism.rounds
    ]
    groups = [(each.of_cell.tolist(), each.probs.tolist()) for each in found.groups]
    noisy = [(each.columns, each.counts.tolist(), each.variance) for each in found.noisy]
    return [asked, groups, noisy, found.num_rows]
