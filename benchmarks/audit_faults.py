"""Does the audit bite, and does it cry wolf? All checks on every planted fault, and on none.

A fault is attacked by all checks on the path that it was planted in, and by the clip checks on all
others. One in the counts is attacked by the checks of counts, one in how rows become persons by
those of persons, one in steps over several processes by those of processes, and one in the sums
within persons by the check that is meant for it.

    python benchmarks/audit_faults.py faults     # benchmarks/results/audit_faults.csv
    python benchmarks/audit_faults.py control    # benchmarks/results/audit_control.csv
    python benchmarks/audit_faults.py path NAME  # a path that is new, on faults that are there
    python benchmarks/audit_faults.py table      # the first as a table for docs/privacy.md

Results are written as they come; what is there already is not computed again.
"""

from __future__ import annotations

import csv
import sys
import tempfile
from collections.abc import Sequence
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
ALONE = ("counts", "persons", "processes")


def faults() -> None:
    """Every alarm that every fault sets off, one a line."""
    for fault in FAULTS:
        if fault.name in {row["fault"] for row in rows_of(FAULT_FILE)}:
            continue
        alarms = alarms_of(fault)
        write_alarms(fault, alarms)
        if not alarms:
            append(FAULT_FILE, [{"fault": fault.name, "check": "NOT CAUGHT"}])


def try_path(path: str) -> None:
    """The clip checks on one more path, for all faults that are looked for on all of them."""
    for fault in FAULTS:
        known = [row for row in rows_of(FAULT_FILE) if row["fault"] == fault.name]
        seen = any(row["path"].startswith(path) for row in known)
        if fault.check == "clip" and fault.path != path and known and not seen:
            with fault.plant():
                write_alarms(fault, clip_alarms(fault, [path]))


def write_alarms(fault: Any, alarms: Sequence[audit.Finding]) -> None:
    """One a line, the strongest first."""
    lines = [
        {
            "fault": fault.name,
            "path": alarm.path,
            "check": alarm.check,
            "question": alarm.question,
            "observed": alarm.observed,
            "strength": alarm.strength,
        }
        for alarm in sorted(alarms, key=lambda alarm: alarm.p_value)
    ]
    append(FAULT_FILE, lines)
    jax.clear_caches()  # compiled programs of past audits fill the memory
    print(fault.name, len(alarms), "alarms", flush=True)


def alarms_of(fault: Any) -> list[audit.Finding]:
    """All alarms on the fault's own path, and the first of the clip checks on others."""
    settings = settings_of(fault)
    others = [path for path in PATHS if path != fault.path]
    with fault.plant():
        if fault.check in ALONE:  # gradients have no part in it
            return list(audit.run(runs=RUNS, checks=[fault.check], **settings).alarms)
        if fault.path == "persons":  # nobody else calls what is broken
            own: dict[str, Any] = {"checks": [fault.check], "paths": [fault.path]}
            return list(audit.run(runs=RUNS, every_way=False, **own, **settings).alarms)
        report = audit.run(runs=RUNS, paths=[fault.path], **settings)
        if fault.check != "clip":
            return list(report.alarms)
        return [*report.alarms, *clip_alarms(fault, others)]


def clip_alarms(fault: Any, paths: list[str]) -> tuple[audit.Finding, ...]:
    """The first alarm of the clip checks on each of these paths."""
    settings = settings_of(fault) | {"every_way": False, "stop_early": True}
    return audit.run(checks=["clip"], paths=paths, **settings).alarms


def settings_of(fault: Any) -> dict[str, Any]:
    """The variant and the family that a fault was planted in."""
    return {"variant": fault.variant, "families": [fault.family], "seed": 1}


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
    checks = {row["check"].split(", ")[0] for row in rows}
    if len(checks) == 1 and checks <= set(ALONE):
        return checks.pop()
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
    match sys.argv[1:]:
        case ["path", name] if name in PATHS:
            try_path(name)
        case [command] if command in commands:
            commands[command]()
        case _:
            sys.exit(__doc__)
