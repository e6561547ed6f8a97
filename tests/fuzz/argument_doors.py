"""Doors for arguments: public functions, called with what nobody should call them with.

A call that is refused has booked nothing; a call that is not refused gets as far as its first
step, where it is stopped.
"""

from __future__ import annotations

import contextlib
import decimal
import fractions
import functools
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pandas as pd
import whole_files
from fuzz_harness import Harness, expect
from hypothesis import strategies as st

import dpvim
import dpvim.fitting
import dpvim.tuning
from dpvim.ledger.book import Ledger
from dpvim.privacy.counts import CountMechanism
from dpvim.privacy.plan import PrivacyPlan
from dpvim.synthesis.analysis.pooling import analyze
from dpvim.synthesis.analysis.rubin import combine
from dpvim.synthesis.fitting import synthesize
from dpvim.synthesis.marginals import fit as marginal_fit
from dpvim.synthesis.schema import Schema
from dpvim.synthesis.tables import read_table
from dpvim.synthesis.twin import Twin

_SCRATCH = Path(tempfile.mkdtemp(prefix="dpvim-fuzz-"))

ARGUMENTS: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 0.5, -0.5, 1e-300, 1e308, 10**400, -(10**30)),
    *(math.nan, math.inf, -math.inf, 1j, fractions.Fraction(1, 3), decimal.Decimal("0.1")),
    *("", "a", "1", "\x00", "\ud800", "x" * 5000, b"", b"a", Path("nowhere"), object(), int),
    *([], (), {}, set(), [1, [2, 3]], {"a": 1}, {1: 2}, [None], range(3), lambda: None),
    *(np.float32(0.5), np.int64(3), np.array([]), np.array(0.5), np.array([math.nan, 1.0])),
    *(np.array(["a", "b"]), np.array([1, "a", None], object), np.array([1 + 1j]), np.zeros((0, 3))),
    *(np.zeros((2, 0)), np.array(["2020-01-01"], "M8[D]"), np.ma.masked_array([1.0], [True])),
    *(pd.DataFrame(), pd.DataFrame({"a": [1], "b": ["x"]}), pd.Series([1.0, None]), pd.NA),
)
arguments = st.sampled_from(range(len(ARGUMENTS))).map(lambda i: ARGUMENTS[i])


@st.composite
def faults(draw: Any, base: dict[str, Any], optional: tuple[str, ...] = ()) -> dict[str, Any]:
    """Arguments of which one or two are hostile."""
    chosen = dict(base)
    for _ in range(draw(st.sampled_from([1, 1, 1, 2]))):
        chosen[draw(st.sampled_from([*base, *optional]))] = draw(arguments)
    return chosen


class ReachedError(BaseException):
    """The call passed all checks: from here on it would compute."""


def _reach(*args: Any, **kwargs: Any) -> Any:
    raise ReachedError


@contextlib.contextmanager
def _stopped_at_first_step() -> Iterator[None]:
    here = _SCRATCH / "here"  # for folders that a checkpoint makes, which has any name
    shutil.rmtree(here, ignore_errors=True)
    here.mkdir()
    with (
        contextlib.chdir(here),
        mock.patch.object(dpvim.fitting, "in_parallel", _reach),
        mock.patch.object(marginal_fit, "release", _reach),
        mock.patch.object(dpvim.tuning.Trials, "run", _reach),
        mock.patch.object(CountMechanism, "release", _reach),
        contextlib.suppress(ReachedError),
    ):
        yield


@contextlib.contextmanager
def _ledger_watched() -> Iterator[Path]:
    """A ledger; a call that fails must leave every byte of it as it was."""
    folder = _SCRATCH / "ledger"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    path = folder / "a.ledger"
    for name, content in _wide_ledger().items():
        (folder / name).write_bytes(content)
    before = path.read_bytes()
    try:
        yield path
    except Exception:
        expect(path.read_bytes() == before, "a call that was refused changed the ledger")
        raise


def _wide_ledger(cache: dict[str, dict[str, bytes]] = {}) -> dict[str, bytes]:  # noqa: B006
    if not cache:
        with tempfile.TemporaryDirectory() as folder:
            Ledger.create(Path(folder) / "a.ledger", name="people", epsilon=50.0, delta=1e-5)
            cache["files"] = {f.name: f.read_bytes() for f in Path(folder).iterdir()}
    return cache["files"]


# -- fits -----------------------------------------------------------------------------------------

