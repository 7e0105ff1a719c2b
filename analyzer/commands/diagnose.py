"""Say what went wrong in a run, since when, where, by which evidence, and what to do.

Exit code 3 when a finding is at least as grave as --fail-on, 0 when not.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analyzer.exit_codes import ERROR, FINDINGS, FINE
from analyzer.output import emit, note, plain_value

if TYPE_CHECKING:
    from analyzer.diagnoses import Assessment, Finding

SHOWN_FINDINGS = 5
SEVERITY_NAMES = ("S1", "S2", "S3", "S4")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``analyzer diagnose``."""
    parser.add_argument("run_directory", type=Path, metavar="RUN")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--fail-on",
        choices=SEVERITY_NAMES,
        default="S2",
        help="least severity for exit code 3: S1 anomaly, S2 worse result, S3 invalid result, S4 diverged",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the verdict and its evidence."""
    from analyzer.diagnoses import assess, is_at_least
    from analyzer.run_log import open_runs

    path: Path = arguments.run_directory
    with open_runs([path]) as run_log:
        assessments = assess(run_log)
        for warning in run_log.warnings:
            note(f"warning: {warning}")
    emit(report_json(path, assessments) if arguments.json else report_text(path, assessments))
    if all(a.outcome == "not_evaluated" for a in assessments):
        note(f"{path}: no rule could be evaluated: the log has none of the columns they need")
        return ERROR
    fired = [a.diagnosis for a in assessments if a.outcome == "fired"]
    return FINDINGS if any(is_at_least(d.severity, arguments.fail_on) for d in fired) else FINE


def command(path: Path, name: str) -> str:
    """The shell command that shows a rule's evidence."""
    return f"analyzer sql {shlex.quote(str(path))} {shlex.quote(f'FROM {name}()')}"


def report_text(path: Path, assessments: Sequence[Assessment]) -> str:
    """The verdict, each cause with its evidence, then what is clear and what was not evaluated."""
    from analyzer.diagnoses import causes, verdict

    blocks = [f"{path}: {verdict(assessments)}"]
    blocks += [_cause_text(path, cause, assessments) for cause in causes(assessments)]
    clear = [a.diagnosis.title for a in assessments if a.outcome == "clear"]
    skipped = [a for a in assessments if a.outcome == "not_evaluated"]
    lines = [f"clear: {', '.join(clear)}"] if clear else []
    lines += [f"not evaluated: {a.diagnosis.title}: no {', '.join(a.missing)}" for a in skipped]
    return "\n\n".join([*blocks, "\n".join(lines)] if lines else blocks) + "\n"


def _cause_text(path: Path, cause: Assessment, assessments: Sequence[Assessment]) -> str:
    from analyzer.diagnoses import symptoms

    diagnosis = cause.diagnosis
    lines = [f"{diagnosis.title} ({diagnosis.evidence}, {diagnosis.severity})"]
    for finding in cause.findings[:SHOWN_FINDINGS]:
        lines += _finding_lines(finding)
    if len(cause.findings) > SHOWN_FINDINGS:
        lines.append(f"  ... {len(cause.findings) - SHOWN_FINDINGS} more of the same")
    lines += [
        f"  means     {diagnosis.meaning}",
        f"  remedy    {diagnosis.remedy}",
        f"  source    {diagnosis.source}",
        f"  query     {command(path, diagnosis.name)}",
    ]
    explained = [s.diagnosis.title for s in symptoms(cause, assessments)]
    return "\n".join(lines + ([f"  explains  {', '.join(explained)}"] if explained else []))


def _finding_lines(finding: Finding) -> list[str]:
    last = f" to step {finding.last_step}" if finding.last_step != finding.first_step else ""
    return [
        f"  since     step {finding.first_step}{last}",
        f"  where     {finding.subject}",
        f"  observed  {_number(finding.observed)} against a threshold of {_number(finding.threshold)}",
        f"  evidence  {finding.detail}",
    ]


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.6g}"


def report_json(path: Path, assessments: Sequence[Assessment]) -> str:
    """The same as one JSON object: verdict, causes, clear, not_evaluated."""
    from analyzer.diagnoses import causes, verdict

    document = {
        "run": str(path),
        "verdict": verdict(assessments),
        "causes": [_cause_document(path, cause, assessments) for cause in causes(assessments)],
        "clear": [a.diagnosis.name for a in assessments if a.outcome == "clear"],
        "not_evaluated": [
            {"name": a.diagnosis.name, "missing": list(a.missing)}
            for a in assessments
            if a.outcome == "not_evaluated"
        ],
    }
    return json.dumps(plain_value(document), indent=2, ensure_ascii=False)


def _cause_document(path: Path, cause: Assessment, assessments: Sequence[Assessment]) -> dict[str, Any]:
    from analyzer.diagnoses import symptoms

    return {
        **_fired_document(path, cause),
        "explains": [_fired_document(path, symptom) for symptom in symptoms(cause, assessments)],
    }


def _fired_document(path: Path, assessment: Assessment) -> dict[str, Any]:
    diagnosis = assessment.diagnosis
    words = ("name", "title", "severity", "evidence", "question", "meaning", "remedy", "source")
    return {
        **{word: getattr(diagnosis, word) for word in words},
        "query": command(path, diagnosis.name),
        "findings": [asdict(finding) for finding in assessment.findings],
    }
