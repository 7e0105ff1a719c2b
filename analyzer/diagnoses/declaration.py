"""What a rule declares, and what it comes to on a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Evidence = Literal["proof", "signature", "anomaly"]
"""An exact invariant is violated; the log is consistent with it; something moved and the cause is open."""
EVIDENCES: tuple[Evidence, ...] = ("proof", "signature", "anomaly")

Outcome = Literal["fired", "clear", "not_evaluated"]
Severity = Literal["S1", "S2", "S3", "S4"]
SEVERITIES: tuple[Severity, ...] = ("S1", "S2", "S3", "S4")
"""Anomaly without measured harm; worse on held-out data; the result is invalid; diverged or non-finite."""

SECOND_RUN = "second run of the same seed"
REPEATED_EVALUATION = "repeated evaluation"
RESUMED_EVENT = "resumed event"
TRAINING_LOSS = "training loss"  # of steps or of evaluations
WHOLE_LOG = "whole log"  # rows that were written are gone
"""Things other than a column that a rule may need, in words that follow "no"."""


@dataclass(frozen=True)
class Diagnosis:
    """One rule. ``name`` is the name of its query; severity is declared until a control run measures it."""

    name: str
    title: str
    question: str
    meaning: str
    remedy: str
    source: str
    evidence: Evidence
    severity: Severity
    explains: tuple[str, ...]  # rules whose findings follow from this one
    requires: tuple[str, ...]  # "table.column"; "manifest.field" for what the run must declare; words above
    panel: int  # panel of the dashboard that shows it, 1-7


@dataclass(frozen=True)
class Finding:
    """One row of a rule's query, and the panel that shows it."""

    run: str
    first_step: int | None
    last_step: int | None
    subject: str
    observed: float | None
    threshold: float | None
    detail: str
    panel: int


@dataclass(frozen=True)
class Assessment:
    """What a rule came to. ``missing`` is filled when it was not evaluated, ``findings`` when it fired."""

    diagnosis: Diagnosis
    outcome: Outcome
    missing: tuple[str, ...]
    findings: tuple[Finding, ...]

    def first_step(self) -> int:
        """The earliest step of its findings; 0 where a finding concerns the whole run."""
        return min((f.first_step or 0 for f in self.findings), default=0)


def is_at_least(severity: Severity, level: Severity) -> bool:
    """Severity is the level or graver."""
    return SEVERITIES.index(severity) >= SEVERITIES.index(level)