_ROWS = np.linspace(-1.0, 1.0, 40, dtype=np.float32)


def _model(x: Any) -> None:
    mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
    with numpyro.plate("records", len(x)):
        numpyro.sample("x", dist.Normal(mean, 1.0), obs=x)


_FIT = {"model": _model, "x": _ROWS, "epsilon": 1.0, "delta": 1e-5, "num_steps": 8}
_FIT_OPTIONS = (
    *("noise_multiplier", "clip_norm", "num_examples", "relation", "sampling_prob", "num_epochs"),
    *("variant", "family", "optimizer", "learning_rate", "init_scale", "init_params", "seed"),
    *("scale_transform", "probe_width", "trace_every", "purpose", "checkpoint", "group_by"),
    *("max_rows_per_person", "ledger", "progress", "no_such_option"),
)


def _fit(case: dict[str, Any]) -> None:
    options = dict(case)
    with _ledger_watched() as path, _stopped_at_first_step():
        model, rows = options.pop("model"), options.pop("x")
        dpvim.fit(model, rows, **{"ledger": path, **options})


def _plan(case: dict[str, Any]) -> None:
    options = dict(case)
    found = dpvim.plan(options.pop("model"), options.pop("x"), **options)
    expect(found.epsilon > 0, "it costs nothing")
    str(found)


def _fit_many(case: dict[str, Any]) -> None:
    options = dict(case)
    with _ledger_watched() as path, _stopped_at_first_step():
        model, rows = options.pop("model"), options.pop("x")
        dpvim.fit_many(model, rows, **{"ledger": path, **options})


def _tune(case: dict[str, Any]) -> None:
    options = dict(case)
    with _ledger_watched() as path, _stopped_at_first_step():
        candidates, rows = options.pop("candidates"), options.pop("x")
        dpvim.tune(candidates, rows, **{"ledger": path, **options})


def _fit_nonprivate(case: dict[str, Any]) -> None:
    options = dict(case)
    with _stopped_at_first_step():
        dpvim.fit_nonprivate(options.pop("model"), options.pop("x"), **options)


def _check_fit(case: dict[str, Any], check: Callable[..., Any]) -> None:
    options = dict(case)
    if options["fit"] is _FITTED:
        options["fit"] = _fitted()
    with _ledger_watched() as path, _stopped_at_first_step():
        fit, rows = options.pop("fit"), options.pop("x")
        check(fit, rows, **{"ledger": path, **options})


def _held_out(case: dict[str, Any]) -> None:
    _check_fit(case, dpvim.held_out)


def _predictive_check(case: dict[str, Any]) -> None:
    _check_fit(case, dpvim.predictive_check)


def _plan_tuning(case: dict[str, Any]) -> None:
    options = dict(case)
    found = dpvim.plan_tuning(options.pop("candidates"), options.pop("x"), **options)
    expect(0 < found.epsilon <= options["epsilon"], f"it costs {found.epsilon}")


def _dpsvi(case: dict[str, Any]) -> None:
    options = dict(case)
    if "start" in options:
        options["init_params"] = {"mean": options.pop("start")}
    rows, key, init_params = (options.pop(name) for name in ("x", "key", "init_params"))
    svi = dpvim.DPSVI(options.pop("model"), options.pop("family"), **options)
    svi.init(key, rows, init_params=init_params)


_DPSVI = {
    "model": _model,
    "family": "mean_field",
    "optimizer": optax.sgd(0.01),
    "plan": PrivacyPlan(
        num_examples=40, sampling_prob=1.0, num_steps=3, clip_norm=1.0, noise_multiplier=9.0
    ),
    "x": _ROWS,
    "key": jax.random.key(0),
    "init_params": None,
}


def _use_posterior(case: tuple[str, Any]) -> None:
    """One argument of one method of what a fit or a twin gives."""
    name, value = case
    posterior, twin = _fitted().posterior, _twin()
    calls: dict[str, Callable[[], Any]] = {
        "sample": lambda: posterior.sample(value),
        "sample, seed": lambda: posterior.sample(2, seed=value),
        "log_prob": lambda: posterior.log_prob(value),
        "interval": lambda: posterior.interval(value),
        "summary": lambda: posterior.summary(value),
        "posterior_from": lambda: _fitted().posterior_from(value),
        "posterior_at": lambda: _fitted().posterior_at(value),
        "resume": lambda: _fitted().resume(value),
        "twin": lambda: twin.sample(value),
        "twin, seed": lambda: twin.sample(2, seed=value),
        "closest": lambda: twin.closest(value),
        "broken_shares": lambda: twin.broken_shares(value),
    }
    calls[name]()


