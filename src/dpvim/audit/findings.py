"""Findings of an audit: what was observed, and its p-value if the mechanism is sound."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from scipy import stats

# All checks of an audit together raise a false alarm with at most this probability.
FALSE_ALARM_RATE = 0.005
# Below this a p-value is a rounding error; it is enough to say that it is smaller.
_SMALLEST_P = 1e-300


@dataclasses.dataclass(frozen=True)
class Finding:
    """One question put to the mechanism.

    Attributes:
        check: The group it belongs to.
        question: The property that was tested.
        observed: A summary of the observations.
        p_value: Probability of something at least as extreme if the mechanism is sound: 0 or 1
            for rules that hold or do not.
        path: The way to a clipped sum that was attacked, and the family; "" if there was none.
    """

    check: str
    question: str
    observed: str
    p_value: float
    path: str = ""

    @classmethod
    def rule(cls, check: str, question: str, observed: str, *, holds: bool) -> Finding:
        """A property that holds always or is broken."""
        return cls(check, question, observed, 1.0 if holds else 0.0)

    @classmethod
    def strongest(cls, check: str, question: str, candidates: list[tuple[float, str]]) -> Finding:
        """The most surprising of several candidates, its p-value corrected for their number."""
        p_value, observed = min(candidates)
        return cls(check, question, observed, min(1.0, p_value * len(candidates)))

    @property
    def group(self) -> str:
        """The check, and the path if there is one."""
        return f"{self.check}, {self.path}" if self.path else self.check

    @property
    def strength(self) -> str:
        """The p-value in words that fit a table."""
        if self.p_value == 0:
            return "certain"
        return f"p < {_SMALLEST_P:g}" if self.p_value <= _SMALLEST_P else f"p = {self.p_value:.0e}"


@dataclasses.dataclass(frozen=True)
class AuditReport:
    """All findings of an audit and the settings it ran with."""

    findings: tuple[Finding, ...]
    settings: dict[str, Any]
    seconds: float

    @property
    def threshold(self) -> float:
        """p-value below which a finding is an alarm, so that all of them together are rare."""
        return FALSE_ALARM_RATE / len(self.findings)

    @property
    def alarms(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.p_value < self.threshold)

    @property
    def passed(self) -> bool:
        return not self.alarms

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for json."""
        return {
            "passed": self.passed,
            "seconds": round(self.seconds, 1),
            "settings": self.settings,
            "threshold": self.threshold,
            "findings": [
                dataclasses.asdict(f) | {"alarm": f in self.alarms} for f in self.findings
            ],
        }

    def __str__(self) -> str:
        verdict = "no attack succeeded" if self.passed else f"{len(self.alarms)} ALARM(S)"
        settings = ", ".join(f"{name} {value}" for name, value in self.settings.items())
        lines = [f"Privacy audit: {verdict}", f"  {settings}; {self.seconds:.0f} s", ""]
        width = max(len(f.question) for f in self.findings)
        previous = ""
        for f in self.findings:
            if f.group != previous:
                lines.append(f"  {f.group}")
                previous = f.group
            mark = "ALARM" if f in self.alarms else "ok"
            extra = f"  ({f.strength})" if f in self.alarms else ""
            lines.append(f"    {mark:<6}{f.question:<{width}}  {f.observed}{extra}")
        lines.append("")
        lines.append(
            f"  A sound mechanism raises an alarm in at most {FALSE_ALARM_RATE:.1%} of audits."
        )
        return "\n".join(lines)


def two_sided_normal(z: float | np.ndarray) -> Any:
    """p-value of a statistic that is standard normal if all is well."""
    return 2 * stats.norm.sf(np.abs(z))


def chi_square(statistic: float, degrees: int) -> float:
    """Two-sided p-value: too regular is as suspicious as too irregular."""
    lower, upper = stats.chi2.cdf(statistic, degrees), stats.chi2.sf(statistic, degrees)
    return float(min(1.0, 2 * min(lower, upper)))
