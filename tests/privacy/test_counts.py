"""Noisy counts: what a record can move, what rounds may spend, and the noise."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import math
import pickle
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dpvim.privacy.counts import (
    LARGEST_STDDEV,
    Cells,
    CountMechanism,
    Marginal,
    count_cells,
    record_weights,
)
from dpvim.privacy.plan import PrivacyPlan
from dpvim.privacy.randomness import SecretStreams
from dpvim.types import BudgetExceededError, Relation

SIZES = (5, 3, 4)
CELLS = Cells(tuple(np.arange(size) for size in SIZES))
SINGLES = [Marginal((0,)), Marginal((1,), 3.0), Marginal((2,))]
PAIRS = [Marginal((0, 1)), Marginal((2, 0), 0.5), Marginal((1, 2))]
# Two rounds of different kinds.
ROUNDS = [(SINGLES, 0.25), (PAIRS, 0.75)]
TABLE = np.random.default_rng(0).integers(0, SIZES, (30, 3))
PLAN = PrivacyPlan(
    num_examples=30,
    sampling_prob=1.0,
    num_steps=1,
    clip_norm=2.0,
    relation=Relation.ADD_OR_REMOVE,
    noise_multiplier=4.0,
)

any_code = st.one_of(st.integers(-2, 7), st.sampled_from([-(2**63), 2**40, 2**63 - 1]))
records = st.tuples(any_code, any_code, any_code)
tables = st.lists(records, max_size=20).map(lambda rows: np.array(rows, np.int64).reshape(-1, 3))


def mechanism_of(*pieces, plan=PLAN, seed=1):
    return CountMechanism(plan, SecretStreams(seed), lambda: iter(pieces))


def weighted_counts(table, norm=1.0):
    """The vector that the Gaussian mechanism adds noise to, over all rounds."""
    parts = []
    for marginals, share in ROUNDS:
        weights = record_weights(marginals, share=share, norm=norm)
        exact = count_cells([table], CELLS, marginals)
        parts += [weight * counts.ravel() for weight, counts in zip(weights, exact, strict=True)]
    return np.concatenate(parts)


# -- sensitivity ----------------------------------------------------------------------------------


@given(tables, records)
def test_one_record_more_moves_all_rounds_by_at_most_the_clip_norm(table, record):
    """Zero-out and add-or-remove: there is a record, or nothing."""
    shift = weighted_counts(np.concatenate([table, [record]])) - weighted_counts(table)
    assert 1 - 1e-8 <= np.linalg.norm(shift) <= 1


@given(tables, records, records)
def test_a_record_replaced_moves_them_by_root_two_of_what_the_plan_charges_two_for(
    table, record, other
):
    first, second = (np.concatenate([table, [each]]) for each in (record, other))
    assert np.linalg.norm(weighted_counts(first) - weighted_counts(second)) <= math.sqrt(2)


def test_two_records_that_share_no_cell_are_root_two_apart():
    first, second = np.array([[0, 0, 0]]), np.array([[1, 1, 1]])
    shift = np.linalg.norm(weighted_counts(first) - weighted_counts(second))
    assert shift == pytest.approx(math.sqrt(2))


def test_the_plan_charges_a_replaced_record_twice_the_clip_norm():
    replaced = dataclasses.replace(PLAN, relation=Relation.REPLACE_ONE)
    half_the_noise = dataclasses.replace(PLAN, noise_multiplier=PLAN.noise_multiplier / 2)
    assert replaced.epsilon(1e-5) == pytest.approx(half_the_noise.epsilon(1e-5), rel=1e-3)


@given(
    st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=30),
    st.floats(1e-9, 1.0),
    st.floats(1e-4, 1e6),
)
def test_squares_of_weights_sum_to_the_share_and_never_to_more(weights, share, norm):
    marginals = [Marginal((0,), weight) for weight in weights]
    found = record_weights(marginals, share=share, norm=norm)
    total = math.fsum((weight / norm) ** 2 for weight in found)
    assert share * (1 - 1e-8) <= total < share
    assert found == pytest.approx([weight * found[0] / weights[0] for weight in weights])


@pytest.mark.parametrize("size", [1e-200, 1e200])
def test_weights_may_be_of_any_size(size):
    found = record_weights([Marginal((0,), size), Marginal((1,), size)], share=1.0, norm=1.0)
    assert found == pytest.approx([math.sqrt(0.5)] * 2)


@pytest.mark.parametrize(
    ("marginals", "share", "message"),
    [
        ([], 0.5, "at least one"),
        ([Marginal((0,), 0.0)], 0.5, "positive"),
        ([Marginal((0,), -1.0)], 0.5, "positive"),
        ([Marginal((0,), math.nan)], 0.5, "positive"),
        ([Marginal((0,), math.inf)], 0.5, "positive"),
        ([Marginal(())], 0.5, "each once"),
        ([Marginal((1, 1))], 0.5, "each once"),
        (SINGLES, 0.0, "share"),
        (SINGLES, -0.1, "share"),
        (SINGLES, 1.1, "share"),
        (SINGLES, math.nan, "share"),
    ],
)
def test_questions_that_make_no_sense_are_refused_and_cost_nothing(marginals, share, message):
    mechanism = mechanism_of(TABLE)
    with pytest.raises(ValueError, match=message):
        mechanism.release(CELLS, marginals, share=share)
    assert mechanism.share_spent == 0


# -- counts ---------------------------------------------------------------------------------------


def test_counts_are_exact():
    for marginal, found in zip(PAIRS, count_cells([TABLE], CELLS, PAIRS), strict=True):
        expected = np.zeros([SIZES[column] for column in marginal.columns], int)
        for row in TABLE:
            expected[tuple(row[list(marginal.columns)])] += 1
        np.testing.assert_array_equal(found, expected)


@given(tables, st.lists(st.integers(0, 20), max_size=4), st.randoms())
def test_pieces_and_order_make_no_difference(table, cuts, random):
    order = random.sample(range(len(table)), len(table))
    pieces = np.split(table[order], sorted(cut for cut in cuts if cut <= len(table)))
    for found, whole in zip(
        count_cells(pieces, CELLS, PAIRS), count_cells([table], CELLS, PAIRS), strict=True
    ):
        np.testing.assert_array_equal(found, whole)


@given(records)
def test_every_record_is_in_one_cell_of_each_marginal(record):
    for counts in count_cells([np.array([record])], CELLS, [*SINGLES, *PAIRS]):
        assert counts.sum() == counts.max() == 1


def test_codes_of_no_cell_are_those_of_the_nearest():
    (counts,) = count_cells([np.array([[-3, 0, 0], [5, 0, 0]])], CELLS, [Marginal((0,))])
    assert counts.tolist() == [1, 0, 0, 0, 1]


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint64])
def test_integers_of_all_kinds_are_counted(dtype):
    for found, whole in zip(
        count_cells([TABLE.astype(dtype)], CELLS, PAIRS),
        count_cells([TABLE], CELLS, PAIRS),
        strict=True,
    ):
        np.testing.assert_array_equal(found, whole)


def test_cells_are_counted_in_groups():
    grouped = Cells((np.array([0, 0, 1, 1, 1]), *CELLS.of_code[1:]))
    assert grouped.sizes == (2, 3, 4)
    fine, coarse = (
        count_cells([TABLE], cells, [Marginal((0, 1))])[0] for cells in (CELLS, grouped)
    )
    np.testing.assert_array_equal(coarse, [fine[:2].sum(axis=0), fine[2:].sum(axis=0)])


# -- budget ---------------------------------------------------------------------------------------


def test_rounds_are_refused_beyond_the_whole():
    mechanism = mechanism_of(TABLE)
    for marginals, share in ROUNDS:
        mechanism.release(CELLS, marginals, share=share)
    assert mechanism.share_spent == 1
    with pytest.raises(BudgetExceededError, match="at most 0"):
        mechanism.release(CELLS, SINGLES, share=0.01)


def test_shares_that_were_computed_may_sum_to_one():
    mechanism = mechanism_of(TABLE)
    for _ in range(10):
        mechanism.release(CELLS, SINGLES, share=0.1)
    with pytest.raises(BudgetExceededError):
        mechanism.release(CELLS, SINGLES, share=0.1)


def test_no_share_is_too_small_to_count():
    """In doubles 1 + 1e-17 is 1, and such rounds would never end."""
    mechanism = mechanism_of(TABLE)
    mechanism._spend(1.0)
    mechanism._spend(1e-9)
    accepted = 0
    with contextlib.suppress(BudgetExceededError):
        for _ in range(100):
            mechanism._spend(1e-17)
            accepted += 1
    assert accepted < 100


def test_a_round_that_breaks_off_is_paid_for():
    def pieces():
        yield TABLE
        raise OSError("the disk is gone")

    mechanism = CountMechanism(PLAN, SecretStreams(1), pieces)
    with pytest.raises(OSError, match="disk"):
        mechanism.release(CELLS, SINGLES, share=0.7)
    assert mechanism.share_spent == 0.7
    with pytest.raises(BudgetExceededError):
        mechanism.release(CELLS, SINGLES, share=0.7)


def test_threads_do_not_share_a_share():
    mechanism, answers = mechanism_of(TABLE), []

    def ask():
        with contextlib.suppress(BudgetExceededError):
            answers.append(mechanism.release(CELLS, SINGLES, share=0.3))

    threads = [threading.Thread(target=ask) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 3


@pytest.mark.parametrize("change", [{"sampling_prob": 0.5}, {"num_steps": 2}])
def test_other_plans_than_one_step_on_all_records_are_refused(change):
    with pytest.raises(ValueError, match="one step on all records"):
        mechanism_of(TABLE, plan=dataclasses.replace(PLAN, **change))


def test_a_plan_without_noise_is_refused_before_anything_is_spent():
    mechanism = mechanism_of(TABLE, plan=dataclasses.replace(PLAN, noise_multiplier=None))
    with pytest.raises(ValueError, match="no noise multiplier"):
        mechanism.release(CELLS, SINGLES, share=0.5)
    assert mechanism.share_spent == 0


@pytest.mark.parametrize("relation", list(Relation))
@pytest.mark.parametrize("num_rows", [29, 30, 31])
def test_the_number_of_records_is_checked_by_the_relation(relation, num_rows):
    rows = np.resize(TABLE, (num_rows, 3))
    mechanism = mechanism_of(rows, plan=dataclasses.replace(PLAN, relation=relation))
    is_bound = relation is Relation.ADD_OR_REMOVE
    if num_rows == 30 or (is_bound and num_rows < 30):
        mechanism.release(CELLS, SINGLES, share=1.0)
    else:
        with pytest.raises(ValueError, match="num_examples"):
            mechanism.release(CELLS, SINGLES, share=1.0)


# -- noise ----------------------------------------------------------------------------------------

# Far below what any key should give, and far above what a wrong scale does (1e-9).
LEAST_P_VALUE = 1e-5
WIDE = Cells((np.arange(200), np.arange(100)))


def noise_of(marginals, *, share=1.0, seed=1, noise=4.0):
    """A table without records releases noise alone."""
    plan = dataclasses.replace(PLAN, noise_multiplier=noise)
    mechanism = mechanism_of(np.zeros((0, 2), int), plan=plan, seed=seed)
    return mechanism.release(WIDE, marginals, share=share)


def chi_square(noisy, variance):
    statistic = np.sum(np.square(noisy.counts / math.sqrt(variance)))
    return min(
        stats.chi2.cdf(statistic, noisy.counts.size), stats.chi2.sf(statistic, noisy.counts.size)
    )


@pytest.mark.parametrize("share", [1.0, 0.25])
@pytest.mark.parametrize("noise", [1.0, 40.0])
def test_scale_is_right_and_the_test_can_tell(share, noise):
    """A record's norm is 1 in units of the clip norm: weights 0.8 and 0.6, times the root."""
    marginals = [Marginal((0, 1), 4.0), Marginal((1, 0), 3.0)]
    for noisy, weight in zip(
        noise_of(marginals, share=share, noise=noise), (0.8, 0.6), strict=True
    ):
        stddev = noise / (weight * math.sqrt(share))
        variance = stddev**2 + 1 / 12
        assert noisy.variance == pytest.approx(variance, rel=1e-8)
        assert chi_square(noisy, variance) > LEAST_P_VALUE
        assert chi_square(noisy, variance * 4 / 9) < 1e-9
        assert chi_square(noisy, variance * 9 / 4) < 1e-9


