"""Verdicts in plain HTML: the headline, each cause with its evidence, and what every check came to."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from analyzer.charts.frame import number
from analyzer.diagnoses import Assessment, Finding, causes, symptoms
from analyzer.page import text
from analyzer.panels import PANELS

OUTCOME_WORDS = {"fired": "fired", "clear": "clear", "not_evaluated": "not evaluated"}
SEVERITY_WORDS = {
    "S1": "anomaly without measured harm",
    "S2": "worse on held-out data",
    "S3": "the result is invalid",
    "S4": "diverged or not finite",
}
FINDING_COLUMNS = ("Where", "Observed", "Threshold", "Detail", "Evidence")
MOST_FINDINGS = 6
"""Rows shown for one cause; the query has all of them."""


def blind_verdict() -> str:
    """The heading of a page that leaves the judgement to its reader."""
    heading = '<h2 id="headline" class="headline blind">Blind reading</h2>'
    return f'<section id="verdict" aria-labelledby="headline">{heading}</section>'


def verdict_section(path: Path, assessments: Sequence[Assessment]) -> str:
    """Headline, causes with their findings, and the table of checks."""
    found = causes(assessments)
    tone = "fired" if found else "clear" if _count(assessments, "clear") else "blind"
    articles = "\n".join(cause(path, one, assessments) for one in found)
    return (
        f'<section id="verdict" aria-labelledby="headline">'
        f'<h2 id="headline" class="headline {tone}">{text(headline(assessments))}</h2>\n'
        f"{articles}\n{checks(assessments)}</section>"
    )


def headline(assessments: Sequence[Assessment]) -> str:
    """The verdict in one line."""
    found = causes(assessments)
    if found:
        first = found[0]
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        since = first.findings[0].first_step
        words = "" if since is None else f", since step {since}"
        return f"{first.diagnosis.title} \N{EN DASH} {first.diagnosis.evidence}{words}{more}"
    evaluated = _count(assessments, "clear")
    skipped = _count(assessments, "not_evaluated")
    if not evaluated:
        return "Nothing could be checked" if skipped else "No check was run"
    tail = f"; {skipped} could not be evaluated" if skipped else ""
    return f"No finding in {evaluated} check{'s' if evaluated > 1 else ''}{tail}"


def _count(assessments: Sequence[Assessment], outcome: str) -> int:
    return sum(one.outcome == outcome for one in assessments)


def cause(path: Path, assessment: Assessment, assessments: Sequence[Assessment]) -> str:
    """One cause: its findings, what it means and explains, the remedy, and the query that shows it again."""
    diagnosis = assessment.diagnosis
    explained = ", ".join(one.diagnosis.title for one in symptoms(assessment, assessments))
    command = f'analyzer sql {shlex.quote(str(path))} "FROM {diagnosis.name}()"'
    facts = {
        "Meaning": text(diagnosis.meaning),
        "Explains": text(explained),
        "Remedy": text(diagnosis.remedy),
        "Reproduce": f"<code>{text(command)}</code>",
    }
    rows = "".join(f"<dt>{name}</dt><dd>{words}</dd>" for name, words in facts.items() if words)
    return (
        f'<article class="finding" id="finding-{text(diagnosis.name)}">'
        f'<h3>{text(diagnosis.title)} <span class="tag">{text(diagnosis.evidence)}</span>'
        f' <span class="tag">{diagnosis.severity}: {SEVERITY_WORDS[diagnosis.severity]}</span></h3>'
        f"{findings_table(assessment.findings)}<dl>{rows}</dl></article>"
    )


def findings_table(findings: Sequence[Finding]) -> str:
    """Where, what was observed against which threshold, and a link to the panel at those steps."""
    rows = "".join(_finding_row(finding) for finding in findings[:MOST_FINDINGS])
    more = len(findings) - MOST_FINDINGS
    tail = (
        f'<tr><td colspan="5">and {more} more; the query below has all of them</td></tr>' if more > 0 else ""
    )
    head = "".join(f'<th scope="col">{column}</th>' for column in FINDING_COLUMNS)
    table = f"<thead><tr>{head}</tr></thead><tbody>{rows}{tail}</tbody>"
    return f'<div class="scroll"><table class="findings">{table}</table></div>'


def _finding_row(finding: Finding) -> str:
    cells = (finding.subject, _number(finding.observed), _number(finding.threshold), finding.detail)
    html = [*(text(cell) for cell in cells), panel_link(finding)]
    labelled = zip(FINDING_COLUMNS, html, strict=True)
    columns = (f'<td data-label="{label}"><span>{cell}</span></td>' for label, cell in labelled)
    return f"<tr>{''.join(columns)}</tr>"


def _number(value: float | None) -> str:
    return "not measured" if value is None else number(value)


def panel_link(finding: Finding) -> str:
    """A link that goes to the panel; the page's script also zooms all step axes to the finding."""
    panel = next(panel for panel in PANELS if panel.number == finding.panel)
    first, last = finding.first_step, finding.last_step
    if first is None:
        return f'<a href="#{panel.anchor}">Panel {panel.number}</a>'
    last = first if last is None else last
    words = f"step {first}" if first == last else f"steps {first} to {last}"
    return (
        f'<a href="#{panel.anchor}" data-first-step="{first}" data-last-step="{last}">'
        f"Panel {panel.number}, {words}</a>"
    )


def checks(assessments: Sequence[Assessment]) -> str:
    """What every check came to, and what those that could not be evaluated lack."""
    if not assessments:
        return ""
    found = causes(assessments)
    rows = "".join(_check_row(one, one in found) for one in assessments)
    head = '<th scope="col">Check</th><th scope="col">Outcome</th><th scope="col">Question</th>'
    return (
        f'<details class="checks" open><summary>{len(assessments)} checks</summary><div class="scroll">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></details>"
    )


def _check_row(assessment: Assessment, is_cause: bool) -> str:
    explained = assessment.outcome == "fired" and not is_cause
    outcome = OUTCOME_WORDS[assessment.outcome] + (", explained above" if explained else "")
    missing = f" Missing: {', '.join(assessment.missing)}." if assessment.missing else ""
    return (
        f'<tr><th scope="row">{text(assessment.diagnosis.title)}</th>'
        f'<td><span class="outcome {assessment.outcome}">{outcome}</span></td>'
        f"<td>{text(assessment.diagnosis.question + missing)}</td></tr>"
    )
