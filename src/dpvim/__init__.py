"""Differentially private variational inference for NumPyro models."""

import importlib
from typing import TYPE_CHECKING, Any

from dpvim.estimates import DivergedError
from dpvim.family import FAMILIES
from dpvim.fitting import fit, fit_nonprivate
from dpvim.plan import PrivacyPlan
from dpvim.posterior import Posterior
from dpvim.result import Fit, load
from dpvim.saving import FileError
from dpvim.statement import PrivacyStatement
from dpvim.svi import DPSVI
from dpvim.trace import Trace
from dpvim.types import (
    BudgetExceededError,
    ConvergenceWarning,
    ModelError,
    NotForReleaseWarning,
    NotPrivateError,
    PrivacyWarning,
    Relation,
)
from dpvim.variants import VARIANTS

if TYPE_CHECKING:
    from dpvim import audit

__version__ = "0.1.0.dev0"

__all__ = [
    "DPSVI",
    "FAMILIES",
    "VARIANTS",
    "BudgetExceededError",
    "ConvergenceWarning",
    "DivergedError",
    "FileError",
    "Fit",
    "ModelError",
    "NotForReleaseWarning",
    "NotPrivateError",
    "Posterior",
    "PrivacyPlan",
    "PrivacyStatement",
    "PrivacyWarning",
    "Relation",
    "Trace",
    "audit",
    "fit",
    "fit_nonprivate",
    "load",
]


def __getattr__(name: str) -> Any:
    """Modules that few need are imported when they are asked for."""
    if name == "audit":
        return importlib.import_module("dpvim.audit")
    raise AttributeError(f"module 'dpvim' has no attribute {name!r}")
