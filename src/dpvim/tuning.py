"""The best of several models or settings, chosen and fitted within one budget.

Two ways to pay for it, of which the one that leaves less noise is taken; both are known before
anything is spent:

* ``repeat``: a random number of trials, each of a candidate drawn at random; only the best trial is
  shown (`dpvim.privacy.accounting.selection`). The cost hardly depends on how many candidates there
  are.
* ``split``: every candidate once, all of them paid for; their scores are shown.

A trial is a fit and a score, both released with noise. The score is the mean log predictive density
of the same records (`dpvim.checking`): what was fitted under privacy can hardly have learnt
single records by heart.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from dpvim import _validate, cells
from dpvim._compile import single_precision
from dpvim._progress import ProgressBar, show_progress
from dpvim.bridge.data import ModelInput
from dpvim.bridge.model import bridge
from dpvim.bridge.persons import read_inputs, rows_of
from dpvim.cells import THREADS, Cluster
from dpvim.checking.density import Score, score_records
from dpvim.checking.questions import check_plan
from dpvim.fitting import fit, fit_on
from dpvim.ledger.book import Booking, Job, Ledger
from dpvim.options import Budget, FitOptions, take
from dpvim.posterior.from_trace import DivergedError
from dpvim.privacy.accounting import epsilon_of
from dpvim.privacy.accounting.selection import Repeats, epsilon_of_selection
from dpvim.privacy.plan import PrivacyPlan
from dpvim.privacy.randomness import SecretStreams
from dpvim.privacy.selection import Selection
from dpvim.privacy.statement import COUNTS, PrivacyStatement, round_up
from dpvim.result import Fit
from dpvim.strategy import Request, choose
from dpvim.types import Relation

REPEAT, SPLIT = "repeat", "split"
_METHODS = (REPEAT, SPLIT)
# The part of the budget that a score would use up if it were a release by itself.
_SCORE_EPSILON = 0.3
_CHANCE = 0.8
# The search for the factor on the noise ends here, and so finely.
_MOST_NOISE = 2.0**12
_HALVINGS = 9

Candidates = Mapping[str, Any]
"""Models by name, or pairs of a model and options of its own for `dpvim.fit`."""


class _Candidate(NamedTuple):
    model: Callable[..., Any]
    options: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class TuningPlan:
    """The plan of a choice among candidates, and its cost; `print` shows it.

    Attributes:
        candidates: Their names.
        method: ``repeat`` or ``split``.
        fit_plan: The plan of every fit.
        score_plan: The plan of every score.
        repeats: The distribution of the number of trials; None for ``split``.
        epsilon, delta: The cost of all of it.
        noise_by_method: The noise multiplier of a fit by each method; infinite where it cannot be.
    """

    candidates: tuple[str, ...]
    method: str
    fit_plan: PrivacyPlan
    score_plan: PrivacyPlan
    repeats: Repeats | None
    epsilon: float
    delta: float
    noise_by_method: dict[str, float]

    def __str__(self) -> str:
        number = len(self.candidates)
        trials = f"each of {number} candidates once"
        if self.repeats is not None:
            chance = self.repeats.chance_of(1 / number)
            trials = (
                f"a random number, {self.repeats.mean:.0f} on average, each of one of {number} "
                f"candidates; any of them is tried with probability {chance:.2f}"
            )
        other = next((m for m in _METHODS if m != self.method), "")
        noise = self.noise_by_method
        rows = {
            "trials": trials,
            "a fit": f"noise multiplier {self.fit_plan.noise_multiplier:.4g}, "
            f"{self.fit_plan.num_steps:,} steps at sampling probability "
            f"{self.fit_plan.sampling_prob:.3g}",
            "a score": f"noise multiplier {self.score_plan.noise_multiplier:.4g}",
            "instead": f"by {other!r} a fit would have {noise[other]:.4g}",
            "cost": f"({round_up(self.epsilon)}, {self.delta:g})-differential privacy, all trials "
            f"together, {self.fit_plan.relation.value}",
        }
        lines = [f"  {name:<8} {text}" for name, text in rows.items()]
        return "\n".join([f"Plan of a choice ({self.method})", *lines])


@dataclasses.dataclass(frozen=True)
class Tuned:
    """The chosen candidate.

    Attributes:
        name: Its name.
        fit: Its fit; its statement has the cost of all trials.
        score: Its score.
        scores: All scores by name, where each was paid for; None after ``repeat``, where showing
            the others would cost more.
        plan: What was done, and its cost.
    """

    name: str
    fit: Fit
    score: Score
    scores: dict[str, Score | None] | None
    plan: TuningPlan

    @property
    def epsilon(self) -> float:
        """The cost of the choice and the fit together, at the plan's delta."""
        return self.plan.epsilon

    def __str__(self) -> str:
        lines = [f"Chosen: {self.name}, {self.score}"]
        for name, score in (self.scores or {}).items():
            if name != self.name:
                found = f"{score.mean:.4g} +- {score.stderr:.2g}" if score else "diverged"
                lines.append(f"  {name}: {found}")
        return "\n".join([*lines, str(self.plan)])


