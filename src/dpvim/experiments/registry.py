"""The experiments by their names, in the order of the paper."""

from __future__ import annotations

from dpvim._extras import require
from dpvim.experiments.experiment import Experiment

# By module, so that a command that needs one does not import all.
_WHERE = {
    "ukb-init": "ukb_experiments:UKB_INIT",
    "ukb-epochs": "ukb_experiments:UKB_EPOCHS",
    "ukb-average": "ukb_experiments:UKB_AVERAGE",
    "ukb-natural": "ukb_experiments:UKB_NATURAL",
    "adult": "adult_experiments:ADULT",
    "adult-noise": "adult_experiments:ADULT_NOISE",
    "full-rank": "full_rank:FULL_RANK",
    "gradients": "gradient_norms:GRADIENTS",
    "variance": "variance:VARIANCE",
    "ou": "ou:OU",
}
# What the others took; it has no cells of its own.
RUNTIME = "runtime"
NAMES = (*_WHERE, RUNTIME)


def find(name: str) -> Experiment:
    """The experiment of that name."""
    module, _, attribute = _WHERE[name].partition(":")
    found: Experiment = getattr(
        require(f"dpvim.experiments.{module}", extra="reproduce"), attribute
    )
    return found
