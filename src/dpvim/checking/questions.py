"""Questions to records: one cell of each for every record, counted by noisy counts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dpvim import _validate
from dpvim._compile import single_precision
from dpvim.bridge.data import ModelInput
from dpvim.bridge.model import BridgedModel
from dpvim.bridge.persons import read_inputs
from dpvim.ledger.book import Job, Ledger
from dpvim.ledger.payment import Account, Tally, paid
from dpvim.privacy.counts import CountMechanism, NoisyMarginal, counts_plan
from dpvim.privacy.plan import PrivacyPlan
from dpvim.privacy.randomness import SecretStreams, fresh_key
from dpvim.privacy.statement import COUNTS, PrivacyStatement
from dpvim.result import Fit
from dpvim.svi import warn_of_seed
from dpvim.types import Record, Relation

# Records are looked at so many at a time.
PIECE_ROWS = 4096


class Question(NamedTuple):
    """A question to records: for each a code in every column, and the cells of the codes.

    Attributes:
        codes: ``records -> codes`` of some of the records; each depends on that record alone.
        sizes: Numbers of codes by column.
    """

    codes: Callable[[Record], Int[np.ndarray, "rows columns"]]
    sizes: tuple[int, ...]


def check_plan(
    inputs: ModelInput,
    *,
    epsilon: float,
    delta: float,
    relation: Relation | str,
    num_examples: int | None,
) -> PrivacyPlan:
    """The plan of a release of counts of these records, calibrated."""
    _validate.one_of("relation", relation, [each.value for each in Relation])
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


def mechanism_of(
    question: Question, inputs: ModelInput, plan: PrivacyPlan, seed: int | None
) -> CountMechanism:
    """The counts of a question's cells, not yet released. Nothing is paid for before."""
    warn_of_seed(plan, seed, stacklevel=5)

    # Codes of all records, before anything is paid for: what is wrong with a question is known now.
    pieces = []
    for first in range(0, inputs.num_rows, PIECE_ROWS):
        part = [leaf[first : first + PIECE_ROWS] for leaf in inputs.records]
        rows = len(part[0])
        # Of one public shape: how a number is rounded may depend on how many are computed with it.
        padded = [jnp.pad(x, [(0, PIECE_ROWS - rows), *[(0, 0)] * (x.ndim - 1)]) for x in part]
        codes = question.codes(padded)[:rows]
        pieces.append(np.clip(codes, 0, np.array(question.sizes) - 1))
    return CountMechanism(plan, SecretStreams(seed), lambda: pieces)


def num_records_of(plan: PrivacyPlan, released: list[NoisyMarginal]) -> float:
    """As many as are declared, or as the counts say if that is private."""
    if not plan.num_rows_is_private:
        return float(plan.num_examples)
    total = float(np.mean([each.counts.sum() for each in released]))
    return float(np.clip(total, 1.0, plan.num_examples))


def statement_of(
    plan: PrivacyPlan,
    delta: float,
    seed: int | None,
    released: str,
    chosen_at: float | None = None,
) -> PrivacyStatement:
    """The statement of one release of counts."""
    return PrivacyStatement.of(
        plan,
        delta=delta,
        steps_done=1,
        released=released,
        for_testing=seed is not None,
        mechanism=COUNTS,
        chosen_at=chosen_at,
    )


@contextlib.contextmanager
def booked(
    ledger: Any,
    purpose: str | None,
    plan: PrivacyPlan,
    rows: Record,
    *,
    otherwise: str,
    delta: float,
    seed: int | None,
) -> Iterator[None]:
    """Pay for a release of counts in a ledger, if there is one. Once it is begun it is paid for.

    Args:
        otherwise: The purpose if none is given.
    """
    if purpose is not None:
        _validate.text("purpose", purpose)
    account = None
    if ledger is not None:
        account = Account(Ledger.of(ledger), purpose or otherwise, delta)
    tally = Tally()
    with paid(account, [Job(plan)], [tally], data=rows, seeded=seed is not None, mechanism=COUNTS):
        tally.add(1)
        yield


def inputs_of(
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


def bridged_of(fit: Fit) -> BridgedModel:
    """The model of a fit, as plain functions of one record."""
    if fit.session is None:
        raise ValueError(
            "fit: expected one that was made in this session, got one that was loaded, which does "
            "not hold its model. Fit the model, then check it."
        )
    return fit.session.prepared.bridged


def check_signature(fit: Fit, inputs: ModelInput) -> None:
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
def latents_of(fit: Fit, num_draws: int, seed: int | None) -> Float[Array, "draws d"]:
    """Draws of the posterior, unconstrained."""
    key = fresh_key() if seed is None else jax.random.key(seed)
    return jnp.asarray(fit.posterior.latent_dist.draw(key, num_draws), jnp.float32)
