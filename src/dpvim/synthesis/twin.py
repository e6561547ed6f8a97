"""A synthetic twin of a table: fit once under differential privacy, sample for ever after."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd

import dpvim.result
from dpvim import _validate
from dpvim.fitting import fit as fit_model
from dpvim.models.mixture import Mixture
from dpvim.randomness import fresh_key
from dpvim.result import Fit
from dpvim.saving import FileError
from dpvim.statement import NoPrivacy, PrivacyStatement
from dpvim.synthesis.encoding import EncodedTable, decode, encode
from dpvim.synthesis.model import model_of
from dpvim.synthesis.schema import Schema
from dpvim.types import Relation

FORMAT = "dpvim twin"
VERSION = 1
FILES = {
    "fit": "posterior.npz",
    "schema": "schema.toml",
    "privacy": "privacy.json",
    "about": "twin.json",
}
DEFAULT_COMPONENTS = 10
# Settings of the optimisation, tried on the tables in benchmarks/twin_quality.py.
_LEARNING_RATE = 1e-2
DEFAULT_CLIP_NORM = 2.0


@dataclasses.dataclass(frozen=True)
class Twin:
    """A fitted model of a table. Nothing in it is private.

    Attributes:
        schema: The table's columns.
        fit: The fit of the model, with its privacy statement.
        components, target, target_model: What the model was made from.
        num_rows: Public number of rows of the original.
    """

    schema: Schema
    fit: Fit
    components: int
    target: str | None
    target_model: str | None
    num_rows: int

    @property
    def privacy(self) -> PrivacyStatement | NoPrivacy:
        """The guarantee that holds for the twin and for everything drawn from it."""
        return self.fit.privacy

    @property
    def model(self) -> Mixture:
        return model_of(
            self.schema,
            components=self.components,
            target=self.target,
            target_model=self.target_model,
        )

    def sample(self, num_rows: int | None = None, *, seed: int | None = None) -> pd.DataFrame:
        """One synthetic table, from one draw of the posterior."""
        return next(self.datasets(1, num_rows, seed=seed))

    def datasets(
        self, count: int, num_rows: int | None = None, *, seed: int | None = None
    ) -> Iterator[pd.DataFrame]:
        """Synthetic tables, each from a draw of the posterior of its own.

        That is what the combining rules need: the spread between the tables is the uncertainty of
        the model, with the noise of differential privacy in it.

        Args:
            count: How many tables.
            num_rows: Rows of each; default as many as the original had.
            seed: Repeats the draw. It takes nothing away from the privacy of the fit.
        """
        count = _validate.positive_int("count", count)
        rows = self.num_rows if num_rows is None else _validate.positive_int("num_rows", num_rows)
        key = fresh_key() if seed is None else jax.random.key(seed)
        key_draws, key_rows = jax.random.split(key)
        draws = self.fit.posterior.sample(count, seed=int(jax.random.bits(key_draws) >> 1))
        model = self.model
        # The number of rows is a shape: one compilation serves all tables.
        rows_of = jax.jit(lambda key, draw: model.sample_rows(key, draw, rows))
        for i, each in enumerate(jax.random.split(key_rows, count)):
            table = rows_of(each, {name: value[i] for name, value in draws.items()})
            values, missing = jax.tree.map(np.asarray, (dict(table.values), dict(table.missing)))
            yield decode(EncodedTable(values, missing), self.schema)

    # -- files --------------------------------------------------------------------------------

    def save(self, folder: str | Path, *, not_for_release: bool = False) -> None:
        """Write the twin to a new folder, complete or not at all."""
        with new_folder(folder) as partial:
            self.write_into(partial, not_for_release=not_for_release)

    def write_into(self, folder: Path, *, not_for_release: bool = False) -> None:
        """Write the twin's files into a folder that exists."""
        self.fit.save(folder / FILES["fit"], not_for_release=not_for_release)
        self.schema.save(folder / FILES["schema"])
        _write_json(folder / FILES["privacy"], self.privacy.to_dict())
        about = {
            "format": FORMAT,
            "version": VERSION,
            "components": self.components,
            "target": self.target,
            "target_model": self.target_model,
            "num_rows": self.num_rows,
        }
        _write_json(folder / FILES["about"], about)

    @classmethod
    def load(cls, folder: str | Path) -> Twin:
        """A twin that was saved; it needs no data to sample more."""
        source = Path(folder)
        about_file = source / FILES["about"]
        if not about_file.exists():
            raise FileNotFoundError(
                f"{source}: expected a folder with a twin (made by synth or Twin.save), found no "
                f"{FILES['about']} in it."
            )
        try:
            about = json.loads(about_file.read_text())
            if about["format"] != FORMAT or about["version"] > VERSION:
                raise FileError(
                    f"{about_file}: written by another program or a newer dpvim. Install a newer "
                    "one."
                )
            settings = {key: about[key] for key in ("components", "target", "target_model")}
            num_rows = _validate.positive_int("num_rows", about["num_rows"])
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise FileError(f"{about_file}: damaged ({error}).") from error
        schema = Schema.load(source / FILES["schema"])
        fit = dpvim.result.load(source / FILES["fit"])
        return cls(schema, fit, **settings, num_rows=num_rows)


