from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dpvim.synthesis.analysis.rubin import NegativeVarianceWarning, combine

LEVELS = np.array([0.5, 0.8, 0.9, 0.95])


def random_input(m: int, k: int, *, spread: float = 2.0, seed: int = 0):
    """Estimates with correlated components, and covariance matrices of size about one."""
    rng = np.random.default_rng(seed)
    mix = rng.normal(size=(k, k))
    estimates = 1 + spread * rng.normal(size=(m, k)) @ mix
    roots = rng.normal(size=(m, k, k + 4)) / np.sqrt(k + 4)
    return estimates, mix.T @ (roots @ roots.swapaxes(1, 2)) @ mix


# Numbers by hand


def test_one_estimate_by_hand():
    found = combine([1.0, 2.0, 3.0, 6.0], [0.3, 0.7, 0.4, 0.6])
    # b = (4 + 1 + 0 + 9) / 3, u = 1/2, T = 5/4 * 14/3 - 1/2 = 16/3, nu = 3 * (32/35)^2
    assert found.estimate == pytest.approx([3.0])
    assert found.between == pytest.approx(np.array([[14 / 3]]))
    assert found.within == pytest.approx(np.array([[0.5]]))
    assert found.covariance == pytest.approx(np.array([[16 / 3]]))
    assert found.standard_error == pytest.approx([np.sqrt(16 / 3)])
    assert found.df == pytest.approx([3 * (32 / 35) ** 2])
    reach = stats.t.ppf(0.975, 3 * (32 / 35) ** 2) * np.sqrt(16 / 3)
    assert [found.lower[0], found.upper[0]] == pytest.approx([3 - reach, 3 + reach])
    assert found.p_value == pytest.approx([2 * stats.t.sf(3 / np.sqrt(16 / 3), found.df[0])])
    assert not found.negative.any()
    assert not found.adjusted
    assert found.num_datasets == 4


def test_two_estimates_by_hand():
    estimates = [[0.0, 0.0], [2.0, 0.0], [2.0, 4.0], [0.0, 4.0]]
    within = np.array([[0.5, 0.25], [0.25, 1.0]])
    found = combine(estimates, [within] * 4)
    # b = diag(4/3, 16/3), so T = 5/4 b - u = [[5/3 - 1/2, -1/4], [-1/4, 20/3 - 1]]
    assert found.covariance == pytest.approx(np.array([[7 / 6, -1 / 4], [-1 / 4, 17 / 3]]))
    # tr(b u^-1) = (4/3 * 1 + 16/3 * 1/2) / (7/16) = 64/7 and q' u^-1 q = 2 / (7/16) for (1, 2)
    ratio = 5 / 4 * (64 / 7) / 2
    test = found.test()
    assert test.statistic == pytest.approx((32 / 7) / 2 / (ratio - 1))
    # t = 2 * 3
    assert test.df_numerator == 2
    assert test.df_denominator == pytest.approx(4 + 2 * (1 - (1 - 2 / 6) / ratio) ** 2)
    assert test.p_value == pytest.approx(stats.f.sf(*test[:3]))


def test_a_negative_variance_is_replaced():
    with pytest.warns(NegativeVarianceWarning, match=r"n_syn / n = 2\.5 times"):
        found = combine([1.0, 1.1, 0.9], [0.5] * 3, num_rows=100, num_synthetic_rows=250)
    assert found.negative.tolist() == [True]
    assert found.standard_error == pytest.approx([np.sqrt(2.5 * 0.5)])
    assert found.df == pytest.approx([2.0])
    assert found.covariance == pytest.approx(np.array([[1.25]]))
    assert "q1 *" in str(found)
    assert "n_syn / n = 2.5" in str(found)


def test_without_row_counts_the_replacement_says_what_it_takes_them_for():
    with pytest.warns(NegativeVarianceWarning, match="taken to be 1.*Give num_rows"):
        found = combine([1.0, 1.1, 0.9], [0.5] * 3)
    assert found.rows_ratio == 1
    assert found.standard_error == pytest.approx([np.sqrt(0.5)])


def test_row_counts_do_nothing_where_the_variance_is_positive():
    plain = combine(*random_input(5, 2))
    told = combine(*random_input(5, 2), num_rows=10, num_synthetic_rows=1000)
    pd.testing.assert_frame_equal(plain.to_frame(), told.to_frame())


