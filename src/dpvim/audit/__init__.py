"""Attacks on the library's own step function, and what they found.

>>> from dpvim import audit
>>> report = audit.run(runs=2_000, paths=["gradients"], checks=["noise", "batches"])
>>> report.passed
True
"""

from dpvim.audit.findings import AuditReport, Finding
from dpvim.audit.running import run

__all__ = ["AuditReport", "Finding", "run"]