_METHODS = (
    *("sample", "sample, seed", "log_prob", "interval", "summary", "posterior_from"),
    *("posterior_at", "resume", "twin", "twin, seed", "closest", "broken_shares"),
)


@functools.cache
def _twin() -> Twin:
    options = {"epsilon": 1.0, "components": 8, "progress": False}
    return synthesize(whole_files.table(), whole_files.schema(), **options)


_FITTED = "a fit"


@functools.cache
def _fitted() -> dpvim.Fit:
    options = {**_FIT, "num_steps": 300, "learning_rate": 0.01, "progress": False}
    return dpvim.fit(options.pop("model"), options.pop("x"), **options)


_TUNE = {"candidates": {"one": _model, "other": _model}, "x": _ROWS, "epsilon": 1.0, "delta": 1e-5}


# -- plans and ledgers ----------------------------------------------------------------------------

_PLAN = {"num_examples": 100, "sampling_prob": 1.0, "num_steps": 3, "clip_norm": 1.0}


def _privacy_plan(case: dict[str, Any]) -> None:
    options = dict(case)
    budget = {name: options.pop(name) for name in ("epsilon", "delta", "beside")}
    plan = PrivacyPlan(**options)
    plan.max_batch_size, repr(plan)
    calibrated = plan.calibrate(**budget)
    cost = calibrated.epsilon(budget["delta"])
    expect(0 < cost <= budget["epsilon"], f"it costs {cost}")
    expect(calibrated.noise_stddev > 0, "it has no noise")


def _create(case: dict[str, Any]) -> None:
    folder = _SCRATCH / "new"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    options = {"path": folder / "a.ledger", **case}
    try:
        with contextlib.chdir(folder):
            ledger = Ledger.create(options.pop("path"), **options)
            ledger = Ledger(ledger.path.absolute())
    except Exception:
        expect(not any(folder.iterdir()), "a ledger that was refused left files")
        raise
    expect(ledger.left() > 0 and ledger.spent() == 0, "it does not begin with its budget")


def _book(case: dict[str, Any]) -> None:
    options = dict(case)
    steps = options.pop("settle")
    with _ledger_watched() as path:
        booking = Ledger(path).book(options.pop("plan"), **options)
        before = path.read_bytes()
        try:
            booking.settle(steps)
        except Exception:
            expect(path.read_bytes() == before, "a settlement that was refused was noted")
            path.write_bytes(_wide_ledger()["a.ledger"])
            raise
        (release,) = Ledger(path).releases
        expect(release.steps == steps, "it is settled at another number")


# -- twins and tables -----------------------------------------------------------------------------


def _synthesize(case: dict[str, Any]) -> None:
    options = dict(case)
    with _ledger_watched() as path, _stopped_at_first_step():
        frame, schema = options.pop("frame"), options.pop("schema")
        synthesize(frame, schema, **{"ledger": path, **options})


_SYNTHESIZE_OPTIONS = (
    *("delta", "target", "engine", "components", "num_examples", "group_by", "target_model"),
    *("numbers", "model", "clip_norm", "learning_rate", "purpose", "relation", "seed", "ledger"),
    *("checkpoint", "no_such_option"),
)


def _two_tables() -> list[pd.DataFrame]:
    rng = np.random.default_rng(0)
    return [pd.DataFrame({"y": rng.normal(size=9), "x": np.arange(9.0)}) for _ in range(3)]


_FORMULAS = (
    *("y ~ x", "y ~", "~ x", "~", "y ~ z", "y + x ~ x", "y ~ x +", "y ~ 0", "y ~ x*x*x", "a~b~c"),
    *("y ~ __import__('os').getcwd()", "y ~ Q(", "y ~ " + "(" * 300 + "x" + ")" * 300, "y ~ \x00"),
    *("y ~ C(x)", "I(y > 0) ~ x", "y ~ np.log(x)", "y ~ x**9999", "y ~ 1/0", "y ~ x[0]"),
)


def _analyze(case: dict[str, Any]) -> None:
    options = dict(case)
    found = analyze(options.pop("datasets"), options.pop("formula"), **{"workers": 1, **options})
    str(found)
    expect(np.isfinite(found.combined.estimate).all(), "it has no estimate")


