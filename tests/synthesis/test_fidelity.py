from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from dpvim.synthesis.analysis.contingency import bin_table, bins_of, concat, cramers_v
from dpvim.synthesis.fidelity import marginal_tv, pairwise_tv, total_variation
from dpvim.synthesis.schema import Binary, Categorical, Count, Integer, Real, Schema

SCHEMA = Schema(
    (
        Categorical(name="c", levels=("a", "b", "c")),
        Binary(name="b", levels=(0, 1), nullable=True),
        Real(name="r", lower=0, upper=10),
    )
)


def frame(c, b, r):
    return pd.DataFrame({"c": list(c), "b": pd.array(b, dtype="Int64"), "r": r})


# Bins


@pytest.mark.parametrize(
    ("column", "size", "ends"),
    [
        (Real(name="x", lower=-1, upper=3), 20, (-1, 3)),
        (Real(name="x", lower=0.1, upper=1000, scale="log"), 20, (0.1, 1000)),
        (Integer(name="x", lower=-3, upper=3), 7, (-3, 4)),
        (Integer(name="x", lower=0, upper=100), 17, (0, 101)),
        (Count(name="x", upper=5), 6, (0, 6)),
        (Count(name="x", upper=2**31 - 1), 20, (0, 2**31)),
    ],
    ids=str,
)
def test_bins_cover_the_declared_range(column, size, ends):
    bins = bins_of(column)
    assert bins.size == size
    assert (bins.edges[0], bins.edges[-1]) == pytest.approx(ends)
    assert (np.diff(bins.edges) > 0).all()
    assert len(set(bins.labels)) == size


@pytest.mark.parametrize(
    "column",
    [
        Real(name="x", lower=0.1, upper=1000, scale="log"),
        Integer(name="x", lower=-50, upper=50),
        Count(name="x", upper=80),
    ],
    ids=str,
)
def test_a_value_is_in_the_bin_that_its_edges_say(column):
    lower, upper = column.bounds
    values = np.linspace(lower, upper, 997)
    values = np.unique(np.rint(values)) if column.integral else values
    codes = bin_table(pd.DataFrame({"x": values}), Schema((column,))).codes["x"]
    edges = bins_of(column).edges
    # Places between bounds have single precision: at an edge either bin will do.
    slack = 0 if column.integral else 1e-6 * values
    assert (edges[codes] <= values + slack).all()
    assert (values < edges[codes + 1] + slack).all()
    assert (codes[0], codes[-1]) == (0, len(edges) - 2)


def test_groups_of_counts_grow():
    labels = bins_of(Count(name="x", upper=80)).labels
    assert labels[:3] == ("0", "1", "2")
    assert labels[-1].endswith("to 80")


def test_missing_values_have_a_group_of_their_own():
    binned = bin_table(frame("abc", [0, None, 1], [0.0, 5.0, 10.0]), SCHEMA)
    assert binned.bins["b"].labels == ("0", "1", "missing")
    assert binned.counts("b").tolist() == [1, 1, 1]
    assert binned.codes["r"].tolist() == [0, 10, 19]


def test_pairs_are_counted_in_both_directions():
    binned = bin_table(frame("aab", [0, 1, None], [0.0, 0.0, 9.0]), SCHEMA)
    assert binned.pair_counts("c", "b").tolist() == [[1, 1, 0], [0, 0, 1], [0, 0, 0]]
    assert (binned.pair_counts("b", "c") == binned.pair_counts("c", "b").T).all()
    assert concat([binned, binned]).counts("c").tolist() == [4, 2, 0]
    assert binned.rows(slice(2)).num_rows == 2


# Dependence


def test_cramers_v_of_known_tables():
    # chi-square is n times (0.1 / 0.5)^2 for shares 0.6 and 0.4 in two equal groups.
    counts = np.array([[30_000, 20_000], [20_000, 30_000]])
    assert cramers_v(counts) == pytest.approx(0.2, abs=1e-3)
    assert cramers_v(np.eye(4, dtype=int) * 500) == pytest.approx(1.0)
    assert cramers_v(np.array([[10, 20]])) == 0.0
    assert cramers_v(np.zeros((2, 2), int)) == 0.0


def test_cramers_v_of_independent_columns_has_no_bias():
    rng = np.random.default_rng(0)
    found = [
        cramers_v(np.histogram2d(*rng.random((2, 500)), bins=15)[0].astype(int)) for _ in range(50)
    ]
    # Without the correction it would be sqrt(14 / 500) = 0.17.
    assert np.mean(found) < 0.06


# Distances


def test_total_variation_is_half_the_l1_distance_of_shares():
    assert total_variation(np.array([1, 1]), np.array([10, 10])) == 0
    assert total_variation(np.array([1, 0]), np.array([0, 7])) == 1
    assert total_variation(np.array([3, 1]), np.array([1, 1])) == pytest.approx(0.25)
    with pytest.raises(ValueError, match="shapes"):
        total_variation(np.ones(2), np.ones(3))
    with pytest.raises(ValueError, match="at least one record"):
        total_variation(np.ones(2), np.zeros(2))


def test_distances_by_name():
    first = bin_table(frame("aabb", [0, 0, 1, 1], [0.0] * 4), SCHEMA)
    # The same marginals, another dependence.
    second = bin_table(frame("aabb", [0, 1, 0, 1], [0.0] * 4), SCHEMA)
    third = bin_table(frame("aabb", [0, 0, None, None], [9.0] * 4), SCHEMA)
    assert marginal_tv(first, second).to_dict() == {"c": 0, "b": 0, "r": 0}
    assert marginal_tv(first, third).to_dict() == {"c": 0, "b": 0.5, "r": 1}
    pairs = pairwise_tv(first, second).set_index(["first", "second"])["tv"]
    assert pairs.to_dict() == {("c", "b"): 0.5, ("c", "r"): 0, ("b", "r"): 0}


def test_a_pair_is_at_least_as_far_apart_as_its_columns():
    rng = np.random.default_rng(1)
    tables = [
        bin_table(
            frame(
                rng.choice(list("abc"), 300, p=p), rng.integers(0, 2, 300), rng.uniform(0, top, 300)
            ),
            SCHEMA,
        )
        for p, top in [((0.2, 0.3, 0.5), 10), ((0.5, 0.4, 0.1), 6)]
    ]
    single = marginal_tv(*tables)
    for row in pairwise_tv(*tables).itertuples():
        assert row.tv >= max(single[row.first], single[row.second]) - 1e-12


def test_other_bins_are_refused():
    table = frame("ab", [0, 1], [1.0, 2.0])
    with pytest.raises(ValueError, match="same schema"):
        marginal_tv(bin_table(table, SCHEMA), bin_table(table, SCHEMA, num_bins=5))
