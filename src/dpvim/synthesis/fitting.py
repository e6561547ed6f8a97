"""Fit a twin: choose the engine, the model of a table, its budget and its settings, and run it.

`synthesize` does all of it. The command line makes the synthesizer first, so that what is wrong
with the choices is said before the table is read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Self, TypeAlias

import pandas as pd

from dpvim import _validate, checkpoints
from dpvim.bridge.data import check_model
from dpvim.bridge.persons import person_numbers
from dpvim.files import existing_file
from dpvim.fingerprint import data_digest, file_digest
from dpvim.fitting import fit as fit_model
from dpvim.ledger.book import Ledger
from dpvim.ledger.payment import Account
from dpvim.options import Budget, FitOptions
from dpvim.privacy.counts import counts_plan
from dpvim.privacy.plan import PrivacyPlan
from dpvim.privacy.randomness import SecretStreams
from dpvim.serialization import plan_to_json
from dpvim.synthesis.constrained import check_possible
from dpvim.synthesis.databases.addresses import is_database
from dpvim.synthesis.databases.connection import DatabaseTable, open_table
from dpvim.synthesis.encoding import EncodedTable, encode
from dpvim.synthesis.marginals.fit import Tables, fit_marginals
from dpvim.synthesis.marginals.release import design, noise_of_pairs
from dpvim.synthesis.model import DEFAULT_NUMBERS, build_model
from dpvim.synthesis.persons import Frames, one_row_a_person
from dpvim.synthesis.schema import Schema
from dpvim.synthesis.tables import check_names, read_pieces
from dpvim.synthesis.twin import DPVI, MARGINALS, Twin
from dpvim.types import Relation

ENGINES = (MARGINALS, DPVI)
_PURPOSE = "a synthetic twin"
DEFAULT_COMPONENTS = 10
DEFAULT_CLIP_NORM = 2.0
DEFAULT_LEARNING_RATE = 2e-2
DEFAULT_STEPS = 4000
# What a twin from counts has of the options of a fit.
_OPTIONS_OF_COUNTS = ("relation", "seed", "progress", "checkpoint")

Source: TypeAlias = Any
"""A table, a file that holds one, or one in a database, as `open_table` takes it."""


def synthesize(
    frame: Source,
    schema: Schema,
    *,
    epsilon: float,
    delta: float | None = None,
    target: str | None = None,
    engine: str | None = None,
    components: int | None = None,
    num_examples: int | None = None,
    group_by: str | None = None,
    target_model: str | None = None,
    numbers: str | None = None,
    model: Callable[..., Any] | None = None,
    clip_norm: float | None = None,
    learning_rate: float | None = None,
    ledger: Any = None,
    purpose: str | None = None,
    **fit_options: Any,
) -> Twin:
    """Learn a model of a sensitive table under (epsilon, delta)-differential privacy.

    Args:
        frame: The table, a file with it, or one in a database, as `dpvim.open_table` takes it; one
            row for each person, unless `group_by` says otherwise. A Parquet file need not fit the
            memory.
        schema: What is publicly known about its columns; every entry must be reviewed.
        epsilon: The budget.
        delta: Default: a tenth of one over the number of rows.
        target: A column that matters more than others: its pairs are counted with less noise.
            With ``dpvi`` it is regressed on all others.
        engine: ``marginals`` (latent traits, fitted to noisy counts of pairs of columns; the
            default) or ``dpvi`` (the paper's way: a model fitted by noisy gradients; the default
            for a model of your own).
        components: Number of mixture components. Default: with ``marginals`` 512 or 1024 points of
            the latent traits, with ``dpvi`` 10.
        num_examples, fit_options: As in `dpvim.fit`; with ``marginals`` ``relation``, ``seed``,
            ``progress`` and ``checkpoint`` alone.
        group_by: A column of the table, and not of the schema, with the ids of persons who may
            have several rows. One row of each, chosen by secret coins, is used: persons instead of
            rows are protected, and a row of the twin stands for a person.
        target_model: With ``dpvi``: ``logistic``, ``poisson`` or ``linear``; default by the
            target's kind.
        numbers: With ``dpvi``, what integer and real columns are in a component: ``histogram`` or
            ``normal``.
        model: A NumPyro model of your own instead of the mixture: called with the columns' values
            and where they are missing (dicts of arrays, as `dpvim.synthesis.encoding.encode`
            returns them) it observes them; called with ``num_rows=`` it returns drawn columns.
        clip_norm, learning_rate: With ``dpvi``, as in `dpvim.fit`; 4000 steps and a learning rate
            of 0.02 unless told. (Longer runs have more noise a step, which shows where data are
            scarce.)
        ledger, purpose: As in `dpvim.fit`: the table's budget pays for the twin, or it is refused.

    Returns:
        A `Twin`: ``twin.sample()``, ``twin.datasets(100)``, ``twin.closest()``,
        ``twin.save("twin")``.

    >>> levels = {"kind": "binary", "levels": ["no", "yes"], "reviewed": True}
    >>> columns = [{"name": name, **levels} for name in ("smoker", "cough")]
    >>> schema = Schema.from_dict({"dpvim_schema": 1, "columns": columns})
    >>> frame = pd.DataFrame({"smoker": ["no", "yes"] * 500, "cough": ["no"] * 999 + ["yes"]})
    >>> twin = synthesize(frame, schema, epsilon=1.0)
    >>> twin.closest(3).columns.tolist()
    ['smoker', 'cough']
    >>> [len(table) for table in twin.datasets(2, 10)]
    [10, 10]
    """
    maker = make_synthesizer(
        schema,
        engine=engine,
        target=target,
        components=components,
        model=model,
        group_by=group_by,
        target_model=target_model,
        numbers=numbers,
        clip_norm=clip_norm,
        learning_rate=learning_rate,
        **fit_options,
    )
    return maker.fit(
        frame,
        epsilon=epsilon,
        delta=delta,
        num_examples=num_examples,
        ledger=ledger,
        purpose=purpose,
    )


@dataclasses.dataclass(frozen=True)
class CountSynthesizer:
    """Makes twins from noisy counts: all that was chosen before a table is read.

    Attributes:
        schema: The table's columns.
        target, components: As in `synthesize`.
        relation, seed, progress, checkpoint: As in `dpvim.fit`.
        group_by: The column of persons' ids, as in `synthesize`.
    """

    schema: Schema
    target: str | None = None
    components: int | None = None
    relation: Relation = Relation.ZERO_OUT
    seed: int | None = None
    progress: bool | None = None
    group_by: str | None = None
    checkpoint: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.target is not None:
            _validate.one_of("target", self.target, self.schema.names)
        if self.components is not None:
            _validate.positive_int("components", self.components)

    def plan(self, num_rows: int, *, epsilon: float, delta: float | None = None) -> PrivacyPlan:
        """The plan for so many rows, calibrated. It needs no data."""
        plan = counts_plan(
            num_examples=num_rows,
            relation=self.relation,
            max_rows_per_person=None if self.group_by is None else 1,
        )
        return plan.calibrate(epsilon=epsilon, delta=resolve_delta(delta, num_rows))

    def facts(self, plan: PrivacyPlan) -> dict[str, Any]:
        """The counts to be made, and their precision, for people to read."""
        wanted = design(self.schema, plan, target=self.target)
        noise = noise_of_pairs(plan, wanted)
        facts: dict[str, Any] = {
            "unit": plan.unit.value,
            "engine": MARGINALS,
            "columns_counted_alone": len(wanted.grouped) if wanted.shares[0] else 0,
            "pairs_counted": len(wanted.pairs),
        }
        if noise:
            facts["noise_of_a_count"] = max(noise)
        if noise and self.target is not None:
            facts["noise_of_a_count_of_target"] = min(noise)
        return facts

    def fit(
        self,
        source: Source,
        *,
        epsilon: float,
        delta: float | None = None,
        num_examples: int | None = None,
        ledger: Any = None,
        purpose: str | None = None,
        **reading: Any,
    ) -> Twin:
        """The twin of a table.

        Args:
            source, epsilon, delta, num_examples, ledger, purpose: As in `synthesize`.
            reading: Of a file, as in `read_table`.
        """
        with contextlib.ExitStack() as opened:
            table = opened.enter_context(opened_table(source, **reading))
            return self._fit(
                table,
                epsilon=epsilon,
                delta=delta,
                num_examples=num_examples,
                ledger=ledger,
                purpose=purpose,
                after_release=opened.close,
                **({} if isinstance(table, DatabaseTable) else reading),
            )

    def _fit(
        self,
        source: pd.DataFrame | str | Path | DatabaseTable,
        *,
        epsilon: float,
        delta: float | None,
        num_examples: int | None,
        ledger: Any,
        purpose: str | None,
        after_release: Callable[[], object],
        **reading: Any,
    ) -> Twin:
        self.schema.check_reviewed()
        tables, num_rows = self.tables_of(source, **reading)
        booked_in = _ledger_of(ledger, purpose, source)
        public_rows = num_rows() if num_examples is None else num_examples
        plan = self.plan(public_rows, epsilon=epsilon, delta=delta)
        delta = resolve_delta(delta, public_rows)
        account = None
        if booked_in is not None:
            account = Account(booked_in, purpose or _PURPOSE, delta)
        with self._checkpoint(source, plan, delta, reading) as checkpoint:
            if checkpoint is not None and self.group_by is not None:
                # The run's own coins: with the same noise, the rows of a person must be the same.
                tables, _ = self.tables_of(source, checkpoint.streams(self.seed), **reading)
            fitted = fit_marginals(
                tables,
                self.schema,
                plan,
                delta=delta,
                target=self.target,
                components=self.components,
                seed=self.seed,
                progress=self.progress,
                account=account,
                checkpoint=checkpoint,
                after_release=after_release,
            )
        return Twin(self.schema, fitted, None, public_rows)

    def tables_of(
        self,
        source: pd.DataFrame | str | Path | DatabaseTable,
        streams: SecretStreams | None = None,
        **reading: Any,
    ) -> tuple[Tables | DatabaseTable, Callable[[], int]]:
        """The table as `fit_marginals` takes it, and a function that counts its records.

        Args:
            source: From `opened_table`.
            streams: Coins that choose a row of each person, instead of fresh ones.
            reading: Of a file, as in `read_table`.
        """
        if isinstance(source, DatabaseTable):
            if self.group_by is not None:
                raise ValueError(
                    "group_by: expected a file or a frame with the rows of persons, got a table in "
                    "a database, where secret coins cannot choose a row of each. Make a table with "
                    "one row a person, or read this one from a file."
                )
            source.readers(self.schema)
            return source, lambda: source.num_rows
        pieces = pieces_of(source, self.schema, self.group_by, **reading)
        if self.group_by is not None:
            coins = (streams or SecretStreams(self.seed)).generator("rows of persons")
            pieces = one_row_a_person(pieces, self.group_by, coins)
        return (
            lambda: (encode(piece, self.schema) for piece in pieces()),
            lambda: sum(map(len, pieces())),
        )

    @contextlib.contextmanager
    def _checkpoint(
        self, source: Source, plan: PrivacyPlan, delta: float, reading: dict[str, Any]
    ) -> Iterator[checkpoints.Checkpoint | None]:
        """The checkpoint, if one was asked for, of a run with all that was chosen."""
        if self.checkpoint is None:
            yield None
            return
        options: Any = [self.target, self.components, self.seed, self.group_by, reading]
        question = {
            "plan": json.dumps({**plan_to_json(plan), "delta": delta}, sort_keys=True),
            "options": data_digest(options).hex(),
            "schema": data_digest(self.schema.to_toml()).hex(),
        }
        if isinstance(source, pd.DataFrame):
            names = [*self.schema.names, self.group_by]
            digest = data_digest(source[[name for name in names if name in source]])
        elif isinstance(source, DatabaseTable):
            digest = source.digest()
        else:
            digest = file_digest(source)
        with checkpoints.opened(self.checkpoint, question, digest) as checkpoint:
            yield checkpoint


@dataclasses.dataclass(frozen=True)
class DpviSynthesizer:
    """Makes twins by DPVI: all that was chosen before a table is read.

    Attributes:
        schema: The table's columns.
        model: Of a table; see `build_model`.
        options: Of the fit, as in `dpvim.fit`.
        group_by: The column of persons' ids, as in `synthesize`.
    """

    schema: Schema
    model: Callable[..., Any]
    options: dict[str, Any]
    group_by: str | None = None

    def read(self, source: Source, **reading: Any) -> tuple[EncodedTable, int, dict[str, Any]]:
        """The table as the model sees it, its number of records, and whose they are, for a fit."""
        _refuse_database(source)
        pieces = pieces_of(source, self.schema, self.group_by, **reading)
        frame = pd.concat(pieces(), ignore_index=True)
        if self.group_by is None:
            table = encode(frame, self.schema)
            return table, table.num_rows, {}
        check_names("table", list(frame.columns), [self.group_by])
        persons = person_numbers(frame[self.group_by], self.group_by)
        table = encode(frame.drop(columns=self.group_by), self.schema)
        of_persons = {"group_by": persons, "max_rows_per_person": 1}
        return table, int(persons.max()) + 1, of_persons

    def fit(
        self,
        source: Source,
        *,
        epsilon: float,
        delta: float | None = None,
        num_examples: int | None = None,
        ledger: Any = None,
        purpose: str | None = None,
        **reading: Any,
    ) -> Twin:
        """The twin of a table; arguments as in `CountSynthesizer.fit`."""
        self.schema.check_reviewed()
        _refuse_database(source)
        booked_in = _ledger_of(ledger, purpose, source)
        table, num_records, by_person = self.read(source, **reading)
        public_rows = num_records if num_examples is None else num_examples
        result = fit_model(
            self.model,
            table.values,
            table.missing,
            epsilon=epsilon,
            delta=resolve_delta(delta, public_rows),
            num_examples=num_examples,
            ledger=booked_in,
            purpose=None if booked_in is None else purpose or _PURPOSE,
            **by_person,
            **self.options,
        )
        return Twin(self.schema, result, self.model, public_rows)


def _refuse_database(source: Source) -> None:
    if isinstance(source, DatabaseTable) or is_database(source):
        raise ValueError(
            f"engine: expected {MARGINALS!r} for a table in a database, from which only counts are "
            f"taken, got {DPVI!r}, which needs its records. Leave out the engine, or read the "
            "table from a file."
        )


def _ledger_of(given: Any, purpose: str | None, source: Source) -> Ledger | None:
    """The ledger, for releases from what the table holds, whatever it is encoded as."""
    if not isinstance(source, pd.DataFrame | DatabaseTable):
        existing_file(source)
    if purpose is not None:
        _validate.text("purpose", purpose)
    if given is not None:
        return Ledger.of(given).about(source)
    if purpose is not None:
        raise ValueError(f"purpose: expected with a ledger, got {purpose!r} alone.")
    return None


@contextlib.contextmanager
def opened_table(
    source: Source, **reading: Any
) -> Iterator[pd.DataFrame | str | Path | DatabaseTable]:
    """A table that counts can be made of, open for the block if it is in a database.

    Args:
        source: As in `synthesize`.
        reading: Of a file, as in `read_table`.
    """
    if isinstance(source, pd.DataFrame | DatabaseTable) or not is_database(source):
        yield source
        return
    with open_table(source, **reading) as table:
        yield table


def pieces_of(source: Source, schema: Schema, group_by: str | None, **reading: Any) -> Frames:
    """A table, piece by piece, with the persons' ids if `group_by` names them.

    Args:
        source, schema, group_by: As in `synthesize`.
        reading: Of a file, as in `read_table`.
    """
    wanted = schema.names if group_by is None else [*schema.names, group_by]

    def pieces() -> Iterable[pd.DataFrame]:
        if isinstance(source, pd.DataFrame):
            return [source]
        return read_pieces(source, columns=wanted, **reading)

    return pieces


def make_synthesizer(
    schema: Schema,
    *,
    engine: str | None = None,
    target: str | None = None,
    components: int | None = None,
    model: Callable[..., Any] | None = None,
    group_by: str | None = None,
    target_model: str | None = None,
    numbers: str | None = None,
    **fit_options: Any,
) -> CountSynthesizer | DpviSynthesizer:
    """Make what makes twins of tables with a schema; arguments as in `synthesize`.

    Options that an engine does not have are refused, so that none is ignored.
    """
    # Otherwise they would be taken for arguments of the model.
    for name in fit_options:
        _validate.one_of("option", name, _FIT_OPTIONS)
    _validate.an_instance("schema", schema, Schema, "a dpvim.Schema")
    for name, text in {
        "engine": engine,
        "target": target,
        "group_by": group_by,
        "target_model": target_model,
        "numbers": numbers,
    }.items():
        if text is not None:
            _validate.text(name, text)
    if components is not None:
        _validate.positive_int("components", components)
    if model is not None:
        check_model(model)
    _validate.seed("seed", fit_options.get("seed"))
    check_possible(schema)
    given = {name: value for name, value in fit_options.items() if value is not None}
    if group_by in schema.names:
        raise ValueError(
            f"group_by: expected a column that is not in the schema, got {group_by!r}: the ids of "
            "persons are not for a twin. Take it out of the schema."
        )
    chosen = engine or (MARGINALS if model is None else DPVI)
    _validate.one_of("engine", chosen, ENGINES)
    if chosen == MARGINALS:
        of_dpvi = {"model": model, "target_model": target_model, "numbers": numbers, **given}
        for name, value in of_dpvi.items():
            if value is not None and name not in _OPTIONS_OF_COUNTS:
                raise ValueError(
                    f"{name}: expected only with the engine {DPVI!r}, got it with {MARGINALS!r}, "
                    "where nothing is clipped and no steps are taken. Leave it out, or choose the "
                    f"engine {DPVI!r}."
                )
        return CountSynthesizer(schema, target, components, group_by=group_by, **given)
    built = build_model(
        schema,
        model,
        components=DEFAULT_COMPONENTS if components is None else components,
        target=target,
        target_model=target_model,
        numbers=numbers or DEFAULT_NUMBERS,
    )
    if not {"num_steps", "num_epochs"} & set(given):
        given["num_steps"] = DEFAULT_STEPS
    # A mixture is no quadratic over wide probes (benchmarks/probe_width.py).
    given.setdefault("probe_width", 1.0)
    defaults = {"clip_norm": DEFAULT_CLIP_NORM, "learning_rate": DEFAULT_LEARNING_RATE}
    return DpviSynthesizer(schema, built, {**defaults, **given}, group_by)


def resolve_delta(delta: float | None, num_rows: int) -> float:
    """The given delta, else a tenth of 1/N: at 1/N a mechanism may publish a record outright.

    >>> resolve_delta(None, 1000), resolve_delta(1e-5, 1000)
    (0.0001, 1e-05)
    """
    if delta is not None:
        return _validate.open_unit("delta", delta)
    return 0.1 / _validate.positive_int("num_examples", num_rows)


class TwinModel:
    """`synthesize` in the manner of scikit-learn.

    >>> model = TwinModel("schema", epsilon=1.0, target="infected")
    >>> model.get_params()["epsilon"]
    1.0

    Then ``model.fit(frame).sample(1000)``; the twin is ``model.twin_``.

    Args:
        schema, epsilon, options: As in `synthesize`.
    """

    def __init__(self, schema: Schema, *, epsilon: float, **options: Any) -> None:
        self.set_params(schema=schema, epsilon=epsilon, **options)

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The settings; `deep` is there for scikit-learn."""
        return dict(self._params)

    def set_params(self, **params: Any) -> Self:
        """Change settings; they hold from the next `fit` on."""
        for name in params:
            _validate.one_of("option", name, [*_OWN_OPTIONS, *_FIT_OPTIONS])
        self._params = {**getattr(self, "_params", {}), **params}
        return self

    def fit(self, frame: pd.DataFrame, y: None = None) -> Self:
        """Fit the model under differential privacy; `y` is there for scikit-learn."""
        self.twin_ = synthesize(frame, **self._params)
        return self

    def sample(self, num_rows: int | None = None, *, seed: int | None = None) -> pd.DataFrame:
        """One synthetic table, from one draw of the posterior."""
        if not hasattr(self, "twin_"):
            raise ValueError("expected a model that was fitted, got one that was not: call fit.")
        return self.twin_.sample(num_rows, seed=seed)


_OWN_OPTIONS = ["schema", "epsilon", *(synthesize.__kwdefaults__ or {})]
_NOT_OF_TWINS = (
    *("noise_multiplier", "epsilon", "delta", "num_examples", "max_rows_per_person"),
    *("ledger", "purpose"),
)
# Options of `dpvim.fit` that `synthesize` hands on.
_FIT_OPTIONS = [
    field.name
    for kind in (Budget, FitOptions)
    for field in dataclasses.fields(kind)
    if field.name not in _NOT_OF_TWINS
]