def test_identical_estimates_are_a_negative_variance():
    with pytest.warns(NegativeVarianceWarning):
        assert combine([1.0, 1.0], [0.5, 0.5]).negative.all()


def test_an_interval_without_degrees_of_freedom_is_infinite():
    # (1 + 1/2) b is 1e-9 above u.
    found = combine([0.0, np.sqrt(4 / 3)], [1 - 1e-9, 1 - 1e-9])
    assert not found.negative.any()
    assert found.lower[0] == -np.inf
    assert found.p_value[0] == pytest.approx(1.0, abs=1e-3)
    assert "too few or too small" in str(found)


# Coverage


def intervals_that_hold(num_rows, num_synthetic_rows, m, *, scale=1.0, replications=20_000):
    """How often intervals hold a normal mean, and how often a variance was negative.

    Each replication has its own data, exact posterior, and m tables, each from a draw of the
    posterior; a table is drawn as its mean and variance. The replications are the components of
    vectors, which `combine` treats one by one if it has only variances.
    """
    rng = np.random.default_rng(0)
    n, n_syn = num_rows, num_synthetic_rows
    held, negative = [], []
    for size in [2000] * (replications // 2000):
        data_mean = rng.normal(size=size) / np.sqrt(n)
        data_variance = rng.chisquare(n - 1, size=size) / (n - 1)
        variance = (n - 1) * data_variance / rng.chisquare(n - 1, size=(m, size))
        mean = data_mean + np.sqrt(variance / n) * rng.normal(size=(m, size))
        estimates = mean + np.sqrt(variance / n_syn) * rng.normal(size=(m, size))
        squared_errors = variance * rng.chisquare(n_syn - 1, size=(m, size)) / (n_syn - 1) / n_syn
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NegativeVarianceWarning)
            found = combine(estimates, squared_errors, num_rows=n, num_synthetic_rows=n_syn)
        # The truth is zero: an interval of a level holds it if the p-value is above 1 - level.
        distance = np.abs(found.estimate) / (np.sqrt(scale) * found.standard_error)
        p_value = 2 * stats.t.sf(distance, found.df)
        held.append(p_value[:, None] > 1 - LEVELS)
        negative.append(found.negative)
    return np.concatenate(held).mean(axis=0), np.concatenate(negative).mean()


@pytest.mark.parametrize(("rows_ratio", "m"), [(50, 5), (4, 20), (1, 100)])
def test_intervals_hold_as_often_as_they_say(rows_ratio, m):
    def accepted(scale):
        held, _ = intervals_that_hold(500, 500 * rows_ratio, m, scale=scale)
        return (np.abs(held - LEVELS) < 0.01).all()

    assert accepted(1.0)
    assert not accepted(2 / 3)
    assert not accepted(3 / 2)


@pytest.mark.parametrize(("rows_ratio", "m"), [(4, 5), (1, 20), (1, 5), (0.25, 20), (0.25, 5)])
def test_few_or_small_tables_make_intervals_wide_not_wrong(rows_ratio, m):
    held, negative = intervals_that_hold(200, int(200 * rows_ratio), m)
    assert negative > 0.02
    assert (held > LEVELS - 0.01).all()


@pytest.mark.filterwarnings("ignore::dpvim.synthesis.analysis.rubin.NegativeVarianceWarning")
def test_the_joint_test_rejects_as_often_as_it_says():
    rng = np.random.default_rng(1)
    m, k, n, n_syn = 20, 3, 500, 2000
    root = np.linalg.cholesky([[1.0, 0.6, 0.2], [0.6, 1.0, 0.0], [0.2, 0.0, 1.0]])
    within = np.stack([root @ root.T / n_syn] * m)
    p_values = []
    for _ in range(3000):
        posterior_mean = rng.normal(size=k) / np.sqrt(n)
        draws = posterior_mean + rng.normal(size=(m, k)) / np.sqrt(n)
        estimates = (draws + rng.normal(size=(m, k)) / np.sqrt(n_syn)) @ root.T
        p_values.append(combine(estimates, within).test().p_value)
    rates = (np.array(p_values)[:, None] < 1 - LEVELS).mean(axis=0)
    assert rates == pytest.approx(1 - LEVELS, abs=0.025)


# Several estimates