@single_precision
def plan_tuning(
    candidates: Candidates,
    *data: Any,
    epsilon: float,
    delta: float,
    method: str | None = None,
    chance: float = _CHANCE,
    **options: Any,
) -> TuningPlan:
    """Show what `tune` would do with these arguments, and its price. Nothing is spent.

    Args:
        candidates, data, epsilon, delta, method, chance, options: As in `tune`.

    >>> import numpy as np, numpyro, numpyro.distributions as dist
    >>> def normal(x):
    ...     mean = numpyro.sample("mean", dist.Normal(0, 10))
    ...     with numpyro.plate("records", x.shape[0]):
    ...         numpyro.sample("x", dist.Normal(mean, 1), obs=x)
    >>> def laplace(x):
    ...     mean = numpyro.sample("mean", dist.Normal(0, 10))
    ...     with numpyro.plate("records", x.shape[0]):
    ...         numpyro.sample("x", dist.Laplace(mean, 1), obs=x)
    >>> both = {"normal": normal, "laplace": laplace}
    >>> plan_tuning(both, np.zeros(5000), epsilon=1.0, delta=1e-6).method
    'split'
    """
    chosen = _candidates(candidates)
    if method is not None:
        _validate.one_of("method", method, _METHODS)
    chance = _validate.open_unit("chance", chance)
    _refuse_own_budgets(chosen, options)
    schedule = _common_schedule(chosen, data, options, epsilon=epsilon, delta=delta)
    inputs = _read(data, options)
    score = check_plan(
        inputs,
        epsilon=_SCORE_EPSILON * epsilon,
        delta=delta,
        relation=schedule.relation,
        num_examples=schedule.num_examples,
    )
    found: dict[str, TuningPlan] = {}
    noises = dict.fromkeys(_METHODS, math.inf)
    failure: ValueError | None = None
    for each in _METHODS if method is None else (method,):
        repeats = Repeats.for_chance(chance, 1 / len(chosen)) if each == REPEAT else None
        try:
            plans, cost = _calibrated(schedule, score, repeats, len(chosen), epsilon, delta)
        except ValueError as error:
            failure = error
            continue
        noises[each] = float(plans[0].noise_multiplier or math.inf)
        found[each] = TuningPlan(tuple(chosen), each, *plans, repeats, cost, float(delta), noises)
    if not found:
        assert failure is not None
        raise failure
    return min(found.values(), key=lambda each: noises[each.method])


