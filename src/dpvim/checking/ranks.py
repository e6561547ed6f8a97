"""Ranks of records among replicates of a fit, as a release of counts."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jaxtyping import Array, Float, Int

from dpvim import _validate
from dpvim._compile import single_precision
from dpvim.bridge.data import ModelInput
from dpvim.bridge.persons import rows_of
from dpvim.checking.questions import (
    Question,
    booked,
    bridged_of,
    check_plan,
    check_signature,
    inputs_of,
    latents_of,
    mechanism_of,
    num_records_of,
    statement_of,
)
from dpvim.privacy.counts import Cells, Marginal
from dpvim.privacy.randomness import SecretStreams
from dpvim.privacy.records import over_records
from dpvim.privacy.statement import PrivacyStatement
from dpvim.result import Fit
from dpvim.types import ModelError, Record, Relation

_REPLICATES = 19


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

    >>> import dpvim, numpyro, numpyro.distributions as dist
    >>> def model(x):
    ...     mean = numpyro.sample("mean", dist.Normal(0, 10))
    ...     with numpyro.plate("records", x.shape[0]):
    ...         numpyro.sample("x", dist.Normal(mean, 1), obs=x)
    >>> x = np.random.default_rng(0).normal(2.0, 1.0, 4000)
    >>> fit = dpvim.fit(model, x, epsilon=1.0, delta=1e-5)
    >>> check = predictive_check(fit, x, epsilon=1.0, delta=1e-5)
    >>> print(str(check).splitlines()[0][:5])
    Ranks
    """
    delta = _validate.open_unit("delta", delta)
    _check_statistics(statistics)
    inputs = inputs_of(fit, data, keyword_data, seed)
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
    mechanism = mechanism_of(question, inputs, plan, seed)
    cells = Cells(tuple(np.arange(size) for _ in names))
    rows = rows_of(data, keyword_data).records
    facts: dict[str, Any] = {"otherwise": "predictive check", "delta": delta, "seed": seed}
    with booked(ledger, purpose, plan, rows, **facts):
        released = mechanism.release(cells, [Marginal((i,)) for i in range(len(names))], share=1.0)
    num_records = num_records_of(plan, released)
    return PredictiveCheck(
        {
            name: RankCheck(each.counts, each.variance, num_records)
            for name, each in zip(names, released, strict=True)
        },
        statement_of(plan, delta, seed, f"counts of records by rank, for {len(names)} statistics"),
    )


def _check_statistics(statistics: Any) -> None:
    if statistics is None:
        return
    expected = "a dict of functions by name"
    _validate.an_instance("statistics", statistics, Mapping, expected)
    for name, statistic in statistics.items():
        _validate.text("statistics", name)
        if not callable(statistic):
            raise TypeError(
                f"statistics[{name!r}]: expected a function, got {type(statistic).__name__}."
            )


def _ranks(
    fit: Fit,
    inputs: ModelInput,
    statistics: Mapping[str, Callable[[dict[str, Array]], Any]] | None,
    seed: int | None,
) -> tuple[Callable[[Record], Int[np.ndarray, "rows statistics"]], list[str]]:
    """The ranks of each record, from 0 to the number of replicates, and the statistics' names."""
    bridged = bridged_of(fit)
    check_signature(fit, inputs)
    latents = latents_of(fit, _REPLICATES, seed)
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
