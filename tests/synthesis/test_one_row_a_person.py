"""Twins of tables with several rows a person."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from dpvim.privacy.randomness import SecretStreams
from dpvim.synthesis.fitting import make_synthesizer, synthesize
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
