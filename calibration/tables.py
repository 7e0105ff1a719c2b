"""The sections of the report that score one part: each takes its outcomes and gives markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence

from calibration.bounds import event_rate_upper_bound, nearest_rank
from calibration.markdown import code, number, percent, steps, table
from calibration.outcome import Outcome
from calibration.peer_scores import RULE_SETS, alarmed, peer_answer
from calibration.scores import (
    DECLARED,
    HEALTHY,
    TOP_COUNT,
    Answer,
    Share,
    both_named,
    confusion,
    delay,
    delays,
    events,
    evidence_of,
    f1_by_class,
    first_word,
    healthy,
    is_found_at_once,
    macro_f1,
    measured_severity,
    named_within,
    our_answer,
    rule_class,
    single_faults,
    truth,
)
from experiments.faults import SEVERITIES

PER_STEPS = 10_000
"""False alarms are counted per so many healthy steps."""


def healthy_steps(outcomes: Sequence[Outcome]) -> int:
    """Steps of controls and hard negatives."""
    return sum(outcome.steps for outcome in healthy(outcomes))


def false_alarm_bound(outcomes: Sequence[Outcome]) -> float:
    """95% upper bound of false alarms per 10k healthy steps, clustered by run."""
    counts = [outcome.event_count() for outcome in healthy(outcomes)]
    return event_rate_upper_bound(counts, max(1, healthy_steps(outcomes)) / PER_STEPS)


def severities(outcomes: Sequence[Outcome], answer: Answer = our_answer) -> str:
    """Top-1, top-3 and macro F1 of the cells with one fault; F1 counts the healthy cells too."""
    rows = []
    for severity in (*SEVERITIES, None):
        cells = single_faults(outcomes, severity)
        signatures = [cell for cell in cells if evidence_of(cell) != "proof"]
        rows.append(
            (
                severity or "all",
                percent(named_within(cells, 1, answer)),
                percent(named_within(cells, TOP_COUNT, answer)),
                percent(named_within(signatures, 1, answer)),
                percent(named_within(signatures, TOP_COUNT, answer)),
                number(macro_f1(confusion([*cells, *healthy(outcomes)], answer))),
            )
        )
    header = (
        "severity",
        "top-1, all rules",
        "top-3, all rules",
        "top-1, signatures",
        "top-3, signatures",
        "macro F1",
    )
    return table(header, rows)


def confusion_matrix(outcomes: Sequence[Outcome]) -> str:
    """A row per truth: how many were right, and each other first word. Columns that are zero are left out."""
    cells = [*single_faults(outcomes), *healthy(outcomes)]
    counts = confusion(cells)
    f1 = f1_by_class(counts)
    rows = []
    for true in sorted(f1, key=lambda name: (name == HEALTHY, name)):
        others = sorted(
            ((word, count) for (name, word), count in counts.items() if name == true and word != true),
            key=lambda pair: (-pair[1], pair[0]),
        )
        total = counts[true, true] + sum(count for _, count in others)
        said = ", ".join(f"{word} {count}" for word, count in others) or "-"
        rows.append((f"`{true}`", f"{counts[true, true]} of {total}", f"{f1[true]:.2f}", said))
    return table(("truth", "right first cause", "F1", "said instead"), rows)


def false_alarms(outcomes: Sequence[Outcome]) -> str:
    """Events by rule and the runs that they were in."""
    rows = []
    for rule, count in sorted(events(outcomes).items()):
        where = [o.identity for o in healthy(outcomes) if rule in {fired.rule for fired in o.fired}]
        rows.append((f"`{rule}`", DECLARED[rule].evidence, count, ", ".join(where)))
    return table(("rule", "evidence", "events", "healthy cells"), rows)


def proofs(outcomes: Sequence[Outcome]) -> str:
    """Rules of proof: found at the first row that can show the fault, and never where there is none."""
    alarms = events(outcomes)
    rows = []
    for name, diagnosis in DECLARED.items():
        cells = [o for o in single_faults(outcomes) if o.expected == (name,)]
        if diagnosis.evidence == "proof" and cells:
            at_once = sum(map(is_found_at_once, cells))
            late = [delay(d) for o in cells for d in o.detections if delay(d) > 0]
            fired = sum(name in {f.rule for f in o.fired} for o in cells)
            rows.append(
                (
                    f"`{name}`",
                    f"{fired} of {len(cells)}",
                    f"{at_once} of {len(cells)}",
                    ", ".join(steps(value) for value in sorted(late)) or "-",
                    alarms[name],
                )
            )
    return table(("rule", "fired", "by the first testable row", "late by, steps", "false alarms"), rows)


def detection_times(outcomes: Sequence[Outcome]) -> str:
    """Median and 90% quantile of the delay at medium severity, by class of rule, then rule by rule."""
    by_rule = delays(single_faults(outcomes, "medium"))
    classes: dict[str, list[float]] = {}
    for rule, values in by_rule.items():
        diagnosis = DECLARED[rule]
        name = "proof" if diagnosis.evidence == "proof" else rule_class(diagnosis)
        classes.setdefault(name, []).extend(values)
    rows = [(name, *_quantiles(values)) for name, values in sorted(classes.items())]
    for rule in sorted(rule for rule in by_rule if DECLARED[rule].evidence != "proof"):
        rows.append((f"`{rule}` ({rule_class(DECLARED[rule])})", *_quantiles(by_rule[rule])))
    return table(("rules", "cells", "median, steps", "90% of cells within, steps"), rows)


def _quantiles(values: Sequence[float]) -> tuple[object, ...]:
    return len(values), steps(nearest_rank(values, 0.5)), steps(nearest_rank(values, 0.9))


def pairs(outcomes: Sequence[Outcome]) -> str:
    """Both of two simultaneous faults among the causes, and what was said where not."""
    cells = [outcome for outcome in outcomes if outcome.kind == "pair"]
    rows = []
    for name in dict.fromkeys(cell.name for cell in cells):
        mine = [cell for cell in cells if cell.name == name]
        wrong = [f"seed {cell.seed}: {code(cell.causes())}" for cell in mine if not both_named(cell)]
        rows.append(
            (
                code(name.split("+")),
                f"{sum(map(both_named, mine))} of {len(mine)}",
                f"{sum(set(c.expected) == set(c.causes()[:2]) for c in mine)} of {len(mine)}",
                "; ".join(wrong) or "-",
            )
        )
    return table(("pair", "both are causes", "both are the first two", "causes otherwise"), rows)


def harms(outcomes: Sequence[Outcome]) -> str:
    """Loss above the paired control at the last evaluation, and the severity that it gives each rule."""
    rows = []
    for name in sorted({o.name for o in single_faults(outcomes)}):
        cells = [o for o in single_faults(outcomes) if o.name == name]
        declared = DECLARED[cells[0].expected[0]].severity
        by_severity = [_harm([o for o in cells if o.severity == severity]) for severity in SEVERITIES]
        medium = [o for o in cells if o.severity == "medium"]
        rows.append((f"`{name}`", *by_severity, declared, measured_severity(medium, declared)))
    return table(("fault", *SEVERITIES, "declared", "measured at medium"), rows)


def _harm(cells: Sequence[Outcome]) -> str:
    """Median gap, and in how many runs it is beyond its interval."""
    measured = [o.harm for o in cells if o.harm is not None]
    gaps = [harm.gap for harm in measured if harm.gap is not None and math.isfinite(harm.gap)]
    worse = f"{sum(harm.is_certain() for harm in measured)} of {len(measured)}"
    if any(harm.nonfinite_count for harm in measured):
        worse += ", not finite"
    return f"{nearest_rank(gaps, 0.5):+.3f} ({worse})" if gaps else f"- ({worse})"


def misses(outcomes: Sequence[Outcome]) -> str:
    """Every cell with one fault whose rule is not the first cause."""
    rows = [
        (
            f"`{o.name}`",
            o.severity,
            o.seed,
            o.start,
            code(o.causes()) if o.causes() else "healthy",
            _why(o),
        )
        for o in single_faults(outcomes)
        if first_word(o) != truth(o)
    ]
    return table(("fault", "severity", "seed", "start", "causes instead", "the expected rule"), rows)


def _why(outcome: Outcome) -> str:
    """What became of the expected rule."""
    (rule,) = outcome.expected
    if rule in outcome.not_evaluated:
        return "was not evaluated"
    if rule in outcome.causes():
        return f"is cause {outcome.causes().index(rule) + 1}"
    return "fired, explained by another" if rule in {f.rule for f in outcome.fired} else "did not fire"


def peers(outcomes: Sequence[Outcome]) -> str:
    """The same scores for other tools' rules on the same logs."""
    cells, well = single_faults(outcomes), healthy(outcomes)
    answers: list[tuple[str, Answer]] = [("flight recorder", our_answer)]
    answers += [(name, peer_answer(name)) for name in RULE_SETS]
    rows = []
    for name, answer in answers:
        medium = single_faults(outcomes, "medium")
        alarms = sum(bool(o.fired) for o in well) if answer is our_answer else alarmed(well, name)
        fired = sum(bool(o.fired) for o in cells) if answer is our_answer else alarmed(cells, name)
        rows.append(
            (
                name,
                percent(Share(fired, len(cells))),
                percent(named_within(cells, 1, answer)),
                percent(named_within(medium, 1, answer)),
                number(macro_f1(confusion([*medium, *well], answer))),
                percent(Share(alarms, len(well))),
            )
        )
    header = (
        "rules",
        "faulty cells with any alarm",
        "right cause first, all",
        "right cause first, medium",
        "macro F1, medium",
        "healthy cells with an alarm",
    )
    return table(header, rows)
