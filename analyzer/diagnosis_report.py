"""What a run was found to have, as text for a person and as JSON for a program."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from analyzer.diagnoses import Assessment, Diagnosis, Finding, cause_title, causes, symptoms, verdict
from analyzer.diagnoses.control import ControlGap
from analyzer.diagnoses.declaration import SECOND_RUN, Severity
from analyzer.diagnoses.ranking import CLEAR
from analyzer.query_library import library
from analyzer.run_log import RunLog

SHOWN_FINDINGS = 5
SHOWN_SPIKES = 3
SHOWN_SIGNALS = 6
SHOWN_STEPS = 3
WORDS = ("name", "title", "severity", "evidence", "question", "meaning", "remedy", "source")
SPIKE_RULES = frozenset({"loss_spike", "bad_batch"})
WORSE_THAN_CONTROL = "Unexplained: worse than its control"

Json = dict[str, Any]


@dataclass(frozen=True)
class Judgement:
    """One run with what every rule came to, and the order of signals around its loss spikes."""

    path: Path
    assessments: tuple[Assessment, ...]
    spike_rows: tuple[Json, ...]  # of signal_order_at_spikes(), this run's
    gap: ControlGap | None
    others: tuple[Path, ...] = ()  # runs that were opened with it
    rules: Path | None = None  # directory of the user's own rules

    def verdict(self) -> str:
        """The first cause; harm against the control that no rule explains is a finding, too."""
        words = verdict(self.assessments)
        return WORSE_THAN_CONTROL if words == CLEAR and self._is_worse() else words

    def severities(self) -> tuple[Severity, ...]:
        """Of everything that was found."""
        fired = tuple(a.diagnosis.severity for a in self.assessments if a.outcome == "fired")
        return fired if fired or not self._is_worse() else ("S2",)

    def command(self, diagnosis: Diagnosis) -> str:
        """The shell command that shows a rule's evidence."""
        if self.rules is not None and diagnosis.name not in {query.name for query in library()}:
            return f"analyzer diagnose {_words(self.path)} --rules {_words(self.rules)}"
        others = self.others if SECOND_RUN in diagnosis.requires else ()
        return command((self.path, *others), diagnosis.name)

    def _is_worse(self) -> bool:
        return self.gap is not None and self.gap.is_worse()


def spike_rows(run_log: RunLog, run: str, assessments: Sequence[Assessment]) -> tuple[Json, ...]:
    """The order of signals around the loss spikes of a run; nothing where no spike was found."""
    fired = {a.diagnosis.name for a in assessments if a.outcome == "fired"}
    if not fired & SPIKE_RULES:
        return ()
    rows = run_log.query("FROM signal_order_at_spikes()").to_pylist()
    return tuple(row for row in rows if row["run"] == run)


def command(paths: Sequence[Path], name: str) -> str:
    """The shell command that shows the rows of a rule of the library."""
    return f"analyzer sql {_words(*paths)} {_words(f'FROM {name}()')}"


def _words(*arguments: Path | str) -> str:
    return shlex.join(map(str, arguments))


def report_text(judgement: Judgement) -> str:
    """The verdict, each cause with its evidence, then what is clear and what was not evaluated."""
    assessments = judgement.assessments
    skipped = [a for a in assessments if a.outcome == "not_evaluated"]
    words = judgement.verdict()
    if words == CLEAR and skipped:
        words = f"{CLEAR}, {len(skipped)} of {len(assessments)} rules not evaluated"
    head = [f"{judgement.path}: {words}"]
    if judgement.gap is not None:
        head.append(_gap_text(judgement.gap))
    blocks = ["\n".join(head), *(_cause_text(judgement, cause) for cause in causes(assessments))]
    clear = [a.diagnosis.title for a in assessments if a.outcome == "clear"]
    lines = [f"clear: {', '.join(clear)}"] if clear else []
    lines += [f"not evaluated: {a.diagnosis.title}: no {', '.join(a.missing)}" for a in skipped]
    return "\n\n".join([*blocks, "\n".join(lines)] if lines else blocks) + "\n"


def _gap_text(gap: ControlGap) -> str:
    if gap.gap is None:
        return (
            f"against {gap.control}: {gap.split} is not finite on any of {gap.nonfinite_count} examples "
            f"at step {gap.step}, where the control is"
        )
    interval = "" if gap.lower is None else f" ({gap.lower:.3g} to {gap.upper:.3g})"
    word = "worse beyond its interval" if gap.is_worse() else "not worse beyond its interval"
    return (
        f"against {gap.control}: {gap.split} {gap.gap:+.3g} nats/token{interval} at step {gap.step}, {word}"
    )


