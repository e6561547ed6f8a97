"""Models of rows, fitted by persons: as if they had been written for persons."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
from conftest import linear_model, logistic_model

import dpvim
from dpvim.audit import models
from dpvim.bridge.model import bridge
from dpvim.bridge.persons import person_numbers, read_inputs
from dpvim.models.regression import Regression
from dpvim.privacy.randomness import SecretStreams

RNG = np.random.default_rng(0)
NUM_ROWS, NUM_PERSONS, CAP = 60, 25, 4
IDS = RNG.integers(0, NUM_PERSONS, NUM_ROWS)
IDS[:7] = 0  # more than the cap
X = RNG.normal(size=(NUM_ROWS, 2)).astype(np.float32)
Y = (RNG.random(NUM_ROWS) < 0.5).astype(np.float32)
QUICK = {"epsilon": 1.0, "delta": 1e-3, "num_steps": 40, "seed": 0, "progress": False}


def read(*args, max_rows=CAP, **kwargs):
    return read_inputs(args, kwargs, max_rows_per_person=max_rows, streams=SecretStreams(0))


def rows_of(name):
    """A model, its rows, and a latent."""
    if name == "look_ups":
        case = models.table()
        level, x = (np.tile(leaf, 3)[:NUM_ROWS] for leaf in case.ordinary)
        return case.model, (level, x)
    return (Regression("logistic") if name == "ready-made" else logistic_model), (X, Y)


@pytest.mark.parametrize("name", ["autodiff", "look_ups", "ready-made"])
def test_a_persons_gradient_is_the_sum_of_those_of_the_rows(name) -> None:
    model, rows = rows_of(name)
    by_row = bridge(model, read(*rows, max_rows=None))
    inputs = read(*rows, np.arange(NUM_ROWS), group_by=IDS)  # with the numbers of the rows
    *arrays, numbers, is_used = inputs.records
    by_person = bridge(model, read(*rows, group_by=IDS))
    latent = jnp.asarray(np.random.default_rng(1).normal(size=by_row.space.dim), jnp.float32)
    gradients = jax.jit(jax.vmap(jax.grad(by_row.by_record.likelihood.log_prob), (None, 0)))
    of_rows = gradients(latent, [jnp.asarray(leaf) for leaf in rows])
    expected = jnp.sum(jnp.where(is_used[..., None], of_rows[numbers], 0.0), axis=1)
    assert is_used.sum() < NUM_ROWS  # the cap cuts
    records = [*arrays, is_used]
    of_persons = jax.jit(jax.vmap(jax.grad(by_person.problem.likelihood.log_prob), (None, 0)))
    np.testing.assert_allclose(of_persons(latent, records), expected, rtol=1e-4, atol=1e-4)

    @jax.jit
    def share(person):
        """Of one person, which nothing clips."""
        is_padding = jnp.arange(len(is_used)) != person
        return by_person.problem.likelihood.clipped_sum(latent, None, records, is_padding, 1e3)

    for person in range(len(is_used)):
        np.testing.assert_allclose(share(person), expected[person], rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize(
    "ids",
    [
        [3, 1, 3, 2],
        [0.3, 0.1, 0.3, 0.2],
        ["c", "a", "c", "b"],
        np.array([b"c", 1, b"c", "b"], object),
        pd.Series([3, 1, 3, 2], index=[9, 8, 7, 6]),
        pd.Series(["c", "a", "c", "b"], dtype="category"),
        [2**60 + 1, 2**60, 2**60 + 1, 7],
    ],
)
def test_rows_with_equal_ids_are_one_persons(ids) -> None:
    np.testing.assert_array_equal(person_numbers(ids), [0, 1, 0, 2])


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1.0, np.nan], "rows without one"),
        (np.array(["a", None], object), "rows without one"),
        (["a", " "], "rows without one"),
        (pd.Series([1, None], dtype="Int64"), "rows without one"),
        (np.ones((2, 2)), "in one column"),
        ("person", "in one column"),
        ([], "in one column"),
    ],
)
def test_ids_that_are_none_are_refused(ids, message) -> None:
    with pytest.raises(ValueError, match=message):
        person_numbers(ids)


def test_a_fit_by_persons_is_the_fit_of_a_model_of_persons() -> None:
    """To single precision: the order of persons is another, and sums do not depend on it."""

    def of_persons(X, y, is_used):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        logits = jnp.einsum("pri,i->pr", X, w)
        with numpyro.plate("persons", X.shape[0]):
            terms = dist.Bernoulli(logits=logits).log_prob(y)
            numpyro.factor("y", jnp.sum(jnp.where(is_used, terms, 0.0), axis=1))

    keep = np.concatenate([np.flatnonzero(person == IDS)[:CAP] for person in np.unique(IDS)])
    inputs = read(X[keep], Y[keep], group_by=IDS[keep])
    options = {**QUICK, "learning_rate": 1e-2}
    with pytest.warns(dpvim.NotForReleaseWarning):
        one = dpvim.fit(
            logistic_model, X[keep], Y[keep], group_by=IDS[keep], max_rows_per_person=CAP, **options
        )
    with pytest.warns(dpvim.NotForReleaseWarning):
        other = dpvim.fit(of_persons, *map(np.asarray, inputs.records), **options)
    for a, b in zip(one.trace.params, other.trace.params, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert one.privacy.epsilon == other.privacy.epsilon
    assert (one.privacy.unit, other.privacy.unit) == ("person", "record")


def test_persons_with_one_row_are_records() -> None:
    options = {**QUICK, "learning_rate": 1e-2}
    with pytest.warns(dpvim.NotForReleaseWarning):
        rows = dpvim.fit(linear_model, X, Y, **options)
    with pytest.warns(dpvim.NotForReleaseWarning):
        persons = dpvim.fit(
            linear_model, X, Y, group_by=np.arange(NUM_ROWS), max_rows_per_person=1, **options
        )
    for a, b in zip(rows.trace.params, persons.trace.params, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_number_of_rows_tells_no_more_than_of_persons() -> None:
    """Arrays have the public shape, whoever has how many rows."""
    some = read(X, Y, group_by=IDS).signature
    others = np.concatenate([np.unique(IDS), np.repeat(IDS[0], NUM_ROWS - len(np.unique(IDS)))])
    assert read(X, Y, group_by=others).signature == some
    assert read(X[:50], Y[:50], group_by=np.arange(50) % len(np.unique(IDS))).signature == some


def test_the_statement_and_its_file_say_the_unit(tmp_path) -> None:
    with pytest.warns(dpvim.NotForReleaseWarning):
        fit = dpvim.fit(
            logistic_model,
            X,
            Y,
            group_by=IDS,
            max_rows_per_person=CAP,
            relation="add_or_remove",
            num_examples=2 * NUM_PERSONS,
            learning_rate=1e-2,
            **QUICK,
        )
    text = str(fit.privacy)
    assert "one person: all rows of a person together, of which at most 4 rows" in text
    assert "one person added or removed" in text
    assert "each of at most 50 persons" in text
    assert "All rows of a person have the same id." in text
    assert "one record" not in text
    fit.save(tmp_path / "fit.npz", not_for_release=True)
    loaded = dpvim.load(tmp_path / "fit.npz")
    assert loaded.privacy.to_dict() == fit.privacy.to_dict()
    assert loaded.privacy.unit == "person"
    facts = fit.privacy.to_dict()
    assert (facts["unit"], facts["max_rows_per_person"]) == ("person", CAP)


def test_a_plan_by_persons() -> None:
    made = dpvim.plan(
        logistic_model, X, Y, epsilon=1.0, delta=1e-3, group_by=IDS, max_rows_per_person=CAP
    )
    num_persons = len(np.unique(IDS))
    assert f"{num_persons} persons, at most 4 rows of each" in str(made)
    assert "for one person" in str(made)
    assert made.to_dict()["unit"] == "person"
    by_record = dpvim.plan(logistic_model, X, Y, epsilon=1.0, delta=1e-3)
    assert "for one record" in str(by_record)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_by": IDS}, "max_rows_per_person: expected with group_by"),
        ({"max_rows_per_person": 3}, "group_by: expected with max_rows_per_person"),
        ({"group_by": IDS, "max_rows_per_person": 0}, "positive integer"),
        ({"group_by": IDS[:-1], "max_rows_per_person": 3}, "each of 60 rows"),
        ({"group_by": "person", "max_rows_per_person": 3}, "frame\\['person'\\]"),
        ({"group_by": IDS, "max_rows_per_person": 3, "num_examples": 60}, "for 60 persons"),
    ],
)
def test_misuse_is_said_before_any_budget_is_spent(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        dpvim.fit(logistic_model, X, Y, epsilon=1.0, delta=1e-3, **options)


def test_a_plan_of_persons_takes_no_rows() -> None:
    """Else a statement about persons could stand beside a run on rows."""
    import optax

    plan = dpvim.PrivacyPlan(
        num_examples=NUM_ROWS,
        sampling_prob=1.0,
        num_steps=2,
        clip_norm=1.0,
        noise_multiplier=1.0,
        max_rows_per_person=2,
    )
    svi = dpvim.DPSVI(logistic_model, "mean_field", optax.sgd(0.1), plan)
    with pytest.raises(ValueError, match="group_by"):
        svi.init(jax.random.key(0), X, Y)


def test_a_run_by_persons_goes_on(ctrl_c) -> None:
    options = {**QUICK, "num_steps": 5000, "learning_rate": 1e-2}
    people = {"group_by": IDS, "max_rows_per_person": CAP}
    ctrl_c(1)
    with pytest.warns(dpvim.NotForReleaseWarning):
        stopped = dpvim.fit(logistic_model, X, Y, **people, **options)
    assert stopped.interrupted
    with pytest.raises(ValueError, match="group_by"):
        stopped.resume(X, Y)
    whole = stopped.resume(X, Y, group_by=IDS)
    assert not whole.interrupted
    assert whole.privacy.unit == "person"
