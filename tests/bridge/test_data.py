from __future__ import annotations

import collections
import dataclasses
import enum
from typing import Any, NamedTuple

import jax
import jax.experimental.sparse
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from scipy import sparse

import dpvim
from dpvim.bridge.data import prepare


def test_arrays_are_records_and_numbers_are_constants():
    inputs = prepare((np.zeros((5, 2)), 3), {"y": np.ones(5, bool), "name": "a", "none": None})
    assert inputs.num_rows == 5
    assert [leaf.shape for leaf in inputs.records] == [(5, 2), (5,)]
    seen = inputs.call(lambda *a, **k: (a, k), [leaf[:1] for leaf in inputs.records])
    assert seen[0][1] == 3
    assert seen[1]["name"] == "a"
    assert seen[1]["none"] is None
    assert seen[1]["y"].shape == (1,)


class Settings(NamedTuple):
    weights: Any
    rate: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Holder:
    data: Any
    note: Any = dataclasses.field(metadata={"static": True}, default=None)


X5 = np.zeros((5, 2))


@pytest.mark.parametrize(
    "hidden",
    [
        [[1.0, 2.0], [3.0, 4.0]],
        {"rows": [1.0, 2.0]},
        {"rows": {"deep": (1, 2)}},
        {"mean": 0.5},
        ("a", "b"),
        Settings(np.zeros(5), 0.1),
        Holder(np.zeros(5), note=3.0),
        np.zeros(5).mean(),
        np.float32(2.0),
        np.int64(3),
        np.bool_(True),
        jnp.float32(1.0),
        np.str_("level"),
        enum.IntEnum("Size", "small large").small,
        b"bytes",
        1j,
        lambda: 3,
        sorted,
        {1.5: np.zeros(5)},
        {3: np.zeros(5)},
        sparse.csr_matrix(np.eye(5)),
        jax.experimental.sparse.BCOO.fromdense(jnp.eye(5)),
        np.ma.masked_array(np.zeros(5), mask=[0, 0, 0, 0, 1]),
        collections.defaultdict(float, {"a": np.zeros(5)}),
        object(),
        {1.0, 2.0},
    ],
    ids=lambda hidden: type(hidden).__name__,
)
def test_nothing_becomes_a_constant_that_was_not_declared(hidden):
    """Data in a container, a statistic, a method of the data: each would get past the clip."""
    for args, kwargs in (((X5, hidden), {}), ((X5,), {"more": hidden}), (([X5, hidden],), {})):
        with pytest.raises((TypeError, ValueError), match=r"expected|dpvim\.public"):
            prepare(args, kwargs)


@pytest.mark.parametrize(
    "declared", [np.arange(3.0), [1.0, 2.0], np.float64(0.5), len, Holder(np.zeros(7)), {"a": 1}]
)
def test_what_is_declared_public_reaches_the_model_as_it_is(declared):
    for args in ((X5, dpvim.public(declared)), (X5, {"deep": [dpvim.public(declared)]})):
        inputs = prepare(args, {"again": dpvim.public(declared)})
        assert [leaf.shape for leaf in inputs.records] == [(5, 2)]
        seen = inputs.call(lambda *a, **k: (a, k), inputs.records)
        given = seen[0][1]
        assert (given["deep"][0] if type(args[1]) is dict else given) is declared
        assert seen[1]["again"] is declared


def test_another_public_value_is_another_set_up():
    knots = np.arange(3.0)
    first, same, other = (
        prepare((X5, dpvim.public(value)), {}).signature for value in (knots, knots, knots + 1)
    )
    assert first == same
    assert first != other


def test_containers_of_arrays_are_data():
    arrays = {"a": [np.zeros(5), (np.ones((5, 3)),)], "b": Settings(np.zeros(5), None)}
    assert [leaf.shape for leaf in prepare((arrays,), {}).records] == [(5,), (5, 3), (5,)]


def test_a_frame_of_numbers_is_an_array():
    assert prepare((pd.DataFrame({"a": [1.0, 2.0], "b": [3.0, 4]}),), {}).records[0].shape == (2, 2)
    assert prepare((pd.Series([1, 2]),), {}).records[0].dtype == np.int32


def test_a_frame_with_columns_of_several_types_is_refused():
    """One person's age of 40.5 instead of 40 would make numbers of another type of all others'."""
    with pytest.raises(TypeError, match="one record could change how all others are held"):
        prepare((pd.DataFrame({"a": [1.5, 2.0], "b": [3, 4]}),), {})


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "message"),
    [
        ((np.zeros(3), np.zeros(4)), {}, ValueError, "argument 0 has 3, argument 1 has 4"),
        ((np.zeros(3),), {"y": np.zeros(4)}, ValueError, "y has 4"),
        ((np.zeros((0, 2)),), {}, ValueError, "no rows"),
        ((np.array([1.0, np.nan]),), {}, ValueError, "argument 0.*NaN"),
        ((np.array([1.0, np.inf]),), {}, ValueError, "NaN or infinity"),
        ((np.array(["a", "b"]),), {}, TypeError, "dtype <U1"),
        ((), {"x": np.array([None, 1])}, TypeError, "x: expected an array of numbers"),
        ((np.array(3.0),), {}, ValueError, "single number"),
        (([1.0, 2.0],), {}, ValueError, "a number or text within another argument"),
        ((np.zeros(2),), {"y": [1, 0]}, ValueError, r"y\[0\]: expected an array, got a number"),
        ((), {}, ValueError, "at least one array"),
        ((np.array([2**40]),), {}, ValueError, "32 bits"),
    ],
)
def test_bad_data_are_refused(args, kwargs, error, message):
    with pytest.raises(error, match=message):
        prepare(args, kwargs)


def test_a_square_array_is_warned_of():
    with pytest.warns(dpvim.PrivacyWarning, match="as many columns as there are records"):
        prepare((np.zeros((30, 30)),), {})
    prepare((np.zeros((30, 29)),), {})


def test_errors_do_not_say_which_row():
    values = np.zeros(1000)
    values[617] = np.nan
    with pytest.raises(ValueError, match="NaN") as error:
        prepare((values,), {})
    assert "617" not in str(error.value)
