"""What was measured on one cell: a row of the results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from analyzer.diagnoses import DIAGNOSES, Assessment, Finding, causes


@dataclass(frozen=True)
class FiredRule:
    """A rule that fired on the whole log."""

    rule: str
    first_step: int
    finding_count: int


@dataclass(frozen=True)
class Detection:
    """When an expected rule could fire and did, in steps of the log; None: never."""

    rule: str
    testable_step: int | None
    detected_step: int | None


@dataclass(frozen=True)
class Harm:
    """How much worse than the paired control at the last evaluation, in nats/token, with a 95% interval."""

    gap: float | None  # None: no example is finite
    lower: float | None
    upper: float | None
    nonfinite_count: int

    def is_certain(self) -> bool:
        """Worse beyond the interval, or not finite."""
        return self.nonfinite_count > 0 or (self.lower is not None and self.lower > 0)


@dataclass(frozen=True)
class Outcome:
    """One cell: its truth, what fired, when, the harm, and what the peers' rules said."""

    identity: str
    part: str
    kind: str
    name: str
    faults: tuple[str, ...]
    expected: tuple[str, ...]  # names of rules
    severity: str
    seed: int
    architecture: str
    start: int
    steps: int
    fired: tuple[FiredRule, ...]
    not_evaluated: tuple[str, ...]
    detections: tuple[Detection, ...]  # one for each expected rule
    harm: Harm | None
    peer_rules: tuple[str, ...]
    training_seconds: float
    diagnosis_seconds: float
    command_seconds: float | None  # of `analyzer diagnose` as a process of its own, on the longest runs
    rules_hash: str
    date: str
    versions: str

    def causes(self) -> tuple[str, ...]:
        """Names of the causes, first one first, ranked from the fired rules as they are declared now."""
        declared = {diagnosis.name: diagnosis for diagnosis in DIAGNOSES}
        first_steps = {fired.rule: fired.first_step for fired in self.fired}
        assessments = [
            Assessment(diagnosis, "fired", (), (_finding(first_steps[name]),))
            for name, diagnosis in declared.items()
            if name in first_steps
        ]
        return tuple(cause.diagnosis.name for cause in causes(assessments))

    def event_count(self) -> int:
        """Findings; on a healthy cell each is a false alarm."""
        return sum(fired.finding_count for fired in self.fired)

    def is_healthy(self) -> bool:
        """No fault was put in."""
        return not self.faults


def _finding(first_step: int) -> Finding:
    return Finding("", first_step, None, "", None, None, "", 1)


def outcome_of(row: dict[str, Any]) -> Outcome:
    """The outcome that was written as a row of JSON or Parquet; unknown columns are left out."""
    known = {name: row[name] for name in Outcome.__dataclass_fields__}
    names = ("faults", "expected", "not_evaluated", "peer_rules")
    return Outcome(
        **known
        | {name: tuple(known[name]) for name in names}
        | {
            "fired": tuple(FiredRule(**fired) for fired in known["fired"]),
            "detections": tuple(Detection(**detection) for detection in known["detections"]),
            "harm": None if known["harm"] is None else Harm(**known["harm"]),
        }
    )
