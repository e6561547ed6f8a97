"""Files as dpvim writes them, made once and without a fit: what hostile ones are made from."""

from __future__ import annotations

import functools
import tempfile
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
from numpyro.distributions import constraints

from dpvim import checkpoints, serialization
from dpvim.bridge.latent_space import LatentSpace, Site
from dpvim.inference.families import FAMILIES
from dpvim.inference.release_sums import ReleaseSums
from dpvim.inference.trace import Trace
from dpvim.ledger.book import Ledger
from dpvim.posterior.from_releases.regression import GaussianPrior
from dpvim.privacy.plan import PrivacyPlan
from dpvim.privacy.statement import PrivacyStatement
from dpvim.synthesis.fitting import synthesize
from dpvim.synthesis.model import build_mixture
from dpvim.synthesis.schema import Schema
from dpvim.synthesis.tables import write_table
from dpvim.synthesis.twin import Twin

SCHEMA = """dpvim_schema = 1
missing = ["", "NA"]
constraints = ["age >= visits", "sex == 'f' or age > 20"]

[[columns]]
name = "sex"
kind = "binary"
levels = ["f", "m"]
reviewed = true

[[columns]]
name = "code"
kind = "categorical"
levels = ["01", "02", "03"]
outside = "03"
nullable = true
reviewed = true
[columns.groups]
"01" = ["011", "1*"]
"02" = ["022"]

[[columns]]
name = "age"
kind = "integer"
lower = 0
upper = 99
reviewed = true

[[columns]]
name = "visits"
kind = "count"
upper = 5
reviewed = true

[[columns]]
name = "dose"
kind = "real"
lower = 0.1
upper = 100.0
scale = "log"
decimals = 2
nullable = true
reviewed = true

[[columns]]
name = "seen"
kind = "date"
lower = "2020-01-01"
upper = 2021-12-31
format = "%d.%m.%Y"
reviewed = true
"""
PLAN = PrivacyPlan(
    num_examples=500, sampling_prob=1.0, num_steps=20, clip_norm=1.0, noise_multiplier=30.0
)
QUESTION = {"plan": "the plan", "model": "the model"}
DIGEST = b"\x07" * 32


@functools.cache
def saved_fit() -> bytes:
    """A fit of two sites, with releases and a prior."""
    sites = [
        Site("w", (2,), (2,), constraints.real),
        Site("scale", (), (), constraints.interval(np.float32(0), np.float32(2))),
    ]
    space = LatentSpace(sites)
    family = FAMILIES["mean_field"](space.layout)
    rng = np.random.default_rng(0)
    like = serialization._shapes_of(family)
    params = type(like)(*(rng.normal(size=(3, 3)).astype(np.float32) for _ in like))
    privacy = PrivacyStatement.of(
        PLAN, delta=1e-5, steps_done=20, released="noisy sums", for_testing=False
    )
    saved = serialization.SavedFit(
        PLAN,
        privacy,
        Trace(np.array([0, 10, 20]), params),
        space,
        family,
        releases=ReleaseSums.zeros(3),
        prior=GaussianPrior(np.zeros(3), np.ones(3)),
    )
    return _content(lambda path: serialization.write(path, saved))


@functools.cache
def schema() -> Schema:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "schema.toml"
        path.write_text(SCHEMA)
        return Schema.load(path)


@functools.cache
def table() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "sex": rng.choice(["f", "m"], 60),
            "code": rng.choice(["01", "02", "03"], 60),
            "age": rng.integers(30, 99, 60),
            "visits": rng.integers(0, 5, 60),
            "dose": np.round(np.exp(rng.normal(size=60)).clip(0.1, 100), 2),
            "seen": "01.02.2021",
        }
    )


@functools.cache
def twin_of_counts() -> dict[str, bytes]:
    """A folder of a twin from counts, by the names of its files."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        twin = synthesize(table(), schema(), epsilon=5.0, delta=1e-3, components=2, seed=0)
    return _folder(lambda path: twin.save(path, not_for_release=True))


@functools.cache
def twin_by_dpvi() -> dict[str, bytes]:
    """A folder of a twin whose fit is that of `saved_fit`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fit.npz"
        path.write_bytes(saved_fit())
        from dpvim.result import load

        twin = Twin(schema(), load(path), build_mixture(schema(), components=2), 500)
        return _folder(twin.save)


@functools.cache
def ledger() -> dict[str, bytes]:
    """A ledger's files: a declaration, two bookings, a settlement; bound to data."""

    def make(path: Path) -> None:
        path.mkdir()
        made = Ledger.create(path / "a.ledger", name="people", epsilon=3.0, delta=1e-5)
        made.book(PLAN, purpose="first", data=np.arange(3.0)).settle(11)
        made.book(PLAN.with_steps(4), purpose="second")

    return _folder(make)


@functools.cache
def checkpoint_archive() -> bytes:
    """Facts of a run and an array, as a checkpoint holds them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        with checkpoints.opened(path, QUESTION, DIGEST) as found:
            found.save({"step": np.arange(4), "loc": np.zeros(3, np.float32)})
        return (path / checkpoints.STATE).read_bytes()


@functools.cache
def finished_checkpoint() -> bytes:
    """The result of a run that ended."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        with checkpoints.opened(path, QUESTION, DIGEST) as found:
            found.finish({"step": np.arange(4), "loc": np.zeros(3, np.float32)})
        return (path / checkpoints.RESULT).read_bytes()


@functools.cache
def table_file(suffix: str) -> bytes:
    """A table with a column of a few texts, as a file of this kind."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"table{suffix}"
        write_table(table(), path)
        return path.read_bytes()


def _content(write: object) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        write(path)  # type: ignore[operator]
        return path.read_bytes()


def _folder(write: object) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "new"
        write(path)  # type: ignore[operator]
        return {file.name: file.read_bytes() for file in path.iterdir()}
