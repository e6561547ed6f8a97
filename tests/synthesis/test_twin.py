"""Twins: what is fitted, drawn, saved, and refused."""

from __future__ import annotations

import dataclasses
import io
import json
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest

import dpvim
from dpvim.inference.release_sums import ReleaseSums
from dpvim.models.columns import Rows, features
from dpvim.posterior.from_releases.regression import GaussianPrior
from dpvim.serialization import FileError
from dpvim.synthesis import fitting
from dpvim.synthesis import twin as twin_module
from dpvim.synthesis.encoding import EncodedTable, encode
from dpvim.synthesis.fitting import TwinModel, synthesize
from dpvim.synthesis.model import TableRegression, _column, load_model
from dpvim.synthesis.schema import Binary, Count, Integer, NotReviewedError, Real, Schema
from dpvim.synthesis.tables import read_table
from dpvim.synthesis.twin import Twin
from dpvim.types import ModelError, NotPrivateError

QUICK = {"engine": "dpvi", "num_steps": 20, "components": 2, "seed": 0, "progress": False}


def check_domain(frame: pd.DataFrame, schema: Schema, num_rows: int) -> None:
    assert list(frame.columns) == schema.names
    assert len(frame) == num_rows
    assert frame["visits"].between(0, 30).all()
    assert frame["age"].between(18, 99).all()
    assert set(frame["sex"]) <= {"f", "m"}
    assert set(frame["code"].dropna()) <= {"01", "02", "NA"}
    assert frame["dose"].dropna().between(0.1, 100.0).all()


def test_tables_have_names_order_types_and_domain_of_the_schema(twin, schema):
    tables = list(twin.datasets(3, 50, seed=1))
    assert len(tables) == 3
    for table in tables:
        check_domain(table, schema, 50)
    assert tables[0]["code"].isna().any()
    assert not tables[0].equals(tables[1])
    assert tables[0].dtypes["age"] == np.int64
    check_domain(twin.sample(seed=0), schema, twin.num_rows)


@pytest.mark.long
def test_every_table_has_a_draw_of_its_own(twin, monkeypatch):
    seen = []

    def spy(model, key, draw, num_rows):
        seen.append(draw["visits.coefficients"])
        return model.sample_rows(key, draw, num_rows)

    monkeypatch.setattr(twin_module, "draw_rows", spy)
    list(twin.datasets(4, 10, seed=0))
    assert len(np.unique(np.stack(seen), axis=0)) == 4
    # and they are draws of the posterior that the fit reports
    expected = twin.fit.posterior
    sampled = expected.sample(2000, seed=1)["visits.coefficients"]
    assert (np.abs(np.mean(seen, axis=0) - sampled.mean(axis=0)) < 3 * sampled.std(axis=0)).all()


def test_a_seed_repeats_a_draw_and_no_seed_does_not(twin):
    assert twin.sample(20, seed=3).equals(twin.sample(20, seed=3))
    assert not twin.sample(20).equals(twin.sample(20))


def test_large_tables_come_in_pieces(twin, schema, monkeypatch, tmp_path):
    monkeypatch.setattr(twin_module, "_PIECE_ROWS", 30)
    check_domain(twin.sample(100, seed=0), schema, 100)
    twin.write_datasets(tmp_path / "data", 2, 100, suffix="parquet", seed=0, progress=False)
    written = read_table(tmp_path / "data" / "synthetic-001.parquet")
    expected = next(twin.datasets(2, 100, seed=0))
    assert written["visits"].tolist() == expected["visits"].tolist()


@pytest.mark.long
def test_a_saved_twin_draws_the_same_without_data(twin, tmp_path):
    twin.save(tmp_path / "twin", not_for_release=True)
    again = Twin.load(tmp_path / "twin")
    assert again.model == twin.model
    assert again.sample(20, seed=5).equals(twin.sample(20, seed=5))
    assert json.loads((tmp_path / "twin" / "privacy.json").read_text()) == twin.privacy.to_dict()


def test_nothing_of_the_data_is_saved(schema, tmp_path):
    # The same values for all: what a file could hold of them would be found in it.
    frame = pd.DataFrame(
        {"visits": [29] * 50, "sex": "m", "code": "zebra", "age": 77, "dose": 66.25}
    )
    made = synthesize(frame, schema, epsilon=1.0, **(QUICK | {"seed": None}))
    made.save(tmp_path / "twin")
    content = {path.name: path.read_bytes() for path in (tmp_path / "twin").iterdir()}
    with zipfile.ZipFile(io.BytesIO(content.pop("posterior.npz"))) as archive:
        arrays = {name: archive.read(name) for name in archive.namelist()}
    sums = [f"releases.{name}.npy" for name in ReleaseSums._fields]
    prior = [f"prior.{name}.npy" for name in GaussianPrior._fields]
    trace = ["steps.npy", "loc.npy", "raw_scale.npy"]
    assert set(arrays) == {"meta.json", *trace, *sums, *prior}
    dose = encode(frame, schema).values["dose"][:1]
    for name, data in (content | arrays).items():
        # Two in a row: four bytes of one value are found by chance in a megabyte of noise.
        for value in (b"zebra", b"66.25", 2 * dose.tobytes(), np.float64(66.25).tobytes()):
            assert value not in data, name


