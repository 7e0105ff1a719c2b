"""Hand-made rows of calibration results."""

from typing import Any

from calibration.outcome import Detection, FiredRule, Outcome


def outcome(fault: str = "", *fired: str, **changes: Any) -> Outcome:
    """A cell with one fault, or a healthy one, on which these rules fired from step 0 on."""
    faults = tuple(fault.split("+")) if fault else ()
    kinds = {0: "negative", 1: "fault", 2: "pair"}
    values: dict[str, Any] = {
        "identity": f"{fault or 'healthy'}-seed0",
        "part": "judged",
        "kind": kinds[len(faults)],
        "name": fault or "healthy",
        "faults": faults,
        "expected": faults,
        "severity": "medium" if fault else "",
        "seed": 0,
        "architecture": "any",
        "start": 0,
        "steps": 300,
        "fired": tuple(FiredRule(rule, 0, 1) for rule in fired),
        "not_evaluated": (),
        "detections": tuple(Detection(rule, 0, 0 if rule in fired else None) for rule in faults),
        "harm": None,
        "peer_rules": (),
        "training_seconds": 1.0,
        "diagnosis_seconds": 0.1,
        "command_seconds": None,
        "rules_hash": "0",
        "date": "2026-01-01",
        "versions": "any",
    }
    return Outcome(**values | changes)
