"""The rules that name what went wrong: DIAGNOSES, their outcomes on an opened log, and their ranking.

A rule is a query of ``queries/diagnoses`` (zero rows mean clear) and the words to tell it in.
Every rule has three outcomes: fired, clear, or not evaluated because of a named missing input.
"""

from analyzer.diagnoses.assessment import assess, assess_runs
from analyzer.diagnoses.declaration import (
    EVIDENCES,
    SEVERITIES,
    Assessment,
    Diagnosis,
    Evidence,
    Finding,
    Outcome,
    Severity,
    is_at_least,
)
from analyzer.diagnoses.ranking import CLEAR, NOT_EVALUATED, cause_title, causes, symptoms, verdict
from analyzer.diagnoses.registry import DIAGNOSES

__all__ = [
    "CLEAR",
    "DIAGNOSES",
    "EVIDENCES",
    "NOT_EVALUATED",
    "SEVERITIES",
    "Assessment",
    "Diagnosis",
    "Evidence",
    "Finding",
    "Outcome",
    "Severity",
    "assess",
    "assess_runs",
    "cause_title",
    "causes",
    "is_at_least",
    "symptoms",
    "verdict",
]
