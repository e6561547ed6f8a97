"""The audit bites: every planted fault is caught, and the library itself is not."""

from __future__ import annotations

import pytest
from faults import FAULTS, Fault

from dpvim import audit

RUNS = 20_000


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_is_caught(fault: Fault) -> None:
    """By the check that is meant for it; `make audit` runs all checks on all faults."""
    with fault.plant():
        report = audit.run(runs=RUNS, checks=[fault.check], relations=["replace_one"], seed=1)
    assert not report.passed, f"{fault.name} went unseen\n{report}"


def test_there_are_enough_faults_and_none_twice() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 18


@pytest.mark.parametrize("variant", ["aligned", "vanilla"])
def test_the_library_itself_passes(variant: str) -> None:
    report = audit.run(runs=RUNS, variant=variant, seed=3)
    assert report.passed, str(report)


def test_a_fault_leaves_nothing_behind() -> None:
    for fault in FAULTS:
        with fault.plant():
            pass
    assert audit.run(runs=1000, checks=["noise", "clip", "batches"], seed=4).passed
