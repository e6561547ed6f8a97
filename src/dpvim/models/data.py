"""Arrays, pytrees and constants as a user hands them in, checked before any budget is spent.

An error names the argument, never a row: it must not say which record is at fault.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpvim.types import Record

_CONSTANTS = (bool, int, float, str, bytes)


class ModelInput(NamedTuple):
    """The arguments of a model, split into records and public constants.

    Attributes:
        records: The arrays, all with the same leading axis.
        num_rows: Its length.
        signature: Shapes, types and constants: what a model that was set up must agree with.
        call: ``(model, records) ->`` whatever the model returns for these records.
    """

    records: list[jax.Array]
    num_rows: int
    signature: tuple[Any, ...]
    call: Callable[[Callable[..., Any], Record], Any]


def prepare(args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModelInput:
    """Split and check the arguments of a model.

    Arrays are data. Python numbers, strings and None are public constants and reach the model as
    they are.
    """
    for value in (*args, *kwargs.values()):
        if isinstance(value, list | tuple) and any(isinstance(v, int | float) for v in value):
            raise ValueError(
                "data: expected arrays, got a list of numbers, which is no array and would reach "
                "the model as public constants. Use numpy.asarray if it is data."
            )
    leaves, structure = jax.tree.flatten_with_path((args, kwargs))
    is_data = [not is_constant(leaf) for _, leaf in leaves]
    arrays = {
        _name_of(path): _numeric_array(_name_of(path), leaf)
        for (path, leaf), data in zip(leaves, is_data, strict=True)
        if data
    }
    if not arrays:
        raise ValueError(
            "data: expected at least one array with a row for each record, got none. Pass NumPy "
            "or JAX arrays."
        )
    num_rows = _common_length(arrays)
    constants = [None if data else leaf for (_, leaf), data in zip(leaves, is_data, strict=True)]

    def call(model: Callable[..., Any], records: Record) -> Any:
        left = iter(records)
        filled = [
            next(left) if data else constant
            for data, constant in zip(is_data, constants, strict=True)
        ]
        model_args, model_kwargs = jax.tree.unflatten(structure, filled)
        return model(*model_args, **model_kwargs)

    # A number too large for single precision becomes infinite, and its record counts for nothing:
    # a warning would tell something about one record.
    with np.errstate(over="ignore"):
        records = [jnp.asarray(array) for array in arrays.values()]
    signature = (structure, constants, [(leaf.shape, leaf.dtype) for leaf in records])
    return ModelInput(records, num_rows, signature, call)


def is_constant(leaf: Any) -> bool:
    """Whether an argument (or a part of one) is a public constant rather than data."""
    return isinstance(leaf, _CONSTANTS) or callable(leaf)


def _numeric_array(name: str, leaf: Any) -> np.ndarray:
    array = np.asarray(leaf)
    if array.dtype.kind not in "biuf":
        raise TypeError(
            f"{name}: expected an array of numbers or booleans, got dtype {array.dtype}. Encode "
            "text and dates as numbers first, with levels that do not come from the data."
        )
    if array.ndim == 0:
        raise ValueError(
            f"{name}: expected an array with a row for each record, got a single number. Pass a "
            "public constant as a Python number."
        )
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError(
            f"{name}: expected finite numbers, got NaN or infinity. Fill in or drop missing "
            "values by a rule that treats every record by itself."
        )
    if array.dtype.kind in "iu" and array.size and not jax.config.read("jax_enable_x64"):
        limits = np.iinfo(np.int32)
        if array.max() > limits.max or array.min() < limits.min:
            raise ValueError(f"{name}: expected integers of 32 bits, got larger ones. Rescale.")
    return array


def _common_length(arrays: dict[str, np.ndarray]) -> int:
    lengths = {name: array.shape[0] for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{name} has {n}" for name, n in lengths.items())
        raise ValueError(
            f"data: expected arrays with the same number of rows, got {found}. Public arrays "
            "that are not data belong into the model (functools.partial)."
        )
    num_rows = next(iter(lengths.values()))
    if num_rows == 0:
        raise ValueError("data: expected at least one record, got arrays with no rows.")
    return num_rows


def _name_of(path: tuple[Any, ...]) -> str:
    """'argument 0', 'X' for keywords; with the way into a nested structure behind it."""
    which, *rest = path[1:]
    head = which.key if path[0].idx == 1 else f"argument {which.idx}"
    return f"{head}{jax.tree_util.keystr(tuple(rest))}"