def test_an_existing_folder_is_refused_before_anything_is_written(twin, tmp_path):
    (tmp_path / "twin").mkdir()
    with pytest.raises(FileExistsError, match="exists already"):
        twin.save(tmp_path / "twin", not_for_release=True)
    assert [path.name for path in tmp_path.iterdir()] == ["twin"]


def test_a_seeded_twin_is_not_saved_for_release(twin, tmp_path):
    with pytest.raises(NotPrivateError):
        twin.save(tmp_path / "twin")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("change", [{"epsilon": 0.001}, {"num_steps": 1}, {"private": True}, None])
def test_a_folder_whose_statement_is_not_the_fits_is_refused(twin, tmp_path, change):
    twin.save(tmp_path / "twin", not_for_release=True)
    path = tmp_path / "twin" / "privacy.json"
    if change is None:
        path.unlink()
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(dpvim.FileError, match="expected the privacy statement of the fit"):
        Twin.load(tmp_path / "twin")


def test_a_twin_without_a_guarantee_says_so_when_it_is_loaded(twin, tmp_path):
    twin.save(tmp_path / "twin", not_for_release=True)
    with pytest.warns(dpvim.NotForReleaseWarning, match="no privacy guarantee"):
        Twin.load(tmp_path / "twin")


def test_rows_are_drawn_from_the_twins_own_posterior_alone(twin):
    """Anything else would go by the twin's guarantee."""
    assert len(next(twin.datasets(1, 5, posterior=twin.fit.posterior_from("last")))) == 5
    other = dataclasses.replace(twin.fit.averaged, privacy={"private": False})
    with pytest.raises(ValueError, match="expected one of this twin's own fit"):
        next(twin.datasets(1, 5, posterior=other))


def test_files_of_another_kind_are_refused(twin, tmp_path):
    with pytest.raises(FileNotFoundError, match="expected a folder with a twin"):
        Twin.load(tmp_path)
    twin.save(tmp_path / "twin", not_for_release=True)
    about = tmp_path / "twin" / "twin.json"
    about.write_text(about.read_text().replace('"version": 2', '"version": 3'))
    with pytest.raises(FileError, match="newer"):
        Twin.load(tmp_path / "twin")
    about.write_text("{")
    with pytest.raises(FileError, match="damaged"):
        Twin.load(tmp_path / "twin")


def test_what_is_wrong_is_said_before_the_budget_is_spent(patients, schema, monkeypatch):
    for name in ("fit_model", "fit_marginals"):
        monkeypatch.setattr(fitting, name, lambda *a, **k: pytest.fail("budget spent"))
    guess = Schema.from_dict(
        {
            "dpvim_schema": 1,
            "columns": [{"name": "age", "kind": "integer", "lower": 0, "upper": 120}],
        }
    )
    with pytest.raises(NotReviewedError, match="age"):
        synthesize(patients, guess, epsilon=1.0)
    with pytest.raises(ValueError, match="Did you mean 'num_steps'"):
        synthesize(patients, schema, epsilon=1.0, num_stepz=10)
    with pytest.raises(ValueError, match="Did you mean 'visits'"):
        synthesize(patients, schema, epsilon=1.0, target="visit")
    with pytest.raises(ValueError, match="suits poisson"):
        synthesize(
            patients, schema, epsilon=1.0, engine="dpvi", target="visits", target_model="linear"
        )
    with pytest.raises(ValueError, match="'dose'"):
        synthesize(patients.drop(columns="dose"), schema, epsilon=1.0, engine="dpvi")


@pytest.mark.parametrize(
    "option", [{"num_steps": 10}, {"clip_norm": 1.0}, {"target_model": "poisson"}]
)
def test_options_that_an_engine_does_not_have_are_refused(patients, schema, option):
    with pytest.raises(ValueError, match="expected only with the engine 'dpvi'"):
        synthesize(patients, schema, epsilon=1.0, **option)


def test_delta_is_a_tenth_of_one_over_the_public_number_of_rows(patients, schema):
    made = synthesize(patients, schema, epsilon=1.0, **QUICK)
    assert made.fit.plan.num_examples == 400
    bounded = synthesize(
        patients, schema, epsilon=1.0, num_examples=1000, relation="add_or_remove", **QUICK
    )
    assert bounded.num_rows == 1000  # the real number is private under this relation
    assert bounded.fit.plan.epsilon(0.1 / 1000) == pytest.approx(1.0, rel=0.01)


