"""Verdicts in plain HTML: the headline, each cause with its evidence, and what every check came to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from analyzer.charts.frame import number
from analyzer.diagnoses import Assessment, Diagnosis, Finding, cause_title, causes, symptoms
from analyzer.diagnosis_report import (
    SHOWN_FINDINGS,
    SHOWN_SIGNALS,
    SHOWN_SPIKES,
    SPIKE_RULES,
    command,
    steps_in_words,
)
from analyzer.page import text
from analyzer.panels import PANELS

SEVERITY_WORDS = {
    "S1": "anomaly without measured harm",
    "S2": "worse on held-out data",
    "S3": "the result is invalid",
    "S4": "diverged or not finite",
}
FINDING_COLUMNS = ("Since", "Where", "Observed", "Threshold", "Evidence", "Shown in")
SPIKE_COLUMNS = ("Spike", "Batch", "Recovered", "Moved, in order", "Hardest training examples near it")
MOST_OPEN_CHECKS = 8
"""Checks that were not evaluated are folded when there are more, so that the panels stay near."""


def blind_verdict() -> str:
    """The heading of a page that leaves the judgement to its reader."""
    heading = '<h2 id="headline" class="headline blind">Blind reading</h2>'
    return f'<section id="verdict" aria-labelledby="headline">{heading}</section>'


def verdict_section(
    path: Path, assessments: Sequence[Assessment], spike_rows: Sequence[dict[str, Any]]
) -> str:
    """Headline, causes with their findings, and the table of checks.

    spike_rows: of ``signal_order_at_spikes()``, told with the causes that are loss spikes or explain one.
    """
    found = causes(assessments)
    tone = "fired" if found else "clear" if _with_outcome(assessments, "clear") else "blind"
    articles = "\n".join(cause(path, one, assessments, spike_rows) for one in found)
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
        # An unexplained anomaly says in its title what kind of evidence it is.
        evidence = "" if first.diagnosis.evidence == "anomaly" else f" \N{EN DASH} {first.diagnosis.evidence}"
        return f"{cause_title(first)}{evidence}{_since(first)}{more}"
    evaluated = len(_with_outcome(assessments, "clear"))
    skipped = len(_with_outcome(assessments, "not_evaluated"))
    if not evaluated:
        return "Nothing could be checked" if skipped else "No check was run"
    tail = f"; {skipped} could not be evaluated" if skipped else ""
    return f"No finding in {evaluated} check{'s' if evaluated > 1 else ''}{tail}"


def _with_outcome(assessments: Iterable[Assessment], outcome: str) -> list[Assessment]:
    return [one for one in assessments if one.outcome == outcome]


def _since(assessment: Assessment) -> str:
    """The earliest step of the findings in words; nothing when they concern the whole run."""
    steps = [finding.first_step for finding in assessment.findings if finding.first_step is not None]
    return f", since step {min(steps)}" if steps else ""


def cause(
    path: Path,
    assessment: Assessment,
    assessments: Sequence[Assessment],
    spike_rows: Sequence[dict[str, Any]],
) -> str:
    """One cause: its findings, what it means and explains, the remedy, and the query that shows it again."""
    diagnosis = assessment.diagnosis
    explained = symptoms(assessment, assessments)
    facts = {
        "Means": text(diagnosis.meaning),
        "Remedy": text(diagnosis.remedy),
        "Explains": "; ".join(_symptom(one) for one in explained),
        "Source": text(diagnosis.source),
        "Query": f"<code>{text(command([path], diagnosis.name))}</code>",
    }
    rows = "".join(f"<dt>{name}</dt><dd>{words}</dd>" for name, words in facts.items() if words)
    told = {diagnosis.name, *(one.diagnosis.name for one in explained)} & SPIKE_RULES
    return (
        f'<article class="finding" id="finding-{text(diagnosis.name)}">'
        f'<h3>{text(cause_title(assessment))} <span class="tag">{text(diagnosis.evidence)}</span>'
        f' <span class="tag">{diagnosis.severity}: {SEVERITY_WORDS[diagnosis.severity]}</span></h3>'
        f"{findings_table(diagnosis, assessment.findings)}{spikes_table(spike_rows) if told else ''}"
        f"<dl>{rows}</dl></article>"
    )


def _symptom(symptom: Assessment) -> str:
    """A symptom as a link to its first finding, and since when it is there."""
    title = text(symptom.diagnosis.title)
    return f"{panel_link(symptom.diagnosis, symptom.findings[0], title)}{_since(symptom)}"


def findings_table(diagnosis: Diagnosis, findings: Sequence[Finding]) -> str:
    """Since when, where, what was observed against which threshold, and a link to its chart and steps."""
    rows = [_finding_cells(diagnosis, finding) for finding in findings[:SHOWN_FINDINGS]]
    more = len(findings) - SHOWN_FINDINGS
    tail = f'<p class="more">{more} more of the same; the query has all of them.</p>' if more > 0 else ""
    return labelled_table("findings", FINDING_COLUMNS, rows) + tail


def labelled_table(kind: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of HTML cells that carry the name of their column, for screens too narrow for a head.

    A first column named Check is the heading of its row.
    """
    head = "".join(f'<th scope="col">{column}</th>' for column in columns)
    body = "".join(f"<tr>{_labelled_cells(columns, row)}</tr>" for row in rows)
    table = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="scroll"><table class="stacked {kind}">{table}</table></div>'