def tune(
    candidates: Candidates,
    *data: Any,
    epsilon: float,
    delta: float,
    method: str | None = None,
    chance: float = _CHANCE,
    seed: int | None = None,
    progress: bool | None = None,
    ledger: Any = None,
    purpose: str | None = None,
    on: str = THREADS,
    **options: Any,
) -> Tuned:
    """Fit the best of several candidates under one budget, its choice included.

    Args:
        candidates: By name, models, or pairs of a model and a dict of options of its own for
            `dpvim.fit`: priors, components, families.
        data: As in `dpvim.fit`; the same for all.
        epsilon, delta: The budget of all trials together.
        method: ``repeat`` or ``split``; by default the one that leaves less noise in a fit.
        chance: With ``repeat``, the probability with which any one candidate is tried.
        seed: For tests: the result has no privacy guarantee.
        progress: Show a progress bar. With ``repeat`` there is none: how many trials there are, and
            how long they take, is not to be shown.
        ledger, purpose: As in `dpvim.fit`: all trials are booked before the first.
        on: ``threads`` of this process, one trial after the other, or ``ray``: the fits of several
            trials on workers of a Ray cluster (docs/sweeps.md).
        options: What all fits share, as in `dpvim.fit`, and data given by keyword.

    Returns:
        The chosen one, with its fit and score. Of trials that were not chosen nothing is kept after
        ``repeat``.

    `dpvim.plan_tuning` has an example of candidates.
    """
    chosen = _candidates(candidates)
    _validate.seed("seed", seed)
    if purpose is not None:
        _validate.text("purpose", purpose)
    plan = plan_tuning(
        candidates, *data, epsilon=epsilon, delta=delta, method=method, chance=chance, **options
    )
    names = list(chosen)
    scores = None
    with cells.opened(on) as ray:
        trials = Trials(chosen, plan, data, options, seed, ray)
        bookings = _book(ledger, plan, data, options, purpose=purpose, seeded=seed is not None)
        if plan.repeats is None:
            show = show_progress(progress)
            with ProgressBar(len(names), show=show, label="fits", unit="fits") as bar:
                done = []
                for trial in trials.run_all(names):
                    done.append(trial)
                    bar.advance(1)
            best = max(done, key=_rank)
            scores = {each.name: each.score for each in done}
        else:
            # How many, and which: secret, and drawn before anything is known.
            rng = SecretStreams(seed).generator("trials")
            order = rng.integers(len(names), size=plan.repeats.draw(rng))
            best = max(trials.run_all([names[index] for index in order]), key=_rank)
    for booking in bookings:
        booking.settle_or_warn(booking.steps)
    return _chosen(best, scores, plan)


def _book(
    ledger: Any,
    plan: TuningPlan,
    data: tuple[Any, ...],
    options: Mapping[str, Any],
    *,
    purpose: str | None,
    seeded: bool,
) -> list[Booking]:
    """Pay for all trials, if there is a ledger."""
    if ledger is None:
        return []
    number = len(plan.candidates)
    facts: dict[str, Any] = {
        "purpose": purpose or f"choice among {number} candidates",
        "data": rows_of(data, _keyword_data(options)).records,
        "delta": plan.delta,
        "seeded": seeded,
    }
    trial = plan.fit_plan, plan.score_plan
    if plan.repeats is not None:
        return [Ledger.of(ledger).book_selection(Selection(trial, plan.repeats), **facts)]
    jobs = [Job(plan.fit_plan, number), Job(plan.score_plan, number, COUNTS)]
    return Ledger.of(ledger).book_all(jobs, **facts)


class Trial(NamedTuple):
    """One fit and its score; a fit from which nothing can be predicted has none."""

    name: str
    fit: Fit | None
    score: Score | None
    error: Exception | None = None


def _rank(trial: Trial) -> float:
    return -math.inf if trial.score is None else trial.score.mean


def _chosen(trial: Trial, scores: dict[str, Score | None] | None, plan: TuningPlan) -> Tuned:
    if trial.score is None or trial.fit is None:
        raise DivergedError(
            f"the best trial ({trial.name}) failed, and with it all others: {trial.error}. What "
            "they cost is spent. Try the models on made-up data before you try again."
        ) from trial.error
    return Tuned(trial.name, trial.fit, trial.score, scores, plan)


