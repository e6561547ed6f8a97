"""Arrays, pytrees and constants as a user hands them in, checked before any budget is spent.

An error names the argument, never a row: it must not say which record is at fault.
"""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpvim._compile import single_precision
from dpvim.mapped import MappedArray, are_mapped, is_on_disk, pieces_of
from dpvim.types import PrivacyWarning, Record

_CONSTANTS = (bool, int, float, str)
# In smaller data as many columns as rows are no surprise.
_FEW_ROWS = 20


@dataclasses.dataclass(frozen=True, eq=False)
class Public:
    """A value that was declared public; see `public`."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Public) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def public(value: Any) -> Public:
    """Declare that a value does not come from the data, so that it may reach a model as it is.

    What a model is given is data, and protected, unless it is declared. Python's own bool, int,
    float and str, given as arguments of their own, count as declared; all else (arrays and NumPy's
    numbers that are not data, lists of numbers, functions, objects with fields) is given as
    ``dpvim.public(value)``. Nothing protects what is declared public: it must not be computed from
    the data.

    >>> import dpvim, numpy as np
    >>> knots = np.linspace(0, 1, 5)  # chosen, not read off the data
    >>> dpvim.public(knots).value is knots
    True
    """
    return Public(value)


class ModelInput(NamedTuple):
    """The arguments of a model, split into records and public constants.

    Attributes:
        records: The arrays, all with the same leading axis; if one of them is on the disk, all are
            held as if they were (`dpvim.mapped`).
        num_rows: Its length.
        signature: Shapes, types and constants, with which a model that was set up must agree.
        call: ``(model, rows) ->`` whatever the model returns for these rows.
        max_rows_per_person: If records are persons, the most rows of one. If that is more than
            one, arrays have an axis of rows behind that of persons, and a last array says which
            rows are used.
    """

    records: list[Any]
    num_rows: int
    signature: tuple[Any, ...]
    call: Callable[[Callable[..., Any], Record], Any]
    max_rows_per_person: int | None = None

    @property
    def rows(self) -> list[Any]:
        """One row of each record: the arrays in the form that the model sees them in."""
        return [leaf[:, 0] for leaf in self.records[:-1]] if self.has_several_rows else self.records

    @property
    def on_disk(self) -> bool:
        """True if records are read from the disk when they are needed."""
        return are_mapped(self.records)

    @property
    def has_several_rows(self) -> bool:
        """True if a record is a person with an axis of rows."""
        return self.max_rows_per_person not in (None, 1)


@single_precision
def prepare(args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModelInput:
    """Split and check the arguments of a model.

    Constants are declared, not guessed: Python's bool, int, float, str and None as arguments of
    their own, and what `public` was called with. All else must be arrays, with a row for each
    record, in dicts, lists and tuples as one likes.
    """
    leaves, structure = jax.tree.flatten_with_path((args, kwargs), is_leaf=_is_leaf)
    is_data = [not _is_constant(path, leaf) for path, leaf in leaves]
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
    _check_keys(leaves)
    _warn_of_square_arrays(arrays, num_rows)
    constants = [None if data else leaf for (_, leaf), data in zip(leaves, is_data, strict=True)]

    def call(model: Callable[..., Any], records: Record) -> Any:
        left = iter(records)
        filled = [
            next(left) if data else _value_of(constant)
            for data, constant in zip(is_data, constants, strict=True)
        ]
        model_args, model_kwargs = jax.tree.unflatten(structure, filled)
        return model(*model_args, **model_kwargs)

    # A number too large for single precision becomes infinite, and its record counts for nothing:
    # a warning would tell something about one record.
    records: list[Any]
    if any(is_on_disk(array) for array in arrays.values()):
        records = [MappedArray(array) for array in arrays.values()]
    else:
        with np.errstate(over="ignore"):
            records = [jnp.asarray(array) for array in arrays.values()]
    signature = (structure, constants, [(leaf.shape, leaf.dtype) for leaf in records])
    return ModelInput(records, num_rows, signature, call)


def check_model(
    model: object, args: tuple[Any, ...] | None = None, keywords: Iterable[str] = ()
) -> None:
    """Refuse what cannot be a model, or does not take such arguments: a misspelt option, say."""
    if not callable(model) or isinstance(model, type):
        raise TypeError(
            f"model: expected a NumPyro model, a function of the data, got "
            f"{getattr(model, '__name__', type(model).__name__)}."
        )
    if args is None:
        return
    try:
        signature = inspect.signature(model)
    except (TypeError, ValueError):  # it has none that can be known
        return
    try:
        signature.bind(*args, **dict.fromkeys(keywords))
    except TypeError as error:
        raise TypeError(
            f"data: expected the arguments of the model, {signature}, got others ({error}). What "
            "is no option of dpvim is handed to the model: is a name misspelt?"
        ) from None


def map_arrays(function: Callable[[Any], Any], arguments: Any) -> Any:
    """Apply a function to all data among the arguments ``(args, kwargs)`` of a model."""

    def of_leaf(path: tuple[Any, ...], leaf: Any) -> Any:
        return leaf if _is_constant(path, leaf) else function(leaf)

    return jax.tree.map_with_path(of_leaf, arguments, is_leaf=_is_leaf)


def _is_leaf(node: Any) -> bool:
    """True for what is not a plain container: dict, list, tuple, named tuple or None.

    Containers that others registered with JAX may hold numbers that are no leaves, and rows that
    are no records (a sparse array, say): they are looked at as one thing.
    """
    is_named_tuple = isinstance(node, tuple) and hasattr(node, "_fields")
    return not (is_named_tuple or type(node) in (dict, list, tuple, type(None)))


def _is_constant(path: tuple[Any, ...], leaf: Any) -> bool:
    """True for a part of the arguments that is declared public; anything else is data."""
    if isinstance(leaf, Public):
        return True
    if type(leaf) not in _CONSTANTS:  # a NumPy number is a float, too, and often a statistic
        return False
    is_argument = len(path) == 2
    if not is_argument:
        raise ValueError(
            f"{_name_of(path)}: expected an array, got a number or text within another argument, "
            "which could be data and would reach the model unprotected. Use numpy.asarray for "
            "data; what is public can be an argument of its own, or dpvim.public(...)."
        )
    return True


def _value_of(constant: Any) -> Any:
    return constant.value if isinstance(constant, Public) else constant


def _numeric_array(name: str, leaf: Any) -> np.ndarray:
    if hasattr(leaf, "todense"):
        raise TypeError(
            f"{name}: expected an array with a row for each record, got a sparse one "
            f"({type(leaf).__name__}). Make it dense."
        )
    if isinstance(leaf, np.ma.MaskedArray):
        raise TypeError(
            f"{name}: expected an array, got a masked one, whose mask would be lost. Fill in what "
            "is missing, and give the mask as an array of its own."
        )
    if len({str(dtype) for dtype in np.atleast_1d(getattr(leaf, "dtypes", 0))}) > 1:
        raise TypeError(
            f"{name}: expected a table whose columns have one type, got several, from which a "
            "common one would be made: one record could change how all others are held. Use "
            "frame.to_numpy('float32'), or give columns as arrays of their own."
        )
    try:
        array = np.asarray(leaf)
    except (ValueError, TypeError, OverflowError) as error:
        raise TypeError(
            f"{name}: expected an array of numbers, got {type(leaf).__name__}, which is none "
            f"({type(error).__name__}). Use numpy.asarray with rows of equal length."
        ) from None
    if array.dtype.kind not in "biuf":
        raise TypeError(
            f"{name}: expected an array of numbers or booleans, got {type(leaf).__name__} of dtype "
            f"{array.dtype}. Encode text and dates as numbers first, with levels that do not come "
            "from the data; give what is public, and no data, as dpvim.public(...)."
        )
    if array.ndim == 0:
        raise ValueError(
            f"{name}: expected an array with a row for each record, got a single number "
            f"({type(leaf).__name__}). A number that does not come from the data is given as a "
            "Python number or as dpvim.public(...); a statistic of the data is not public."
        )
    if array.dtype.kind == "f" and not all(np.isfinite(each).all() for each in pieces_of(array)):
        raise ValueError(
            f"{name}: expected finite numbers, got NaN or infinity. Fill in or drop missing "
            "values by a rule that treats every record by itself."
        )
    if array.dtype.kind in "iu" and array.size:
        limits = np.iinfo(np.int32)
        if any(each.max() > limits.max or each.min() < limits.min for each in pieces_of(array)):
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


def _warn_of_square_arrays(arrays: dict[str, np.ndarray], num_rows: int) -> None:
    """Warn of arrays like kernels and adjacency matrices, whose rows hold others' data, too."""
    for name, array in arrays.items():
        if num_rows >= _FEW_ROWS and num_rows in array.shape[1:]:
            warnings.warn(
                f"{name}: has as many columns as there are records. If each column belongs to a "
                "record, too (distances, a kernel, who knows whom), rows hold the data of others, "
                "and the guarantee for one record is not one for a person.",
                PrivacyWarning,
                stacklevel=4,
            )


def _check_keys(leaves: list[tuple[Any, Any]]) -> None:
    """Refuse keys other than texts: names of arrays are public, and numbers may be computed."""
    for path, _ in leaves:
        for step in path[1:]:
            if isinstance(step, jax.tree_util.DictKey) and type(step.key) is not str:
                raise TypeError(
                    f"{_name_of(path)}: expected texts as keys of a dict of arrays, got "
                    f"{type(step.key).__name__}. Name the arrays."
                )


def _name_of(path: tuple[Any, ...]) -> str:
    """An argument's name ('argument 0', 'X' for keywords), and the path into it if it is nested."""
    which, *rest = path[1:]
    head = which.key if path[0].idx == 1 else f"argument {which.idx}"
    return f"{head}{jax.tree_util.keystr(tuple(rest))}"
