"""The plan of the house: a room imports only rooms that stand before it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dpvim

ROOT = Path(dpvim.__file__).parent
# From the ground up: packages, and modules that lie at the top. Those in one row may import each
# other.
LAYERS = [
    {
        "_validate",
        "types",
        "_compile",
        "_extras",
        "_html",
        "_progress",
        "files",
        "archives",
        "channel",
        "rendezvous",
        "cache",
        "cells",
        "fingerprint",
        "mapped",
    },
    {"privacy"},
    {"inference"},
    {"bridge"},
    {"posterior", "models"},
    {"serialization", "plots", "checkpoints", "ledger"},
    {"options", "prepared", "resumable", "strategy", "svi", "result", "fitting", "jobs"}
    | {"checking", "tuning"},
    {"synthesis"},
    {"experiments", "audit", "serve"},
    {"cli", "__main__"},
    {"__init__"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
HEAVY = {"numpyro", "pandas"}
# What handles records: a posterior is made from releases, so nothing there knows these.
SEES_RECORDS = {
    *("privacy.batches", "privacy.clipping", "privacy.records", "privacy.sampling"),
    *("inference.gradient", "inference.engine", "inference.loop"),
    *("bridge.data", "bridge.model", "bridge.model_runner", "bridge.gather_gradients"),
    "bridge.structured",
}
WITHOUT_JAX = ("plan", "statement", "accounting")


def modules():
    return sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))


def layer_of(path: Path) -> str:
    return path.parts[0] if len(path.parts) > 1 else path.stem


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            base = node.module or ""
            if base == "dpvim":
                found |= {f"dpvim.{alias.name}" for alias in node.names}
            else:
                found.add(base)
    return found


@pytest.mark.parametrize("path", modules(), ids=str)
def test_imports_point_upwards(path):
    rank = RANK[layer_of(path)]
    for name in imports_of(path):
        if name.startswith("dpvim."):
            assert RANK[name.split(".")[1]] <= rank, f"{path} must not import {name}"


@pytest.mark.parametrize("path", modules(), ids=str)
def test_numpyro_and_pandas_begin_with_the_bridge(path):
    if RANK[layer_of(path)] < RANK["bridge"]:
        assert not {name.split(".")[0] for name in imports_of(path)} & HEAVY


@pytest.mark.parametrize("path", [p for p in modules() if p.parts[0] == "posterior"], ids=str)
def test_posteriors_know_nothing_that_handles_records(path):
    known = {name.removeprefix("dpvim.") for name in imports_of(path)}
    assert not known & SEES_RECORDS


def test_what_handles_records_is_there():
    for name in SEES_RECORDS:
        assert (ROOT / (name.replace(".", "/") + ".py")).exists(), name


@pytest.mark.parametrize("path", [p for p in modules() if p.parts[0] == "privacy"], ids=str)
def test_accounting_needs_no_jax(path):
    if any(part.removesuffix(".py") in WITHOUT_JAX for part in path.parts):
        assert "jax" not in imports_of(path)


def test_what_a_fit_does_not_need_is_not_imported():
    heavy = {"arviz", "dp_accounting", "matplotlib", "pandas", "rich", "scipy.stats", "statsmodels"}
    code = f"import sys, dpvim; print(*({heavy} & sys.modules.keys()))"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout.split() == []