def test_the_variance_includes_that_of_rounding():
    """Noise 1 on 20 000 cells cannot tell; on 2 million it can."""
    table = Cells((np.arange(2000), np.arange(1000)))
    mechanism = mechanism_of(
        np.zeros((0, 2), int), plan=dataclasses.replace(PLAN, noise_multiplier=1.0)
    )
    (noisy,) = mechanism.release(table, [Marginal((0, 1))], share=1.0)
    assert noisy.variance == pytest.approx(1 + 1 / 12)
    assert chi_square(noisy, noisy.variance) > LEAST_P_VALUE
    assert chi_square(noisy, 1.0) < 1e-9


def test_the_clip_norm_is_a_unit():
    """Counts are released as counts: the clip norm cancels."""
    plans = [dataclasses.replace(PLAN, clip_norm=norm) for norm in (0.5, 1.0, 1000.0)]
    found = [mechanism_of(TABLE, plan=plan).release(CELLS, PAIRS, share=1.0) for plan in plans]
    for others in found[1:]:
        for first, other in zip(found[0], others, strict=True):
            assert first.variance == pytest.approx(other.variance)
            np.testing.assert_array_equal(first.counts, other.counts)


def test_released_counts_are_exact_ones_and_noise():
    with_table = mechanism_of(TABLE).release(CELLS, PAIRS, share=1.0)
    noise = mechanism_of(TABLE[:0]).release(CELLS, PAIRS, share=1.0)
    for noisy, alone, exact in zip(
        with_table, noise, count_cells([TABLE], CELLS, PAIRS), strict=True
    ):
        assert noisy.counts.dtype == np.int64
        np.testing.assert_array_equal(noisy.counts - alone.counts, exact)


