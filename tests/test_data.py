from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from dpvim.models.data import prepare


def test_arrays_are_records_and_numbers_are_constants():
    inputs = prepare((np.zeros((5, 2)), 3), {"y": np.ones(5, bool), "name": "a", "none": None})
    assert inputs.num_rows == 5
    assert [leaf.shape for leaf in inputs.records] == [(5, 2), (5,)]
    seen = inputs.call(lambda *a, **k: (a, k), [leaf[:1] for leaf in inputs.records])
    assert seen[0][1] == 3
    assert seen[1]["name"] == "a"
    assert seen[1]["none"] is None
    assert seen[1]["y"].shape == (1,)


def test_a_frame_of_numbers_is_an_array():
    assert prepare((pd.DataFrame({"a": [1.0, 2.0], "b": [3, 4]}),), {}).records[0].shape == (2, 2)


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
        (([1.0, 2.0],), {}, ValueError, "list of numbers, which is no array"),
        ((np.zeros(2),), {"y": [1, 0]}, ValueError, "list of numbers, which is no array"),
        ((), {}, ValueError, "at least one array"),
        ((np.array([2**40]),), {}, ValueError, "32 bits"),
    ],
)
def test_bad_data_are_refused(args, kwargs, error, message):
    with pytest.raises(error, match=message):
        prepare(args, kwargs)


def test_errors_do_not_say_which_row():
    values = np.zeros(1000)
    values[617] = np.nan
    with pytest.raises(ValueError, match="NaN") as error:
        prepare((values,), {})
    assert "617" not in str(error.value)
