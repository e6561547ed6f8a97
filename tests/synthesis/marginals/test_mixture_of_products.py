"""Mixtures of products: records, expected counts, releases that are simulated once more."""

from __future__ import annotations

import numpy as np
import pytest

from dpvim.synthesis.marginals.mixture import (
    Couple,
    Mixture,
    count_pairs,
    coupled,
    draw_cells,
    expected_counts,
    release_again,
)
from dpvim.synthesis.marginals.pair_counts import PairCounts

SIZES = (2, 3, 4)


@pytest.fixture(scope="module")
def truth() -> Mixture:
    rng = np.random.default_rng(0)
    probs = tuple(rng.dirichlet(np.ones(size), 3) for size in SIZES)
    return Mixture(np.array([0.5, 0.3, 0.2]), probs)


def _with_a_couple(truth: Mixture) -> Mixture:
    """The first column and the last go together beyond what the components say."""
    odds = np.array([[8.0, 0.1, 1.0, 0.0], [0.2, 5.0, 1.0, 1.0]])
    first, last, _ = coupled(truth.probs[0], truth.probs[2], odds)
    couple = Couple(0, 2, odds, truth.probs[2])
    return truth._replace(probs=(first, truth.probs[1], last), couples=(couple,))


def test_a_couple_has_its_odds_in_every_component(truth):
    married = _with_a_couple(truth)
    (couple,) = married.couples
    together = np.zeros((2, 4))
    for k, weight in enumerate(truth.weights):
        joint = np.outer(truth.probs[0][k], truth.probs[2][k]) * couple.odds
        joint /= joint.sum()
        np.testing.assert_allclose(married.probs[0][k], joint.sum(axis=1))
        np.testing.assert_allclose(married.probs[2][k], joint.sum(axis=0))
        together += weight * joint
    pairs = expected_counts(married, 1.0)[1]
    np.testing.assert_allclose(pairs[:2, 5:], together)
    # The sum over components of equal weight, which the fit has.
    found = coupled(truth.probs[0], truth.probs[2], couple.odds)[2]
    equal = married._replace(weights=np.ones(3))
    np.testing.assert_allclose(found, expected_counts(equal, 1.0)[1][:2, 5:])


@pytest.mark.parametrize("couples", [False, True])
def test_expected_counts_are_those_of_many_records(truth, couples):
    truth = _with_a_couple(truth) if couples else truth
    codes = draw_cells(truth, 200_000, np.random.default_rng(1))
    for found, wanted in zip(
        count_pairs(codes, SIZES), expected_counts(truth, 200_000), strict=True
    ):
        spread = np.sqrt(np.maximum(wanted, 1))
        assert (np.abs(found - wanted) / spread).max() < 4.5


@pytest.mark.parametrize("couples", [False, True])
def test_even_rows_have_the_shares_of_the_mixture(truth, couples):
    truth = _with_a_couple(truth) if couples else truth
    codes = draw_cells(truth, 10_000, np.random.default_rng(0), evenly=True)
    for column, probs in enumerate(truth.probs):
        wanted = 10_000 * truth.weights @ probs
        # Off by less than one for each component; independent rows are off by fifty and more.
        assert np.abs(np.bincount(codes[:, column], minlength=len(wanted)) - wanted).max() < 8


def test_independent_rows_vary_as_they_should(truth):
    rng = np.random.default_rng(3)
    counts = [np.bincount(draw_cells(truth, 400, rng)[:, 0], minlength=2)[0] for _ in range(400)]
    share = float(truth.weights @ truth.probs[0][:, 0])
    assert np.std(counts) == pytest.approx(np.sqrt(400 * share * (1 - share)), rel=0.2)


@pytest.mark.parametrize("rows", [5_000, 800_000])  # the second is simulated with fewer
def test_a_release_once_more_has_noise_and_sampling_errors(truth, rows):
    singles, pairs = expected_counts(truth, rows)
    variance = np.where(pairs > 0, 30.0**2, np.inf)
    counts = PairCounts(SIZES, singles, np.full(9, np.inf), pairs, variance, rows)
    rng = np.random.default_rng(0)
    again = np.array([release_again(counts, truth, rng).pairs for _ in range(200)])
    measured = pairs > 0
    found = (again - pairs)[:, measured]
    wanted = np.sqrt(30.0**2 + pairs * (1 - pairs / rows))[measured]
    np.testing.assert_allclose(found.std(axis=0), wanted, rtol=0.25)
    assert (np.abs(found.mean(axis=0)) / wanted).max() < 4 / np.sqrt(200)
    # Cells of one pair of columns sum to the number of records: sampling errors cancel.
    total = again[:, : SIZES[0], SIZES[0] : SIZES[0] + SIZES[1]].sum(axis=(1, 2)) - rows
    assert total.std() == pytest.approx(30.0 * np.sqrt(SIZES[0] * SIZES[1]), rel=0.2)