class Trials:
    """Runs trials: a fit and a score, each by the plan's noise."""

    def __init__(
        self,
        candidates: Mapping[str, _Candidate],
        plan: TuningPlan,
        data: tuple[Any, ...],
        options: Mapping[str, Any],
        seed: int | None,
        ray: Cluster | None = None,
    ) -> None:
        self._candidates, self._plan, self._data, self._seed = candidates, plan, data, seed
        self._options, self._ray = options, ray
        self._keyword_data = _keyword_data(options)

    def run_all(self, names: Sequence[str]) -> Iterator[Trial]:
        """Trials in order; several at a time where workers take their steps."""
        if self._ray is None:
            yield from itertools.starmap(self.run, enumerate(names))
            return
        with (
            warnings.catch_warnings(),  # which threads share
            ThreadPoolExecutor(self._ray.num_processors, "dpvim-trial") as threads,
        ):
            parts = [threads.submit(self.run, *each) for each in enumerate(names)]
            try:
                for part in parts:
                    yield part.result()
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                self._ray.cancel()
                raise

    def run(self, number: int, name: str) -> Trial:
        """One trial. Whatever is doubtful about a fit shows in its score."""
        candidate, plan = self._candidates[name], self._plan.fit_plan
        own = {
            **self._options,
            **candidate.options,
            "noise_multiplier": plan.noise_multiplier,
            "delta": self._plan.delta,
            "num_examples": plan.num_examples,
            "relation": plan.relation,
            "sampling_prob": plan.sampling_prob,
            "num_steps": plan.num_steps,
            "num_epochs": None,
            "seed": None if self._seed is None else self._seed + number,
            "progress": False,
        }
        # Of a trial that is not shown nothing may be said, be it a warning, an error, or how often
        # there is one. What is doubtful about the chosen one `fit.posterior.doubts` tells.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                fitted = self._fit(candidate.model, own)
                if fitted.interrupted:
                    raise KeyboardInterrupt
                assert fitted.plan == dataclasses.replace(plan, clip_norm=fitted.plan.clip_norm)
                # Before anything is made of it: whatever carries its statement carries this one.
                fitted = dataclasses.replace(fitted, privacy=self._statement(fitted))
                score = score_records(
                    fitted,
                    self._data,
                    self._keyword_data,
                    self._plan.score_plan,
                    delta=self._plan.delta,
                    chosen_at=self._plan.epsilon,
                    seed=own["seed"],
                )
            except Exception as error:
                return Trial(name, None, None, error)
        return Trial(name, fitted, score)

    def _fit(self, model: Any, options: dict[str, Any]) -> Fit:
        if self._ray is None:
            return fit(model, *self._data, **options)
        return fit_on(self._ray, model, *self._data, **options)

    def _statement(self, fitted: Fit) -> PrivacyStatement:
        """The statement of a fit that is chosen among trials: its price is that of them all."""
        alone = fitted.privacy
        assert isinstance(alone, PrivacyStatement)
        return PrivacyStatement.of(
            alone.plan,
            delta=alone.delta,
            steps_done=alone.steps_done,
            released=alone.released,
            for_testing=alone.for_testing,
            chosen_at=self._plan.epsilon,
        )


def _candidates(candidates: Candidates) -> dict[str, _Candidate]:
    found = {}
    _validate.an_instance("candidates", candidates, Mapping, "a dict of models by name")
    for name, given in candidates.items():
        model, own = given if isinstance(given, tuple) else (given, {})
        if not callable(model):
            raise TypeError(
                f"candidates[{name!r}]: expected a model, or a pair of a model and options, got "
                f"{type(model).__name__}."
            )
        expected = "a dict of options beside the model"
        _validate.an_instance(f"candidates[{name!r}]", own, Mapping, expected)
        found[str(name)] = _Candidate(model, dict(own))
    if len(found) < 2:
        raise ValueError(
            f"candidates: expected at least two to choose from, got {len(found)}. For one there is "
            "dpvim.fit."
        )
    return found


