"""A ledger as a user meets it: budgets, bookings, settlements, data."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
import pytest
from ledgers import DELTA, lines_of, make_ledger, plan_of

import dpvim
from dpvim.ledger.book import Job, Ledger
from dpvim.ledger.entries import LedgerError
from dpvim.privacy.plan import NonPrivatePlan
from dpvim.types import BudgetExceededError, PrivacyWarning

ROWS = np.arange(12.0).reshape(6, 2)


def test_the_total_is_composed_and_less_than_the_sum(tmp_path):
    ledger = make_ledger(tmp_path, epsilon=10.0)
    plans = [
        plan_of(noise=10.0),
        plan_of(noise=3.0, sampling_prob=0.2, num_steps=50),
        plan_of(noise=30.0, num_steps=7),
    ]
    for plan in plans:
        ledger.book(plan, purpose="a look")
    together = dpvim.privacy.accounting.epsilon_of(
        [plan.dp_event for plan in plans], delta=DELTA, relation="zero_out"
    )
    own = [plan.epsilon(DELTA) for plan in plans]
    assert ledger.spent() == pytest.approx(together)
    assert max(own) < ledger.spent() < 0.95 * sum(own)
    assert [release.booked.epsilon for release in ledger.releases] == own
    assert ledger.releases[-1].booked.total == pytest.approx(together)


def test_a_release_beyond_the_budget_is_refused_with_what_is_left(tmp_path):
    plan = plan_of(num_steps=10, noise=40.0)
    ledger = make_ledger(tmp_path, epsilon=plan.with_steps(14).epsilon(DELTA) * 1.0001)
    ledger.book(plan, purpose="first")
    before = lines_of(ledger)
    with pytest.raises(BudgetExceededError) as refused:
        ledger.book(plan, purpose="second")
    text = str(refused.value)
    assert lines_of(ledger) == before
    assert "'people'" in text
    assert "4 of its 10 steps" in text
    assert "Nothing was released" in text
    # What is offered is granted, and hardly more than that.
    left = float(text.split("One release of epsilon = ")[1].split(" ")[0])
    noise = float(text.split("with noise multiplier ")[1].split(" ")[0])
    assert ledger.left() == pytest.approx(left, abs=1e-4)
    ledger.check_affordable(dataclasses.replace(plan, noise_multiplier=noise * 1.001))
    with pytest.raises(BudgetExceededError):
        ledger.check_affordable(dataclasses.replace(plan, noise_multiplier=noise * 0.98))
    ledger.book(plan.with_steps(4), purpose="what is left")
    with pytest.raises(BudgetExceededError, match=r"One release of epsilon = 0\.00"):
        ledger.book(plan.with_steps(1), purpose="more")


def test_a_settled_release_costs_the_steps_that_were_taken(tmp_path):
    ledger = make_ledger(tmp_path)
    plan = plan_of(num_steps=10, noise=40.0)
    booking = ledger.book(plan, purpose="stopped")
    assert ledger.spent() == plan.epsilon(DELTA)
    assert ledger.releases[0].state == "open"
    booking.settle(3)
    assert ledger.spent() == plan.with_steps(3).epsilon(DELTA)
    assert ledger.releases[0].state == "stopped"
    assert ledger.releases[0].epsilon == plan.with_steps(3).epsilon(DELTA)
    booking.settle(3)  # once more is no change
    assert len(ledger.entries) == 3
    for other in (0, 4):
        with pytest.raises(LedgerError, match="was settled at 3 steps"):
            booking.settle(other)


@pytest.mark.parametrize("steps", [-1, 11, True])
def test_steps_that_were_not_booked_cannot_be_settled(tmp_path, steps):
    booking = make_ledger(tmp_path).book(plan_of(num_steps=10), purpose="a look")
    with pytest.raises(ValueError, match="expected 0 to 10"):
        booking.settle(steps)


def test_a_release_that_was_not_made_costs_nothing(tmp_path):
    ledger = make_ledger(tmp_path)
    ledger.book(plan_of(), purpose="not made").settle(0)
    assert ledger.spent() == 0
    assert ledger.releases[0].state == "not made"


def test_a_booking_is_found_again_by_its_id(tmp_path):
    ledger = make_ledger(tmp_path)
    booking = ledger.book(plan_of(num_steps=5), purpose="killed")
    again = Ledger(ledger.path).booking(booking.id)
    assert again.steps == 5
    again.settle(2)
    booking.settle(2)
    assert ledger.releases[0].steps == 2
    with pytest.raises(LedgerError, match="no booking 'none'"):
        ledger.booking("none")


def test_several_releases_are_booked_together_or_not_at_all(tmp_path):
    ledger = make_ledger(tmp_path, epsilon=plan_of(num_steps=5).epsilon(DELTA) * 1.0001)
    jobs = [Job(plan_of(), 3), Job(plan_of(num_steps=2), 1)]
    first, second = ledger.book_all(jobs, purpose="many")
    assert (first.steps, second.steps) == (3, 2)
    first.settle(0)
    with pytest.raises(BudgetExceededError, match="these 2 releases"):
        ledger.book_all(jobs, purpose="many more")
    assert len(ledger.releases) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"relation": "replace_one"}, "expected 'zero_out', which the ledger"),
        ({"noise_multiplier": None}, "no noise multiplier yet"),
    ],
)
def test_plans_that_do_not_fit_the_ledger_are_refused(tmp_path, change, message):
    ledger = make_ledger(tmp_path)
    with pytest.raises(ValueError, match=message):
        ledger.book(dataclasses.replace(plan_of(), **change), purpose="a look")
    assert ledger.releases == ()


def test_what_has_no_guarantee_has_no_price(tmp_path):
    ledger = make_ledger(tmp_path)
    with pytest.raises(TypeError, match="without noise has no price"):
        ledger.book(
            NonPrivatePlan(num_examples=3, sampling_prob=1.0, num_steps=1),  # type: ignore[arg-type]
            purpose="a look",
        )
    with pytest.raises(ValueError, match="Leave out the seed"):
        ledger.book(plan_of(), purpose="a test", seeded=True)
    marked = Ledger(ledger.path, allow_seeds=True)
    marked.book(plan_of(), purpose="a test", seeded=True)
    assert ledger.releases[0].booked.seeded
    assert ledger.spent() == plan_of().epsilon(DELTA)


def test_a_ledger_for_persons_takes_plans_for_persons(tmp_path):
    ledger = make_ledger(tmp_path, unit="person")
    with pytest.raises(ValueError, match=r"unit of privacy is a person.*got one for a record"):
        ledger.book(plan_of(), purpose="a look")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": -1.0}, "epsilon"),
        ({"delta": 1.0}, "delta"),
        ({"relation": "swap"}, "relation"),
        ({"unit": "household"}, "unit"),
        ({"name": " "}, "name: expected a few words"),
    ],
)
def test_budgets_that_are_none(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        make_ledger(tmp_path, **change)
    assert list(tmp_path.iterdir()) == []


def test_a_purpose_is_words_on_one_line(tmp_path):
    ledger = make_ledger(tmp_path)
    ledger.book(plan_of(), purpose=' two\nlines "quoted" über ')
    assert ledger.releases[0].booked.purpose == 'two lines "quoted" über'
    assert len(lines_of(ledger)) == 2
    with pytest.raises(ValueError, match="purpose: expected a few words"):
        ledger.book(plan_of(), purpose="")


# -- data -----------------------------------------------------------------------------------------


def test_the_first_data_are_the_ledgers_and_others_are_refused(tmp_path):
    ledger = make_ledger(tmp_path)
    ledger.book(plan_of(), purpose="first", data=ROWS)
    ledger.book(plan_of(), purpose="again", data=ROWS.astype(np.float32))
    before = lines_of(ledger)
    with pytest.raises(LedgerError, match=r"another fingerprint.*ledger.bind"):
        ledger.book(plan_of(), purpose="others", data=ROWS + 1)
    assert lines_of(ledger) == before
    ledger.bind(ROWS[:3], "the first half")
    ledger.book(plan_of(), purpose="a part", data=ROWS[:3])


def test_data_in_another_form_are_vouched_for_by_their_source(tmp_path):
    table = pd.DataFrame({"age": [1, 2], "sex": ["f", None]})
    ledger = make_ledger(tmp_path, data=table)
    with pytest.raises(LedgerError, match="another fingerprint"):
        ledger.book(plan_of(), purpose="arrays", data=ROWS)
    known = Ledger(ledger.path, data=table)
    known.book(plan_of(), purpose="arrays", data=ROWS)
    with pytest.raises(LedgerError, match="another fingerprint"):
        Ledger(ledger.path, data=table.assign(age=[1, 3]))
    assert ledger.about(table).about(ROWS).book(plan_of(), purpose="told already").steps == 1


def test_a_lost_key_is_named_and_data_can_be_bound_anew(tmp_path):
    ledger = make_ledger(tmp_path, data=ROWS)
    key = tmp_path / "people.ledger.key"
    key.unlink()
    with pytest.raises(LedgerError, match=r"people.ledger.key: expected the key.*there is none"):
        ledger.book(plan_of(), purpose="a look", data=ROWS)
    ledger.bind(ROWS, "the key was lost")
    ledger.book(plan_of(), purpose="a look", data=ROWS)


def test_a_key_that_others_may_read_is_announced(tmp_path):
    ledger = make_ledger(tmp_path, data=ROWS)
    key = tmp_path / "people.ledger.key"
    assert key.stat().st_mode & 0o777 == 0o600
    key.chmod(0o644)
    with pytest.warns(PrivacyWarning, match="chmod 600"):
        ledger.book(plan_of(), purpose="a look", data=ROWS)


def test_a_booking_that_cannot_be_settled_is_a_warning_and_stays_paid_for(tmp_path):
    ledger = make_ledger(tmp_path)
    booking = ledger.book(plan_of(num_steps=9), purpose="a look")
    content = ledger.path.read_bytes()
    ledger.path.write_bytes(content[:-30])
    with pytest.warns(PrivacyWarning, match="full price.*Settle it later"):
        booking.settle_or_warn(4)
    ledger.path.write_bytes(content)
    assert ledger.releases[0].steps == 9


def test_what_is_no_ledger_is_named(tmp_path):
    with pytest.raises(TypeError, match=r"expected a dpvim.Ledger.*got int"):
        Ledger.of(3)
    stranger = tmp_path / "notes.txt"
    stranger.write_text("milk, bread\n")
    with pytest.raises(LedgerError, match=r"notes.txt: the ledger is damaged: line 1"):
        Ledger.of(stranger)