def test_noise_of_marginals_and_rounds_is_independent():
    mechanism = mechanism_of(np.zeros((0, 2), int))
    marginals = [Marginal((0, 1)), Marginal((0, 1)), Marginal((1, 0))]
    released = [
        noisy.counts.ravel() / math.sqrt(noisy.variance)
        for _ in range(2)
        for noisy in mechanism.release(WIDE, marginals, share=0.5)
    ]
    for first, second in itertools.combinations(released, 2):
        assert abs(first @ second) / math.sqrt(len(first)) < 5


def test_noise_of_mechanisms_is_independent_without_a_seed():
    first, second = (noise_of([Marginal((0, 1))], seed=None)[0] for _ in range(2))
    z = np.sum(first.counts * second.counts) / first.variance / math.sqrt(first.counts.size)
    assert abs(z) < 5


def test_counts_have_a_stream_of_their_own():
    asked = []

    class Spy(SecretStreams):
        def generator(self, purpose):
            asked.append(purpose)
            return super().generator(purpose)

    CountMechanism(PLAN, Spy(1), lambda: iter([TABLE]))
    assert asked == ["counts"]


def test_noise_that_its_numbers_cannot_hold_is_refused_before_it_is_paid_for():
    """Beyond 2^63 integers overflow, beyond 2^53 doubles are even: counts would show."""
    mechanism = mechanism_of(TABLE)
    marginals = [Marginal((0,)), Marginal((1,), 1e-9)]
    with pytest.raises(ValueError, match="noise of at most"):
        mechanism.release(CELLS, marginals, share=1.0)
    assert mechanism.share_spent == 0
    largest = dataclasses.replace(PLAN, noise_multiplier=LARGEST_STDDEV * (1 - 1e-8))
    (noisy,) = mechanism_of(TABLE, plan=largest).release(CELLS, SINGLES[:1], share=1.0)
    assert np.abs(noisy.counts).max() < 2**31


def test_a_mechanism_cannot_be_used_twice():
    mechanism = mechanism_of(TABLE)
    for again in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="used twice"):
            again(mechanism)
    mechanism._process += 1  # as in a child process
    with pytest.raises(RuntimeError, match="forked"):
        mechanism.release(CELLS, SINGLES, share=0.5)
