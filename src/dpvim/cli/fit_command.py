"""``dpvim fit``: the private posterior of a regression or of the user's own model."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Any

import jax
import pandas as pd
import typer

from dpvim.checkpoints import forget
from dpvim.cli.common import plain_errors, print_json
from dpvim.cli.options import (
    AsJson,
    Checkpoint,
    ChosenClipNorm,
    ChosenLearningRate,
    ChosenSteps,
    Delimiter,
    Delta,
    DryRun,
    Encoding,
    Epsilon,
    Formulas,
    FormulasRule,
    LedgerOption,
    MaxRows,
    NewFolder,
    NumExamples,
    Person,
    PrivateSeed,
    Purpose,
    RegressionKind,
    RelationOption,
    SamplingProb,
    SchemaFile,
    Table,
    Target,
    command_line,
)
from dpvim.cli.planning import by_person, end_dry_run
from dpvim.cli.workers import in_processes
from dpvim.files import new_folder, write_json
from dpvim.fitting import fit as fit_model
from dpvim.ledger.book import Ledger
from dpvim.rendezvous import several_processes
from dpvim.synthesis.encoding import encode
from dpvim.synthesis.fitting import resolve_delta
from dpvim.synthesis.formulas import is_formula, quoted, refusal
from dpvim.synthesis.model import TableRegression, load_model
from dpvim.synthesis.schema import Schema
from dpvim.synthesis.tables import read_table
from dpvim.types import Relation


def fit(
    table: Table,
    schema: SchemaFile,
    model: Annotated[
        str,
        typer.Option(help="logistic, poisson, linear, or a Python file with your own; it is run."),
    ],
    epsilon: Epsilon,
    output: NewFolder,
    target: Target = None,
    delta: Delta = None,
    clip_norm: ChosenClipNorm = None,
    learning_rate: ChosenLearningRate = None,
    sampling_prob: SamplingProb = None,
    steps: ChosenSteps = None,
    relation: RelationOption = Relation.ZERO_OUT,
    num_examples: NumExamples = None,
    person: Person = None,
    max_rows: MaxRows = None,
    level: Annotated[float, typer.Option(help="Level of the intervals.")] = 0.9,
    formulas: Formulas = FormulasRule.refuse,
    delimiter: Delimiter = None,
    encoding: Encoding = None,
    ledger: LedgerOption = None,
    purpose: Purpose = None,
    seed: PrivateSeed = None,
    checkpoint: Checkpoint = None,
    processes: Annotated[
        int, typer.Option(min=1, help="Share the work among so many processes of this machine.")
    ] = 1,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """The posterior of a model of a table under differential privacy.

    A regression takes all other columns as covariates: indicators of all levels but the first, and
    numbers on the scale of their declared bounds (docs/schema.md).

    Examples:

    - `dpvim fit patients.csv --schema patients.toml --model poisson --target infected --epsilon 1
      -o infected`

    - `dpvim fit patients.csv --schema patients.toml --model my_model.py --epsilon 1 -o mine`

    - `dpvim fit visits.csv --schema visits.toml --model poisson --target infected --epsilon 1
      --person patient --max-rows 5 -o visits`

    The last one protects patients, and uses at most 5 visits of each.
    """
    asked = locals() | {"processes": 1}
    with plain_errors("fit", table=table, schema=schema, ledger=ledger, output=output):
        if processes > 1 and not dry_run:
            in_processes(processes, fit, asked)
            return
        leads = not several_processes() or jax.process_index() == 0
        known = Schema.load(schema)
        known.check_reviewed()
        by_person(person, max_rows, None)  # refuses one without the other
        if person in known.names:
            raise ValueError(
                f"--person: expected a column that is not in the schema, got {person!r}. Ids are "
                "not for a model: take it out of the schema."
            )
        regression = _regression(known, model, target)
        if regression is not None and formulas is FormulasRule.refuse:
            _check_names(schema, regression.names)
        chosen: Any = load_model(model) if regression is None else regression.model
        booked_in = None if ledger is None else Ledger(ledger, data=table)
        with new_folder(output) if leads else tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            columns = known.names if person is None else [*known.names, person]
            frame = read_table(table, columns=columns, delimiter=delimiter, encoding=encoding)
            grouped = by_person(person, max_rows, None if person is None else frame[person])
            encoded = encode(frame, known)
            data: tuple[Any, ...] = (encoded.values, encoded.missing)
            if regression is not None:
                data = regression.data(encoded)
            public_rows = len(frame) if person is None else max(1, frame[person].nunique())
            public_rows = public_rows if num_examples is None else num_examples
            options: dict[str, Any] = {
                **grouped,
                "epsilon": epsilon,
                "delta": resolve_delta(delta, public_rows),
                "clip_norm": clip_norm,
                "learning_rate": learning_rate,
                "sampling_prob": sampling_prob,
                "num_steps": steps,
                "num_examples": num_examples,
                "relation": relation,
                "ledger": booked_in,
                "purpose": purpose if booked_in is None else purpose or f"fit of {model}",
            }
            if dry_run:
                end_dry_run(chosen, data, as_json=as_json, **options)
            data = _own_rows(data, len(frame))
            result = fit_model(chosen, *data, seed=seed, checkpoint=checkpoint, **options)
            if not leads:
                return
            summary = result.posterior.summary(level)
            if regression is not None:
                labels = {f"coefficients[{i}]": name for i, name in enumerate(regression.names)}
                summary = summary.rename(index=labels)
            result.save(folder / "posterior.npz", not_for_release=seed is not None)
            known.save(folder / "schema.toml")
            _quote_formulas(summary, formulas).to_csv(
                folder / "summary.csv", index_label="parameter", encoding="utf-8"
            )
            write_json(folder / "privacy.json", result.privacy.to_dict())
            (folder / "command.txt").write_text(command_line() + "\n", encoding="utf-8")
        if checkpoint is not None:
            forget(checkpoint)
    if as_json:
        rows = summary.reset_index(names="parameter").to_dict("records")
        print_json({"folder": str(output), "privacy": result.privacy.to_dict(), "parameters": rows})
    else:
        typer.echo(summary.to_string())
        typer.echo(f"\n{result.privacy}")


def _own_rows(data: tuple[Any, ...], num_rows: int) -> tuple[Any, ...]:
    """The rows of this process, which are all of them if there is one."""
    if not several_processes():
        return data
    ends = [num_rows * i // jax.process_count() for i in range(jax.process_count() + 1)]
    own = slice(*ends[jax.process_index() :][:2])
    return jax.tree.map(lambda leaf: leaf[own], data)


def _check_names(schema: Path, names: list[str]) -> None:
    """Refuse names of coefficients that spreadsheets would run."""
    if found := [f"the coefficient {name!r}" for name in names if is_formula(name)]:
        raise refusal(schema, found)


def _quote_formulas(summary: pd.DataFrame, formulas: FormulasRule) -> pd.DataFrame:
    # Names of one's own parameters are known too late to refuse them: the budget is spent.
    return summary if formulas is FormulasRule.allow else summary.rename(index=quoted)


def _regression(schema: Schema, model: str, target: str | None) -> TableRegression | None:
    if Path(model).suffix == ".py":
        if target is not None:
            raise ValueError("--target: expected none with a model of your own, which has its own.")
        return None
    if model not in RegressionKind.__members__:
        raise ValueError(
            f"--model: expected logistic, poisson, linear or a file that ends in .py, got "
            f"{model!r}."
        )
    if target is None:
        raise ValueError(f"--target: expected the column that the {model} regression explains.")
    return TableRegression(schema, kind=model, target=target)