def _cause_text(judgement: Judgement, cause: Assessment) -> str:
    diagnosis = cause.diagnosis
    lines = [f"{cause_title(cause)} ({diagnosis.evidence}, {diagnosis.severity})"]
    for finding in cause.findings[:SHOWN_FINDINGS]:
        lines += _finding_lines(finding)
    if len(cause.findings) > SHOWN_FINDINGS:
        lines.append(f"  ... {len(cause.findings) - SHOWN_FINDINGS} more of the same")
    lines += [
        f"  means     {diagnosis.meaning}",
        f"  remedy    {diagnosis.remedy}",
        f"  source    {diagnosis.source}",
        f"  query     {judgement.command(diagnosis)}",
    ]
    explained = symptoms(cause, judgement.assessments)
    if explained:
        lines.append(f"  explains  {', '.join(_symptom_text(s) for s in explained)}")
    if SPIKE_RULES & {diagnosis.name, *(s.diagnosis.name for s in explained)}:
        lines += _spike_lines(judgement.spike_rows)
    return "\n".join(lines)


def _finding_lines(finding: Finding) -> list[str]:
    return [
        f"  since     {steps_in_words(finding)}",
        f"  where     {finding.subject}",
        f"  observed  {_number(finding.observed)} against a threshold of {_number(finding.threshold)}",
        f"  evidence  {finding.detail}",
    ]


def steps_in_words(finding: Finding) -> str:
    """Where a finding begins and ends."""
    first, last = finding.first_step, finding.last_step
    if first is None:
        return "the whole run"
    return f"step {first}" if last in (None, first) else f"step {first} to {last}"


def _symptom_text(symptom: Assessment) -> str:
    steps = [str(s) for s in sorted({f.first_step for f in symptom.findings if f.first_step is not None})]
    more = ", ..." if len(steps) > SHOWN_STEPS else ""
    word = "step" if len(steps) == 1 else "steps"
    where = f" ({word} {', '.join(steps[:SHOWN_STEPS])}{more})" if steps else ""
    return symptom.diagnosis.title + where


def _spike_lines(rows: Sequence[Json]) -> list[str]:
    """One line for each of the first spikes: batch, recovery, signals in the order in which they moved."""
    spikes = [(step, list(group)) for step, group in groupby(rows, key=lambda row: row["step"])]
    lines = []
    for step, signals in spikes[:SHOWN_SPIKES]:
        first = signals[0]
        batch = "" if first["batch_hash"] is None else f", batch {first['batch_hash']:x}"
        back = "not back" if first["recovered_step"] is None else f"back at step {first['recovered_step']}"
        moved = [_signal_text(row) for row in signals if row["signal"] is not None]
        order = "; ".join(moved[:SHOWN_SIGNALS]) or "no signal left its baseline before"
        lines.append(f"  spike     step {step}{batch}, {back}; in order: {order}")
        if first["worst_examples"]:
            lines.append(f"            hardest training examples near it: {first['worst_examples']}")
    return lines


def _signal_text(row: Json) -> str:
    change = f"{row['baseline_value']:.3g} to {row['moved_value']:.3g}"
    return f"{row['signal']} {row['subject']} {change} at step {row['moved_step']}"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.6g}"


def report_document(judgement: Judgement) -> Json:
    """The same for a program: verdict, control, causes, clear, not_evaluated."""
    assessments = judgement.assessments
    return {
        "run": str(judgement.path),
        "verdict": judgement.verdict(),
        "control": None if judgement.gap is None else asdict(judgement.gap),
        "causes": [_cause_document(judgement, cause) for cause in causes(assessments)],
        "clear": [a.diagnosis.name for a in assessments if a.outcome == "clear"],
        "not_evaluated": [
            {"name": a.diagnosis.name, "missing": list(a.missing)}
            for a in assessments
            if a.outcome == "not_evaluated"
        ],
    }


def _cause_document(judgement: Judgement, cause: Assessment) -> Json:
    explained = symptoms(cause, judgement.assessments)
    is_spike = SPIKE_RULES & {cause.diagnosis.name, *(s.diagnosis.name for s in explained)}
    return {
        **_fired_document(judgement, cause),
        "explains": [_fired_document(judgement, symptom) for symptom in explained],
        "signal_order": list(judgement.spike_rows) if is_spike else [],
    }


def _fired_document(judgement: Judgement, assessment: Assessment) -> Json:
    return {
        **{word: getattr(assessment.diagnosis, word) for word in WORDS},
        "query": judgement.command(assessment.diagnosis),
        "findings": [asdict(finding) for finding in assessment.findings],
    }
