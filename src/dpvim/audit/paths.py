"""Code paths from records to a clipped sum that fits may take, each with rows to attack it.

`gradients` is the general one with records that are their own gradients: whoever writes the records
writes the gradients. The others are what users run: NumPyro models by autodiff and by look-ups,
with several rows a person, and the ready-made models, which bring clipped sums of their own.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.tree_util import PyTreeDef

from dpvim.audit import models
from dpvim.audit.canaries import NOT_FINITE, Records, concat, extreme_rows, take
from dpvim.audit.models import Case
from dpvim.bridge.data import ModelInput, prepare
from dpvim.bridge.model import BridgedModel, bridge
from dpvim.bridge.persons import GROUP_BY, as_persons
from dpvim.inference.gradient import Problem
from dpvim.privacy.clipping import Likelihood
from dpvim.privacy.norm_counts import COUNT_SHARE, NUM_NORM_BINS
from dpvim.privacy.persons import RowsByPerson
from dpvim.types import Latent

_DIM = 4
_CLIP_NORM = 0.37
CANARY, OPPOSITE = "canary", "opposite"


class Adversary(NamedTuple):
    """A choice of canary and of the other rows, by name; see `CodePath.row_number`.

    Attributes:
        name: What it tries.
        canary: Its rows, one step after the other.
        opposite: What replaces them if a record is replaced.
        others: Rows that are there in both worlds.
        directions: Rows along whose shares to score the canary and its opposite; their own if None.
    """

    name: str
    canary: tuple[str, ...]
    opposite: tuple[str, ...]
    others: tuple[str, ...]
    directions: tuple[str, str] | None = None


class FitCase(NamedTuple):
    """A model, where a fit of it starts, and rows that are there with the canary and without."""

    model: Callable[..., Any]
    bridged: BridgedModel
    structure: PyTreeDef
    loc: np.ndarray
    others: Records
    canary: Records
    max_rows_per_person: int | None = None

    def arguments(self, records: Records) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of the model for these records: rows, and of persons whose they are."""
        if self.max_rows_per_person is None:
            return jax.tree.unflatten(self.structure, records), {}
        *arrays, is_used = records
        rows = [leaf[is_used] for leaf in arrays]
        return jax.tree.unflatten(self.structure, rows), {GROUP_BY: np.nonzero(is_used)[0]}


class CodePath(NamedTuple):
    """One way to a clipped sum.

    Attributes:
        name: What it is called in `PATHS`.
        problem: What is fitted.
        by_record: The same with a gradient for each record, which a variant that whitens takes.
        loc: Where the means start.
        scale: Standard deviation that games start from; small where the gradients depend on it.
        clip_norm: What rows are clipped to.
        rows: Extreme rows, then ordinary ones.
        names: Those of the extreme rows, in order.
        not_finite: Names of rows that must count for nothing.
        adversaries: Who plays in games.
        fit: What whole fits are made of.
        max_rows_per_person: If records are persons, room for so many rows of each.
    """

    name: str
    problem: Problem
    by_record: Problem
    loc: np.ndarray
    scale: float
    clip_norm: float
    rows: Records
    names: tuple[str, ...]
    not_finite: tuple[str, ...]
    adversaries: tuple[Adversary, ...]
    fit: FitCase
    max_rows_per_person: int | None = None

    def row_number(self, name: str) -> int:
        """Number of a row by its name; ordinary ones are called "0", "1" and so on."""
        return self.names.index(name) if name in self.names else len(self.names) + int(name)

    @property
    def ordinary(self) -> Records:
        return take(self.rows, slice(len(self.names), None))


