"""Scores of a set of outcomes. Pure functions: what was found, what was missed, and how late."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from analyzer.diagnoses import DIAGNOSES, Diagnosis
from calibration.outcome import Detection, Outcome

HEALTHY = "healthy"
ABSTAIN = "abstain"  # anomalies only: something moved, and no rule names a cause
DECLARED = {diagnosis.name: diagnosis for diagnosis in DIAGNOSES}
TOP_COUNT = 3

PER_STEP, WINDOWED, EVALUATED = "per-step signals", "windowed signals", "evaluations"
WINDOW_TABLES = ("units", "weight", "update", "activation", "activation_gradient")
EVALUATION_TABLES = ("evaluations", "example_losses")
"""Tables of a row every 10 to 50 steps, and of a row per evaluation; others have one every step."""

Answer = Callable[[Outcome], tuple[str, ...]]
"""What a set of rules says of a cell: names of causes, first one first."""


def our_answer(outcome: Outcome) -> tuple[str, ...]:
    """The ranked causes."""
    return outcome.causes()


def truth(outcome: Outcome) -> str:
    """Name of the rule that must be first, or "healthy"; of a cell with at most one fault."""
    return outcome.expected[0] if outcome.expected else HEALTHY


def first_word(outcome: Outcome, answer: Answer = our_answer) -> str:
    """The first cause, "healthy" when nothing fired, "abstain" when only anomalies did."""
    named = answer(outcome)
    if not named:
        return HEALTHY
    return ABSTAIN if named[0] in DECLARED and DECLARED[named[0]].evidence == "anomaly" else named[0]


def single_faults(outcomes: Iterable[Outcome], severity: str | None = None) -> list[Outcome]:
    """Cells with one fault, of one severity or of all."""
    return [o for o in outcomes if o.kind == "fault" and severity in (None, o.severity)]


def healthy(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Controls and hard negatives."""
    return [outcome for outcome in outcomes if outcome.is_healthy()]


def evidence_of(outcome: Outcome) -> str:
    """Evidence of the rule that must fire on a cell with one fault."""
    return DECLARED[outcome.expected[0]].evidence


@dataclass(frozen=True)
class Share:
    """So many of so many."""

    count: int
    total: int

    def value(self) -> float:
        """As a number; NaN of nothing."""
        return self.count / self.total if self.total else math.nan


def named_within(outcomes: Sequence[Outcome], places: int, answer: Answer = our_answer) -> Share:
    """Cells with one fault whose rule is among the first causes."""
    return Share(sum(truth(o) in answer(o)[:places] for o in outcomes), len(outcomes))


def confusion(outcomes: Iterable[Outcome], answer: Answer = our_answer) -> Counter[tuple[str, str]]:
    """(truth, first word) -> number of cells."""
    return Counter((truth(outcome), first_word(outcome, answer)) for outcome in outcomes)


def f1_by_class(counts: Counter[tuple[str, str]]) -> dict[str, float]:
    """Harmonic mean of precision and recall of every class that is true of some cell; 0 when never right."""
    classes = sorted({true for true, _ in counts})
    scores = {}
    for name in classes:
        right = counts[name, name]
        said = sum(count for (_, word), count in counts.items() if word == name)
        present = sum(count for (true, _), count in counts.items() if true == name)
        scores[name] = 2 * right / (said + present)
    return scores


def macro_f1(counts: Counter[tuple[str, str]]) -> float:
    """Mean over the classes, each weighing the same however many cells it has."""
    scores = f1_by_class(counts)
    return sum(scores.values()) / len(scores) if scores else math.nan


def rule_class(diagnosis: Diagnosis) -> str:
    """By the rarest signal that the rule needs."""
    tables = {need.partition(".")[0] for need in diagnosis.requires}
    if tables & set(EVALUATION_TABLES):
        return EVALUATED
    return WINDOWED if tables & set(WINDOW_TABLES) or needs_entropy(diagnosis) else PER_STEP


def needs_entropy(diagnosis: Diagnosis) -> bool:
    """Attention's entropy and logits are taken every 50 steps; its future mass at every one."""
    return bool({"attention.entropy", "attention.max_abs_logit"} & set(diagnosis.requires))


def delays(outcomes: Iterable[Outcome]) -> dict[str, list[float]]:
    """Steps from the first testable row to detection, by rule; infinity where the rule did not fire."""
    found: dict[str, list[float]] = {}
    for outcome in outcomes:
        for detection in outcome.detections:
            found.setdefault(detection.rule, []).append(delay(detection))
    return found


def delay(detection: Detection) -> float:
    """Steps from the first testable row to detection; infinity: never."""
    if detection.detected_step is None or detection.testable_step is None:
        return math.inf
    return detection.detected_step - detection.testable_step


def is_found_at_once(outcome: Outcome) -> bool:
    """The rule of a cell with one fault fired by the first row that must show it, and not before the fault.

    That row is counted for the slowest input of a rule; one that has its proof without waiting is not late.
    """
    return [
        delay(detection) <= 0 and (detection.detected_step or 0) >= (outcome.start or 0)
        for detection in outcome.detections
    ] == [True]


def events(outcomes: Iterable[Outcome]) -> Counter[str]:
    """False alarms: findings on healthy cells, by rule."""
    counts: Counter[str] = Counter()
    for outcome in healthy(outcomes):
        for fired in outcome.fired:
            counts[fired.rule] += fired.finding_count
    return counts


def both_named(outcome: Outcome) -> bool:
    """Both rules of a pair are causes."""
    return set(outcome.expected) <= set(outcome.causes())


def measured_severity(outcomes: Sequence[Outcome], declared: str) -> str:
    """What the paired controls say of a rule: S4 where most are not finite, S2 where most are worse, else S1.

    S3, an invalid result, can not be measured by a loss, and is kept as declared.
    """
    harms = [outcome.harm for outcome in outcomes if outcome.harm is not None]
    if not harms:
        return declared
    if 2 * sum(harm.nonfinite_count > 0 for harm in harms) > len(harms):
        return "S4"
    if declared == "S3":
        return declared
    return "S2" if 2 * sum(harm.is_certain() for harm in harms) > len(harms) else "S1"