def synthesize(
    frame: pd.DataFrame,
    schema: Schema,
    *,
    epsilon: float,
    delta: float | None = None,
    target: str | None = None,
    target_model: str | None = None,
    components: int = DEFAULT_COMPONENTS,
    clip_norm: float = DEFAULT_CLIP_NORM,
    sampling_prob: float | None = None,
    num_steps: int | None = None,
    num_examples: int | None = None,
    relation: str = Relation.ZERO_OUT,
    learning_rate: float = _LEARNING_RATE,
    seed: int | None = None,
    progress: bool | None = None,
) -> Twin:
    """Learn a model of a sensitive table under (epsilon, delta)-differential privacy.

    Args:
        frame: The table; one row for each person.
        schema: What is publicly known about its columns; every entry must be reviewed.
        epsilon: The budget.
        delta: Default: a tenth of one over the number of rows.
        target: A column to be regressed on all others.
        target_model: ``logistic``, ``poisson`` or ``linear``; default by the target's kind.
        components: Number of mixture components.
        clip_norm, sampling_prob, num_steps, num_examples, relation, learning_rate, seed, progress:
            As in `dpvim.fit`.

    Returns:
        A `Twin`: ``twin.sample()``, ``twin.datasets(100)``, ``twin.save("twin")``.
    """
    schema.check_reviewed()
    model = model_of(schema, components=components, target=target, target_model=target_model)
    public_rows = len(frame) if num_examples is None else num_examples
    table = encode(frame, schema)
    result = fit_model(
        model,
        table.values,
        table.missing,
        epsilon=epsilon,
        delta=default_delta(public_rows) if delta is None else delta,
        clip_norm=clip_norm,
        sampling_prob=sampling_prob,
        num_steps=num_steps,
        num_examples=num_examples,
        relation=relation,
        learning_rate=learning_rate,
        seed=seed,
        progress=progress,
    )
    kind = None if model.response is None else model.response.kind
    return Twin(schema, result, components, target, kind, public_rows)


def default_delta(num_rows: int) -> float:
    """A tenth of 1/N: at delta = 1/N a mechanism may publish a record outright."""
    return 0.1 / num_rows


class new_folder:  # noqa: N801 -- used like a function
    """A folder that appears under its name only when everything in it has been written."""

    def __init__(self, folder: str | Path, *, replace: bool = False) -> None:
        self._target = Path(folder)
        self._partial = self._target.with_name(self._target.name + ".partial")
        if self._target.exists() and not replace:
            raise FileExistsError(
                f"{self._target}: exists already. Choose another name, or remove it first."
            )

    def __enter__(self) -> Path:
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir(parents=True)
        return self._partial

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if kind is not None:
            shutil.rmtree(self._partial, ignore_errors=True)
            return
        if self._target.exists():
            shutil.rmtree(self._target)
        os.replace(self._partial, self._target)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
