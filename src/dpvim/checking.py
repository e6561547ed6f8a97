"""Checks of a fit at a price: how well it predicts records, and whether they look like its own.

Both ask one thing of each record, put it into a cell, and release the cells' counts by the
mechanism of `dpvim.privacy.counts`: a record is in one cell of each question, whatever it holds.

* `held_out`: the log predictive density of records, on average. Its cells need no bounds to be
  declared: a first round counts on a scale of orders of magnitude, and a second one between the
  ends that the first one found.
* `predictive_check`: the rank of a record among replicates that the fit would have made in its
  place. If the model is right, all ranks are equally likely.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jaxtyping import Array, Float, Int

from dpvim import _validate
from dpvim._compile import single_precision
from dpvim.bridge.data import ModelInput
from dpvim.bridge.model import BridgedModel
from dpvim.bridge.persons import read_inputs, rows_of
from dpvim.ledger.book import Job, Ledger
from dpvim.ledger.payment import Account, Tally, paid
from dpvim.privacy.counts import Cells, CountMechanism, Marginal, NoisyMarginal, counts_plan
from dpvim.privacy.plan import PrivacyPlan
from dpvim.privacy.randomness import SecretStreams, fresh_key
from dpvim.privacy.records import over_records
from dpvim.privacy.statement import COUNTS, PrivacyStatement
from dpvim.result import Fit
from dpvim.svi import warn_of_seed
from dpvim.types import ModelError, Record, Relation

# Records are looked at so many at a time.
_PIECE_ROWS = 4096
_DRAWS = 64
# The scale of orders of magnitude: even steps of asinh(x / _UNIT), which are 1 % of large numbers.
_UNIT, _STEP, _LARGEST = 0.25, 0.01, 1e8
_STEPS = math.ceil(math.asinh(_LARGEST / _UNIT) / _STEP)
_NUM_CODES = 2 * _STEPS + 1
# The first round counts in cells of so many steps, with that part of the release.
_COARSE = 32
_FIRST_SHARE = 0.25
_NUM_CELLS = 40
# A count that is so many standard deviations of its noise above zero is not noise; beside others
# that are not, one is enough.
_STANDS_OUT, _GOES_ON = 4.0, 1.0
_MARGIN = 2
_REPLICATES = 19


@dataclasses.dataclass(frozen=True)
class Score:
    """A mean over records, released with noise.

    Attributes:
        mean: Of the log predictive density of a record, or of the difference of two fits'.
        noise: Standard deviation of what the privacy noise adds to it.
        sampling: Standard deviation of what it would vary by with other records of the same kind.
        low, high: Where what records say was cut off; found in a first round of counts.
        num_records: Public, or as many as the counts say.
        privacy: The guarantee.
    """

    mean: float
    noise: float
    sampling: float
    low: float
    high: float
    num_records: float
    privacy: PrivacyStatement

    @property
    def stderr(self) -> float:
        """Of the mean, for statements on records that are not in the data."""
        return math.hypot(self.noise, self.sampling)

    def __str__(self) -> str:
        return (
            f"{self.mean:.4g} +- {self.stderr:.2g} nats a record (of it noise {self.noise:.2g}), "
            f"{self.num_records:,.0f} records, each between {self.low:.3g} and {self.high:.3g}"
        )


@dataclasses.dataclass(frozen=True)
class RankCheck:
    """Ranks of records among replicates of a fit, for one statistic.

    Attributes:
        counts: Noisy counts of records by rank, the lowest first.
        variance: Of the noise of each.
        num_records: Public, or as many as the counts say.
    """

    counts: np.ndarray
    variance: float
    num_records: float

    @property
    def chi_square(self) -> float:
        """The squared distance from equal counts, in units of what it varies by if all is well."""
        expected = self.num_records / len(self.counts)
        return float(np.sum((self.counts - expected) ** 2) / (expected + self.variance))

    @property
    def p_value(self) -> float:
        """The probability of counts that are as unequal, if the model is right.

        Noise and sampling are both in it. It is a little large, since the records that are ranked
        were in the fit.
        """
        return float(scipy.stats.chi2.sf(self.chi_square, len(self.counts) - 1))

    @property
    def excess(self) -> float:
        """The share of records that are at other ranks than they should be, beyond the noise."""
        expected = self.num_records / len(self.counts)
        squares = np.sum((self.counts - expected) ** 2 - expected - self.variance)
        size = len(self.counts)
        return float(math.sqrt(max(squares, 0.0) * size) / (2 * self.num_records))


@dataclasses.dataclass(frozen=True)
class PredictiveCheck:
    """The ranks of records for each statistic; `print` shows them.

    Attributes:
        ranks: By the names of the statistics.
        privacy: The guarantee, for all of them together.
    """

    ranks: dict[str, RankCheck]
    privacy: PrivacyStatement

    def __str__(self) -> str:
        lines = ["Ranks of records among replicates of the fit (equal counts if all is well)"]
        for name, each in self.ranks.items():
            verdict = "unlike" if each.p_value < 0.01 else "as expected"
            lines.append(
                f"  {name:<16} {verdict}: p = {each.p_value:.2g}, about {each.excess:.1%} of the "
                "records are at other ranks"
            )
        return "\n".join(lines)


class Question(NamedTuple):
    """A question to records: for each a code in every column, and the cells of the codes.

    Attributes:
        codes: ``records -> codes`` of some of the records; each depends on that record alone.
        sizes: Numbers of codes by column.
    """

    codes: Callable[[Record], Int[np.ndarray, "rows columns"]]
    sizes: tuple[int, ...]


def held_out(
    fit: Fit,
    *data: Any,
    epsilon: float,
    delta: float,
    against: Fit | None = None,
    relation: Relation | str = Relation.ZERO_OUT,
    num_examples: int | None = None,
    num_draws: int = _DRAWS,
    seed: int | None = None,
    ledger: Any = None,
    purpose: str | None = None,
    **keyword_data: Any,
) -> Score:
    """Release how well a fit predicts records: the mean of their log predictive density.

    Records that the fit has not seen are what a comparison should be made on: set some aside, by a
    rule that does not look at them. The cost adds to that of other releases from the same records.

    Args:
        fit: Made in this session, so that it knows its model.
        data, keyword_data: As in `dpvim.fit`, other records.
        epsilon, delta, relation, num_examples: The budget, as in `dpvim.fit`.
        against: Another fit to the same kind of records: then it is the difference of the two that
            is released, record by record, which varies less than both.
        num_draws: Draws of the posterior that the density is averaged over.
        seed: For tests: the result has no privacy guarantee.
        ledger, purpose: As in `dpvim.fit`: the release is booked before it is made.
    """
    _validate.positive_int("num_draws", num_draws)
    inputs = _inputs(fit, data, keyword_data, seed)
    fits = [fit] if against is None else [fit, against]
    densities = [_log_density(each, inputs, num_draws, seed) for each in fits]
    plan = check_plan(
        inputs, epsilon=epsilon, delta=delta, relation=relation, num_examples=num_examples
    )

    def codes(records: Record) -> Int[np.ndarray, "rows 1"]:
        found = [density(records) for density in densities]
        return magnitude_codes(found[0] if len(found) == 1 else found[0] - found[1])[:, None]

    what = "log predictive density" if against is None else "difference of log densities"
    mechanism = _mechanism(Question(codes, (_NUM_CODES,)), inputs, plan, seed)
    rows = rows_of(data, keyword_data).records
    with _booked(ledger, purpose or "held-out score", plan, rows, delta=delta, seed=seed):
        return _release_mean(
            mechanism, _statement(plan, delta, seed, f"counts of records by {what}")
        )


def score_records(
    fit: Fit,
    data: tuple[Any, ...],
    keyword_data: Mapping[str, Any],
    plan: PrivacyPlan,
    *,
    delta: float,
    chosen_at: float,
    seed: int | None = None,
) -> Score:
    """Release the mean log predictive density of records, as one of the trials of a choice.

    Args:
        fit, data, keyword_data: As of `held_out`.
        plan: Calibrated.
        delta, chosen_at: Of the choice: its cost is the score's.
        seed: For tests.
    """
    inputs = _inputs(fit, data, keyword_data, seed)
    density = _log_density(fit, inputs, _DRAWS, seed)
    question = Question(lambda records: magnitude_codes(density(records))[:, None], (_NUM_CODES,))
    mechanism = _mechanism(question, inputs, plan, seed)
    what = "counts of records by log predictive density"
    return _release_mean(mechanism, _statement(plan, delta, seed, what, chosen_at))


def predictive_check(
    fit: Fit,
    *data: Any,
    epsilon: float,
    delta: float,
    statistics: Mapping[str, Callable[[dict[str, Array]], Any]] | None = None,
    relation: Relation | str = Relation.ZERO_OUT,
    num_examples: int | None = None,
    seed: int | None = None,
    ledger: Any = None,
    purpose: str | None = None,
    **keyword_data: Any,
) -> PredictiveCheck:
    """Release how records rank among replicates that the fit would have made in their place.

    Args:
        fit: Made in this session, so that it knows its model.
        data, keyword_data: As in `dpvim.fit`.
        epsilon, delta, relation, num_examples: The budget, for all statistics together.
        statistics: By name, numbers to rank by: functions of one record's observed sites, a dict of
            their values. Default: the observed sites themselves.
        seed: For tests: the result has no privacy guarantee.
        ledger, purpose: As in `dpvim.fit`: the release is booked before it is made.
    """
    inputs = _inputs(fit, data, keyword_data, seed)
    if inputs.has_several_rows:
        raise ValueError(
            "fit: expected one by records, or with one row a person, got one with several rows a "
            "person, whose ranks would be many. held_out takes persons."
        )
    ranks, names = _ranks(fit, inputs, statistics, seed)
    plan = check_plan(
        inputs, epsilon=epsilon, delta=delta, relation=relation, num_examples=num_examples
    )
    size = _REPLICATES + 1
    question = Question(ranks, (size,) * len(names))
    mechanism = _mechanism(question, inputs, plan, seed)
    cells = Cells(tuple(np.arange(size) for _ in names))
    rows = rows_of(data, keyword_data).records
    with _booked(ledger, purpose or "predictive check", plan, rows, delta=delta, seed=seed):
        released = mechanism.release(cells, [Marginal((i,)) for i in range(len(names))], share=1.0)
    num_records = _num_records(plan, released)
    return PredictiveCheck(
        {
            name: RankCheck(each.counts, each.variance, num_records)
            for name, each in zip(names, released, strict=True)
        },
        _statement(plan, delta, seed, f"counts of records by rank, for {len(names)} statistics"),
    )


@contextlib.contextmanager
def _booked(
    ledger: Any,
    purpose: str,
    plan: PrivacyPlan,
    rows: Record,
    *,
    delta: float,
    seed: int | None,
) -> Iterator[None]:
    """Pay for a release of counts in a ledger, if there is one. Once it is begun it is paid for."""
    account = None if ledger is None else Account(Ledger.of(ledger), purpose, delta)
    tally = Tally()
    with paid(account, [Job(plan)], [tally], data=rows, seeded=seed is not None, mechanism=COUNTS):
        tally.add(1)
        yield


def check_plan(
    inputs: ModelInput,
    *,
    epsilon: float,
    delta: float,
    relation: Relation | str,
    num_examples: int | None,
) -> PrivacyPlan:
    """The plan of a release of counts of these records, calibrated."""
    if num_examples is None:
        if relation == Relation.ADD_OR_REMOVE:
            raise ValueError(
                "num_examples: expected a public bound on the number of records under "
                "relation='add_or_remove', got none."
            )
        num_examples = inputs.num_rows
    plan = counts_plan(
        num_examples=num_examples,
        relation=relation,
        max_rows_per_person=inputs.max_rows_per_person,
    )
    plan.check_num_rows(inputs.num_rows)
    return plan.calibrate(epsilon=epsilon, delta=delta)


def _release_mean(mechanism: CountMechanism, privacy: PrivacyStatement) -> Score:
    """Release the mean of a number that is coded on the scale of orders of magnitude."""
    plan = mechanism.plan
    alone = [Marginal((0,))]
    values = magnitudes()
    coarse = np.arange(len(values)) // _COARSE
    (first,) = mechanism.release(Cells((coarse,)), alone, share=_FIRST_SHARE)
    low, high = _ends(first, values, coarse)
    edges = np.linspace(low, high, _NUM_CELLS + 1)
    cells = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, _NUM_CELLS - 1)
    (second,) = mechanism.release(Cells((cells,)), alone, share=1 - _FIRST_SHARE)
    counts = second.counts.astype(float)
    rows = _num_records(plan, [second])
    # Around the middle, so that noise on many counts does not add up to a shift of all.
    middle = (low + high) / 2
    away = (edges[:-1] + edges[1:]) / 2 - middle
    mean = float(counts @ away) / rows
    spread = max(float(counts @ away**2) / rows - mean**2, 0.0)
    return Score(
        mean=middle + mean,
        noise=math.sqrt(second.variance * float(away @ away)) / rows,
        sampling=math.sqrt(spread / rows),
        low=low,
        high=high,
        num_records=rows,
        privacy=privacy,
    )


def magnitude_codes(numbers: Float[np.ndarray, " rows"]) -> Int[np.ndarray, " rows"]:
    """The place of each number on the scale of orders of magnitude; what is no number is lowest."""
    numbers = np.nan_to_num(np.asarray(numbers, float), nan=-np.inf)
    steps = np.rint(np.arcsinh(np.clip(numbers, -_LARGEST, _LARGEST) / _UNIT) / _STEP)
    return _STEPS + steps.astype(np.int64)


def magnitudes() -> Float[np.ndarray, " codes"]:
    """The number that each code stands for."""
    return _UNIT * np.sinh(_STEP * np.arange(-_STEPS, _STEPS + 1))


def _ends(
    first: NoisyMarginal, values: Float[np.ndarray, " codes"], coarse: Int[np.ndarray, " codes"]
) -> tuple[float, float]:
    """Between these lies all that stands out from the noise, and a little more on either side."""
    noise = math.sqrt(first.variance)
    low = high = int(np.argmax(first.counts))
    others = np.flatnonzero(first.counts > _STANDS_OUT * noise)
    goes_on = first.counts > _GOES_ON * noise
    while low > 0 and goes_on[low - 1]:
        low -= 1
    while high < len(goes_on) - 1 and goes_on[high + 1]:
        high += 1
    low, high = min([low, *others]) - _MARGIN, max([high, *others]) + _MARGIN
    inside = values[(coarse >= low) & (coarse <= high)]
    return float(inside[0]), float(inside[-1])


def _mechanism(
    question: Question, inputs: ModelInput, plan: PrivacyPlan, seed: int | None
) -> CountMechanism:
    warn_of_seed(plan, seed, stacklevel=5)

    # Codes of all records, before anything is paid for: what is wrong with a question is known now.
    pieces = []
    for first in range(0, inputs.num_rows, _PIECE_ROWS):
        part = [leaf[first : first + _PIECE_ROWS] for leaf in inputs.records]
        rows = len(part[0])
        # Of one public shape: how a number is rounded may depend on how many are computed with it.
        padded = [jnp.pad(x, [(0, _PIECE_ROWS - rows), *[(0, 0)] * (x.ndim - 1)]) for x in part]
        codes = question.codes(padded)[:rows]
        pieces.append(np.clip(codes, 0, np.array(question.sizes) - 1))
    return CountMechanism(plan, SecretStreams(seed), lambda: pieces)


def _num_records(plan: PrivacyPlan, released: list[NoisyMarginal]) -> float:
    """As many as are declared, or as the counts say if that is private."""
    if not plan.num_rows_is_private:
        return float(plan.num_examples)
    total = float(np.mean([each.counts.sum() for each in released]))
    return float(np.clip(total, 1.0, plan.num_examples))


def _statement(
    plan: PrivacyPlan,
    delta: float,
    seed: int | None,
    released: str,
    chosen_at: float | None = None,
) -> PrivacyStatement:
    return PrivacyStatement.of(
        plan,
        delta=delta,
        steps_done=1,
        released=released,
        for_testing=seed is not None,
        mechanism=COUNTS,
        chosen_at=chosen_at,
    )


def _inputs(
    fit: Fit, data: tuple[Any, ...], keyword_data: Mapping[str, Any], seed: int | None
) -> ModelInput:
    """Records of the kind that the fit has: rows, or persons."""
    _validate.an_instance("fit", fit, Fit, "a dpvim.Fit")
    _validate.seed("seed", seed)
    return read_inputs(
        data,
        dict(keyword_data),
        max_rows_per_person=fit.plan.max_rows_per_person,
        streams=SecretStreams(seed),
    )


def _bridged(fit: Fit) -> BridgedModel:
    if fit.session is None:
        raise ValueError(
            "fit: expected one that was made in this session, got one that was loaded, which does "
            "not hold its model. Fit the model, then check it."
        )
    return fit.session.prepared.bridged


def _check_signature(fit: Fit, inputs: ModelInput) -> None:
    """Refuse data of another kind than those of the fit; there may be more or fewer records."""
    assert fit.session is not None
    given, known = (
        (structure, constants, [(shape[1:], dtype) for shape, dtype in arrays])
        for structure, constants, arrays in (inputs.signature, fit.session.prepared.signature)
    )
    if given != known:
        raise ValueError(
            "data: expected arrays of the shapes and types, and constants, that the fit was made "
            "with, got others. Only the number of records may differ."
        )


@single_precision
def _latents(fit: Fit, num_draws: int, seed: int | None) -> Float[Array, "draws d"]:
    """Draws of the posterior, unconstrained."""
    key = fresh_key() if seed is None else jax.random.key(seed)
    return jnp.asarray(fit.posterior.latent_dist.draw(key, num_draws), jnp.float32)


def _log_density(
    fit: Fit, inputs: ModelInput, num_draws: int, seed: int | None
) -> Callable[[Record], Float[np.ndarray, " rows"]]:
    """The log predictive density of each record under a fit."""
    log_prob = _bridged(fit).by_record.likelihood.log_prob
    _check_signature(fit, inputs)
    latents = _latents(fit, num_draws, seed)

    def of_record(latents: Array, record: Record) -> Array:
        each = jax.lax.map(lambda latent: log_prob(latent, record), latents)
        return jax.nn.logsumexp(each) - math.log(num_draws)

    compiled = jax.jit(functools.partial(over_records, of_record))

    @single_precision
    def of_records(records: Record) -> Float[np.ndarray, " rows"]:
        return np.asarray(compiled(latents, records), float)

    return of_records


def _ranks(
    fit: Fit,
    inputs: ModelInput,
    statistics: Mapping[str, Callable[[dict[str, Array]], Any]] | None,
    seed: int | None,
) -> tuple[Callable[[Record], Int[np.ndarray, "rows statistics"]], list[str]]:
    """The ranks of each record, from 0 to the number of replicates, and the statistics' names."""
    bridged = _bridged(fit)
    _check_signature(fit, inputs)
    latents = _latents(fit, _REPLICATES, seed)
    # Coins of the records: with others, or those of other records, a record has another rank.
    bits = SecretStreams(seed).generator("ranks").integers(2**32, size=2, dtype=np.uint32)
    key = jax.random.wrap_key_data(jnp.asarray(bits))
    chosen = (
        dict(statistics)
        if statistics
        else {name: functools.partial(_own_value, name) for name in bridged.observed_names}
    )
    if not chosen:
        raise ValueError("statistics: expected at least one, got none.")

    def numbers(sites: dict[str, Array]) -> Float[Array, " statistics"]:
        found = []
        for name, statistic in chosen.items():
            value = jnp.asarray(statistic(sites), jnp.float32)
            if value.size != 1:
                raise ModelError(
                    f"statistics[{name!r}]: expected one number for a record, got an array of "
                    f"shape {value.shape}. Give a function that makes it one."
                )
            found.append(value.reshape(()))
        return jnp.stack(found)

    def of_record(shared: Any, record_and_key: Any) -> Array:
        record, bits = record_and_key
        own = jax.random.wrap_key_data(bits)
        keys = jax.random.split(own, _REPLICATES + 1)
        observed, _ = bridged.replicate(shared[0], record, keys[0])

        def one(latent_and_key: Any) -> Array:
            latent, each = latent_and_key
            return numbers(bridged.replicate(latent, record, each)[1])

        replicates = jax.lax.map(one, (shared, keys[1:]))
        seen = numbers(observed)
        below = jnp.sum(replicates < seen, axis=0)
        ties = jnp.sum(replicates == seen, axis=0)
        # Ties are broken evenly: anywhere among those that are equal.
        place = jnp.floor(jax.random.uniform(keys[0], seen.shape) * (ties + 1)).astype(int)
        return below + jnp.minimum(place, ties)

    compiled = jax.jit(functools.partial(over_records, of_record))
    done = 0

    @single_precision
    def of_records(records: Record) -> Int[np.ndarray, "rows statistics"]:
        nonlocal done
        rows = len(records[0])
        numbers = done + jnp.arange(rows)
        keys = jax.vmap(lambda i: jax.random.key_data(jax.random.fold_in(key, i)))(numbers)
        done += rows
        return np.asarray(compiled(latents, (records, keys)))

    return of_records, list(chosen)


def _own_value(name: str, sites: dict[str, Array]) -> Array:
    return sites[name]
