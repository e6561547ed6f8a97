"""The audit's own arithmetic, report and command."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from dpvim import audit
from dpvim.audit.findings import AuditReport, Finding, chi_square
from dpvim.audit.game import hockey_stick
from dpvim.cli import app


def test_hockey_stick_accepts_what_is_claimed_and_rejects_less() -> None:
    """One Gaussian release with noise 1 is (1, 0.1269)-DP, and no better."""
    rng = np.random.default_rng(0)
    present, absent = rng.normal(1, 1, 200_000), rng.normal(0, 1, 200_000)
    true, too_small, too_cheap = hockey_stick(
        present, absent, [(1.0, 0.1269), (1.0, 0.11), (0.8, 0.1269)]
    )
    assert true > 0.001
    assert too_small < 1e-6
    assert too_cheap < 1e-6


def test_hockey_stick_p_values_are_conservative() -> None:
    rng = np.random.default_rng(1)
    values = [
        hockey_stick(rng.normal(1, 1, 2000), rng.normal(0, 1, 2000), [(1.0, 0.1269)])[0]
        for _ in range(300)
    ]
    assert np.mean(np.array(values) < 0.05) < 0.05


def test_infinite_scores_are_told_apart() -> None:
    present = np.where(np.arange(4000) % 5 == 0, np.inf, 0.0)
    assert hockey_stick(present, np.zeros(4000), [(1.0, 0.05)])[0] < 1e-10


def test_chi_square_is_two_sided() -> None:
    assert chi_square(100.0, 100) > 0.5
    assert chi_square(10.0, 100) < 1e-9
    assert chi_square(300.0, 100) < 1e-9


def test_the_strongest_candidate_pays_for_all_candidates() -> None:
    finding = Finding.strongest("check", "question", [(0.5, "a"), (0.001, "b"), (1.0, "c")])
    assert finding.p_value == pytest.approx(0.003)
    assert finding.observed == "b"


def report_of(*p_values: float) -> AuditReport:
    findings = tuple(Finding("noise", f"question {i}", "seen", p) for i, p in enumerate(p_values))
    return AuditReport(findings, {"runs": 1}, 1.0)


def test_alarms_are_corrected_for_the_number_of_findings() -> None:
    assert report_of(0.004).alarms
    assert not report_of(0.004, 0.5).alarms
    assert report_of(0.0, 0.5).alarms


def test_the_report_reads_well() -> None:
    text = str(report_of(0.0, 0.5, 1e-9))
    assert "2 ALARM" in text
    assert "certain" in text
    assert "p = 1e-09" in text
    assert "no attack succeeded" in str(report_of(0.5))


def test_the_report_names_paths() -> None:
    findings = tuple(
        Finding("clip", "share of one row", "seen", 1.0, path)
        for path in ("linear, mean_field", "linear, full_rank")
    )
    lines = str(AuditReport(findings, {"runs": 1}, 1.0)).splitlines()
    assert "  clip, linear, mean_field" in lines
    assert "  clip, linear, full_rank" in lines


def test_bad_questions_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1000"):
        audit.run(runs=10)
    with pytest.raises(ValueError, match="Did you mean 'aligned'"):
        audit.run(runs=1000, variant="alinged")
    with pytest.raises(ValueError, match="check"):
        audit.run(runs=1000, checks=["nose"])
    with pytest.raises(ValueError, match="Did you mean 'mixture'"):
        audit.run(runs=1000, paths=["mixtures"])
    with pytest.raises(ValueError, match="family"):
        audit.run(runs=1000, families=["full"])
    with pytest.raises(ValueError, match="cannot serve 'natural'"):
        audit.run(runs=1000, variant="natural", families=["full_rank"])


@pytest.mark.long
def test_the_command_reports_and_exits_with_zero() -> None:
    checks = ["--check", "clip", "--check", "batches"]
    on = ["--path", "poisson", "--family", "full_rank"]
    result = CliRunner().invoke(app, ["audit", "--runs", "1000", *checks, *on, "--json"])
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert content["passed"]
    found = {(f["check"], f["path"]) for f in content["findings"]}
    assert found == {("batches", ""), ("clip", "poisson, full_rank")}


def test_the_command_exits_with_one_if_an_attack_succeeds(monkeypatch) -> None:
    monkeypatch.setattr("dpvim.cli.audit_command.run", lambda **options: report_of(0.0))
    result = CliRunner().invoke(app, ["audit", "--quick"])
    assert result.exit_code == 1
    assert "1 ALARM" in result.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["--rums", "3"],
        ["--variant", "x"],
        ["--path", "x"],
        ["--family", "x"],
        ["--runs", "10"],
        ["--quick", "--runs", "9"],
    ],
)
def test_misuse_ends_with_two(arguments) -> None:
    assert CliRunner().invoke(app, ["audit", *arguments]).exit_code == 2
