"""The way of one table to its twin: review, budget, plan, one fit, a report.

It does what ``dpvim schema draft``, ``ledger init``, ``synth`` and ``report`` do, by the same
functions. Pages ask it, and tell it what was typed.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dpvim import _validate
from dpvim._extras import require
from dpvim._progress import listening
from dpvim.files import new_folder
from dpvim.ledger.book import Ledger
from dpvim.privacy.plan import PrivacyPlan
from dpvim.serve import forms
from dpvim.synthesis.constrained import check_possible
from dpvim.synthesis.draft import draft
from dpvim.synthesis.fitting import CountSynthesizer, make_synthesizer, resolve_delta
from dpvim.synthesis.report.names import REPORT
from dpvim.synthesis.schema import Schema, SchemaError
from dpvim.synthesis.tables import read_table
from dpvim.synthesis.twin import DATA, Twin, check_format
from dpvim.types import BudgetExceededError

# What a person can do something about; anything else is a fault of ours.
PLAIN_ERRORS = (ValueError, TypeError, OSError, BudgetExceededError, ImportError)
DEFAULT_DATASETS = 20
_PURPOSE = "a synthetic twin, by dpvim serve"


@dataclasses.dataclass(frozen=True)
class Choice:
    """A plan that was looked at, and may be carried out."""

    epsilon: float
    delta: float
    target: str | None
    plan: PrivacyPlan
    total: float
    facts: Mapping[str, Any]


@dataclasses.dataclass
class Job:
    """The one fit. Fields are written by its thread alone."""

    started: float = dataclasses.field(default_factory=time.monotonic)
    label: str = "counting"
    done: int = 0
    total: int = 0
    stage_started: float = dataclasses.field(default_factory=time.monotonic)
    error: str | None = None
    twin: Twin | None = None
    is_over: bool = False

    def hear(self, label: str, done: int, total: int) -> None:
        """Take down the progress of a part of the work."""
        if label != self.label:
            self.stage_started = time.monotonic()
        self.label, self.done, self.total = label, done, total

    @property
    def seconds_left(self) -> float | None:
        """Of this part of the work, if it can be told."""
        if not 0 < self.done <= self.total:
            return None
        return (time.monotonic() - self.stage_started) * (self.total - self.done) / self.done


class Session:
    """A table on its way to a twin. Pages may call it from several threads.

    Attributes:
        table: The file with the table.
        schema_path: The schema, which is read if it is there, and written when it is saved.
        ledger_path: The ledger, which is used if it is there.
        output: The folder of the twin, which must not be there.

    Guarantees:
        At most one fit is begun, whoever asks and however often, unless one ended with an error
        and is asked for anew. Every fit is booked in the ledger.
    """

    def __init__(
        self,
        table: Path,
        *,
        schema_path: Path,
        ledger_path: Path,
        output: Path,
        datasets: int = DEFAULT_DATASETS,
        **reading: Any,
    ) -> None:
        require("dpvim.synthesis.report.page", extra="report")  # before anything is spent
        self.table, self.schema_path, self.output = table, schema_path, output
        self.ledger_path = ledger_path
        self._datasets, self._reading = _validate.positive_int("datasets", datasets), reading
        self._lock = threading.Lock()
        if output.exists():
            raise FileExistsError(f"{output}: exists already. Choose another name.")
        frame = read_table(table, **reading)
        self.num_rows = len(frame)
        self.comments: dict[str, str] = {}
        self.left_out: dict[str, str] = {}
        if schema_path.exists():
            known = Schema.load(schema_path)
            self.left_out = {
                name: "not in the schema." for name in frame.columns if name not in known.names
            }
        else:
            made = draft(frame)
            known, self.comments, self.left_out = made.schema, made.comments, made.left_out
        self._like, self._constraints = known, known.constraints
        self.entries = forms.entries_of(known)
        self.included = [True] * len(self.entries)
        self.ledger = Ledger(ledger_path, data=table) if ledger_path.exists() else None
        self.choice: Choice | None = None
        self.job: Job | None = None

    # -- schema -----------------------------------------------------------------------------------

    @property
    def schema(self) -> Schema:
        """The columns that are included, as they are declared now."""
        return self._schema_of(self.entries, self.included)

    def _schema_of(self, entries: list[dict[str, Any]], included: list[bool]) -> Schema:
        chosen = [entry for entry, wanted in zip(entries, included, strict=True) if wanted]
        if not chosen:
            raise SchemaError("columns: expected at least one that is part of the twin, got none.")
        return forms.schema_of(chosen, self._like, self._constraints)

    @property
    def is_reviewed(self) -> bool:
        """True if all that is included is said to be public knowledge."""
        return not self.schema.unreviewed

    def review(self, columns: Sequence[Mapping[str, str]]) -> dict[int, str]:
        """Take over what was typed, column by column, and write the schema.

        Returns:
            Errors by the number of the column. A column with one stays as it was, not reviewed.

        Raises:
            SchemaError: The columns do not go together, or cannot be written to tables. Nothing
                has changed.
        """
        errors: dict[int, str] = {}
        with self._lock:
            self._refuse_while_fitting()
            if len(columns) != len(self.entries):
                raise ValueError("columns: expected one form for each. Load the page again.")
            included, entries = ["include" in form for form in columns], list(self.entries)
            for number, form in enumerate(columns):
                try:
                    entries[number] = forms.changed(entries[number], form, self._like)
                except SchemaError as error:
                    errors[number] = str(error)
                    entries[number] = {**entries[number], "reviewed": False}
            schema = self._schema_of(entries, included)
            check_possible(schema)
            check_format(schema, "csv", "refuse")
            schema.save(self.schema_path)
            self.entries, self.included, self.choice = entries, included, None
        return errors

    # -- budget -----------------------------------------------------------------------------------

    def declare_budget(self, name: str, epsilon: float, delta: float | None) -> None:
        """Make the table's ledger, if there is none."""
        with self._lock:
            if self.ledger is None:
                self.ledger = Ledger.create(
                    self.ledger_path,
                    name=name,
                    epsilon=epsilon,
                    delta=resolve_delta(delta, self.num_rows),
                    data=self.table,
                )

    # -- plan -------------------------------------------------------------------------------------

    def look_at(self, epsilon: float, target: str | None) -> Choice:
        """Plan a twin, and see if the budget pays for it. Nothing is spent."""
        with self._lock:
            self._refuse_while_fitting()
            self.choice = None
            ledger = self._ledger()
            maker = self._maker(target)
            epsilon = _validate.epsilon("epsilon", epsilon)
            plan = maker.plan(self.num_rows, epsilon=epsilon, delta=ledger.delta)
            total = ledger.check_affordable(plan)
            facts = maker.facts(plan)
            self.choice = Choice(epsilon, ledger.delta, target, plan, total, facts)
            return self.choice

    def _maker(self, target: str | None) -> CountSynthesizer:
        # All that could be refused later, when the budget is spent.
        self.schema.check_reviewed()
        check_format(self.schema, "csv", "refuse")
        maker = make_synthesizer(self.schema, target=target, progress=False)
        assert isinstance(maker, CountSynthesizer)
        return maker

    def _ledger(self) -> Ledger:
        if self.ledger is None:
            raise ValueError("budget: expected one that is declared, got none.")
        return self.ledger

    # -- fit --------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin the fit that was looked at, unless one was begun already."""
        with self._lock:
            if self.job is not None and self.job.error is None:
                return
            if self.choice is None:
                raise ValueError("plan: expected one that was looked at, got none.")
            choice, self.choice = self.choice, None
            self.job = job = Job()
            arguments = (job, self._maker(choice.target), choice, self._ledger())
        threading.Thread(target=self._work, args=arguments, daemon=True, name="dpvim-fit").start()

    def _work(self, job: Job, maker: CountSynthesizer, choice: Choice, ledger: Ledger) -> None:
        try:
            with listening(job.hear):
                job.twin = self._make(job, maker, choice, ledger)
        except PLAIN_ERRORS as error:
            job.error = str(error)
        except BaseException as error:
            # The page shows no traceback; the terminal does.
            job.error = f"An error of dpvim's own ({type(error).__name__}); the terminal has more."
            raise
        finally:
            job.is_over = True

    def _make(self, job: Job, maker: CountSynthesizer, choice: Choice, ledger: Ledger) -> Twin:
        with new_folder(self.output) as folder:
            twin = maker.fit(
                self.table,
                epsilon=choice.epsilon,
                delta=choice.delta,
                ledger=ledger,
                purpose=_PURPOSE,
                **self._reading,
            )
            twin.write_into(folder)
        # From here on the budget is spent and its result is safe.
        twin.write_datasets(self.output / DATA, self._datasets, progress=False)
        twin.write_closest(self.output)
        job.hear("writing the report", 0, 0)
        twin.report(self.output / REPORT, sorted((self.output / DATA).iterdir()))
        return twin

    def _refuse_while_fitting(self) -> None:
        if self.job is not None and self.job.error is None:
            raise ValueError("A fit was begun: schema and plan cannot change any more.")

    @property
    def report(self) -> Path | None:
        """The report, when it is there."""
        path = self.output / REPORT
        return path if self.job is not None and self.job.is_over and path.is_file() else None