def _combine(case: dict[str, Any]) -> None:
    options = dict(case)
    found = combine(options.pop("estimates"), options.pop("covariances"), **options)
    str(found)
    expect((found.lower <= found.upper).all(), "an interval is none")


# -- small ones -----------------------------------------------------------------------------------

_READERS = {
    "load": dpvim.load,
    "read_table": read_table,
    "open_table": dpvim.open_table,
    "Twin.load": Twin.load,
    "Schema.load": Schema.load,
    "Ledger": Ledger,
    "family": dpvim.family,
    "public": dpvim.public,
    "from_dict": Schema.from_dict,
}
_PATHS = (
    *("/dev/zero", "/", ".", "/dev/null", "a" * 5000 + ".csv", "/x/" * 2000, "\x00.csv", "a.csv"),
)


def _read(case: tuple[str, Any]) -> None:
    name, value = case
    _READERS[name](value)


def harnesses() -> list[Harness]:
    """All doors for arguments."""
    formula = st.sampled_from(_FORMULAS) | arguments
    tables = _two_tables()
    spec = {"datasets": tables, "formula": "y ~ x"}
    analyses = faults(spec, ("family", "num_rows", "levels", "dates", "missing", "level"))
    formulas = formula.map(lambda each: {**spec, "formula": each})
    pooled = {"estimates": [[0.9], [1.4], [0.6]], "covariances": [[0.02], [0.03], [0.02]]}
    budget = {**_PLAN, "epsilon": 1.0, "delta": 1e-5, "beside": ()}
    created = {"name": "people", "epsilon": 1.0, "delta": 1e-5}
    booked = {"plan": whole_files.PLAN, "purpose": "a look", "settle": 3}
    made = {"frame": whole_files.table(), "schema": whole_files.schema(), "epsilon": 1.0}
    each = {**_FIT, "each": [{"epsilon": 1.0}, {"epsilon": 2.0}]}
    del each["epsilon"]
    scored = {"fit": _FITTED, "x": _ROWS, "epsilon": 1.0, "delta": 1e-5}
    without = {"model": _model, "x": _ROWS, "num_steps": 8}
    of_dpsvi = ("variant", "scale_transform", "init_scale", "probe_width", "seed", "start")
    of_checks = ("relation", "num_examples", "seed", "ledger", "purpose", "group_by", "no_such")
    readers = st.tuples(st.sampled_from([*_READERS]), arguments | st.sampled_from(_PATHS))
    return [
        Harness("readers", readers, _read, 2),
        Harness("privacy plan", faults(budget, ("relation", "noise_multiplier")), _privacy_plan),
        Harness("ledger create", faults(created, ("path", "relation", "unit", "data")), _create),
        Harness("ledger book", faults(booked, ("data", "delta", "runs", "mechanism")), _book),
        Harness("analyze", analyses | formulas, _analyze, 0.5),
        Harness("combine", faults(pooled, ("num_rows", "names", "level")), _combine),
        Harness("synthesize", faults(made, _SYNTHESIZE_OPTIONS), _synthesize, 0.5),
        Harness("held out", faults(scored, ("against", "num_draws", *of_checks)), _held_out, 0.2),
        Harness(
            "predictive check",
            faults(scored, ("statistics", *of_checks)),
            _predictive_check,
            0.2,
        ),
        Harness("plan tuning", faults(_TUNE, ("method", "chance", "relation")), _plan_tuning, 0.2),
        Harness("dpsvi", faults(_DPSVI, of_dpsvi), _dpsvi, 0.2),
        Harness("posterior", st.tuples(st.sampled_from(_METHODS), arguments), _use_posterior, 0.5),
        Harness("fit nonprivate", faults(without, _FIT_OPTIONS), _fit_nonprivate, 0.2),
        Harness("plan", faults(_FIT, _FIT_OPTIONS), _plan, 0.2),
        Harness("fit", faults(_FIT, _FIT_OPTIONS), _fit, 0.2),
        Harness("fit many", faults(each, ("on", *_FIT_OPTIONS)), _fit_many, 0.2),
        Harness("tune", faults(_TUNE, ("method", "chance", "num_steps", "on")), _tune, 0.2),
    ]


def remove_scratch() -> None:
    """Leave nothing behind."""
    shutil.rmtree(_SCRATCH, ignore_errors=True)
    _SCRATCH.mkdir()
