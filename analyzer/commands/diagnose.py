"""Say what went wrong in each run, since when, where, by which evidence, and what to do.

Exit code 3 when a finding is at least as grave as --fail-on, 0 when not, 1 when nothing could be evaluated.
Several runs are read together, so that two of one seed can be compared; each gets its own verdict.

  analyzer diagnose runs/mine --control runs/healthy --fail-on S2
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from analyzer.commands.sql import seconds
from analyzer.exit_codes import ERROR, FINDINGS, FINE
from analyzer.output import emit, note, plain_value

if TYPE_CHECKING:
    from analyzer.diagnosis_report import Judgement
    from analyzer.sandbox import Limits

SEVERITY_NAMES = ("S1", "S2", "S3", "S4")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``analyzer diagnose``."""
    parser.add_argument("run_directories", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--json", action="store_true", help="print JSON: an object, for several runs a list")
    parser.add_argument(
        "--fail-on",
        choices=SEVERITY_NAMES,
        default="S2",
        help="least severity for exit code 3: S1 anomaly, S2 worse result, S3 invalid result, S4 diverged "
        "(default S2)",
    )
    parser.add_argument(
        "--control",
        type=Path,
        metavar="RUN",
        help="the same run without the fault: a held-out loss that is worse for certain is a finding of S2",
    )
    parser.add_argument("--rules", type=Path, metavar="DIR", help="apply the rules of this directory as well")
    parser.add_argument(
        "--timeout", type=seconds, metavar="SECONDS", help="stop the rules of --rules after this long"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the verdict of each run and its evidence."""
    from analyzer.diagnosis_report import report_document, report_text
    from analyzer.sandbox import TIMEOUT_SECONDS, Limits

    limits = Limits(arguments.timeout or TIMEOUT_SECONDS)
    judgements = judge(arguments.run_directories, arguments.control, arguments.rules, limits)
    if arguments.json:
        documents = [plain_value(report_document(judgement)) for judgement in judgements]
        answer = documents[0] if len(documents) == 1 else documents
        emit(json.dumps(answer, indent=2, ensure_ascii=False))
    else:
        emit("\n".join(report_text(judgement) for judgement in judgements))
    return max(exit_code(judgement, arguments.fail_on) for judgement in judgements)


def judge(
    paths: Sequence[Path], control: Path | None, rules: Path | None, limits: Limits
) -> tuple[Judgement, ...]:
    """What each run was found to have, in the order given. ``limits`` bound the rules of the user's own."""
    from analyzer.diagnoses import assess_runs
    from analyzer.diagnoses.control import control_gap, raised
    from analyzer.diagnoses.user_rules import run_rules
    from analyzer.diagnosis_report import Judgement, spike_rows
    from analyzer.run_log import open_runs

    judgements = []
    user_assessments = {} if rules is None else run_rules(paths, rules, limits)
    with open_runs(paths) as run_log:
        for run, ours in assess_runs(run_log).items():
            path = run_log.paths[run]
            assessments = (*ours, *user_assessments.get(run, ()))
            gap = None if control is None else control_gap(path, control)
            spikes = spike_rows(run_log, run, assessments)
            judged = assessments if gap is None else raised(assessments, gap)
            others = tuple(other for other in run_log.paths.values() if other != path)
            judgements.append(Judgement(path, judged, spikes, gap, others, rules))
        for warning in run_log.warnings:
            note(f"warning: {warning}")
    return tuple(judgements)


def exit_code(judgement: Judgement, fail_on: str) -> int:
    """Of one run; says on stderr when nothing could be evaluated."""
    from analyzer.diagnoses.declaration import SEVERITIES, WHOLE_LOG

    if all(a.outcome == "not_evaluated" for a in judgement.assessments):
        is_damaged = any(WHOLE_LOG in a.missing for a in judgement.assessments)
        why = "the log is damaged" if is_damaged else "the log has none of the columns they need"
        note(f"{judgement.path}: no rule could be evaluated: {why}")
        return ERROR
    grave = SEVERITIES[SEVERITY_NAMES.index(fail_on) :]
    return FINDINGS if set(judgement.severities()) & set(grave) else FINE
