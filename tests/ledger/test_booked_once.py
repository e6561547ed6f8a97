"""Runs with a checkpoint, by persons, and checks: each is booked once, before it is made."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from conftest import linear_model
from ledgers import DELTA, make_ledger

import dpvim
from dpvim.fitting import PreparedFit
from dpvim.ledger import payment
from dpvim.ledger.entries import LedgerError
from dpvim.privacy.accounting.selection import Repeats
from dpvim.synthesis.schema import Binary, Schema
from dpvim.tuning import Trials

pytestmark = pytest.mark.filterwarnings("ignore::dpvim.ConvergenceWarning")
RNG = np.random.default_rng(0)
X = RNG.normal(size=(400, 3))
Y = X @ np.array([1.0, -0.5, 0.2]) + RNG.normal(size=400)
PERSONS = np.repeat(np.arange(100), 4)
QUICK = {"delta": DELTA, "noise_multiplier": 60.0, "num_steps": 50, "clip_norm": 1.0}
QUICK |= {"learning_rate": 1e-2, "progress": False}
SCHEMA = Schema(tuple(Binary(name=n, levels=(0, 1), reviewed=True) for n in ("a", "b")))
TABLE = pd.DataFrame(RNG.integers(0, 2, size=(500, 2)), columns=["a", "b"])


class Crash(BaseException):
    """Stands for the end of a process."""


@pytest.fixture
def ledger(tmp_path):
    return make_ledger(tmp_path)


def fit(ledger, folder, **changes):
    return dpvim.fit(linear_model, X, Y, ledger=ledger, checkpoint=folder, **(QUICK | changes))


@pytest.mark.parametrize("where", ["before", "after", "at the end"])
def test_a_fit_that_crashes_and_goes_on_is_booked_once(ledger, tmp_path, monkeypatch, where):
    folder = tmp_path / "run"
    with monkeypatch.context() as crashing:
        if where == "before":  # booked, and the process never knew
            really = payment.Ledger.book_all

            def book_all(*args, **settings):
                really(*args, **settings)
                raise Crash

            crashing.setattr(payment.Ledger, "book_all", book_all)
        elif where == "after":
            crashing.setattr(PreparedFit, "run", lambda *args, **settings: crash())
        else:
            crashing.setattr(payment.Booking, "settle_or_warn", lambda self, steps: crash())
        with pytest.raises(Crash):
            fit(ledger, folder)
    (booked,) = ledger.releases
    assert booked.state == "open"
    if where == "at the end":
        with pytest.warns(UserWarning, match="ended before"):
            made = fit(ledger, folder)
    else:
        made = fit(ledger, folder)
    (release,) = ledger.releases
    assert release.state == "done"
    assert release.booked.epsilon == made.privacy.epsilon == ledger.spent()


def crash():
    raise Crash


def test_an_interrupted_run_stays_booked_until_it_is_whole(ledger, tmp_path, monkeypatch):
    with monkeypatch.context() as interrupted:
        really = PreparedFit.run

        def run(self, *args, **settings):
            return [r._replace(interrupted=True) for r in really(self, *args, **settings)]

        interrupted.setattr(PreparedFit, "run", run)
        fit(ledger, tmp_path / "run")
    assert [each.state for each in ledger.releases] == ["open"]


def test_another_run_under_the_same_id_is_refused(ledger):
    plan = dpvim.PrivacyPlan(
        num_examples=400, sampling_prob=1.0, num_steps=1, clip_norm=1.0, noise_multiplier=60.0
    )
    account = payment.Account(ledger, "a", DELTA)
    first = payment.book_once(account, payment.Job(plan), id="x" * 32, data=X)
    again = payment.book_once(account, payment.Job(plan), id="x" * 32, data=X)
    assert first.id == again.id
    assert len(ledger.releases) == 1
    with pytest.raises(LedgerError, match="another plan"):
        payment.book_once(account, payment.Job(plan.with_steps(2)), id="x" * 32, data=X)


def test_a_twin_that_crashes_and_goes_on_is_booked_once(ledger, tmp_path, monkeypatch):
    settings = {"epsilon": 0.3, "delta": DELTA, "ledger": ledger, "checkpoint": tmp_path / "run"}
    from dpvim.synthesis.marginals import fit as marginals

    with monkeypatch.context() as crashing:
        crashing.setattr(marginals, "release", lambda *args: crash())
        with pytest.raises(Crash):
            dpvim.synthesize(TABLE, SCHEMA, **settings, progress=False)
    assert [each.state for each in ledger.releases] == ["open"]
    dpvim.synthesize(TABLE, SCHEMA, **settings, progress=False)
    assert [each.state for each in ledger.releases] == ["done"]


def test_a_fit_by_persons_that_crashes_and_goes_on_is_booked_once(tmp_path, monkeypatch):
    ledger = make_ledger(tmp_path, epsilon=3.0, unit="person")
    by_person = {"group_by": PERSONS, "max_rows_per_person": 2}
    with monkeypatch.context() as crashing:
        crashing.setattr(PreparedFit, "run", lambda *args, **settings: crash())
        with pytest.raises(Crash):
            fit(ledger, tmp_path / "run", **by_person)
    assert [each.state for each in ledger.releases] == ["open"]
    made = fit(ledger, tmp_path / "run", **by_person)
    (release,) = ledger.releases
    assert release.state == "done"
    assert release.booked.epsilon == made.privacy.epsilon == ledger.spent()


def test_a_ledger_of_persons_knows_its_rows_whichever_are_used(tmp_path):
    ledger = make_ledger(tmp_path, epsilon=3.0, unit="person")
    for _ in range(2):
        fit(ledger, None, group_by=PERSONS, max_rows_per_person=2)
    assert [each.state for each in ledger.releases] == ["done", "done"]
    with pytest.raises(LedgerError):
        dpvim.fit(
            linear_model, X + 1, Y, ledger=ledger, group_by=PERSONS, max_rows_per_person=2, **QUICK
        )


def test_checks_are_booked(ledger):
    made = dpvim.fit(linear_model, X, Y, ledger=ledger, **QUICK)
    budget = {"epsilon": 0.1, "delta": DELTA, "ledger": ledger}
    dpvim.held_out(made, X, Y, **budget, purpose="score")
    dpvim.predictive_check(made, X, Y, **budget)
    purposes = [each.booked.purpose for each in ledger.releases]
    assert purposes[1:] == ["score", "predictive check"]
    assert {each.state for each in ledger.releases} == {"done"}
    with pytest.raises(dpvim.BudgetExceededError):
        dpvim.held_out(made, X, Y, **(budget | {"epsilon": 5.0}))
    assert len(ledger.releases) == 3


@pytest.mark.parametrize("method", ["split", "repeat"])
def test_a_choice_is_booked_whole(tmp_path, method, monkeypatch):
    monkeypatch.setattr(Repeats, "draw", lambda self, rng: 1)
    ledger = make_ledger(tmp_path, epsilon=2.0)
    candidates = {"one": linear_model, "other": (linear_model, {"learning_rate": 2e-2})}
    shared = {"num_steps": 50, "clip_norm": 1.0, "progress": False, "epsilon": 1.0, "delta": DELTA}
    chosen = dpvim.tune(candidates, X, Y, ledger=ledger, method=method, **shared)
    assert ledger.spent() == pytest.approx(chosen.epsilon, rel=2e-3)
    assert {each.state for each in ledger.releases} == {"done"}
    with pytest.raises(dpvim.BudgetExceededError):
        dpvim.tune(candidates, X, Y, ledger=ledger, method=method, **(shared | {"epsilon": 1.9}))
    assert ledger.spent() == pytest.approx(chosen.epsilon, rel=2e-3)


def test_trials_that_end_badly_are_all_paid_for(tmp_path, monkeypatch):
    """How many of them there were by then is secret."""
    monkeypatch.setattr(Trials, "run", lambda *args: crash())
    ledger = make_ledger(tmp_path, epsilon=2.0)
    candidates = {"one": linear_model, "other": (linear_model, {"learning_rate": 2e-2})}
    shared = {"num_steps": 50, "clip_norm": 1.0, "progress": False, "epsilon": 1.0, "delta": DELTA}
    with pytest.raises(Crash):
        dpvim.tune(candidates, X, Y, ledger=ledger, method="repeat", **shared)
    (release,) = ledger.releases
    assert release.state == "open"
    assert ledger.spent() == pytest.approx(1.0, rel=0.01)


def test_a_run_that_was_settled_at_less_cannot_go_on(ledger, tmp_path, monkeypatch):
    """Else it would release everything at the price of nothing."""
    folder = tmp_path / "run"
    with monkeypatch.context() as crashing:
        crashing.setattr(PreparedFit, "run", lambda *args, **settings: crash())
        with pytest.raises(Crash):
            fit(ledger, folder)
    ledger.booking(ledger.releases[0].booked.id).settle(0)
    with pytest.raises(LedgerError, match="no longer paid for"):
        fit(ledger, folder)


def test_names_of_bookings_are_new_or_all_known(ledger):
    plan = dpvim.PrivacyPlan(
        num_examples=400, sampling_prob=1.0, num_steps=1, clip_norm=1.0, noise_multiplier=60.0
    )
    job = payment.Job(plan)
    ledger.book_all([job], purpose="a", ids=["known"])
    for ids in (["known", "new"], ["new", "new"]):
        with pytest.raises(LedgerError, match="a new name for each"):
            ledger.book_all([job, job], purpose="a", ids=ids)
    assert ledger.check() == []


def test_a_wrong_question_costs_nothing(ledger):
    made = dpvim.fit(linear_model, X, Y, **QUICK)
    budget = {"epsilon": 0.1, "delta": DELTA, "ledger": ledger}
    with pytest.raises(KeyError):
        dpvim.predictive_check(made, X, Y, statistics={"a": lambda sites: sites["no"]}, **budget)
    assert ledger.releases == ()


def test_persons_are_scored_as_persons(tmp_path):
    ledger = make_ledger(tmp_path, epsilon=3.0, unit="person")
    by = {"group_by": PERSONS}
    made = dpvim.fit(linear_model, X, Y, **by, max_rows_per_person=2, **QUICK)
    score = dpvim.held_out(made, X, Y, **by, epsilon=1.0, delta=DELTA, ledger=ledger)
    assert score.num_records == 100
    assert score.privacy.unit.value == "person"
    with pytest.raises(ValueError, match="several rows a person"):
        dpvim.predictive_check(made, X, Y, **by, epsilon=1.0, delta=DELTA)
