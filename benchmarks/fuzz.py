"""Hostile and broken input at every door: files and arguments, with many cases.

    python benchmarks/fuzz.py --cases 10000
    python benchmarks/fuzz.py --cases 10000 --only files --seed 7

The doors are those of `tests/fuzz`, where a few hundred cases run. A case comes out as a right
result or as an error of ours; anything else is a failure, which is printed as small as hypothesis
can make it. Exits with 1 if there was one.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fuzz"))


def run(doors: list[Any], cases: int, seed: int | None) -> int:
    """Run about so many cases at the doors, by their shares; number of failures."""
    explore = importlib.import_module("fuzz_harness").explore
    total = sum(door.share for door in doors)
    failures, done, everything = 0, 0, Counter[str]()
    print(f"{'door':<20}{'cases':>7}{'seconds':>9}  outcomes")
    for door in doors:
        began = time.monotonic()
        try:
            kinds = explore(door, max(1, round(cases * door.share / total)), seed)
        except (AssertionError, BaseExceptionGroup) as error:
            found = error.exceptions if isinstance(error, BaseExceptionGroup) else (error,)
            failures += len(found)
            for each in found:
                notes = "\n".join(getattr(each, "__notes__", []))
                print(f"{door.name:<20} FAILED: {each!s:.2000}\n{notes:.2000}")
            continue
        shown = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
        print(
            f"{door.name:<20}{kinds.total():>7}{time.monotonic() - began:>9.1f}  {shown}",
            flush=True,
        )
        done += kinds.total()
        everything += kinds
    print(f"{'all':<20}{done:>7}{'':>9}  {everything['result']} results, {failures} failures")
    return failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, help="other cases than the same ones at every run")
    parser.add_argument("--only", choices=["files", "arguments"])
    given = parser.parse_args()
    modules = [
        importlib.import_module(name)
        for kind, name in (("files", "file_doors"), ("arguments", "argument_doors"))
        if given.only in (None, kind)
    ]
    doors = [door for module in modules for door in module.harnesses()]
    failures = run(doors, given.cases, given.seed)
    for module in modules:
        module.remove_scratch()
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
