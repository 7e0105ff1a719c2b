"""The rules that name what went wrong: DIAGNOSES, and their outcomes on an opened log.

A rule is a query of ``queries/diagnoses`` (zero rows mean clear) and the words to tell it in.
Every rule has three outcomes: fired, clear, or not evaluated because of a named missing column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from analyzer.run_log import RunLog

Evidence = Literal["proof", "signature"]
Outcome = Literal["fired", "clear", "not_evaluated"]
Severity = Literal["S1", "S2", "S3", "S4"]

SEVERITIES: tuple[Severity, ...] = ("S1", "S2", "S3", "S4")
"""Anomaly without measured harm; worse on held-out data; the result is invalid; diverged or non-finite."""

CLEAR = "clear"
NOT_EVALUATED = "not evaluated"


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
    requires: tuple[str, ...]  # "table.column"; "manifest.field" for what the run must declare
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


DIAGNOSES = (
    Diagnosis(
        name="causal_mask_absent",
        title="Broken causal mask",
        question="Does attention see the future although the run declares a causal mask?",
        meaning="A query attends to later keys, so the model can copy the token that it is asked to predict.",
        remedy="Mask the scores with -inf before the softmax: allow key j for query i only if j <= i.",
        source="exact invariant: masked probabilities are exactly 0.0, and so is their sum",
        evidence="proof",
        severity="S3",
        explains=("loss_below_entropy_floor", "overfitting", "loss_spike"),
        requires=("manifest.mask_type", "attention.future_mass"),
        panel=1,
    ),
    Diagnosis(
        name="loss_below_entropy_floor",
        title="Loss below the entropy floor",
        question="Is an evaluation loss lower than any causal model can reach on that split?",
        meaning="The model sees the future, the targets leaked into the input, or the loss is miscounted.",
        remedy="Change one token and see that no earlier prediction moves; check how the loss is reduced.",
        source="prefix-tree entropy of the enumerated split: the least loss of any function of the prefix",
        evidence="proof",
        severity="S3",
        explains=(),
        requires=("manifest.entropy_floor", "evaluations.loss_sum", "evaluations.token_count"),
        panel=1,
    ),
    Diagnosis(
        name="nonfinite_value",
        title="Non-finite value",
        question="Did any recorded quantity turn NaN or infinite, and which was first?",
        meaning="Arithmetic left the range of the number format; everything computed from the value is lost.",
        remedy="Resume from a checkpoint before this step; make that operation stable or its input smaller.",
        source="counts of NaN and infinite elements, in the order in which a step computes them",
        evidence="proof",
        severity="S4",
        explains=(),
        requires=("steps.train_loss",),
        panel=1,
    ),
    Diagnosis(
        name="loss_spike",
        title="Loss spike",
        question="Did the training loss jump far above its own recent noise?",
        meaning="One or more updates or batches were unlike those before; consistent with many causes.",
        remedy="Look at the batch of that step; if spikes return, lower the learning rate or clip harder.",
        source="robust z of ln(loss) above 6, calibrated on healthy and injected runs",
        evidence="signature",
        severity="S1",
        explains=(),
        requires=("steps.train_loss",),
        panel=1,
    ),
    Diagnosis(
        name="overfitting",
        title="Overfitting",
        question="Does held-out loss rise, beyond its uncertainty, while training loss keeps falling?",
        meaning="The model learns its training examples by heart and grows overconfident on others.",
        remedy="Keep the checkpoint of the minimum, or regularise: dropout, weight decay, more data.",
        source="paired per-example differences, delete-one-cluster jackknife, three evaluations in a row",
        evidence="signature",
        severity="S2",
        explains=(),
        requires=("manifest.primary_split", "example_losses.loss_sum", "example_losses.token_count"),
        panel=1,
    ),
)
"""In display order; one per file of ``queries/diagnoses``."""


def assess(run_log: RunLog) -> tuple[Assessment, ...]:
    """The outcome of every rule, in the order of DIAGNOSES."""
    recorded = {table: run_log.recorded_columns(table) for table in _required_tables()}
    return tuple(_assess_one(run_log, diagnosis, recorded) for diagnosis in DIAGNOSES)


def _required_tables() -> set[str]:
    return {requirement.partition(".")[0] for diagnosis in DIAGNOSES for requirement in diagnosis.requires}


def _assess_one(run_log: RunLog, diagnosis: Diagnosis, recorded: dict[str, set[str]]) -> Assessment:
    missing = tuple(
        requirement
        for requirement in diagnosis.requires
        for table, _, column in [requirement.partition(".")]
        if column not in recorded[table]
    )
    if missing:
        return Assessment(diagnosis, "not_evaluated", missing, ())
    rows = run_log.query(f"FROM {diagnosis.name}()").to_pylist()
    findings = tuple(Finding(**row, panel=diagnosis.panel) for row in rows)
    return Assessment(diagnosis, "fired" if findings else "clear", (), findings)


def causes(assessments: Sequence[Assessment]) -> tuple[Assessment, ...]:
    """Fired rules that no other fired rule explains: the gravest first, proof before signature."""
    fired = [a for a in assessments if a.outcome == "fired"]
    unexplained = [a for a in fired if not any(a.diagnosis.name in o.diagnosis.explains for o in fired)]
    return tuple(
        sorted(
            unexplained,
            key=lambda a: (-SEVERITIES.index(a.diagnosis.severity), a.diagnosis.evidence != "proof"),
        )
    )


def symptoms(cause: Assessment, assessments: Sequence[Assessment]) -> tuple[Assessment, ...]:
    """Fired rules that a cause explains."""
    return tuple(
        a for a in assessments if a.outcome == "fired" and a.diagnosis.name in cause.diagnosis.explains
    )


def verdict(assessments: Sequence[Assessment]) -> str:
    """The first cause's title; "clear" when no rule fired; "not evaluated" when none could be evaluated."""
    named = causes(assessments)
    if named:
        return named[0].diagnosis.title
    return CLEAR if any(a.outcome == "clear" for a in assessments) else NOT_EVALUATED


def is_at_least(severity: Severity, level: Severity) -> bool:
    """Severity is the level or graver."""
    return SEVERITIES.index(severity) >= SEVERITIES.index(level)
