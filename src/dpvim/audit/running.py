"""All checks in one call."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from dpvim import _validate
from dpvim._compile import single_precision
from dpvim._extras import require
from dpvim._progress import ProgressBar, show_progress
from dpvim.audit.batches import batch_checks
from dpvim.audit.clip import clip_checks
from dpvim.audit.counts import count_checks
from dpvim.audit.findings import AuditReport, Finding
from dpvim.audit.fits import fit_checks
from dpvim.audit.game import game_checks
from dpvim.audit.noise import noise_checks
from dpvim.audit.paths import PATHS, CodePath, ReferenceGradients
from dpvim.audit.persons import person_checks
from dpvim.audit.processes import process_checks
from dpvim.audit.target import Target, VectorizedRuns, make_target
from dpvim.inference.families import FAMILIES
from dpvim.inference.sharing import Sharing
from dpvim.inference.variants import VARIANTS, make_variant, served_variants
from dpvim.privacy.plan import SMALLEST_CLIP_NORM, PrivacyPlan
from dpvim.privacy.randomness import SecretStreams
from dpvim.types import Relation

FULL_RUNS = 200_000
QUICK_RUNS = 20_000
_MIN_RUNS = 1000
_MIN_FITS = 200
_MIN_TRIALS, _MAX_TRIALS = 2000, 5000
_RUNS_FOR_ALL_FITS = 100_000
# The narrowest and the widest. Others differ by the weights of their slopes, which tests hold for
# every family (tests/privacy/test_lattice.py), and not at all for the aligned variant.
_FAMILIES = ("mean_field", "full_rank")
CHECKS = ("noise", "batches", "persons", "processes", "counts", "clip", "game", "fits")


class _Part(NamedTuple):
    """A piece of an audit, the check that it belongs to, and what it is about."""

    check: str
    path: str
    run: Callable[[], Iterable[Finding]]


@single_precision
def run(
    *,
    runs: int = FULL_RUNS,
    variant: str = "aligned",
    relations: Sequence[str] = (Relation.ZERO_OUT, Relation.REPLACE_ONE),
    checks: Sequence[str] = CHECKS,
    paths: Sequence[str] = tuple(PATHS),
    families: Sequence[str] | None = None,
    seed: int | None = None,
    every_way: bool = True,
    stop_early: bool = False,
    progress: bool | None = False,
) -> AuditReport:
    """Attack the installed library and report what was found.

    Args:
        runs: Runs of four steps in each world of each game; other checks scale with it.
        variant: Which gradient estimator to attack.
        relations: Neighbouring relations whose claims are tested in the game.
        checks: Which groups of checks to run.
        paths: Which ways to a clipped sum to attack; see `dpvim.audit.paths`.
        families: Which variational families; by default mean-field and full-rank where they serve
            the variant.
        seed: Repeats an audit. By default all randomness is the library's own, from the
            operating system.
        every_way: Run steps in every way for the first family (eagerly, by both code generators,
            as constants, with thousands of rows), not only in those that fits are.
        stop_early: Leave a path at the first rule that is broken.
        progress: Show a progress bar; None asks the terminal.
    """
    require("jax_privacy.auditing", extra="audit")  # not after minutes of games
    if families is None:
        families = [f for f in _FAMILIES if variant in served_variants(f)]
    _check_arguments(runs, variant, relations, checks, paths, families)
    audit = _Audit(variant, runs, seed, every_way=every_way)
    began = time.perf_counter()
    parts = [p for p in audit.parts(relations, paths, families) if p.check in checks]
    findings: list[Finding] = []
    with ProgressBar(len(parts), show=show_progress(progress), label="audit", unit="parts") as bar:
        for part in parts:
            for finding in part.run():
                findings.append(dataclasses.replace(finding, path=part.path))
                if stop_early and finding.p_value == 0:
                    break
            bar.advance(1)
    settings = {
        "variant": variant,
        "runs": runs,
        "relations": ", ".join(relations),
        "paths": ", ".join(paths),
        "families": ", ".join(families),
    }
    return AuditReport(tuple(findings), settings, time.perf_counter() - began)


def _check_arguments(
    runs: int,
    variant: str,
    relations: Sequence[str],
    checks: Sequence[str],
    paths: Sequence[str],
    families: Sequence[str],
) -> None:
    """Refuse what cannot be asked, before anything is compiled."""
    if _validate.positive_int("runs", runs) < _MIN_RUNS:
        raise ValueError(f"runs: expected at least {_MIN_RUNS}, got {runs}.")
    _validate.one_of("variant", variant, VARIANTS)
    for name, given, known in (
        ("relation", relations, [r.value for r in Relation]),
        ("check", checks, CHECKS),
        ("path", paths, PATHS),
        ("family", families, FAMILIES),
    ):
        for each in given:
            _validate.one_of(name, each, known)
    for family in families:
        make_variant(variant, FAMILIES[family](2))  # refuses what a family cannot serve


class _Audit:
    """The targets of an audit, made when they are needed and kept."""

    def __init__(self, variant: str, runs: int, seed: int | None, *, every_way: bool) -> None:
        self._variant, self._runs, self._seed = variant, runs, seed
        self._every_way = every_way
        self._streams = _streams(seed)
        self._path = functools.cache(_make_path)
        self._program = functools.lru_cache(1)(self._make_program)

    def parts(
        self, relations: Sequence[str], paths: Sequence[str], families: Sequence[str]
    ) -> Iterator[_Part]:
        """Checks that know nothing of likelihoods once; the rest on every path."""
        yield _Part("noise", "", self._noise)
        yield _Part("batches", "", self._batches)
        yield _Part("persons", "", self._persons)
        yield _Part("processes", "", self._processes)
        yield _Part("counts", "", functools.partial(self._counts, relations))
        attacked = list(itertools.product(paths, families))
        for path, family in attacked:
            thorough = self._every_way and family == families[0]
            clip = functools.partial(self._clip, path, family, thorough=thorough)
            yield _Part("clip", f"{path}, {family}", clip)
        for path, family in attacked:
            for relation in map(Relation, relations):
                game = functools.partial(self._game, path, family, relation)
                yield _Part("game", f"{path}, {family}", game)
        for path, family in self._fit_cases(paths, families):
            fits = functools.partial(self._fits, path, family)
            yield _Part("fits", f"{path}, {family}", fits)

    def _fit_cases(
        self, paths: Sequence[str], families: Sequence[str]
    ) -> Iterator[tuple[str, str]]:
        """Whole fits take long to compile: in a short audit every path has one of the families."""
        if self._runs >= _RUNS_FOR_ALL_FITS:
            return itertools.product(paths, families)
        return zip(paths, itertools.cycle(families), strict=False)

    def _noise(self) -> list[Finding]:
        some = list(itertools.islice(self._streams, 4))
        return noise_checks(self._target("gradients"), some, runs=max(self._runs // 10, QUICK_RUNS))

    def _batches(self) -> list[Finding]:
        target, steps = self._target("gradients", num_examples=40), max(self._runs, QUICK_RUNS)
        return batch_checks(target, next(self._streams), next(self._streams), steps=steps)

    def _persons(self) -> Iterable[Finding]:
        trials = min(max(self._runs // 10, _MIN_TRIALS), _MAX_TRIALS)
        return person_checks(lambda: next(self._streams), trials=trials)

    def _processes(self) -> Iterable[Finding]:
        def make(sharing: Sharing | None) -> Target:
            return self._target("gradients", num_examples=40, sharing=sharing)

        return process_checks(make, lambda: next(self._streams), runs=self._runs)

    def _counts(self, relations: Sequence[str]) -> Iterable[Finding]:
        each = [Relation(relation) for relation in relations]
        return count_checks(each, lambda: next(self._streams), runs=self._runs)

    def _clip(self, path: str, family: str, *, thorough: bool) -> Iterable[Finding]:
        # A grid that is coarser than the one rows are rounded to: what is kept below it shows.
        target = self._target(path, family, noise_multiplier=1024.0, num_examples=20_000)
        return clip_checks(target, thorough=thorough)

    def _game(self, path: str, family: str, relation: Relation) -> list[Finding]:
        is_private = relation is Relation.ADD_OR_REMOVE
        program = self._program(path, family, is_private)
        return game_checks(program, relation, lambda: next(self._streams), runs=self._runs)

    def _fits(self, path: str, family: str) -> list[Finding]:
        seed = self._seed
        return fit_checks(
            self._path(path)[0],
            family=family,
            variant=self._variant,
            # Fits take longer than the steps of games.
            fits=max(self._runs // (40 if path == "gradients" else 200), _MIN_FITS),
            seeds=(None, None) if seed is None else (2 * seed, 2 * seed + 1),
        )

    def _make_program(self, path: str, family: str, is_private: bool) -> VectorizedRuns:
        """The runs of games; those of other relations are the same, but for what is claimed."""
        relation = Relation.ADD_OR_REMOVE if is_private else Relation.ZERO_OUT
        scale = self._path(path)[0].scale
        return VectorizedRuns(self._target(path, family, relation=relation, scale=scale))

    def _target(
        self,
        path: str,
        family: str = "mean_field",
        *,
        relation: Relation = Relation.ZERO_OUT,
        noise_multiplier: float = 1.0,
        num_examples: int = 9,
        scale: float = 1.0,
        sharing: Sharing | None = None,
    ) -> Target:
        """Four steps at sampling probability 0.2 and noise 1: strong attacks have a chance."""
        code_path, reference = self._path(path)
        # A whitened gradient is that of the latent in units of the approximation's scale.
        whitens = make_variant(self._variant, FAMILIES[family](2)).whitens
        unit = scale if whitens else 1.0
        plan = PrivacyPlan(
            num_examples=num_examples,
            sampling_prob=0.2,
            num_steps=4,
            clip_norm=max(unit * code_path.clip_norm, SMALLEST_CLIP_NORM),
            relation=relation,
            noise_multiplier=noise_multiplier,
            max_rows_per_person=code_path.max_rows_per_person,
        )
        return make_target(
            code_path,
            reference,
            plan,
            variant=self._variant,
            family=family,
            scale=scale,
            sharing=sharing,
        )


def _make_path(name: str) -> tuple[CodePath, ReferenceGradients]:
    path = PATHS[name]()
    return path, ReferenceGradients(path.problem)


def _streams(seed: int | None) -> Iterator[SecretStreams]:
    """Randomness for one part of an audit after the other."""
    for number in itertools.count():
        yield SecretStreams(seed, run=number)