_OF_THE_PLAN = [field.name for field in dataclasses.fields(Budget)]


def _refuse_own_budgets(chosen: Mapping[str, _Candidate], shared: Mapping[str, Any]) -> None:
    """All trials have one plan: the price of a trial must not tell which candidate it was."""
    for name in ("noise_multiplier", "checkpoint"):
        if shared.get(name) is not None:
            raise ValueError(f"{name}: expected not to be given to tune, got {shared[name]!r}.")
    for name, candidate in chosen.items():
        for option in candidate.options:
            if option in (*_OF_THE_PLAN, "checkpoint", "seed", "progress"):
                raise ValueError(
                    f"candidates[{name!r}]: expected options other than {option!r}, which is the "
                    "same for all trials. Give it to tune."
                )


def _read(data: tuple[Any, ...], options: Mapping[str, Any]) -> ModelInput:
    """Records as the fits have them: rows, or persons."""
    return read_inputs(
        data,
        _keyword_data(options),
        max_rows_per_person=options.get("max_rows_per_person"),
        streams=SecretStreams(),
    )


def _keyword_data(options: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a fit that are data."""
    rest = {"delta": 0.5, "noise_multiplier": 1.0, **options}
    take(Budget, rest)
    take(FitOptions, rest)
    return rest


def _common_schedule(
    chosen: Mapping[str, _Candidate],
    data: tuple[Any, ...],
    shared: Mapping[str, Any],
    *,
    epsilon: float,
    delta: float,
) -> PrivacyPlan:
    """One sampling probability and number of steps for all: the largest that any asks for.

    Candidates with their own would have prices of their own, and the price must not depend on
    which candidate was drawn.
    """
    plans = []
    for candidate in chosen.values():
        options = {**shared, **candidate.options, "epsilon": epsilon, "delta": delta}
        request = Request(take(Budget, options), take(FitOptions, options))
        inputs = _read(data, shared)
        (strategy,) = choose([request], bridge(candidate.model, inputs), inputs.num_rows)
        assert isinstance(strategy.plan, PrivacyPlan)
        strategy.plan.check_num_rows(inputs.num_rows)
        plans.append(strategy.plan)
    return dataclasses.replace(
        plans[0],
        sampling_prob=max(plan.sampling_prob for plan in plans),
        num_steps=max(plan.num_steps for plan in plans),
    )


def _calibrated(
    schedule: PrivacyPlan,
    score: PrivacyPlan,
    repeats: Repeats | None,
    num_candidates: int,
    epsilon: float,
    delta: float,
) -> tuple[tuple[PrivacyPlan, PrivacyPlan], float]:
    """Plans of a fit and a score with so much more noise that all trials cost at most epsilon.

    Both get the same factor on the noise that each would have by itself.
    """
    alone = schedule.calibrate(epsilon=epsilon, delta=delta), score

    def plans(factor: float) -> tuple[PrivacyPlan, PrivacyPlan]:
        first, second = (
            dataclasses.replace(plan, noise_multiplier=factor * (plan.noise_multiplier or 0.0))
            for plan in alone
        )
        return first, second

    def cost(factor: float) -> float:
        trial = [plan.dp_event for plan in plans(factor)]
        relation = Relation(schedule.relation)
        if repeats is None:
            return epsilon_of(trial * num_candidates, delta=delta, relation=relation)
        return epsilon_of_selection(trial, repeats, delta=delta, relation=relation)

    def is_enough(factor: float) -> bool:
        try:
            return cost(factor) <= epsilon
        except ValueError:  # what the caps of batches cost counts e^epsilon times
            return False

    low, high = 1.0, 2.0
    while not is_enough(high) and high < _MOST_NOISE:
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return plans(high), cost(high)
