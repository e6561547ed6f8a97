"""``dpvim audit``."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from dpvim.audit.paths import PATHS
from dpvim.audit.running import CHECKS, FULL_RUNS, QUICK_RUNS, run
from dpvim.cli.common import FOUND, plain_errors, print_json
from dpvim.cli.options import AsJson
from dpvim.inference.families import FAMILIES
from dpvim.inference.variants import VARIANTS
from dpvim.types import Relation

VariantName = StrEnum("VariantName", {n: n for n in VARIANTS})  # type: ignore[misc]
CheckName = StrEnum("CheckName", {n: n for n in CHECKS})  # type: ignore[misc]
PathName = StrEnum("PathName", {n: n for n in PATHS})  # type: ignore[misc]
FamilyName = StrEnum("FamilyName", {n: n for n in FAMILIES})  # type: ignore[misc]
_ALIGNED = VariantName("aligned")


def audit(
    quick: Annotated[
        bool, typer.Option("--quick", help=f"{QUICK_RUNS:,} runs a game: a few minutes.")
    ] = False,
    runs: Annotated[
        int | None, typer.Option(help=f"Runs in each world of a game.  [default: {FULL_RUNS}]")
    ] = None,
    variant: Annotated[
        VariantName, typer.Option(help="The gradient estimator to attack.")
    ] = _ALIGNED,
    relation: Annotated[
        list[Relation] | None,
        typer.Option(help="Neighbouring relations to test.  [default: zero_out, replace_one]"),
    ] = None,
    check: Annotated[
        list[CheckName] | None, typer.Option(help="Only these groups of checks.")
    ] = None,
    path: Annotated[
        list[PathName] | None,
        typer.Option(help="Only these ways to a clipped sum: autodiff, ready-made models, ..."),
    ] = None,
    family: Annotated[
        list[FamilyName] | None, typer.Option(help="Only these variational families.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Repeat an audit.")] = None,
    as_json: AsJson = False,
) -> None:
    """Attack the installed library: noise, batches, persons, processes, counts, clip, games, fits.

    Clip, games and fits are attacked on every way that fits may take: gradients by autodiff, by
    look-ups, and the clipped sums of the ready-made models, for every family. Ends with 0 if no
    attack succeeded and with 1 if one did. A sound library raises an alarm in at most 0.5 % of
    audits.

    Examples:

    - `dpvim audit --quick`

    - `dpvim audit --variant vanilla --json > audit.json`

    - `dpvim audit --path mixture --family full_rank`
    """
    if runs is None:
        runs = QUICK_RUNS if quick else FULL_RUNS
    elif quick:
        raise typer.BadParameter("give --quick or --runs, not both.")
    with plain_errors("audit"):
        report = run(
            runs=runs,
            variant=variant.value,
            relations=tuple(relation or (Relation.ZERO_OUT, Relation.REPLACE_ONE)),
            checks=tuple(c.value for c in check) if check else CHECKS,
            paths=tuple(p.value for p in path) if path else tuple(PATHS),
            families=tuple(f.value for f in family) if family else None,
            seed=seed,
            progress=None,
        )
    if as_json:
        print_json(report.to_dict())
    else:
        typer.echo(str(report))
    if not report.passed:
        raise typer.Exit(FOUND)
