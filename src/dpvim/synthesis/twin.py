"""A synthetic twin of a table: tables drawn from a fitted model, and its folder of files."""

from __future__ import annotations

import dataclasses
import itertools
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
import pandas as pd

import dpvim.result
from dpvim import _html, _validate
from dpvim._extras import require
from dpvim._progress import ProgressBar, show_progress
from dpvim.files import as_path, new_folder, read_json, write_json
from dpvim.models.sample_rows import draw_rows
from dpvim.posterior.posterior import Posterior
from dpvim.privacy.randomness import fresh_key
from dpvim.privacy.statement import NoPrivacy, PrivacyStatement
from dpvim.result import Fit
from dpvim.serialization import FileError
from dpvim.synthesis.constrained import RowsOf, broken_shares, given_constraints
from dpvim.synthesis.encoding import EncodedTable, decode, encode, in_file
from dpvim.synthesis.formulas import check_schema
from dpvim.synthesis.marginals.closeness import among, compare, describe, groups_of
from dpvim.synthesis.marginals.fit import MarginalFit
from dpvim.synthesis.marginals.release import codes_of
from dpvim.synthesis.model import build_mixture, mixture_settings
from dpvim.synthesis.schema import Schema, SchemaError
from dpvim.synthesis.tables import read_table, write_table
from dpvim.types import NotForReleaseWarning

DPVI, MARGINALS = "dpvi", "marginals"
"""Engines: a model by DPVI, or latent traits from noisy counts."""

_FORMAT, _VERSION = "dpvim twin", 2
_FIT, _SCHEMA, _PRIVACY, ABOUT = "posterior.npz", "schema.toml", "privacy.json", "twin.json"
DATA, CLOSEST = "data", "closest"
# Fields of a privacy statement that must agree with the fit.
_GUARANTEE_FIELDS = (
    *("private", "delta", "relation", "noise_multiplier", "clip_norm", "sampling_prob"),
    *("num_examples", "num_steps", "max_rows_per_person"),
)
# Tables are drawn in pieces of so many rows, which bounds the memory they take.
_PIECE_ROWS = 250_000
_REPORT_TABLES = 20