def _labelled_cells(columns: Sequence[str], cells: Sequence[str]) -> str:
    return "".join(
        f'<th scope="row">{cell}</th>'
        if column == "Check"
        else f'<td data-label="{column}"><div>{cell}</div></td>'
        for column, cell in zip(columns, cells, strict=True)
    )


def _finding_cells(diagnosis: Diagnosis, finding: Finding) -> tuple[str, ...]:
    return (
        steps_in_words(finding),
        text(finding.subject),
        _number(finding.observed),
        _number(finding.threshold),
        text(finding.detail),
        panel_link(diagnosis, finding, f"Panel {finding.panel}"),
    )


def _number(value: float | None) -> str:
    return "not measured" if value is None else number(value)


def panel_link(diagnosis: Diagnosis, finding: Finding, words: str) -> str:
    """A link that goes to the finding's chart; the page's script also zooms all step axes to its steps."""
    panel = next(panel for panel in PANELS if panel.number == finding.panel)
    anchor = panel.anchor_of(diagnosis.requires)
    first, last = finding.first_step, finding.last_step
    return step_link(anchor, first, first if last is None else last, words)


def step_link(anchor: str, first_step: int | None, last_step: int | None, words: str) -> str:
    """A link within the page, with the steps that the script shows on following it."""
    steps = "" if first_step is None else f' data-first-step="{first_step}" data-last-step="{last_step}"'
    return f'<a href="#{anchor}"{steps}>{words}</a>'


def spikes_table(spike_rows: Sequence[dict[str, Any]]) -> str:
    """The first loss spikes: batch, recovery, signals in the order in which they moved, hardest examples."""
    spikes = [list(signals) for _, signals in groupby(spike_rows, key=lambda row: row["step"])]
    if not spikes:
        return ""
    more = len(spikes) - SHOWN_SPIKES
    tail = f'<p class="more">{more} more spikes: FROM signal_order_at_spikes().</p>' if more > 0 else ""
    return labelled_table("spikes", SPIKE_COLUMNS, map(_spike_cells, spikes[:SHOWN_SPIKES])) + tail


def _spike_cells(signals: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    first = signals[0]
    step, back = first["step"], first["recovered_step"]
    moved = [row for row in signals if row["signal"] is not None]
    shown_from = min([step, *(row["moved_step"] for row in moved)])
    listed = "".join(f"<li>{text(_signal_words(row))}</li>" for row in moved[:SHOWN_SIGNALS])
    return (
        step_link(PANELS[0].anchor, shown_from, step if back is None else back, f"step {step}"),
        "not recorded" if first["batch_hash"] is None else f"<code>{first['batch_hash']:x}</code>",
        "never" if back is None else f"step {back}",
        f"<ol>{listed}</ol>" if listed else "no signal left its baseline before",
        text(first["worst_examples"] or "not recorded"),
    )


def _signal_words(row: dict[str, Any]) -> str:
    change = f"{number(row['baseline_value'])} to {number(row['moved_value'])}"
    return f"step {row['moved_step']}: {row['signal']} {row['subject']}, {change}"


def checks(assessments: Sequence[Assessment]) -> str:
    """What every check came to: causes with their symptoms, what could not be evaluated, what is clear."""
    if not assessments:
        return ""
    fired = fired_rows(assessments)
    skipped, clear = (_with_outcome(assessments, outcome) for outcome in ("not_evaluated", "clear"))
    missing = [(_title(one), text(", ".join(one.missing)), _question(one)) for one in skipped]
    return (
        f'<div class="checks"><h3>{len(assessments)} check{"s" if len(assessments) > 1 else ""}</h3>'
        + (labelled_table("outcomes", ("Check", "Outcome", "Question"), fired) if fired else "")
        + folded("not evaluated", ("Check", "Missing", "Question"), missing, len(missing) <= MOST_OPEN_CHECKS)
        + folded("clear", ("Check", "Question"), [(_title(one), _question(one)) for one in clear], False)
        + "</div>"
    )


def fired_rows(assessments: Sequence[Assessment]) -> list[tuple[str, str, str]]:
    """Each cause, and under it the symptoms that no cause before it has explained."""
    rows, told = [], set()
    for one in causes(assessments):
        link = f'<a href="#finding-{text(one.diagnosis.name)}">fired</a>'
        rows.append((_title(one), link, _question(one)))
        new = [s for s in symptoms(one, assessments) if s.diagnosis.name not in told]
        told |= {symptom.diagnosis.name for symptom in new}
        rows += [
            (f'<span class="symptom">{_title(s)}</span>', "symptom of the above", _question(s)) for s in new
        ]
    return rows


def _title(assessment: Assessment) -> str:
    return text(assessment.diagnosis.title)


def _question(assessment: Assessment) -> str:
    return text(assessment.diagnosis.question)


def folded(words: str, columns: Sequence[str], rows: Sequence[Sequence[str]], is_open: bool) -> str:
    """A table behind a line with the number of its rows; nothing without rows. Opens without a script."""
    if not rows:
        return ""
    tone = words.replace(" ", "_")
    summary = f'<summary><span class="outcome {tone}">{len(rows)} {words}</span></summary>'
    return (
        f"<details{' open' if is_open else ''}>{summary}{labelled_table('outcomes', columns, rows)}</details>"
    )
