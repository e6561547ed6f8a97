"""Constraints between columns that are publicly known, such as ``age >= years_married``.

The grammar is a small part of Python's, read with `ast` and never run: comparisons (also ``in`` a
list) of columns and constants, ``and``, ``or``, ``not``, and sums and differences of numbers and
dates. A column whose name is no identifier is ``Q('age at entry')``.

>>> from dpvim.synthesis.schema.columns import Count, Integer
>>> columns = (Integer(name="age", lower=0, upper=99), Count(name="years_married", upper=80))
>>> rule = parse_constraint("age >= years_married + 15", columns)
>>> rule.holds({"age": np.array([40, 20]), "years_married": np.array([7, 7])}, {})
array([ True, False])
"""

from __future__ import annotations

import ast
import math
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dpvim.synthesis.schema.columns import LARGEST_REAL, AnyColumn, Date
from dpvim.synthesis.schema.errors import SchemaError, did_you_mean, mismatch
from dpvim.synthesis.schema.levels import Level, Levelled, Ordinal
from dpvim.synthesis.schema.moments import UNITS, read_moment, units_of

_LONGEST = 1000
_SECONDS_OF_A_DAY = 86_400.0
_EQUALITY: dict[type, Callable[[Any, Any], Any]] = {ast.Eq: operator.eq, ast.NotEq: operator.ne}
_ORDER: dict[type, Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_SUMS: dict[type, Callable[[Any, Any], Any]] = {ast.Add: operator.add, ast.Sub: operator.sub}
_GRAMMAR = (
    "Compare columns and constants with ==, !=, <, <=, >, >= or in, add and subtract numbers and "
    "dates, and join comparisons by and, or, not."
)


@dataclass(frozen=True)
class Constraint:
    """A rule that every row of a twin obeys.

    Attributes:
        text: As it is declared.
        names: The columns that it is about.
    """

    text: str
    names: tuple[str, ...]
    _tree: ast.expr
    _columns: Mapping[str, AnyColumn]

    def holds(
        self, values: Mapping[str, np.ndarray], missing: Mapping[str, np.ndarray]
    ) -> np.ndarray:
        """Mark the rows that obey. A row in which one of the columns is missing does.

        Args:
            values: By column, indices of levels, numbers, or units of a date from the lower bound.
            missing: By nullable column, where values are missing.
        """
        found = _Rows(self._columns, values).condition(self._tree)
        unknown = [missing[name] for name in self.names if name in missing]
        rows = np.broadcast_to(found, np.shape(values[self.names[0]]))
        return np.logical_or.reduce([rows, *unknown])


def parse_constraint(text: str, columns: Sequence[AnyColumn]) -> Constraint:
    """Read a constraint on these columns, or say what is wrong with it."""
    if len(text) > _LONGEST:
        raise _error(f"at most {_LONGEST} characters", len(text), "Write several constraints.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on escapes in texts
            tree = ast.parse(text.strip(), mode="eval").body
        known = {column.name: column for column in columns}
        rows = _Rows(known, {name: np.zeros(0, int) for name in known})
        rows.condition(tree)  # a table without rows: what is wrong is wrong for all
    except SchemaError as error:
        raise SchemaError(f"constraints: {text!r}: {error}") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _error("a condition such as 'age >= years_married'", text, _GRAMMAR) from None
    if not rows.seen:
        raise _error("a condition on columns", text, "Name at least one column.")
    return Constraint(text, tuple(rows.seen), tree, known)


class _Term(NamedTuple):
    """One side of a comparison.

    Attributes:
        kind: ``number``, ``date`` or ``time`` (both in seconds), ``level`` (its index), or
            ``constant`` (a text or a boolean, whose meaning the other side gives).
        value: An array with an entry for each row, or a constant.
        column: Of a level or a date, what it is declared as.
    """

    kind: str
    value: Any
    column: AnyColumn | None = None


class _Rows:
    """Evaluates expressions on rows; on none, it checks them."""

    def __init__(self, columns: Mapping[str, AnyColumn], values: Mapping[str, np.ndarray]) -> None:
        self._columns, self._values = columns, values
        self.seen: dict[str, None] = {}

    def condition(self, node: ast.expr) -> np.ndarray:
        """Mark the rows where a condition is true."""
        if isinstance(node, ast.BoolOp):
            join = np.logical_and if isinstance(node.op, ast.And) else np.logical_or
            return np.asarray(join.reduce(np.broadcast_arrays(*map(self.condition, node.values))))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return np.logical_not(self.condition(node.operand))
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            links = zip(sides[:-1], node.ops, sides[1:], strict=True)
            found = [self._comparison(*link) for link in links]
            return np.asarray(np.logical_and.reduce(np.broadcast_arrays(*found)))
        raise _expected("a comparison", node)

    def _comparison(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> np.ndarray:
        if isinstance(op, ast.In | ast.NotIn):
            if not isinstance(right, ast.List | ast.Tuple) or not right.elts:
                raise _expected("a list of constants after in, such as ['a', 'b']", right)
            found = [self._comparison(left, ast.Eq(), each) for each in right.elts]
            among = np.logical_or.reduce(np.broadcast_arrays(*found))
            return np.asarray(among if isinstance(op, ast.In) else np.logical_not(among))
        compare = (_EQUALITY | _ORDER).get(type(op))
        if compare is None:
            raise _expected("==, !=, <, <=, >, >= or in", left)
        first, second = _alike(self._term(left), self._term(right), left)
        if type(op) in _ORDER and first.kind == "level":
            unordered = [t.column for t in (first, second) if not isinstance(t.column, Ordinal)]
            if any(column is not None for column in unordered):
                raise _expected("== or != for levels without an order", left)
        return np.asarray(compare(first.value, second.value))

    def _term(self, node: ast.expr) -> _Term:
        if isinstance(node, ast.Constant):
            return _constant(node)
        if isinstance(node, ast.Name) and node.id in ("true", "false") and not self._is(node.id):
            return _Term("constant", node.id == "true")
        if isinstance(node, ast.Name):
            return self._column(node.id)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Q" and not node.keywords:
            names = [each.value for each in node.args if isinstance(each, ast.Constant)]
            if len(node.args) == len(names) == 1 and isinstance(names[0], str):
                return self._column(names[0])
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            term = self._term(node.operand)
            if term.kind in ("number", "time"):
                return _Term(term.kind, -term.value)
        if isinstance(node, ast.BinOp) and type(node.op) in _SUMS:
            return _sum(self._term(node.left), node, self._term(node.right))
        raise _expected("a column, a constant, or a sum or difference of these", node)

    def _is(self, name: str) -> bool:
        return name in self._columns

    def _column(self, name: str) -> _Term:
        if not self._is(name):
            hint = did_you_mean(name, self._columns) or "Columns are without quotes, texts in them."
            raise mismatch("a column", "one that is declared", name, hint)
        self.seen[name] = None
        column, values = self._columns[name], np.asarray(self._values[name])
        if isinstance(column, Levelled):
            if column.level_type is int:
                return _Term("number", np.array(column.levels, float)[values])
            return _Term("level", values, column)
        if isinstance(column, Date):
            return _Term("date", _seconds(values.astype(np.int64) + column.origin, column), column)
        return _Term("number", values.astype(float))


def _constant(node: ast.Constant) -> _Term:
    value = node.value
    if isinstance(value, str | bool):
        return _Term("constant", value)
    if isinstance(value, int | float) and abs(value) <= LARGEST_REAL and not math.isnan(value):
        return _Term("number", float(value))
    raise _expected("a number, a text, true or false", node)


def _alike(first: _Term, second: _Term, node: ast.expr) -> tuple[_Term, _Term]:
    """Both sides of a comparison in the same units."""
    kinds = {first.kind, second.kind}
    if first.kind == "constant" and second.kind != "constant":
        second, first = _alike(second, first, node)
        return first, second
    if second.kind == "constant" and first.kind == "level":
        assert isinstance(first.column, Levelled)
        return first, _Term("level", _code(second.value, first.column))
    if second.kind == "constant" and first.kind == "date":
        assert isinstance(first.column, Date)
        return first, _Term("date", _date(second.value, first.column))
    if kinds == {"number", "time"}:
        return _in_seconds(first), _in_seconds(second)
    if kinds == {"level"}:
        levels = [t.column.levels for t in (first, second) if isinstance(t.column, Levelled)]
        if len(set(levels)) > 1:
            raise _expected("columns with the same levels on both sides", node)
        return first, second
    if len(kinds) > 1 or kinds == {"constant"}:
        raise _expected(f"sides that can be compared, not {first.kind} and {second.kind}", node)
    return first, second


def _sum(first: _Term, node: ast.BinOp, second: _Term) -> _Term:
    """Numbers beside dates are days."""
    apply, kinds = _SUMS[type(node.op)], (first.kind, second.kind)
    if kinds == ("number", "number"):
        return _Term("number", apply(first.value, second.value))
    if kinds == ("date", "date") and isinstance(node.op, ast.Sub):
        return _Term("time", first.value - second.value)
    if kinds == ("number", "date") and isinstance(node.op, ast.Add):
        first, second = second, first
    if first.kind in ("date", "time") and second.kind in ("number", "time"):
        total = apply(first.value, _in_seconds(second).value)
        return _Term(first.kind, total, first.column)
    if kinds == ("number", "time"):
        return _Term("time", apply(_in_seconds(first).value, second.value))
    raise _expected("numbers and dates in sums and differences", node)


def _in_seconds(term: _Term) -> _Term:
    return _Term("time", term.value * _SECONDS_OF_A_DAY) if term.kind == "number" else term


def _code(value: Level, column: Levelled) -> int:
    if type(value) is not column.level_type or value not in column.levels:
        hint = did_you_mean(value, [*map(str, column.levels)]) or "Texts need quotes."
        raise mismatch(f"a level of {column.name!r}", "one that is declared", value, hint)
    return column.levels.index(value)


def _date(value: object, column: Date) -> float:
    moment = read_moment(value, column.resolution) if isinstance(value, str) else None
    if moment is None:
        expected = f"a {column.resolution} in ISO 8601"
        raise mismatch(f"a date beside {column.name!r}", expected, value, "Write '2020-01-31'.")
    return float(_seconds(np.asarray(units_of(moment, column.resolution)), column))


def _seconds(units: np.ndarray, column: Date) -> np.ndarray:
    """Seconds from 1970; whole numbers, which comparisons need."""
    moments = units.astype(f"datetime64[{UNITS[column.resolution]}]")
    return moments.astype("datetime64[s]").astype(np.int64).astype(float)


def _expected(what: str, node: ast.AST) -> SchemaError:
    return SchemaError(f"expected {what}, got {ast.unparse(node)!r}. {_GRAMMAR}")


def _error(expected: str, given: object, hint: str) -> SchemaError:
    return mismatch("constraints", expected, given, hint)