@given(st.integers(2, 12), st.integers(1, 5), st.sampled_from([0.2, 1.0, 5.0]), st.integers(0, 99))
def test_several_estimates_are_the_single_ones_side_by_side(m, k, spread, seed):
    estimates, covariances = random_input(m, k, spread=spread, seed=seed)
    rows = {"num_rows": 100, "num_synthetic_rows": 70}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NegativeVarianceWarning)
        whole = combine(estimates, covariances, **rows)
        variances = np.einsum("lii->li", covariances)
        diagonal = combine(estimates, variances, **rows)
        single = [combine(estimates[:, i], variances[:, i], **rows) for i in range(k)]
    pd.testing.assert_frame_equal(whole.to_frame(), diagonal.to_frame())
    for name in ("estimate", "standard_error", "df", "lower", "upper", "p_value", "negative"):
        one_by_one = np.concatenate([getattr(one, name) for one in single])
        np.testing.assert_allclose(getattr(whole, name), one_by_one, rtol=1e-9)
    # The covariance matrix is one, and has the single variances on its diagonal.
    np.testing.assert_allclose(np.diag(whole.covariance), whole.standard_error**2, rtol=1e-9)
    scale = whole.standard_error
    assert np.linalg.eigvalsh(whole.covariance / np.outer(scale, scale))[0] > 0
    raw = (1 + 1 / m) * whole.between - whole.within
    assert whole.adjusted == (np.linalg.eigvalsh(raw)[0] <= 0)
    if not whole.adjusted:
        np.testing.assert_allclose(whole.covariance, raw)


def test_a_single_contrast_has_the_p_value_of_the_table():
    found = combine(*random_input(6, 3))
    for i, name in enumerate(found.names):
        assert found.test(name).p_value == pytest.approx(found.p_value[i])
    with pytest.warns(NegativeVarianceWarning):
        tight = combine(*random_input(6, 3, spread=0.1), num_rows=10, num_synthetic_rows=20)
    assert tight.test([1, 0, 0]).p_value == pytest.approx(tight.p_value[0])


def test_a_contrast_is_the_analysis_of_the_contrast():
    estimates, covariances = random_input(6, 3)
    weights = np.array([1.0, -2.0, 0.5])
    direct = combine(estimates @ weights, np.einsum("i,lij,j->l", weights, covariances, weights))
    assert combine(estimates, covariances).test(weights).p_value == pytest.approx(direct.p_value[0])


def test_the_joint_test_does_not_depend_on_coordinates():
    estimates, covariances = random_input(6, 3)
    change = np.array([[2.0, 1.0, 0.0], [0.0, 1.0, 0.0], [5.0, 0.0, 0.1]])
    moved = combine(estimates @ change.T, change @ covariances @ change.T)
    assert moved.test() == pytest.approx(combine(estimates, covariances).test())


def test_the_hypothesis_may_be_another_value():
    estimates, covariances = random_input(6, 3)
    shift = np.array([1.0, 2.0, 3.0])
    shifted = combine(estimates - shift, covariances)
    assert combine(estimates, covariances).test(value=shift) == pytest.approx(shifted.test())


def test_the_joint_test_replaces_a_negative_variance():
    estimates, covariances = random_input(6, 3, spread=0.1)
    with pytest.warns(NegativeVarianceWarning):
        found = combine(estimates, covariances, num_rows=10, num_synthetic_rows=20)
    test = found.test()
    mean, within = estimates.mean(axis=0), covariances.mean(axis=0)
    assert test.negative
    assert test.statistic == pytest.approx(mean @ np.linalg.solve(2 * within, mean) / 3)
    assert (test.df_numerator, test.df_denominator) == (3, 15)


def test_two_tables_have_a_joint_test():
    test = combine(*random_input(2, 2, spread=9.0)).test()
    assert 0 < test.df_denominator < 2
    assert 0 < test.p_value < 1


def test_covariances_that_were_not_given_are_unknown():
    estimates, covariances = random_input(6, 2)
    found = combine(estimates, np.einsum("lii->li", covariances), names=["a", "b"])
    assert np.isnan(found.covariance[0, 1])
    assert found.test("a").p_value == pytest.approx(found.p_value[0])
    with pytest.raises(ValueError, match="given variances only"):
        found.test(["a", "b"])


# Shapes, names, printing