def test_twin_model_is_synthesize(patients, schema, twin):
    model = TwinModel(
        schema, epsilon=5.0, engine="dpvi", target="visits", num_steps=5, components=2, seed=0
    )
    with pytest.raises(ValueError, match="call fit"):
        model.sample(5)
    model.set_params(num_steps=200)
    assert model.fit(patients).sample(20, seed=5).equals(twin.sample(20, seed=5))
    assert model.get_params()["num_steps"] == 200
    with pytest.raises(ValueError, match="Did you mean 'epsilon'"):
        model.set_params(epsilom=1)


# -- models of one's own -----------------------------------------------------------------------


@pytest.fixture
def two_columns(schema):
    return Schema(columns=tuple(c for c in schema.columns if c.name in ("sex", "visits")))


@pytest.mark.long
def test_a_model_of_ones_own(patients, two_columns, model_file, tmp_path):
    model = load_model(model_file)
    made = synthesize(
        patients[["sex", "visits"]],
        two_columns,
        epsilon=20.0,
        model=model,
        num_steps=800,
        learning_rate=0.05,
        seed=0,
    )
    drawn = made.sample(4000, seed=0)
    assert list(drawn.columns) == ["visits", "sex"]
    assert (drawn["sex"] == "m").mean() == pytest.approx((patients["sex"] == "m").mean(), abs=0.1)
    assert drawn["visits"].mean() == pytest.approx(patients["visits"].clip(0, 30).mean(), rel=0.2)

    made.save(tmp_path / "twin", not_for_release=True)
    with pytest.raises(ValueError, match="the model that this twin was made with"):
        Twin.load(tmp_path / "twin")
    again = Twin.load(tmp_path / "twin", model=model)
    assert again.sample(10, seed=0).equals(made.sample(10, seed=0))

    def other(num_rows):
        with numpyro.plate("records", num_rows):
            return {"sex": numpyro.sample("a", dist.Bernoulli(0.5)), "visits": 0}

    with pytest.raises(ModelError, match="without rate, share"):
        Twin.load(tmp_path / "twin", model=other).sample(3)


def test_files_without_a_model_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is none"):
        load_model(tmp_path / "nowhere.py")
    (tmp_path / "empty.py").write_text("x = 1\n")
    with pytest.raises(ModelError, match="a function named model"):
        load_model(tmp_path / "empty.py")


def test_a_regression_of_a_table(patients, schema):
    table = encode(patients, schema)
    regression = TableRegression(schema, kind="poisson", target="visits")
    assert regression.names == [
        "sex=m",
        "code=02",
        "code=NA",
        "code missing",
        "age",
        "dose",
        "dose missing",
    ]
    covariates, outcome = regression.data(table)
    assert covariates.shape == (400, 7)
    assert outcome.max() <= 30
    np.testing.assert_array_equal(covariates[:, 3], table.missing["code"])
    np.testing.assert_allclose(np.unique(covariates[:, 0]), [-0.5, 0.5])
    expected = features(
        [_column(schema.column(name)) for name in schema.names if name != "visits"],
        jax.tree.map(jnp.asarray, Rows(table.values, table.missing)),
    )
    np.testing.assert_allclose(covariates, expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="nullable"):
        TableRegression(schema, kind="linear", target="dose")
    with pytest.raises(ValueError, match="no regression"):
        TableRegression(schema, kind="logistic", target="code")


@pytest.mark.parametrize("target", ["n", "i"])
def test_what_a_row_of_a_regression_is_depends_on_no_other_row(target):
    """To the last bit, whatever the number of rows, which can be private."""
    schema = Schema(
        (
            Count(name="n", upper=1000),
            Count(name="n?", upper=10**9, nullable=True),
            Integer(name="i", lower=-5, upper=1000),
            Real(name="r", lower=0, upper=1, nullable=True),
            Binary(name="b", levels=("no", "yes")),
        )
    )
    rng = np.random.default_rng(0)
    rows = 41
    values = {
        "n": rng.integers(0, 1000, rows, np.int32),
        "n?": rng.integers(0, 10**9, rows, np.int32),
        "i": rng.integers(-5, 1000, rows, np.int32),
        "r": rng.random(rows, np.float32),
        "b": rng.integers(0, 2, rows, np.int32),
    }
    missing = {name: rng.random(rows) < 0.2 for name in ("n?", "r")}
    kind = "poisson" if target == "n" else "linear"
    regression = TableRegression(schema, kind=kind, target=target)

    def data(chosen) -> np.ndarray:
        table = EncodedTable(*({k: v[chosen] for k, v in d.items()} for d in (values, missing)))
        X, y = regression.data(table)
        return np.column_stack([X, y])

    whole = data(slice(None))
    assert whole.dtype == np.float32
    for length in range(1, 41):
        for start in range(0, rows - length, 3):
            np.testing.assert_array_equal(
                data(slice(start, start + length)), whole[start:][:length]
            )
    for left_out in range(rows):
        others = np.delete(np.arange(rows), left_out)
        np.testing.assert_array_equal(data(others), whole[others])