def _from_case(name: str, make: Callable[[], Case]) -> CodePath:
    """A path through a NumPyro model, as `dpvim.fit` sets it up."""
    case = make()
    ordinary = jax.tree.leaves(case.ordinary)
    inputs, structure = _inputs(case)
    bridged = bridge(case.model, inputs)
    canary, opposite = jax.tree.leaves(case.canary), jax.tree.leaves(case.opposite)
    # The first row is what padding is filled with.
    named = {CANARY: canary, OPPOSITE: opposite}
    named |= {name: jax.tree.leaves(args) for name, args in case.extra.items()}
    named |= extreme_rows(canary)
    loc = np.asarray(bridged.space.unconstrain(case.start))
    fit = FitCase(
        case.model,
        bridged,
        structure,
        loc,
        take(ordinary, range(5)),
        canary,
        case.max_rows_per_person,
    )
    return CodePath(
        name=name,
        problem=bridged.problem,
        by_record=bridged.by_record,
        loc=loc,
        scale=0.05,
        clip_norm=case.clip_norm,
        rows=concat([*named.values(), ordinary]),
        names=tuple(named),
        not_finite=(*NOT_FINITE, *(name for name in case.extra if "infinite" in name)),
        adversaries=(
            Adversary("long gradient", (CANARY,), (OPPOSITE,), ("0",)),
            Adversary("overflow", ("-1e25",), (OPPOSITE,), ("0",), (CANARY, OPPOSITE)),
            Adversary("nan", ("nan",), (OPPOSITE,), ("0",), (CANARY, OPPOSITE)),
        ),
        fit=fit,
        max_rows_per_person=case.max_rows_per_person,
    )


def _inputs(case: Case) -> tuple[ModelInput, PyTreeDef]:
    """A case's ordinary rows as the library has them, and the form of the model's arguments."""
    if case.max_rows_per_person is None:
        return prepare(case.ordinary, {}), jax.tree.structure(case.ordinary)
    *arguments, is_used = case.ordinary
    rows = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), tuple(arguments))
    arranged = RowsByPerson(np.arange(is_used.size).reshape(is_used.shape), is_used)
    return as_persons(prepare(rows, {}), arranged), jax.tree.structure(rows)


def _gradients() -> CodePath:
    """Likelihood exp(theta . x) of a record x: its gradient is the record itself."""

    def log_prob(latent: Latent, record: Any) -> Any:
        return jnp.dot(latent, record[0])

    problem = Problem(_DIM, Likelihood.from_log_prob(log_prob), lambda latent: jnp.zeros(()))
    named, ordinary = _gradient_rows()
    return CodePath(
        name="gradients",
        problem=problem,
        by_record=problem,
        loc=np.zeros(_DIM, np.float32),
        scale=1.0,
        clip_norm=_CLIP_NORM,
        rows=[np.concatenate([*(row[None] for row in named.values()), ordinary])],
        names=tuple(named),
        not_finite=NOT_FINITE,
        adversaries=_gradient_adversaries(),
        fit=_fit_of_means(),
    )


def _gradient_rows() -> tuple[dict[str, np.ndarray], np.ndarray]:
    axis, contrast = np.zeros((2, _DIM), np.float32)
    axis[0] = _CLIP_NORM
    contrast[:2] = _CLIP_NORM / np.sqrt(2), -_CLIP_NORM / np.sqrt(2)
    spread = np.full(_DIM, _CLIP_NORM / np.sqrt(_DIM), np.float32)
    unit = axis / _CLIP_NORM
    directions = {
        "far above the clip": 100 * spread,
        "at the clip": spread,
        CANARY: axis,
        "contrast": contrast,
        "just below the clip": np.float32(0.999) * axis,
        "100 axis": 100 * axis,
        "1e19 axis": unit * np.float32(1e19),
        "1e25 axis": unit * np.float32(1e25),
        "3e38 axis": unit * np.float32(3e38),
    }
    rows = directions | {f"-{name}": -row for name, row in directions.items()}
    rows[OPPOSITE] = -axis
    rows |= {name: row[0][0] for name, row in extreme_rows([axis[None]]).items()}
    random = np.random.default_rng(0).normal(size=(24, _DIM)).astype(np.float32)
    return rows, random * np.float32(_CLIP_NORM)


