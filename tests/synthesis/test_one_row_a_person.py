"""Twins of tables with several rows a person."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pandas as pd
import pytest

from dpvim import checkpoints
from dpvim.prepared import PreparedFit
from dpvim.privacy.randomness import SecretStreams
from dpvim.synthesis.fitting import make_synthesizer, synthesize
from dpvim.synthesis.marginals import fit as marginal_fit
from dpvim.synthesis.persons import one_row_a_person
from dpvim.synthesis.tables import write_table
from dpvim.types import NotForReleaseWarning


@pytest.fixture
def visits(patients) -> pd.DataFrame:
    """Several rows of a hundred persons."""
    return patients.assign(person=np.arange(len(patients)) % 100)


def kept_of(pieces, seed=0) -> list[pd.DataFrame]:
    kept = one_row_a_person(lambda: pieces, "person", SecretStreams(seed).generator("rows"))
    first, second = list(kept()), list(kept())
    for one, other in zip(first, second, strict=True):
        pd.testing.assert_frame_equal(one, other)  # all rounds see the same table
    return first


def test_one_row_of_each_person_however_the_table_is_cut() -> None:
    table = pd.DataFrame({"person": [1, 2, 1, 3, 1, 2], "row": range(6)})
    for cuts in ([table], [table[:2], table[2:]], [table[:0], table[:3], table[3:]]):
        rows = pd.concat(kept_of(cuts))
        assert list(rows.columns) == ["row"]
        assert sorted(table["person"][rows["row"]]) == [1, 2, 3]
    seen = {tuple(pd.concat(kept_of([table], seed))["row"]) for seed in range(40)}
    assert len(seen) == 6  # three rows of one, two of another


@pytest.mark.parametrize("engine", ["marginals", "dpvi"])
def test_a_twin_protects_persons(visits, schema, engine, tmp_path) -> None:
    write_table(visits, tmp_path / "visits.csv")
    options = {"num_steps": 5, "components": 2} if engine == "dpvi" else {"components": 8}
    for source in (visits, tmp_path / "visits.csv"):
        with pytest.warns(NotForReleaseWarning):
            twin = synthesize(
                source,
                schema,
                epsilon=5.0,
                group_by="person",
                engine=engine,
                seed=0,
                progress=False,
                **options,
            )
        assert twin.num_rows == 100
        facts = twin.privacy.to_dict()
        assert (facts["unit"], facts["max_rows_per_person"]) == ("person", 1)
        assert facts["num_examples"] == 100
        assert "one person: all rows of a person together" in str(twin.privacy)
        assert list(twin.sample(5, seed=0).columns) == schema.names
        if engine == "dpvi":
            break


@pytest.mark.parametrize("engine", ["marginals", "dpvi"])
def test_a_twin_that_goes_on_after_a_crash_has_the_same_row_of_each_person(
    visits, schema, engine, tmp_path, monkeypatch
) -> None:
    """With the same noise and other rows, the difference of two releases would have no noise."""
    monkeypatch.setattr(checkpoints, "fresh_secret", lambda: bytes(32))
    seen: list[Any] = []
    really_counted, really_run = marginal_fit._source_of_counts, PreparedFit.run

    def counted(*args):
        seen.append(list((source := really_counted(*args)).pieces()))
        return source

    def run(prepared, states, records, **settings):
        seen.append([np.asarray(leaf) for leaf in jax.tree.leaves(records)])
        return really_run(prepared, states, records, **settings)

    monkeypatch.setattr(marginal_fit, "_source_of_counts", counted)
    monkeypatch.setattr(PreparedFit, "run", run)
    options = {"num_steps": 5, "components": 2} if engine == "dpvi" else {"components": 8}
    for folder in ("one", "other"):
        synthesize(
            visits,
            schema,
            epsilon=5.0,
            group_by="person",
            engine=engine,
            progress=False,
            checkpoint=tmp_path / folder,
            **options,
        )
    first, second = seen
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_is_wrong_with_persons_is_said(visits, schema) -> None:
    with pytest.raises(ValueError, match="not in the schema, got 'age'"):
        make_synthesizer(schema, group_by="age")
    with pytest.raises(ValueError, match="none named 'persons'"):
        synthesize(visits, schema, epsilon=1.0, group_by="persons")
    missing = visits.assign(person=visits["person"].where(visits["person"] > 3))
    with pytest.raises(ValueError, match="person: expected the id of a person in every row"):
        synthesize(missing, schema, epsilon=1.0, group_by="person")
    with pytest.raises(ValueError, match="max_rows_per_person"):
        synthesize(visits, schema, epsilon=1.0, group_by="person", max_rows_per_person=2)