def test_frames_and_series_bring_their_names():
    estimates, covariances = random_input(4, 2)
    names = ["age", "sex"]
    frames = [pd.DataFrame(c, index=names, columns=names) for c in covariances]
    expected = combine(estimates, covariances, names=names)
    for given_estimates in (
        pd.DataFrame(estimates, columns=names),
        [pd.Series(row, index=names) for row in estimates],
        [pd.Series(row[::-1], index=names[::-1]) if i else pd.Series(row, index=names)
         for i, row in enumerate(estimates)],
    ):  # fmt: skip
        found = combine(given_estimates, frames)
        pd.testing.assert_frame_equal(found.to_frame(), expected.to_frame())
    with pytest.raises(ValueError, match="same order"):
        combine(pd.DataFrame(estimates, columns=names), [f[names[::-1]] for f in frames])


def test_the_printed_table():
    text = str(combine(*random_input(6, 2), names=["age", "sex"], level=0.9))
    assert text.splitlines()[0] == "6 synthetic data sets, 90 % intervals"
    assert "5 %" in text
    assert "95 %" in text
    assert [line.split()[0] for line in text.splitlines()[2:4]] == ["age", "sex"]
    assert "*" not in text


def test_a_higher_level_is_a_wider_interval():
    low, high = (combine(*random_input(6, 2), level=level) for level in (0.5, 0.99))
    assert (low.upper < high.upper).all()
    assert (low.lower > high.lower).all()


@pytest.mark.parametrize(
    ("estimates", "covariances", "options", "message"),
    [
        ([1.0], [1.0], {}, "at least 2 data sets, got 1.*vary between data sets"),
        ([], [], {}, r"expected shape \[m\] or \[m, k\]"),
        (np.ones((2, 2, 2)), np.ones((2, 2)), {}, r"expected shape \[m\] or \[m, k\]"),
        ([1.0, np.nan], [1.0, 1.0], {}, "got nan for estimate 0 in data set 1"),
        ([1.0, 2.0], [1.0, np.inf], {}, "NaN or infinity in data set 1"),
        ([1.0, 2.0], [1.0, 1.0, 1.0], {}, r"expected shape \[2, 1\].*got \[3\]"),
        ([[1, 2], [3, 4]], [1.0, 1.0], {}, r"\[2, 2\] \(variances\) or \[2, 2, 2\]"),
        ([1.0, 2.0], [1.0, -1.0], {}, "at least 0, got -1 for estimate 0 in data set 1"),
        ([1.0, 2.0], [0.0, 0.0], {}, "positive variance of 'q1'"),
        ([[1, 2], [3, 4]], [[[1, 0.5], [0.1, 1]]] * 2, {}, r"symmetric.*0\.5 and 0\.1"),
        ([[1, 2], [3, 4]], [[[1, 1], [1, 1]]] * 2, {}, "positive definite"),
        ([[1, 2], [3]], [1.0, 1.0], {}, "estimates: expected numbers"),
        (["a", "b"], [1.0, 1.0], {}, "estimates: expected numbers"),
        ([1.0, 2.0], [0.1, 0.1], {"level": 95}, "level: expected"),
        ([1.0, 2.0], [0.1, 0.1], {"num_rows": 5}, "both or neither, got num_rows only"),
        ([1.0, 2.0], [0.1, 0.1], {"num_rows": 0, "num_synthetic_rows": 1}, "num_rows: expected"),
        ([1.0, 2.0], [0.1, 0.1], {"names": ["a", "b"]}, "expected 1 different names"),
    ],
)
def test_input_that_cannot_be_meant(estimates, covariances, options, message):
    with pytest.raises(ValueError, match=message):
        combine(estimates, covariances, **options)


@pytest.mark.parametrize(
    ("contrast", "message"),
    [
        ("ages", "Did you mean 'age'"),
        ([[1, 2, 3]], r"shape \[c, 2\], got shape \(1, 3\)"),
        ([[1, 2], [2, 4]], "independent contrasts, got 2 of rank 1"),
        (["age", "age"], "independent contrasts"),
        ([[np.nan, 1]], "finite numbers"),
    ],
)
def test_contrasts_that_cannot_be_meant(contrast, message):
    with pytest.raises(ValueError, match=message):
        combine(*random_input(6, 2), names=["age", "sex"]).test(contrast)
