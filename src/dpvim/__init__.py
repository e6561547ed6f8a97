"""Differentially private variational inference for NumPyro models."""

import importlib
from typing import TYPE_CHECKING, Any

from dpvim.bridge.data import public
from dpvim.fitting import fit, fit_many, fit_nonprivate
from dpvim.inference.families import FAMILIES, family
from dpvim.inference.trace import Trace
from dpvim.inference.variants import VARIANTS
from dpvim.posterior.from_trace import DivergedError
from dpvim.posterior.posterior import Posterior
from dpvim.privacy.plan import PrivacyPlan
from dpvim.privacy.statement import PrivacyStatement
from dpvim.result import Fit, load
from dpvim.serialization import FileError
from dpvim.strategy import FitPlan, plan
from dpvim.svi import DPSVI
from dpvim.types import (
    BudgetExceededError,
    ConvergenceWarning,
    ModelError,
    NotForReleaseWarning,
    NotPrivateError,
    PrivacyWarning,
    Relation,
)

if TYPE_CHECKING:
    from dpvim import audit
    from dpvim.checking import held_out, predictive_check
    from dpvim.ledger.book import Ledger
    from dpvim.ledger.entries import LedgerError
    from dpvim.synthesis.analysis.pooling import analyze
    from dpvim.synthesis.analysis.rubin import combine
    from dpvim.synthesis.databases.connection import open_table
    from dpvim.synthesis.fitting import TwinModel, synthesize
    from dpvim.synthesis.schema import Schema
    from dpvim.synthesis.tables import read_table
    from dpvim.synthesis.twin import Twin
    from dpvim.tuning import plan_tuning, tune

__version__ = "0.1.0"

__all__ = [
    "DPSVI",
    "FAMILIES",
    "VARIANTS",
    "BudgetExceededError",
    "ConvergenceWarning",
    "DivergedError",
    "FileError",
    "Fit",
    "FitPlan",
    "Ledger",
    "LedgerError",
    "ModelError",
    "NotForReleaseWarning",
    "NotPrivateError",
    "Posterior",
    "PrivacyPlan",
    "PrivacyStatement",
    "PrivacyWarning",
    "Relation",
    "Schema",
    "Trace",
    "Twin",
    "TwinModel",
    "analyze",
    "audit",
    "combine",
    "family",
    "fit",
    "fit_many",
    "fit_nonprivate",
    "held_out",
    "load",
    "open_table",
    "plan",
    "plan_tuning",
    "predictive_check",
    "public",
    "read_table",
    "synthesize",
    "tune",
]


# What few need is imported when it is asked for.
_LATER = {
    "Ledger": "ledger.book",
    "LedgerError": "ledger.entries",
    "Schema": "synthesis.schema",
    "Twin": "synthesis.twin",
    "TwinModel": "synthesis.fitting",
    "analyze": "synthesis.analysis.pooling",
    "combine": "synthesis.analysis.rubin",
    "held_out": "checking",
    "open_table": "synthesis.databases.connection",
    "plan_tuning": "tuning",
    "predictive_check": "checking",
    "read_table": "synthesis.tables",
    "synthesize": "synthesis.fitting",
    "tune": "tuning",
}


def __getattr__(name: str) -> Any:
    if name == "audit":
        return importlib.import_module("dpvim.audit")
    if name in _LATER:
        return getattr(importlib.import_module(f"dpvim.{_LATER[name]}"), name)
    raise AttributeError(f"module 'dpvim' has no attribute {name!r}")
