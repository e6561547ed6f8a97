"""Does the audit bite, and does it cry wolf? All checks on every planted fault, and on none.

A fault is attacked by all checks on the path that it was planted in, and by the clip checks on all
others; one in the counts by the checks of counts.

    python benchmarks/audit_faults.py faults     # benchmarks/results/audit_faults.csv
    python benchmarks/audit_faults.py control    # benchmarks/results/audit_control.csv
    python benchmarks/audit_faults.py table      # the first as a table for docs/privacy.md

Results are written as they come; what is there already is not computed again.
"""

from __future__ import annotations

import csv
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax

from dpvim import audit
from dpvim.audit.paths import PATHS
from dpvim.audit.running import CHECKS

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT.parent / "tests" / "audit"))
from faults import FAULTS  # type: ignore[import-not-found]  # noqa: E402

FAULT_FILE = ROOT / "results" / "audit_faults.csv"
CONTROL_FILE = ROOT / "results" / "audit_control.csv"
RUNS = 20_000
CONTROL_RUNS = 4000
NUM_CONTROLS = 20


def faults() -> None:
    """Every alarm that every fault sets off, one a line."""
    for fault in FAULTS:
        if fault.name in {row["fault"] for row in rows_of(FAULT_FILE)}:
            continue
        alarms = sorted(alarms_of(fault), key=lambda alarm: alarm.p_value)
        lines = [
            {
                "fault": fault.name,
                "path": alarm.path,
                "check": alarm.check,
                "question": alarm.question,
                "observed": alarm.observed,
                "strength": alarm.strength,
            }
            for alarm in alarms
        ] or [{"fault": fault.name, "check": "NOT CAUGHT"}]
        append(FAULT_FILE, lines)
        jax.clear_caches()  # compiled programs of past audits fill the memory
        print(fault.name, len(alarms), "alarms", flush=True)


def alarms_of(fault: Any) -> list[audit.Finding]:
    """All alarms on the fault's own path, and the first of the clip checks on others."""
    settings: dict[str, Any] = {"variant": fault.variant, "families": [fault.family], "seed": 1}
    others = [path for path in PATHS if path != fault.path]
    with fault.plant():
        if fault.check == "counts":  # gradients have no part in it
            return list(audit.run(runs=RUNS, checks=["counts"], **settings).alarms)
        report = audit.run(runs=RUNS, paths=[fault.path], **settings)
        if fault.check != "clip":
            return list(report.alarms)
        more = audit.run(
            checks=["clip"], paths=others, every_way=False, stop_early=True, **settings
        )
    return [*report.alarms, *more.alarms]


def control() -> None:
    """The library as it is, seed after seed; the clip checks are the same for all seeds."""
    checks = [check for check in CHECKS if check != "clip"]
    for seed in range(NUM_CONTROLS):
        if str(seed) in {row["seed"] for row in rows_of(CONTROL_FILE)}:
            continue
        report = audit.run(runs=CONTROL_RUNS, checks=checks, seed=1000 + seed)
        jax.clear_caches()  # compiled programs of past audits fill the memory
        alarms = "; ".join(f"{a.group}: {a.question}" for a in report.alarms)
        smallest = min(f.p_value for f in report.findings) / report.threshold
        append(
            CONTROL_FILE,
            [
                {
                    "seed": seed,
                    "findings": len(report.findings),
                    "alarms": len(report.alarms),
                    "which": alarms,
                    "smallest_p_over_threshold": f"{smallest:.3g}",
                }
            ],
        )
        print(seed, alarms or "no alarm", flush=True)


def table() -> None:
    """One line a fault: where it was planted and caught, by which checks, and the evidence.

    The evidence is the strongest on the path that it was planted in.
    """
    print("| fault | caught on | by | strongest evidence |\n|---|---|---|---|")
    rows = rows_of(FAULT_FILE)
    for fault in FAULTS:
        own = [row for row in rows if row["fault"] == fault.name]
        if not own:
            continue
        checks = "; ".join(dict.fromkeys(row["check"] for row in own))
        first = next((row for row in own if row["path"].startswith(fault.path)), own[0])
        evidence = f"{first['question']}: {first['observed']} ({first['strength']})"
        print(f"| {fault.name} | {_places(own)} | {checks} | {evidence} |")


def _places(rows: list[dict[str, str]]) -> str:
    """The paths with an alarm; noise and batches are the same on all."""
    if all(row["check"].split(", ")[0] == "counts" for row in rows):
        return "counts"
    families = {row["path"].split(", ")[-1] for row in rows if row["path"]}
    paths = list(dict.fromkeys(row["path"].split(", ")[0] for row in rows if row["path"]))
    if not paths or len(paths) == len(PATHS):
        return "all"
    return ", ".join(paths) + (", full-rank" if families == {"full_rank"} else "")


def rows_of(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open() as file:
        return list(csv.DictReader(file))


def append(path: Path, rows: list[dict[str, object]]) -> None:
    fields = {
        FAULT_FILE: ["fault", "path", "check", "question", "observed", "strength"],
        CONTROL_FILE: ["seed", "findings", "alarms", "which", "smallest_p_over_threshold"],
    }[path]
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, fields)
        if new:
            writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    # Seeds do not change the programs: compile each once.
    jax.config.update("jax_compilation_cache_dir", tempfile.mkdtemp())
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    commands = {"faults": faults, "control": control, "table": table}
    if len(sys.argv) != 2 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    commands[sys.argv[1]]()