@dataclasses.dataclass(frozen=True)
class Twin:
    """A fitted model of a table. Nothing that `save` writes is private.

    Attributes:
        schema: The table's columns.
        fit: The fit, with its privacy statement: to noisy counts, or of a model by DPVI.
        model: Of DPVI, what draws rows when it is called with ``num_rows``; else None.
        num_rows: Public number of rows of the original.

    `dpvim.synthesize` has an example.
    """

    schema: Schema
    fit: Fit | MarginalFit
    model: Callable[..., Any] | None
    num_rows: int

    @property
    def by_dpvi(self) -> Fit:
        """The fit of a model; a twin from counts has none."""
        if isinstance(self.fit, MarginalFit):
            raise ValueError(
                "expected a twin by DPVI (engine 'dpvi'), got one from noisy counts, which has no "
                "trace and no posterior of parameters. Draw its datasets."
            )
        return self.fit

    @property
    def posterior(self) -> Posterior:
        """The posterior that tables are drawn from; of a fit of a model.

        What the releases tell is local, and a mixture has many modes: it has the average of the
        trace. The regression of a target is a block of its own, which the releases tell.
        """
        fit = self.by_dpvi
        return fit.posterior if fit.several_modes else fit.averaged

    @property
    def privacy(self) -> PrivacyStatement | NoPrivacy:
        """The guarantee that holds for the twin and for everything drawn from it."""
        return self.fit.privacy

    def sample(self, num_rows: int | None = None, *, seed: int | None = None) -> pd.DataFrame:
        """One synthetic table, from one draw of the posterior."""
        return next(self.datasets(1, num_rows, seed=seed))

    def closest(self, num_rows: int | None = None, *, seed: int | None = None) -> pd.DataFrame:
        """The synthetic table that is closest to the original: for looking at, and for training.

        It is drawn from the best fit, as evenly as so many rows allow. What it does not show is
        how uncertain the fit is: intervals need several `datasets`.

        Args:
            num_rows: Its rows; default as many as the original had.
            seed: Repeats the draw.
        """
        if not isinstance(self.fit, MarginalFit):
            raise ValueError(
                "closest: expected a twin from noisy counts (engine 'marginals'), got one by DPVI, "
                "whose fit is a posterior without a best point. Take sample()."
            )
        rows = self._num_rows(num_rows)
        drawn = self.fit.closest(np.random.SeedSequence(_validate.seed("seed", seed)))
        return pd.concat(self._pieces(drawn, rows), ignore_index=True)

    def datasets(
        self,
        count: int,
        num_rows: int | None = None,
        *,
        posterior: Posterior | None = None,
        seed: int | None = None,
    ) -> Iterator[pd.DataFrame]:
        """Synthetic tables, each from a draw of the posterior of its own.

        That is what the combining rules need: the spread between the tables is the uncertainty of
        the model, with the noise of differential privacy in it.

        Args:
            count: How many tables.
            num_rows: Rows of each; default as many as the original had.
            posterior: Another one than ``twin.posterior``, from ``fit.posterior_from``.
            seed: Repeats the draw. It takes nothing away from the privacy of the fit.
        """
        for pieces in self._tables(count, num_rows, seed, posterior):
            yield pd.concat(pieces, ignore_index=True)

    def write_datasets(
        self,
        folder: str | Path,
        count: int,
        num_rows: int | None = None,
        *,
        suffix: str = "csv",
        formulas: str = "refuse",
        seed: int | None = None,
        progress: bool | None = None,
    ) -> None:
        """Write synthetic-001.csv, ... to a new folder, which appears when it is complete.

        Args:
            folder: The new folder.
            count, num_rows, seed: As in `datasets`.
            suffix: ``csv``, ``csv.gz``, ``tsv``, ``tsv.gz`` or ``parquet``.
            formulas: What becomes of declared texts that spreadsheets would run as formulas when
                they open a CSV file: ``refuse``, ``quote`` (an apostrophe before them), ``allow``.
            progress: Show a progress bar. Default: if standard error is a terminal.
        """
        check_format(self.schema, suffix, formulas)
        width = max(3, len(str(count)))
        bar = ProgressBar(count, show=show_progress(progress), label="sampling", unit="tables")
        with new_folder(folder) as partial, bar:
            for number, pieces in enumerate(self._tables(count, num_rows, seed), start=1):
                path = partial / f"synthetic-{number:0{width}}.{suffix}"
                self._write(pieces, path, formulas)
                bar.advance(1)

    def write_closest(
        self,
        folder: str | Path,
        num_rows: int | None = None,
        *,
        suffix: str = "csv",
        formulas: str = "refuse",
        seed: int | None = None,
    ) -> None:
        """Write closest.csv, the table that `closest` gives, into a folder that exists.

        Args:
            folder: The folder.
            num_rows, seed: As in `closest`.
            suffix, formulas: As in `write_datasets`.
        """
        check_format(self.schema, suffix, formulas)
        table = self.closest(num_rows, seed=seed)
        self._write([table], Path(folder) / f"{CLOSEST}.{suffix}", formulas)

    def _write(self, pieces: Iterable[pd.DataFrame], path: Path, formulas: str) -> None:
        as_text = path.suffix != ".parquet"
        written = (in_file(piece, self.schema, as_text=as_text) for piece in pieces)
        write_table(written, path, missing=self.schema.missing[0], formulas=formulas)

    def _tables(
        self,
        count: int,
        num_rows: int | None,
        seed: int | None,
        posterior: Posterior | None = None,
    ) -> Iterator[Iterator[pd.DataFrame]]:
        """For each table its pieces."""
        count, rows = _validate.positive_int("count", count), self._num_rows(num_rows)
        _validate.seed("seed", seed)
        if posterior is not None and posterior.privacy != self.privacy.to_dict():
            raise ValueError(
                "posterior: expected one of this twin's own fit, from twin.fit.posterior_from, got "
                "one with another privacy statement. What is drawn from it would go by the twin's."
            )
        if isinstance(self.fit, MarginalFit):
            draws = self.fit.draws(count, np.random.SeedSequence(seed))
        else:
            draws = self._draws_of_model(count, seed, posterior or self.posterior)
        return (self._pieces(draw, rows) for draw in draws)

    def _num_rows(self, num_rows: int | None) -> int:
        return self.num_rows if num_rows is None else _validate.positive_int("num_rows", num_rows)

    def _draws_of_model(
        self, count: int, seed: int | None, posterior: Posterior
    ) -> Iterator[RowsOf]:
        """Draws of the posterior, each as a function that draws rows from the model with it."""
        key = fresh_key() if seed is None else jax.random.key(seed)
        key_draws, key_rows = jax.random.split(key)
        draws = posterior.sample(count, seed=int(jax.random.bits(key_draws) >> 1))
        for i in range(count):
            draw = {name: values[i] for name, values in draws.items()}
            yield self._rows_of_model(jax.random.fold_in(key_rows, i), draw)

    def _rows_of_model(self, key: Any, draw: dict[str, Any]) -> RowsOf:
        assert self.model is not None
        model, pieces = self.model, itertools.count()

        def rows(num_rows: int) -> EncodedTable:
            drawn = draw_rows(model, jax.random.fold_in(key, next(pieces)), draw, num_rows)
            values, missing = jax.tree.map(np.asarray, tuple(drawn))
            return EncodedTable(values, missing)

        return rows

    def _pieces(self, rows_of: RowsOf, num_rows: int) -> Iterator[pd.DataFrame]:
        """The one way from a draw to tables: all of them obey the schema's constraints."""
        obeying = given_constraints(rows_of, self.schema)
        for first in range(0, num_rows, _PIECE_ROWS):
            yield decode(obeying(min(_PIECE_ROWS, num_rows - first)), self.schema)

    def broken_shares(self, num_rows: int = 10_000, *, seed: int | None = 0) -> dict[str, float]:
        """By constraint of the schema, the share of the model's rows that would break it.

        Such rows are drawn again, so tables have none. A large share says that the constraint
        bends the distributions of its columns.

        Args:
            num_rows: How many rows are drawn to tell.
            seed: Repeats the draw.
        """
        _validate.seed("seed", seed)
        if not self.schema.constraints:
            return {}
        if isinstance(self.fit, MarginalFit):
            rows_of = self.fit.closest(np.random.SeedSequence(seed))
        else:
            rows_of = next(self._draws_of_model(1, seed, self.by_dpvi.averaged))
        return broken_shares(rows_of, self.schema, _validate.positive_int("num_rows", num_rows))

    def doubts(
        self,
        datasets: Iterable[pd.DataFrame | str | Path],
        columns: Sequence[str] | None = None,
    ) -> list[str]:
        """Pairs of columns whose association in tables is not that of the released counts.

        Intervals of regressions that rest on such pairs are not to be trusted. A twin by DPVI has
        no counts to compare with, and no doubts of this kind.

        Args:
            datasets: At least two of the twin's tables, frames or paths; twenty are looked at.
            columns: Those that matter; default all.
        """
        if not isinstance(self.fit, MarginalFit):
            return []
        names = self.schema.names
        for name in columns or ():
            _validate.one_of("columns", name, names)
        releases = self.fit.releases

        def groups(dataset: pd.DataFrame | str | Path) -> np.ndarray:
            is_frame = isinstance(dataset, pd.DataFrame)
            frame = dataset if is_frame else read_table(dataset, columns=names)
            codes = codes_of(encode(frame, self.schema), self.schema, releases.grids)
            return groups_of(releases, codes)

        tables = [groups(each) for each in itertools.islice(datasets, _REPORT_TABLES)]
        if len(tables) < 2:
            raise ValueError(f"datasets: expected at least two, got {len(tables)}.")
        chosen = range(len(names)) if columns is None else [names.index(c) for c in columns]
        return describe(among(compare(releases, tables), list(chosen)), names)

    def report(
        self,
        path: str | Path,
        datasets: Iterable[pd.DataFrame | str | Path] | None = None,
        **options: Any,
    ) -> None:
        """Write a page of HTML on the twin; see `dpvim.synthesis.report.page.write_report`.

        Args:
            path: The file.
            datasets: Synthetic tables, frames or paths; default twenty that are drawn now.
            options: ``compare=`` the original, for a report that is not for release; others.
        """
        tables = self.datasets(_REPORT_TABLES) if datasets is None else datasets
        page = require("dpvim.synthesis.report.page", extra="report")
        page.write_report(self, tables, path, **options)

    def _repr_html_(self) -> str:
        rows = {
            "engine": MARGINALS if isinstance(self.fit, MarginalFit) else DPVI,
            "rows": f"{self.num_rows:,}",
            "columns": ", ".join(self.schema.names),
        }
        return _html.card(
            "Synthetic twin",
            _html.facts(rows),
            self.privacy._repr_html_(),
            _html.paragraph("twin.sample(), twin.datasets(100), twin.report('report.html')"),
            is_bad=not self.privacy.private,
        )

    # -- files --------------------------------------------------------------------------------

    def save(self, folder: str | Path, *, not_for_release: bool = False) -> None:
        """Write the twin to a new folder, complete or not at all."""
        with new_folder(folder) as partial:
            self.write_into(partial, not_for_release=not_for_release)

    def write_into(self, folder: Path, *, not_for_release: bool = False) -> None:
        """Write the twin's files into a folder that exists."""
        self.fit.save(folder / _FIT, not_for_release=not_for_release)
        self.schema.save(folder / _SCHEMA)
        write_json(folder / _PRIVACY, self.privacy.to_dict())
        about: dict[str, Any] = {"format": _FORMAT, "version": _VERSION, "num_rows": self.num_rows}
        if isinstance(self.fit, MarginalFit):
            about["engine"] = MARGINALS
        else:
            about |= {"engine": DPVI, "model": mixture_settings(self.model, self.schema)}
        write_json(folder / ABOUT, about)

    @classmethod
    def load(cls, folder: str | Path, *, model: Callable[..., Any] | None = None) -> Self:
        """A twin that was saved; it needs no data to sample more.

        Args:
            folder: Made by `save` or by ``dpvim synth``.
            model: The model, if the twin was made with the user's own: no code is loaded.
        """
        source = as_path("folder", folder)
        about_file = source / ABOUT
        if not about_file.is_file():
            raise FileNotFoundError(
                f"{source}: expected a folder with a twin, made by synth or Twin.save; found no "
                f"{ABOUT} in it."
            )
        try:
            about = read_json(about_file)
            version = _validate.positive_int("version", about["version"])
            if about["format"] != _FORMAT or version > _VERSION:
                raise FileError(
                    f"{about_file}: expected a twin of version {_VERSION} at most. Install a newer "
                    "dpvim."
                )
            num_rows = _validate.positive_int("num_rows", about["num_rows"])
            schema = Schema.load(source / _SCHEMA)
            counted = about.get("engine", DPVI) == MARGINALS  # twins of old have no engine
            if not counted and about["model"] is not None:
                model = build_mixture(schema, **about["model"])
        except (FileError, SchemaError):
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise FileError(
                f"{about_file}: damaged ({type(error).__name__}: {error!s:.300})."
            ) from error
        fit: Fit | MarginalFit
        if counted:
            fit, model = MarginalFit.load(source / _FIT, schema), None
            _check_statement(source / _PRIVACY, fit)
            return cls(schema, fit, model, num_rows)
        if model is None:
            raise ValueError(
                f"{source}: expected the model that this twin was made with, got none. It is the "
                "user's own and is not part of the folder."
            )
        fit = dpvim.result.load(source / _FIT)
        _check_statement(source / _PRIVACY, fit)
        return cls(schema, fit, model, num_rows)


