"""The audit bites: every planted fault is caught, and the library itself is not."""

from __future__ import annotations

from collections import Counter

import pytest
from faults import FAULTS, Fault

from dpvim import audit
from dpvim.audit.paths import PATHS

RUNS = 20_000


CASES = [
    pytest.param(fault, id=fault.name, marks=() if fault.path == "gradients" else pytest.mark.long)
    for fault in FAULTS
]


@pytest.mark.parametrize("fault", CASES)
def test_every_fault_is_caught(fault: Fault) -> None:
    """By the check that is meant for it; `make audit` runs all checks on all faults."""
    with fault.plant():
        report = audit.run(
            runs=RUNS,
            variant=fault.variant,
            checks=[fault.check],
            paths=[fault.path],
            families=[fault.family],
            relations=["replace_one"],
            seed=1,
            stop_early=True,
        )
    assert not report.passed, f"{fault.name} went unseen\n{report}"


def test_there_are_enough_faults_and_none_twice() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 38
    assert sum(fault.check == "counts" for fault in FAULTS) >= 12
    on_path = Counter(fault.path for fault in FAULTS)
    assert all(on_path[path] >= 2 for path in PATHS), on_path


@pytest.mark.long
@pytest.mark.parametrize("variant", ["aligned", "vanilla", "whitened"])
def test_noise_and_general_path_of_the_library_pass(variant: str) -> None:
    checks = ["noise", "batches", "clip", "game"] + ["fits"] * (variant != "vanilla")
    report = audit.run(runs=RUNS, variant=variant, checks=checks, paths=["gradients"], seed=3)
    assert report.passed, str(report)


@pytest.mark.long
@pytest.mark.parametrize("path", [path for path in PATHS if path != "gradients"])
def test_paths_of_the_library_pass(path: str) -> None:
    """In the ways that fits are run; `dpvim audit` has others, which take long to compile."""
    report = audit.run(
        runs=4000,
        checks=["clip", "game"],
        paths=[path],
        families=["full_rank"],
        every_way=False,
        seed=3,
    )
    assert report.passed, str(report)


@pytest.mark.long
def test_counts_of_the_library_pass() -> None:
    relations = ["zero_out", "replace_one", "add_or_remove"]
    report = audit.run(runs=RUNS, checks=["counts"], relations=relations, seed=3)
    assert report.passed, str(report)


def test_a_fault_leaves_nothing_behind() -> None:
    for fault in FAULTS:
        with fault.plant():
            pass
    report = audit.run(
        runs=1000,
        checks=["noise", "counts", "clip", "batches"],
        paths=["gradients", "linear"],
        families=["mean_field"],
        every_way=False,
        seed=4,
    )
    assert report.passed, str(report)