def _gradient_adversaries() -> tuple[Adversary, ...]:
    """From the plain canary to rows that break careless arithmetic."""
    alone, crowd = ("zero",), (CANARY,) * 8
    along = (CANARY, OPPOSITE)

    def one(
        name: str,
        row: str,
        others: tuple[str, ...] = alone,
        directions: tuple[str, str] | None = None,
    ) -> Adversary:
        return Adversary(name, (row,), (f"-{row}",), others, directions)

    return (
        one("along one axis", CANARY),
        Adversary("alternating sign", along, along[::-1], alone),
        one("contrast", "contrast"),
        one("just below the clip", "just below the clip"),
        one("against the crowd", "-100 axis", crowd, along[::-1])._replace(opposite=("100 axis",)),
        Adversary("zero gradient", ("zero",), ("zero",), crowd, along),
        one("overflow", "1e25 axis", alone, along),
        one("inf", "inf", alone, along),
        Adversary("nan", ("nan",), ("nan",), alone, along),
    )


def _fit_of_means() -> FitCase:
    """A model whose gradients are, but for a constant, the records themselves."""

    def model(x: Any) -> None:
        mean = numpyro.sample("mean", dist.Normal(0, 1).expand([2]).to_event(1))
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("x", dist.Normal(mean, 1).to_event(1), obs=x)

    others = (np.zeros((5, 2), np.float32),)
    canary = [np.array([[1e4, 0.0]], np.float32)]
    bridged = bridge(model, prepare(others, {}))
    loc = np.zeros(2, np.float32)
    return FitCase(model, bridged, jax.tree.structure(others), loc, list(others), canary)


_CASES = {
    "autodiff": models.plain,
    "persons": models.persons,
    "look_ups": models.table,
    "logistic": models.logistic,
    "poisson": models.poisson,
    "linear": models.linear,
    "mixture": models.mixture,
}
PATHS: dict[str, Callable[[], CodePath]] = {
    "gradients": _gradients,
    **{name: functools.partial(_from_case, name, make) for name, make in _CASES.items()},
}


class ReferenceGradients:
    """Per-record gradients by autodiff in double precision, to compare shares with.

    It shares no code with the clipped sums under attack.
    """

    def __init__(self, problem: Problem) -> None:
        one = jax.grad(problem.likelihood.log_prob)
        self._gradients = jax.jit(jax.vmap(jax.vmap(one, (None, 0)), (0, None)))

    def at(self, latents: np.ndarray, records: Records) -> np.ndarray:
        """Gradients of the records at several latents, shape [latents, rows, d]."""
        with jax.enable_x64(True):
            wide = [leaf.astype(float) if leaf.dtype.kind == "f" else leaf for leaf in records]
            return np.asarray(self._traced(jnp.asarray(latents, float), wide))

    def _traced(self, *given: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that values are outside of supports
            return self._gradients(*given)


def clipped(rows: np.ndarray, bound: float) -> np.ndarray:
    """Rows (along the last axis) shortened to the bound."""
    with np.errstate(invalid="ignore"):  # what is not finite ends as NaN
        norms = np.linalg.norm(rows, axis=-1, keepdims=True)
        return rows * np.minimum(1.0, bound / np.maximum(norms, 1e-300))


def clipped_and_counted(rows: np.ndarray, bound: float) -> np.ndarray:
    """Rows shortened to their part of the bound, each with its count: octaves from an eighth of
    the bound to sixteen times of it, and what is below."""
    lengths = np.linalg.norm(rows, axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        octave = np.floor(np.log2(lengths / bound))
    number = np.nan_to_num(np.clip(octave + 4, 0, NUM_NORM_BINS - 1)).astype(int)
    counts = np.eye(NUM_NORM_BINS)[number] * np.isfinite(lengths)[..., None]
    parts = (
        np.sqrt(1 - COUNT_SHARE) * clipped(rows, bound),
        np.sqrt(COUNT_SHARE) * bound * counts,
    )
    return np.concatenate(parts, axis=-1)
