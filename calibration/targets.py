"""The targets that were set before the judged part was run, beside what it gave."""

from __future__ import annotations

import math
from collections.abc import Sequence

from calibration.bounds import nearest_rank
from calibration.markdown import number, percent, steps, table, verdict
from calibration.matrix import MEMORY_STEPS
from calibration.outcome import Outcome
from calibration.scores import (
    DECLARED,
    EVALUATED,
    PER_STEP,
    TOP_COUNT,
    WINDOWED,
    Share,
    confusion,
    delays,
    events,
    evidence_of,
    healthy,
    is_found_at_once,
    macro_f1,
    named_within,
    rule_class,
    single_faults,
)
from calibration.tables import false_alarm_bound, healthy_steps

TOP_ONE, TOP_THREE, MACRO_F1 = 0.90, 0.97, 0.90
ALARMS_PER_10K_STEPS = 1.0
PER_STEP_DELAY, WINDOW_DELAY, OVERFITTING_EVALUATIONS = 25, 50, 3
"""Steps; a window is the 50 steps of dead units and of attention's entropy."""
EVALUATION_STEPS = 50  # between two of a long cell
DIAGNOSIS_SECONDS = 2.0

Row = tuple[str, str, str]


def targets(outcomes: Sequence[Outcome]) -> str:
    """Target, result, and whether it is met."""
    rows = [*_proofs(outcomes), *_signatures(outcomes), *_false_alarms(outcomes)]
    rows += [*_delays(outcomes), *_speed(outcomes)]
    return table(("target", "result", ""), rows)


def _proofs(outcomes: Sequence[Outcome]) -> list[Row]:
    cells = [o for o in single_faults(outcomes) if evidence_of(o) == "proof"]
    at_once = Share(sum(map(is_found_at_once, cells)), len(cells))
    alarms = sum(n for rule, n in events(outcomes).items() if DECLARED[rule].evidence == "proof")
    return [
        (
            "faults with a proof: found at the first row that can show them, 100%",
            percent(at_once),
            verdict(at_once.value(), at_once.count == at_once.total),
        ),
        ("no false alarm of a proof", str(alarms), verdict(alarms, alarms == 0)),
    ]


def _signatures(outcomes: Sequence[Outcome]) -> list[Row]:
    cells = [o for o in single_faults(outcomes, "medium") if evidence_of(o) != "proof"]
    first, among = named_within(cells, 1), named_within(cells, TOP_COUNT)
    f1 = macro_f1(confusion([*single_faults(outcomes, "medium"), *healthy(outcomes)]))
    return [
        (
            f"other faults at medium severity: right cause first, {TOP_ONE:.0%}",
            percent(first),
            verdict(first.value(), first.value() >= TOP_ONE),
        ),
        (
            f"among the first three, {TOP_THREE:.0%}",
            percent(among),
            verdict(among.value(), among.value() >= TOP_THREE),
        ),
        (f"macro F1 at medium severity, {MACRO_F1:.2f}", number(f1), verdict(f1, f1 >= MACRO_F1)),
    ]


def _false_alarms(outcomes: Sequence[Outcome]) -> list[Row]:
    bound, count = false_alarm_bound(outcomes), sum(events(outcomes).values())
    return [
        (
            f"false alarms: 95% upper bound of {ALARMS_PER_10K_STEPS:.0f} event per 10k healthy steps",
            f"{count} events in {healthy_steps(outcomes):,} steps, bound {bound:.2f}",
            verdict(bound, bound <= ALARMS_PER_10K_STEPS),
        )
    ]


def _delays(outcomes: Sequence[Outcome]) -> list[Row]:
    by_rule = delays(single_faults(outcomes, "medium"))
    limits = (
        (f"rules on {PER_STEP}: median delay", PER_STEP, PER_STEP_DELAY),
        (f"rules on {WINDOWED}: median delay, one window", WINDOWED, WINDOW_DELAY),
    )
    rows = []
    for words, name, limit in limits:
        values = [v for rule, delays in by_rule.items() if _is_signature(rule, name) for v in delays]
        middle = nearest_rank(values, 0.5)
        rows.append((f"{words}, {limit} steps", steps(middle), verdict(middle, middle <= limit)))
    middle = nearest_rank(by_rule.get("overfitting", []), 0.5)
    limit = OVERFITTING_EVALUATIONS * EVALUATION_STEPS
    words = (
        "overfitting: median delay after the first certain rise, "
        f"{OVERFITTING_EVALUATIONS} evaluations, {limit} steps"
    )
    after_minimum = nearest_rank(_delays_after_the_minimum(outcomes), 0.5)
    result = f"{steps(middle)}; {steps(after_minimum)} after the minimum"
    return [*rows, (words, result, verdict(middle, middle <= limit))]


def _delays_after_the_minimum(outcomes: Sequence[Outcome]) -> list[float]:
    """Of overfitting at medium severity; infinity where it was not found."""
    cells = [o for o in single_faults(outcomes, "medium") if o.expected == ("overfitting",)]
    minima = [{fired.rule: fired.first_step for fired in cell.fired}.get("overfitting") for cell in cells]
    found = [detection.detected_step for cell in cells for detection in cell.detections]
    return [
        math.inf if minimum is None or step is None else step - minimum
        for minimum, step in zip(minima, found, strict=True)
    ]


def _is_signature(rule: str, name: str) -> bool:
    return DECLARED[rule].evidence != "proof" and rule_class(DECLARED[rule]) == name != EVALUATED


def _speed(outcomes: Sequence[Outcome]) -> list[Row]:
    seconds = [o.command_seconds for o in outcomes if o.command_seconds is not None]
    middle, worst = nearest_rank(seconds, 0.5), max(seconds, default=float("nan"))
    return [
        (
            f"diagnosing {MEMORY_STEPS} steps as a process of its own, {DIAGNOSIS_SECONDS:.0f} s",
            f"median {number(middle, 2)} s, longest {number(worst, 2)} s, both cores at work",
            verdict(worst, worst <= DIAGNOSIS_SECONDS),
        )
    ]
