"""Hostile and broken input at every door: files and arguments, with many cases.

    python benchmarks/fuzz.py --cases 10000
    python benchmarks/fuzz.py --cases 10000 --only files --seed 7
    python benchmarks/fuzz.py --cases 10000 --each --kept build/fuzz.jsonl  # as many at every door

The doors are those of `tests/fuzz`, where a few hundred cases run. A case comes out as a right
result or as an error of ours; anything else is a failure, which is printed as small as hypothesis
can make it. Exits with 1 if there was one.

Cases are run some hundreds at a time, each lot with a seed of its own. With `--kept` a lot that is
done is a line of that file, and is not run again: a command that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fuzz"))

_LOT = 500


def lots(cases: int, seed: int) -> list[tuple[int, int]]:
    """Numbers of cases, and their seeds."""
    sizes = [min(_LOT, cases - first) for first in range(0, cases, _LOT)]
    return [(size, seed + number) for number, size in enumerate(sizes)]


class Kept:
    """Lots that are done, in a file; without one nothing is kept."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.lots: list[dict[str, Any]] = []
        if path is not None and path.exists():
            self.lots = [json.loads(line) for line in path.read_text().splitlines()]

    def find(self, door: str, size: int, seed: int) -> dict[str, Any] | None:
        asked = {"door": door, "cases": size, "seed": seed}
        return next((lot for lot in self.lots if asked.items() <= lot.items()), None)

    def add(self, lot: dict[str, Any]) -> None:
        self.lots.append(lot)
        if self._path is not None:
            with open(self._path, "a") as file:
                print(json.dumps(lot), file=file)


def run_lot(door: Any, size: int, seed: int) -> dict[str, Any]:
    """Run so many cases at a door: kinds of outcomes, seconds, and what failed."""
    explore = importlib.import_module("fuzz_harness").explore
    began, failures = time.process_time(), []
    kinds: Counter[str] = Counter()
    try:
        kinds = explore(door, size, seed)
    except (AssertionError, BaseExceptionGroup) as error:
        found = error.exceptions if isinstance(error, BaseExceptionGroup) else (error,)
        for each in found:
            notes = "\n".join(getattr(each, "__notes__", []))
            failures.append(f"{each!s:.2000}\n{notes:.2000}")
    return {
        "door": door.name,
        "cases": size,
        "seed": seed,
        "run": kinds.total(),
        "seconds": round(time.process_time() - began, 1),
        "kinds": dict(kinds.most_common()),
        "failures": failures,
    }


def run(doors: list[Any], cases: dict[str, int], seed: int, kept: Kept) -> int:
    """Run so many cases at each door; number of failures."""
    failures, done, everything = 0, 0, Counter[str]()
    print(f"{'door':<20}{'cases':>7}{'cpu s':>9}  outcomes")
    for door in doors:
        kinds, seconds = Counter[str](), 0.0
        for size, own_seed in lots(cases[door.name], seed):
            lot = kept.find(door.name, size, own_seed)
            if lot is None:
                lot = run_lot(door, size, own_seed)
                kept.add(lot)
            for failure in lot["failures"]:
                print(f"{door.name:<20} FAILED, seed {own_seed}: {failure}", flush=True)
            failures += len(lot["failures"])
            kinds.update(lot["kinds"])
            seconds += lot["seconds"]
        shown = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
        print(f"{door.name:<20}{kinds.total():>7}{seconds:>9.1f}  {shown}", flush=True)
        done += kinds.total()
        everything += kinds
    print(f"{'all':<20}{done:>7}{'':>9}  {everything['result']} results, {failures} failures")
    return failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--each", action="store_true", help="so many at every door, not in all")
    parser.add_argument("--seed", type=int, default=0, help="other cases")
    parser.add_argument("--only", choices=["files", "arguments"])
    parser.add_argument("--door", action="append", help="this one alone; may be given again")
    parser.add_argument("--kept", type=Path, help="file of what is done")
    given = parser.parse_args()
    modules = [
        importlib.import_module(name)
        for kind, name in (("files", "file_doors"), ("arguments", "argument_doors"))
        if given.only in (None, kind)
    ]
    doors = [door for module in modules for door in module.harnesses()]
    total = sum(door.share for door in doors)
    cases = {
        door.name: given.cases if given.each else max(1, round(given.cases * door.share / total))
        for door in doors
    }
    if given.door:
        doors = [door for door in doors if door.name in given.door]
    failures = run(doors, cases, given.seed, Kept(given.kept))
    for module in modules:
        module.remove_scratch()
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
