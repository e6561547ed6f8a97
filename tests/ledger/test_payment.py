"""Fits and twins pay before they release, and for the steps that they took."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import linear_model
from ledgers import DELTA, lines_of, make_ledger

import dpvim
from dpvim.experiments import running
from dpvim.inference import loop
from dpvim.ledger.book import Job
from dpvim.ledger.payment import Account, Tally, paid
from dpvim.synthesis.marginals import fit as marginals
from dpvim.types import BudgetExceededError

RNG = np.random.default_rng(0)
X = RNG.normal(size=(400, 3))
Y = X @ np.array([1.0, -0.5, 0.2]) + RNG.normal(size=400)
QUICK = {"delta": DELTA, "noise_multiplier": 60.0, "num_steps": 50, "clip_norm": 1.0}
QUICK |= {"learning_rate": 1e-2, "progress": False}


@pytest.fixture
def ledger(tmp_path):
    return make_ledger(tmp_path)


def fit(ledger, **changes):
    return dpvim.fit(linear_model, X, Y, ledger=ledger, **(QUICK | changes))


def test_a_fit_is_booked_and_settled(ledger):
    made = fit(ledger, purpose="effects")
    (release,) = ledger.releases
    assert release.state == "done"
    assert release.booked.purpose == "effects"
    assert release.booked.epsilon == made.privacy.epsilon == ledger.spent()
    assert dpvim.PrivacyPlan(**release.booked.plan) == made.plan
    again = fit(str(ledger.path), delta=1e-4)
    assert ledger.releases[1].booked.purpose == "fit of linear_model"
    assert ledger.releases[1].booked.delta == 1e-4
    assert ledger.spent() == again.plan.with_steps(100).epsilon(DELTA)


def test_the_booking_stands_before_the_first_step(ledger, monkeypatch):
    seen = []
    really = loop._loop

    def looped(*arguments, **settings):
        seen.append([release.state for release in ledger.releases])
        return really(*arguments, **settings)

    monkeypatch.setattr(loop, "_loop", looped)
    fit(ledger)
    assert seen == [["open"]]


def test_a_fit_beyond_the_budget_takes_no_step(ledger, monkeypatch):
    monkeypatch.setattr(loop, "_loop", None)  # to call it is an error
    before = lines_of(ledger)
    with pytest.raises(BudgetExceededError, match=r"of its 50 steps at this noise.*Nothing was"):
        fit(ledger, noise_multiplier=20.0)
    assert lines_of(ledger) == before
    with pytest.raises(BudgetExceededError, match="Nothing was released"):
        dpvim.plan(linear_model, X, Y, ledger=ledger, **(QUICK | {"noise_multiplier": 20.0}))


def test_wrong_input_is_refused_before_it_is_booked(ledger):
    for change in ({"variant": "none"}, {"init_params": {"none": 1.0}}, {"num_examples": 3}):
        with pytest.raises(ValueError, match=r"none|num_examples"):
            fit(ledger, **change)
    assert len(lines_of(ledger)) == 1


def test_other_data_are_refused(ledger):
    fit(ledger)
    with pytest.raises(dpvim.LedgerError, match="another fingerprint"):
        dpvim.fit(linear_model, X + 1, Y, ledger=ledger, **QUICK)
    assert len(ledger.releases) == 1


def test_an_interrupted_fit_costs_the_steps_it_took_and_a_resumed_one_the_others(
    ledger, monkeypatch, ctrl_c
):
    monkeypatch.setattr(loop, "_LONGEST_CHUNK", 10)
    ctrl_c(2)
    stopped = fit(ledger, purpose="stopped")
    assert stopped.interrupted
    (release,) = ledger.releases
    assert release.state == "stopped"
    assert release.steps == 20
    assert ledger.spent() == stopped.privacy.epsilon == stopped.plan.with_steps(20).epsilon(DELTA)
    monkeypatch.undo()
    done = stopped.resume(X, Y)
    assert [each.steps for each in ledger.releases] == [20, 30]
    assert ledger.releases[1].booked.purpose == "stopped"
    assert ledger.spent() == pytest.approx(done.privacy.epsilon)
    with pytest.raises(BudgetExceededError):  # the plan's, and nothing is booked for it
        stopped.resume(X, Y)
    assert len(ledger.releases) == 2


def test_a_resumed_fit_that_is_not_paid_for_can_be_resumed_later(tmp_path, monkeypatch, ctrl_c):
    plan_cost = dpvim.PrivacyPlan(
        num_examples=400, sampling_prob=1.0, num_steps=50, clip_norm=1.0, noise_multiplier=60.0
    )
    ledger = make_ledger(tmp_path, epsilon=plan_cost.epsilon(DELTA) * 1.0001)
    monkeypatch.setattr(loop, "_LONGEST_CHUNK", 10)
    ctrl_c(2)
    stopped = fit(ledger)
    monkeypatch.undo()
    other = ledger.book(plan_cost.with_steps(25), purpose="meanwhile")
    with pytest.raises(BudgetExceededError, match="5 of its 30 steps"):
        stopped.resume(X, Y)
    other.settle(0)
    assert not stopped.resume(X, Y).interrupted


def test_many_fits_are_booked_at_once(ledger):
    each = [{"noise_multiplier": 60.0}, {"noise_multiplier": 90.0}, {"noise_multiplier": 60.0}]
    shared = {name: value for name, value in QUICK.items() if name != "noise_multiplier"}
    dpvim.fit_many(linear_model, X, Y, each=each, ledger=ledger, purpose="a grid", **shared)
    assert [(r.booked.runs, r.steps, r.state) for r in ledger.releases] == [
        (2, 100, "done"),
        (1, 50, "done"),
    ]
    with pytest.raises(BudgetExceededError, match="these 2 releases"):
        dpvim.fit_many(linear_model, X, Y, each=each * 20, ledger=ledger, **shared)
    assert len(ledger.releases) == 2


@pytest.mark.parametrize("chunks", [0, 2])
def test_an_error_in_a_run_costs_the_steps_that_were_begun(ledger, monkeypatch, chunks):
    """Whatever a chunk did before it failed is paid for; what was not begun is not."""
    monkeypatch.setattr(loop, "_LONGEST_CHUNK", 10)
    begun = []
    really = loop._segments

    def failing(*arguments):
        begun.append(arguments)
        if len(begun) > 1 + chunks:  # before the first chunk snapshots are counted
            raise MemoryError
        return really(*arguments)

    monkeypatch.setattr(loop, "_segments", failing)
    with pytest.raises(MemoryError):
        fit(ledger)
    assert ledger.releases[0].steps == 10 * chunks


def test_a_chunk_that_fails_on_its_way_is_paid_for(ledger, monkeypatch):
    """It may have seen the data, and its error may have told of them."""

    def failing(running):
        raise MemoryError

    monkeypatch.setattr(loop, "_LONGEST_CHUNK", 10)
    monkeypatch.setattr(loop.jax, "block_until_ready", failing)
    with pytest.raises(MemoryError):
        fit(ledger)
    assert ledger.releases[0].steps == 10


def test_seeds_and_fits_without_noise_are_refused(ledger):
    with pytest.raises(ValueError, match="Leave out the seed"):
        fit(ledger, seed=0)
    with pytest.raises(ValueError, match="without noise has no price"):
        dpvim.fit_nonprivate(linear_model, X, Y, ledger=ledger)
    with pytest.raises(ValueError, match="purpose: expected with ledger="):
        dpvim.fit(linear_model, X, Y, purpose="none", **QUICK)
    assert len(lines_of(ledger)) == 1


def test_the_relation_is_the_ledgers(ledger):
    with pytest.raises(ValueError, match="Costs of different relations do not"):
        fit(ledger, relation="replace_one")


def test_without_an_account_nothing_is_booked():
    tally = Tally()
    with paid(None, [], [tally], data=None):
        tally.add(3)
    assert tally.steps == 3


def test_a_killed_process_leaves_the_whole_booking(ledger):
    """The block never ends: what settles is not reached."""
    account = Account(ledger, "killed", DELTA)
    plan = dpvim.PrivacyPlan(
        num_examples=9, sampling_prob=1.0, num_steps=9, clip_norm=1.0, noise_multiplier=60.0
    )
    under_way = paid(account, [Job(plan)], [Tally()], data=None)
    under_way.__enter__()
    assert ledger.releases[0].steps == 9
    assert ledger.releases[0].state == "open"


def test_fits_of_experiments_are_booked_with_their_seeds_and_marked(ledger):
    shared = {name: QUICK[name] for name in ("num_steps", "clip_norm", "learning_rate", "delta")}
    each = [{"seed": 0, "noise_multiplier": 60.0}]
    marked = dpvim.Ledger(ledger.path, allow_seeds=True)
    with running.quiet(), running.booked_in(marked, "reproduce it"):
        running.fits(linear_model, X, Y, each=each, **shared)
    running.fits(linear_model, X, Y, each=each, **shared)  # the block is over
    (release,) = ledger.releases
    assert release.booked.seeded
    assert (release.booked.purpose, release.state) == ("reproduce it", "done")


# -- twins ----------------------------------------------------------------------------------------


def test_a_twin_from_counts_is_booked_before_it_is_made(ledger, patients, schema, monkeypatch):
    seen = []
    really = marginals.release

    def release(*arguments):
        seen.append([each.state for each in ledger.releases])
        return really(*arguments)

    monkeypatch.setattr(marginals, "release", release)
    monkeypatch.setattr(marginals, "fit_traits", None)  # what comes after costs nothing
    with pytest.raises(TypeError):
        dpvim.synthesize(patients, schema, epsilon=0.5, ledger=ledger, purpose="a twin")
    assert seen == [["open"]]
    (made,) = ledger.releases
    assert (made.booked.mechanism, made.booked.purpose, made.state) == ("counts", "a twin", "done")
    assert made.booked.delta == 0.1 / len(patients)
    with pytest.raises(BudgetExceededError, match="the same release with noise multiplier"):
        dpvim.synthesize(patients, schema, epsilon=2.0, delta=DELTA, ledger=ledger)
    with pytest.raises(dpvim.LedgerError, match="another fingerprint"):
        dpvim.synthesize(patients.iloc[1:], schema, epsilon=0.1, ledger=ledger)
    assert seen == [["open"]]


def test_a_twin_that_did_not_look_at_the_table_costs_nothing(ledger, patients, schema, monkeypatch):
    def refused(*arguments, **settings):
        raise ValueError("weight")

    monkeypatch.setattr(dpvim.privacy.counts, "record_weights", refused)
    with pytest.raises(ValueError, match="weight"):
        dpvim.synthesize(patients, schema, epsilon=0.5, ledger=ledger)
    assert ledger.releases[0].state == "not made"


@pytest.mark.long
def test_a_twin_by_dpvi_is_booked_for_its_table(ledger, patients, schema):
    options = {"engine": "dpvi", "components": 2, "num_steps": 20, "progress": False}
    dpvim.synthesize(patients, schema, epsilon=0.5, ledger=ledger, **options)
    (made,) = ledger.releases
    assert (made.booked.mechanism, made.booked.purpose) == ("gradients", "a synthetic twin")
    assert made.state == "done"
    ledger.about(patients).book(made.booked.price(1), purpose="known by its table")
