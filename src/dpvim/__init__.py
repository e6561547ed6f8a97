"""Differentially private variational inference for NumPyro models."""

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
    "fit",
    "fit_nonprivate",
    "load",
]
