"""Arrays on the disk: the same fits as from memory, bit by bit, and only batches are read."""

from __future__ import annotations

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest

import dpvim
from dpvim import mapped
from dpvim.fingerprint import data_digest
from dpvim.ledger.fingerprint import digest_of
from dpvim.mapped import MappedArray
from dpvim.privacy.batches import BatchReader
from dpvim.privacy.sampling import EMPTY

RNG = np.random.default_rng(0)
X = RNG.normal(size=(3000, 3))
Y = (RNG.random(3000) < 0.4).astype(np.int64)
QUICK = {
    "epsilon": 1.0,
    "delta": 1e-5,
    "num_steps": 40,
    "sampling_prob": 0.02,
    "seed": 3,
    "progress": False,
}


def model(X, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


@pytest.fixture
def on_disk(tmp_path):
    for name, array in (("x", X), ("y", Y)):
        np.save(tmp_path / f"{name}.npy", array)
    return tuple(np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in "xy")


def bits(fit):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((fit.trace, fit.releases))]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip_norm": 1.0, "learning_rate": 1e-2},
        {"clip_norm": 1.0, "relation": "add_or_remove", "num_examples": 3100},
    ],
    ids=["default", "aligned", "number of records is private"],
)
def test_fits_are_those_from_memory(on_disk, options):
    fits = [dpvim.fit(model, *data, **QUICK, **options) for data in ((X, Y), on_disk)]
    assert bits(fits[0]) == bits(fits[1])


def test_one_array_on_the_disk_is_enough(on_disk):
    assert bits(dpvim.fit(model, on_disk[0], Y, **QUICK)) == bits(dpvim.fit(model, X, Y, **QUICK))


def test_only_rows_of_batches_are_read_while_it_runs(on_disk, monkeypatch):
    read = []
    get = MappedArray.__getitem__

    def counted(self, rows):
        read.append(len(rows))
        return get(self, rows)

    monkeypatch.setattr(MappedArray, "__getitem__", counted)
    dpvim.fit(model, *on_disk, **QUICK)
    # Two arrays; 40 batches of 60 records on average.
    assert 2 * 40 * 50 < sum(read) < 2 * 40 * 70


def test_many_fits_and_svi_read_from_the_disk_too(on_disk):
    alone = dpvim.fit(model, *on_disk, **QUICK)
    options = {k: v for k, v in QUICK.items() if k != "seed"}
    many = dpvim.fit_many(model, *on_disk, **options, each=[{"seed": 3}, {"seed": 4}])
    assert bits(many[0]) == bits(alone)

    def one_step(data):
        facts = {"num_examples": 3000, "sampling_prob": 0.02, "num_steps": 2}
        plan = dpvim.PrivacyPlan(**facts, clip_norm=1.0, noise_multiplier=5.0)
        svi = dpvim.DPSVI(model, "mean_field", optax.adam(1e-2), plan, seed=1)
        state = svi.init(jax.random.key(0), *data)
        return np.asarray(svi.update(state, *data)[1].release)

    assert np.array_equal(one_step((X, Y)), one_step(on_disk))


def test_a_reader_puts_rows_where_the_batches_say():
    array = MappedArray(np.arange(20.0).reshape(10, 2))
    reader = BatchReader([array], lambda records: records)
    rows = np.array([[7, EMPTY], [2, 7], [0, 0]], np.int32)  # the third step is not taken yet
    (found,), places = reader.read(rows, 2), reader.places(rows)
    for step, batch in enumerate(rows[:2]):
        for place, row in zip(places[step], batch, strict=True):
            assert (place == EMPTY) == (row == EMPTY)
            if row != EMPTY:
                assert np.array_equal(found[place], [2 * row, 2 * row + 1])
    assert not found[4:].any()
    assert reader.numbers_a_row == 2


def test_fingerprints_are_those_of_arrays_in_memory(on_disk, monkeypatch):
    monkeypatch.setattr(mapped, "_PIECE_BYTES", 1000)
    in_memory = X.astype(np.float32)
    assert data_digest(MappedArray(on_disk[0])) == data_digest(in_memory)
    assert digest_of([MappedArray(on_disk[0])]) == digest_of([in_memory])


def test_checks_see_every_piece(tmp_path, monkeypatch):
    monkeypatch.setattr(mapped, "_PIECE_BYTES", 1000)
    for bad, match in ((np.nan, "finite"), (2.0**40, "32 bits")):
        dtype = np.int64 if match == "32 bits" else np.float64
        array = np.memmap(tmp_path / "bad", mode="w+", dtype=dtype, shape=(3000, 3))
        array[2999, 2] = bad
        with pytest.raises(ValueError, match=match):
            dpvim.fit(model, array, Y, **QUICK)


def test_what_cannot_be_read_in_batches_is_refused(on_disk):
    with pytest.raises(ValueError, match="sampling_prob"):
        dpvim.fit(model, *on_disk, **(QUICK | {"sampling_prob": 1.0}))
    with pytest.raises(ValueError, match="group_by"):
        dpvim.fit(model, *on_disk, **QUICK, group_by=np.arange(3000), max_rows_per_person=1)


def test_columns_of_arrow_files_are_on_the_disk(tmp_path):
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"x": X[:, 0].astype(np.float32)})
    with (
        pa.OSFile(str(tmp_path / "t.arrow"), "wb") as file,
        pa.ipc.new_file(file, table.schema) as w,
    ):
        w.write_table(table)
    with pa.memory_map(str(tmp_path / "t.arrow")) as source:
        column = pa.ipc.open_file(source).read_all()["x"].chunk(0).to_numpy()
        assert mapped.is_on_disk(column)
        assert np.array_equal(MappedArray(column)[[5, 1]], X[[5, 1], 0].astype(np.float32))
        del column
