"""Does the audit bite, and does it cry wolf? All checks on every planted fault, and on none.

    python benchmarks/audit_faults.py faults     # benchmarks/results/audit_faults.csv, 10 minutes
    python benchmarks/audit_faults.py control    # benchmarks/results/audit_control.csv, 30 minutes
    python benchmarks/audit_faults.py table      # the first as a table for docs/privacy.md

Results are written as they come; what is there already is not computed again.
"""

from __future__ import annotations

import csv
import sys
import tempfile
from pathlib import Path

import jax

from dpvim import audit

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT.parent / "tests" / "audit"))
from faults import FAULTS  # type: ignore[import-not-found]  # noqa: E402

FAULT_FILE = ROOT / "results" / "audit_faults.csv"
CONTROL_FILE = ROOT / "results" / "audit_control.csv"
RUNS = 20_000
CONTROL_RUNS = 4000
NUM_CONTROLS = 100


def faults() -> None:
    """Every alarm that every fault sets off, one a line."""
    for fault in FAULTS:
        if fault.name in {row["fault"] for row in rows_of(FAULT_FILE)}:
            continue
        with fault.plant():
            report = audit.run(runs=RUNS, seed=1)
        lines = [
            {
                "fault": fault.name,
                "check": alarm.check,
                "question": alarm.question,
                "observed": alarm.observed,
                "strength": alarm.strength,
            }
            for alarm in sorted(report.alarms, key=lambda finding: finding.p_value)
        ] or [{"fault": fault.name, "check": "NOT CAUGHT"}]
        append(FAULT_FILE, lines)
        print(fault.name, len(report.alarms), "alarms", flush=True)


def control() -> None:
    """The library as it is, seed after seed."""
    for seed in range(NUM_CONTROLS):
        if str(seed) in {row["seed"] for row in rows_of(CONTROL_FILE)}:
            continue
        report = audit.run(runs=CONTROL_RUNS, seed=1000 + seed)
        jax.clear_caches()  # compiled programs of past audits fill the memory
        alarms = "; ".join(f"{a.check}: {a.question}" for a in report.alarms)
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
    """One line a fault: the checks that caught it, and the strongest evidence."""
    print("| fault | caught by | strongest evidence |\n|---|---|---|")
    rows = rows_of(FAULT_FILE)
    for fault in FAULTS:
        own = [row for row in rows if row["fault"] == fault.name]
        checks = ", ".join(dict.fromkeys(row["check"] for row in own))
        first = own[0]
        evidence = f"{first['question']}: {first['observed']} ({first['strength']})"
        print(f"| {fault.name} | {checks} | {evidence} |")


def rows_of(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open() as file:
        return list(csv.DictReader(file))


def append(path: Path, rows: list[dict[str, object]]) -> None:
    fields = {
        FAULT_FILE: ["fault", "check", "question", "observed", "strength"],
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
