"""Fired rules -> causes, each with the symptoms that it explains. Pure functions over assessments."""

from __future__ import annotations

from collections.abc import Sequence

from analyzer.diagnoses.declaration import EVIDENCES, SEVERITIES, Assessment

CLEAR = "clear"
NOT_EVALUATED = "not evaluated"

DETECTION_LAG_STEPS = 64
"""A cause may be seen this much later than its symptom: a symptom on a per-step signal (loss, gradient norm)
against a cause that needs a window of units (50 steps) or weights (every 10)."""


def causes(assessments: Sequence[Assessment]) -> tuple[Assessment, ...]:
    """Fired rules that no other fired rule explains: proof, then signature, then anomaly; early first.

    Upstream comes before downstream because what a fired rule explains is a symptom and no cause.
    """
    fired = [a for a in assessments if a.outcome == "fired"]
    order = {a.diagnosis.name: place for place, a in enumerate(assessments)}

    def rank(assessment: Assessment) -> tuple[int, int, int, int]:
        """Surest evidence first, then the earliest step, the gravest, and the order of the rules."""
        diagnosis = assessment.diagnosis
        return (
            EVIDENCES.index(diagnosis.evidence),
            assessment.first_step(),
            -SEVERITIES.index(diagnosis.severity),
            order[diagnosis.name],
        )

    return tuple(sorted((a for a in fired if not _explained(a, fired)), key=rank))


def symptoms(cause: Assessment, assessments: Sequence[Assessment]) -> tuple[Assessment, ...]:
    """Fired rules that a cause explains, by way of other fired rules too."""
    fired = [a for a in assessments if a.outcome == "fired"]
    reached = {cause.diagnosis.name}
    waiting = [cause]
    while waiting:
        current = waiting.pop()
        followers = [a for a in fired if explains(current, a) and a.diagnosis.name not in reached]
        reached |= {a.diagnosis.name for a in followers}
        waiting += followers
    return tuple(a for a in fired if a.diagnosis.name in reached - {cause.diagnosis.name})


def explains(cause: Assessment, symptom: Assessment) -> bool:
    """The cause's rule names the symptom's, and the cause was there in time."""
    in_time = cause.first_step() <= symptom.first_step() + DETECTION_LAG_STEPS
    return symptom.diagnosis.name in cause.diagnosis.explains and in_time


def _explained(symptom: Assessment, fired: Sequence[Assessment]) -> bool:
    return any(explains(other, symptom) for other in fired)


def verdict(assessments: Sequence[Assessment]) -> str:
    """The first cause in words; "clear" when no rule fired; "not evaluated" when none could be evaluated."""
    named = causes(assessments)
    if named:
        return cause_title(named[0])
    return CLEAR if any(a.outcome == "clear" for a in assessments) else NOT_EVALUATED


def cause_title(cause: Assessment) -> str:
    """The rule's title; an anomaly that is a cause is one that nothing explains, and is called so."""
    diagnosis = cause.diagnosis
    if diagnosis.evidence == "anomaly":
        return f"Unexplained anomaly: {diagnosis.title[:1].lower()}{diagnosis.title[1:]}"
    return diagnosis.title
