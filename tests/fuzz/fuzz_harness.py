"""One harness for all fuzzing: a hostile case goes in, and a right result or an error of ours
comes out. Anything else is a failure, which hypothesis makes small.

`benchmarks/fuzz.py` runs the same harnesses with many cases.
"""

from __future__ import annotations

import linecache
import resource
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis

import dpvim

SOURCE = Path(dpvim.__file__).parent
# Plain errors that our code may raise; classes of its own are known by their module.
PLAIN = (ValueError, TypeError, FileNotFoundError, FileExistsError, RuntimeError, OSError)
MOST_MEGABYTES = 300.0
MOST_SECONDS = 30.0


class Harness(NamedTuple):
    """A door that hostile input comes through.

    Attributes:
        name: Of the door.
        cases: Strategy of the input.
        run: Hands one case to the door, and checks what it gives back.
        share: Cases relative to other harnesses: cheap ones take more.
    """

    name: str
    cases: Any
    run: Callable[[Any], Any]
    share: float = 1.0


class WrongOutcomeError(AssertionError):
    """A case that came out neither as a right result nor as an error of ours."""


def outcome_of(harness: Harness, case: Any) -> str:
    """The kind of outcome of one case: ``result``, or the class of the error.

    Raises:
        WrongOutcomeError: If it is none that may be.
    """
    memory, began = _peak_megabytes(), time.monotonic()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            harness.run(case)
        kind = "result"
    except WrongOutcomeError:
        raise
    except Exception as error:
        if reason := why_not_ours(error):
            raise WrongOutcomeError(f"{harness.name}: {reason}\n{_last_frames(error)}") from error
        kind = type(error).__name__
    if (grown := _peak_megabytes() - memory) > MOST_MEGABYTES:
        raise WrongOutcomeError(f"{harness.name}: the case took {grown:.0f} MB")
    if (seconds := time.monotonic() - began) > MOST_SECONDS:
        raise WrongOutcomeError(f"{harness.name}: the case took {seconds:.0f} s")
    return kind


def why_not_ours(error: Exception) -> str:
    """Why an exception is not one that our code made, with a message; empty if it is."""
    kind = type(error)
    if not (kind in PLAIN or kind.__module__.startswith("dpvim")):
        return f"{kind.__module__}.{kind.__name__} got through: {str(error)[:300]}"
    if len(str(error)) < 10 or ":" not in str(error):
        return f"an error without a message that names anything: {error!r}"
    if len(str(error)) > 20_000:
        return f"a message of {len(str(error)):,} characters"
    last = traceback.extract_tb(error.__traceback__)[-1]
    if SOURCE not in Path(last.filename).parents:
        return f"raised in {last.filename}, not by us: {error!r:.300}"
    if not linecache.getline(last.filename, last.lineno or 0).strip().startswith("raise"):
        return f"not raised on purpose in {last.filename}:{last.lineno}: {error!r:.300}"
    return ""


def explore(harness: Harness, max_examples: int, seed: int | None = None) -> Counter[str]:
    """Run so many cases; kinds of outcomes and their numbers.

    Raises:
        WrongOutcomeError: For the smallest case that was found to fail.
    """
    kinds: Counter[str] = Counter()

    def body(case: Any) -> None:
        kinds[outcome_of(harness, case)] += 1

    name = f"fuzz_{harness.name}".replace(" ", "_")
    body.__name__ = body.__qualname__ = name  # derandomised by the name
    settings = hypothesis.settings(
        max_examples=max_examples,
        deadline=None,  # the benchmark has no profile
        derandomize=seed is None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        print_blob=False,
    )
    test = settings(hypothesis.given(harness.cases)(body))
    (test if seed is None else hypothesis.seed(seed)(test))()
    return kinds


def expect(holds: object, what: str) -> None:
    """Part of a right result."""
    if not holds:
        raise WrongOutcomeError(f"accepted, but {what}")


def _last_frames(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-6:]
    return "".join(traceback.format_list(frames))


def _peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