def check_format(schema: Schema, suffix: str, formulas: str) -> None:
    """Refuse a format that tables of this schema cannot be written in, by the rule for formulas."""
    if not suffix.lower().endswith("parquet"):
        check_schema(schema, formulas)


def _check_statement(path: Path, fit: Fit | MarginalFit) -> None:
    """Refuse a folder that claims more than its fit, and say it if there is no guarantee."""
    stated = read_json(path) if path.is_file() else {}
    facts = json.loads(json.dumps(fit.privacy.to_dict()))
    # Words may change from version to version, the last digits of epsilon, too.
    epsilon = stated.get("epsilon", 0.0)
    # Not a number is not less than any: it must be one that is enough.
    enough = isinstance(epsilon, int | float) and epsilon >= 0.999 * facts.get("epsilon", 0.0)
    claims_less = not enough
    if claims_less or any(stated.get(name) != facts.get(name) for name in _GUARANTEE_FIELDS):
        raise FileError(
            f"{path}: expected the privacy statement of the fit beside it, got another one or "
            "none. The folder was changed after it was written."
        )
    if not fit.privacy.private:
        warnings.warn(
            f"{path.parent}: this twin has no privacy guarantee, and neither has anything drawn "
            "from it.",
            NotForReleaseWarning,
            stacklevel=3,
        )
