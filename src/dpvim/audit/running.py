"""All checks in one call."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence

from dpvim import _validate
from dpvim.audit.batches import batch_checks
from dpvim.audit.clip import clip_checks
from dpvim.audit.findings import AuditReport, Finding
from dpvim.audit.fits import fit_checks
from dpvim.audit.game import game_checks
from dpvim.audit.noise import noise_checks
from dpvim.audit.target import Target, make_target
from dpvim.plan import PrivacyPlan
from dpvim.progress import ProgressBar, wanted
from dpvim.randomness import SecretStreams
from dpvim.types import Relation
from dpvim.variants import VARIANTS

FULL_RUNS = 200_000
QUICK_RUNS = 20_000
_FEWEST_RUNS = 1000
# Not one: a forgotten clip norm must show.
CLIP_NORM = 0.37
CHECKS = ("noise", "clip", "batches", "game", "fits")


def run(
    *,
    runs: int = FULL_RUNS,
    variant: str = "aligned",
    relations: Sequence[str] = (Relation.ZERO_OUT, Relation.REPLACE_ONE),
    checks: Sequence[str] = CHECKS,
    seed: int | None = None,
    progress: bool | None = False,
) -> AuditReport:
    """Attack the installed library and report what was found.

    Args:
        runs: Runs of four steps in each world of each game; other checks scale with it.
        variant: Which gradient estimator to attack.
        relations: Neighbouring relations whose claims are tested in the game.
        checks: Which groups of checks to run.
        seed: Repeats an audit. By default all randomness is the library's own, from the
            operating system.
        progress: Show a progress bar; None asks the terminal.
    """
    runs = _validate.positive_int("runs", runs)
    if runs < _FEWEST_RUNS:
        raise ValueError(f"runs: expected at least {_FEWEST_RUNS}, got {runs}.")
    _validate.one_of("variant", variant, VARIANTS)
    for relation in relations:
        _validate.one_of("relation", relation, [r.value for r in Relation])
    for check in checks:
        _validate.one_of("check", check, CHECKS)
    began = time.perf_counter()
    parts = _parts(variant, relations, runs, seed)
    wished = [part for name, part in parts if name in checks]
    findings: list[Finding] = []
    with ProgressBar(len(wished), show=wanted(progress), label="audit", unit="parts") as bar:
        for part in wished:
            findings += part()
            bar.advance(1)
    settings = {"variant": variant, "runs": runs, "relations": ", ".join(relations)}
    return AuditReport(tuple(findings), settings, time.perf_counter() - began)


def _parts(
    variant: str, relations: Sequence[str], runs: int, seed: int | None
) -> list[tuple[str, Callable[[], list[Finding]]]]:
    """The pieces of an audit with the checks they belong to."""
    streams = _streams(seed)
    seeds = (None, None) if seed is None else (2 * seed, 2 * seed + 1)

    def noise() -> list[Finding]:
        some = list(itertools.islice(streams, 4))
        return noise_checks(_target(variant), some, runs=max(runs // 10, QUICK_RUNS))

    def clip() -> list[Finding]:
        # A grid that is coarser than the one rows are rounded to: what is kept below it shows.
        return clip_checks(_target(variant, noise_multiplier=1024.0, num_examples=20_000))

    def batches() -> list[Finding]:
        target = _target(variant, num_examples=40)
        return batch_checks(target, next(streams), next(streams), steps=max(runs, QUICK_RUNS))

    def game(relation: str) -> list[Finding]:
        return game_checks(_target(variant, relation), lambda: next(streams), runs=runs)

    def fits() -> list[Finding]:
        return fit_checks(variant=variant, fits=max(runs // 40, 200), seeds=seeds)

    return [
        ("noise", noise),
        ("clip", clip),
        ("batches", batches),
        *(("game", functools.partial(game, relation)) for relation in relations),
        ("fits", fits),
    ]


def _target(
    variant: str,
    relation: str = Relation.ZERO_OUT,
    *,
    noise_multiplier: float = 1.0,
    num_examples: int = 9,
) -> Target:
    """Four steps at sampling probability 0.2 and noise 1: strong attacks have a chance."""
    plan = PrivacyPlan(
        num_examples=num_examples,
        sampling_prob=0.2,
        num_steps=4,
        clip_norm=CLIP_NORM,
        relation=Relation(relation),
        noise_multiplier=noise_multiplier,
    )
    return make_target(plan, variant=variant)


def _streams(seed: int | None) -> Iterator[SecretStreams]:
    """Randomness for one part of an audit after the other."""
    for number in itertools.count():
        yield SecretStreams(seed, run=number)
